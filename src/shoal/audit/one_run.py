"""Canaries: many guesses about one run (Steinke, Nasr & Jagielski 2023; for clients Andrew et al. 2023).

Every canary is a record, or a client, that pulls in a direction of its own. A coin decides for each whether it is
there (or which way it pulls); the adversary looks at all rounds of one run, scores each canary by how far the
released sums moved its way, and guesses on those of which it is surest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.audit import bounds
from shoal.audit.broken import Broken
from shoal.audit.cases import Case
from shoal.audit.game import FAR, step_radius, update_radius
from shoal.audit.testbed import Holder, Row, federation, one_thread, steps_of, without
from shoal.mechanisms.schedules import NO_NOISE
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex

ALPHA = 0.01  # with the canaries of one run a smaller one has no power
AGAIN = 0.1  # of a second run, which must say the same before anything is flagged: by chance once in a thousand times
SHARES = (0.02, 0.05, 0.1, 0.25)  # of all canaries, guessed at each end


@dataclass(frozen=True)
class Guesses:
    """What the guesses prove, and what the scores suggest."""

    canaries: int
    epsilon: float
    guesses: int
    right: int
    estimate: float


def guess(broken: Broken, canaries: int, alpha: float = ALPHA) -> Guesses:
    """Play one run with so many canaries, and guess; the bound is wrong with a probability of alpha at most."""
    case = broken.case
    coins = broken.streams.generator("coins").integers(2, size=canaries) * 2 - 1
    scores = (_of_records if case.where == "steps" else _of_clients)(broken, coins)
    order = np.argsort(scores)
    delta = case.claim.delta if case.claim is not None else 1e-5
    best = Guesses(canaries, 0.0, 0, 0, _estimate(scores, coins, delta))
    for share in SHARES:
        k = max(1, int(share * canaries))
        right = int((coins[order[-k:]] > 0).sum() + (coins[order[:k]] < 0).sum())
        epsilon = bounds.one_run_epsilon(canaries, 2 * k, right, delta, alpha / len(SHARES))
        if epsilon >= best.epsilon:
            best = replace(best, epsilon=epsilon, guesses=2 * k, right=right)
    return best


def _of_records(broken: Broken, coins: np.ndarray) -> np.ndarray:
    """One client holds all canaries; the coin turns a canary round."""
    count = len(coins)
    charged, played = (_wider_batch(record, count) for record in (broken.case.record, broken.played))
    clip = step_radius(charged, broken.streams, count)
    rows = [Row(FAR * clip, place, int(coin)) for place, coin in enumerate(coins)]
    seen = steps_of(federation(played, [rows], count, broken.streams), played)
    found: np.ndarray = seen.vectors[0, :count] - seen.vectors[0, count:]
    return found


def _wider_batch(record: Algorithm, batch: int) -> Algorithm:
    """The method with a larger batch and the same noise on its sum."""
    before = record.records.batch
    assert record.per_step is not None
    ratio = record.per_step.multiplier(0, 1, before) / max(record.per_step.multiplier(0, 1, batch), 1e-30)
    noise = (record.per_step.noise_schedule() or NO_NOISE).scaled(ratio)
    record = replace(record, records=record.records.of_batch(batch), per_step=record.per_step.with_noise(noise))
    if record.per_record is not None:
        counted = record.per_record.recounted(lambda count: count * before / batch)
        record = replace(record, per_record=counted)
    return record


def _of_clients(broken: Broken, coins: np.ndarray) -> np.ndarray:
    """A canary a client; the coin says whether it is there, or, where another takes its place, which way it pulls."""
    count, rounds = len(coins), broken.case.setting.rounds
    played = _more_clients(broken.case, broken.played, count)
    clip = update_radius(broken.case.record, broken.streams)
    swaps = broken.case.unit == "record" or played.clients.replaces
    signs = coins if swaps else np.ones(count, dtype=int)
    rows = [Row(FAR * clip, place, int(sign)) for place, sign in enumerate(signs)]
    clients: list[Holder] = [[row] for row in rows]
    if played.sums_gradients:  # each is a record of the last client
        everything = replace(played.records, rate=1.0, nominal_records=1)
        played = replace(broken.played, records=everything)
        clients = [*([[Row(0.0)]] * (broken.case.setting.clients - 1)), rows]
    if not swaps:
        played = without(played, *np.flatnonzero(coins < 0).tolist())
    sim = federation(played, clients, count, broken.streams, rounds=rounds)
    params, scores = torch.zeros_like(sim.params), np.zeros(count)
    state: dict[str, Tensor] = {}
    cohort = replace(sim.cohort, algorithm=played)
    with one_thread():
        for t in range(rounds):
            before = params
            params, state, metrics = run_round(cohort, params, state, RoundIndex(t, rounds))
            moved = (params - before).double().numpy() / (metrics.get("clip") or 1.0)
            scores += moved[:count] - moved[count:]
    return scores


def _more_clients(case: Case, record: Algorithm, count: int) -> Algorithm:
    """The method with more clients at the same rate, and as much noise on the sum."""
    before = record.clients.expected(0, case.setting.rounds, case.setting.clients)
    cohort = round(count * before / case.setting.clients)
    record = replace(record, clients=record.clients.of_cohort(cohort))
    if record.per_update is not None:
        record = replace(record, per_update=record.per_update.for_cohort(before, cohort))
    return record


def _estimate(scores: np.ndarray, coins: np.ndarray, delta: float) -> float:
    """Andrew et al. 2023: epsilon of two Gaussians with the means and the spread of both kinds of scores."""
    seen, unseen = scores[coins > 0], scores[coins < 0]
    spread = math.sqrt((seen.var() + unseen.var()) / 2)
    shift = float(seen.mean() - unseen.mean()) / max(spread, 1e-12)
    return bounds.epsilon_of_shift(min(shift, 1e3), delta)
