"""Canaries: many guesses about one run (Steinke, Nasr & Jagielski 2023; for clients Andrew et al. 2023).

Every canary is a record, or a client, that pulls in a direction of its own. A coin decides for each whether it is
there (or which way it pulls); the adversary looks at all rounds of one run, scores each canary by how far the
released sums moved its way, and guesses on those of which it is surest. Where noise is correlated between rounds, it
undoes that first; where clients collude with it, it subtracts their shares of the noise. What the guesses prove is in
`one_run_bounds` (Mahloujifar et al. 2024). A second adversary sees the same run, and of it only the final model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.audit import bounds, one_run_bounds
from shoal.audit.bounds import Array
from shoal.audit.broken import Broken
from shoal.audit.cases import DELTA, Case, Claim
from shoal.audit.checks import charged_noise
from shoal.audit.game import FAR, step_radius, update_radius
from shoal.audit.one_run_bounds import Count, guesses_of
from shoal.audit.testbed import Holder, Row, federation, known_noise, one_thread, steps_of, zeroed
from shoal.mechanisms.sampling import participation
from shoal.mechanisms.schedules import NO_NOISE
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex

ALPHA = 0.05  # of the bound on epsilon: the confidence of the literature
FLAG = 0.01  # a claim is doubted where so many right guesses are no likelier than this; and flagged where
AGAIN = 0.1  # other runs say the same at this: by chance once in a thousand times
OF_A_CLIENT = 1000  # records that are canaries; with more of them there are more clients


@dataclass(frozen=True)
class Run:
    """The guesses about one run: by who saw every round, by who saw the final model, and all of them guessed."""

    every_round: Count
    final: Count
    everyone: Count
    estimate: float


@dataclass(frozen=True)
class Guesses:
    """What the guesses about one run, or several together, prove, and what they suggest.

    Attributes:
        canaries: Of each run.
        runs: How many there were.
        epsilon: The bound on epsilon, whatever the mechanism does within the Gaussian family.
        p_value: How likely so many right guesses are at most, if the claim is true, whatever the mechanism.
        guesses: About all runs.
        right: How many of them were.
        independent: The bound if the scores of canaries were independent, which is *assumed*.
        final: The bound from the final model alone.
        final_p_value: The p-value of the guesses from the final model alone.
        estimate: The epsilon of two Gaussians fitted to the scores (Andrew et al. 2023): no bound.
    """

    canaries: int
    runs: int
    epsilon: float
    p_value: float
    guesses: int
    right: int
    independent: float
    final: float
    final_p_value: float
    estimate: float


def guess(broken: Broken, canaries: int, runs: int = 1, alpha: float = ALPHA) -> Guesses:
    """Play this many runs with this many canaries each; a bound is wrong with a probability of alpha at most."""
    return together([play(anew(broken, number), canaries) for number in range(runs)], broken.case.claim, alpha)


def anew(broken: Broken, number: int) -> Broken:
    """The same with other random numbers; run 0 has the given ones."""
    seed = broken.streams.number("again", number)
    return replace(broken, streams=type(broken.streams)(seed)) if number else broken


def together(played: Sequence[Run], claim: Claim | None, alpha: float = ALPHA) -> Guesses:
    """What the guesses about these runs say together."""
    delta = claim.delta if claim is not None else DELTA
    counts, final = [run.every_round for run in played], [run.final for run in played]
    same = counts == final
    p_value = _p_value(counts, claim)
    epsilon = one_run_bounds.epsilon(counts, delta, alpha)
    return Guesses(
        canaries=counts[0].canaries,
        runs=len(played),
        epsilon=epsilon,
        p_value=p_value,
        guesses=sum(count.guesses for count in counts),
        right=sum(count.right for count in counts),
        independent=one_run_bounds.independent_epsilon([run.everyone for run in played], delta, alpha),
        final=epsilon if same else one_run_bounds.epsilon(final, delta, alpha),
        final_p_value=p_value if same else _p_value(final, claim),
        estimate=float(np.median([run.estimate for run in played])),
    )


def _p_value(counts: Sequence[Count], claim: Claim | None) -> float:
    return one_run_bounds.p_value_of(bounds.tradeoff(claim.event, claim.adjacency), counts) if claim else 1.0


def play(broken: Broken, canaries: int) -> Run:
    """Play one run with this many canaries, and guess their coins."""
    case = broken.case
    if case.where == "steps":  # so many that all clients have as many
        clients = math.ceil(canaries / OF_A_CLIENT)
        canaries = clients * math.ceil(canaries / clients)
    coins = broken.streams.generator("coins").integers(2, size=canaries) * 2 - 1
    every_round, final = (_of_records if case.where == "steps" else _of_clients)(broken, coins)
    delta = case.claim.delta if case.claim is not None else DELTA
    few, most = guesses_of(canaries), 2 * (canaries // 2)
    return Run(
        _count(every_round, coins, few),
        _count(final, coins, few),
        _count(every_round, coins, most),
        _estimate(every_round, coins, delta),
    )


def _count(scores: Array, coins: np.ndarray, guesses: int) -> Count:
    """Half of the guesses are for the highest scores, half for the lowest."""
    order, k = np.argsort(scores), guesses // 2
    right = int((coins[order[-k:]] > 0).sum() + (coins[order[:k]] < 0).sum())
    return Count(len(coins), guesses, right)


def _of_records(broken: Broken, coins: np.ndarray) -> tuple[Array, Array]:
    """Clients hold all canaries, for one step; the coin turns a canary round. The final model is all there is."""
    clients = math.ceil(len(coins) / OF_A_CLIENT)
    held = coins.reshape(clients, -1)
    count = held.shape[1]
    charged, played = (_wider_batch(record, count) for record in (broken.case.record, broken.played))
    clip = step_radius(charged, broken.streams, count)
    holders = [[Row(FAR * clip, place, int(coin)) for place, coin in enumerate(each)] for each in held]
    seen = steps_of(federation(played, holders, count, broken.streams), played)
    found: Array = (seen.vectors[:, :count] - seen.vectors[:, count:]).ravel()
    return found, found


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


def _of_clients(broken: Broken, coins: np.ndarray) -> tuple[Array, Array]:
    """A canary a client; the coin says whether it is there, or, where another takes its place, which way it pulls."""
    count, rounds = len(coins), broken.case.setting.rounds
    played = _more_clients(broken.case, broken.played, count)
    clip = update_radius(broken.case.record, broken.streams)
    swaps = broken.case.unit == "record" or played.clients.replaces
    signs = coins if swaps else np.ones(count, dtype=int)
    rows = [Row(FAR * clip, place, int(sign)) for place, sign in enumerate(signs)]
    clients: list[Holder] = [[row] for row in rows]
    if played.sums_gradients:
        # each is a record of the last client; so large a batch leaves the gradients as they are
        everything = replace(played.records, rate=1.0, nominal_records=count)
        played = replace(broken.played, records=everything)
        clients = [*([[Row(0.0)]] * (broken.case.setting.clients - 1)), rows]
    if not swaps:
        played, clients = zeroed(played, clients, *np.flatnonzero(coins < 0).tolist())
    sim = federation(played, clients, count, broken.streams, rounds=rounds)
    rate = 1.0 if played.sums_gradients else played.clients.rate(0, rounds, count)
    state: dict[str, Tensor] = {}
    params, moved = torch.zeros_like(sim.params), np.empty((rounds, 2, count))
    known = np.zeros(len(params))
    cohort = replace(sim.cohort, algorithm=played)
    with one_thread():
        for t in range(rounds):
            before, index = params, RoundIndex(t, rounds)
            params, state, metrics = run_round(cohort, params, state, index)
            one_unit = math.sqrt(2) * (metrics.get("clip") or 1.0) / metrics["expected_clients"]  # a canary's pull
            shares = known_noise(cohort, len(params), broken.case.colluding, index)
            moved[t] = ((params - before).double().numpy() - shares).reshape(2, count) / one_unit
            known += shares
    end, along = (params.double().numpy() - known).reshape(2, count), moved[:, 0] - moved[:, 1]
    if rate < 1:
        scores = _log_ratio(broken.case, rate, swaps)(along).sum(0)
    else:
        scores = decorrelated(_turns(played, rounds, count), moved[:, 0] + moved[:, 1]) @ along
    return scores, end[0] - end[1]


def _turns(record: Algorithm, rounds: int, count: int) -> Array:
    """The rounds that a canary is in, 1 for each, where that is public: all that it may be in."""
    return participation(record.clients, rounds, count).repeated(np.eye(1, rounds)[0])


def decorrelated(turns: Array, noise: Array) -> Array:
    """The weights of rounds in the log likelihood ratio of a canary's coin, whose noise may be correlated.

    The noise of rounds is C^-1 z, the releases C^-1 (C x + z): who undoes C finds a canary by (C x) . (C y), which is
    x . S^-1 y where S is the covariance of the noise. S is estimated from coordinates that no canary moves, not taken
    from what is charged: noise that is correlated in another way is undone too.

    Args:
        turns: How far a canary pulls in each round [T].
        noise: Of each round, where no canary pulls [T, N].

    Returns:
        The weight of each round [T].
    """
    spread = np.atleast_2d(np.cov(noise))
    least = 1e-9 * max(float(np.trace(spread)), 1e-30)
    return np.asarray(np.linalg.solve(spread + least * np.eye(len(turns)), turns), dtype=np.float64)


def _log_ratio(case: Case, rate: float, swaps: bool) -> Callable[[Array], Array]:
    """The log likelihood ratio of a canary's coin, given how far a round moved its way, in units of its own pull."""
    noise = charged_noise(case.claim.event) if case.claim is not None else None
    if noise is None:
        return lambda moved: moved

    def there(moved: Array) -> Array:
        found: Array = np.logaddexp(math.log1p(-rate), math.log(rate) + (moved - 0.5) / noise**2)
        return found

    return lambda moved: there(moved) - (there(-moved) if swaps else 0.0)


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
