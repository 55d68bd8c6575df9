"""The distinguishing game: two neighbouring federations, and an adversary who must tell them apart.

Each trial plays the engine anew. The adversary knows both data sets and all that is public: it looks at what was
released along the line on which the two differ, at how much noise lies beside that line, and at what else was
released; it learns the likelihood ratio from one half of the trials, and is judged on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.algorithms.base import Algorithm, Local
from shoal.audit import bounds
from shoal.audit.bounds import Array, Point
from shoal.audit.cases import BATCH, DRIFT_BATCH, DRIFT_STEPS, MORE, Case
from shoal.audit.testbed import Holder, Row, Seen, federation, rounds_of, silent, steps_of, without
from shoal.mechanisms.sampling import Clients
from shoal.random.streams import Streams
from shoal.training.round import SimulatedCohort, run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import Trainer

WIDTH = 50
FAR = 10.0  # how far beyond the clip a record reaches that wants to move as much as it can


@dataclass(frozen=True, eq=False)
class Game:
    """How it went: the tests, and the scores that they were made on."""

    points: list[Point]
    without: Array
    with_unit: Array
    trials: int
    estimate: float

    def epsilon(self, delta: float) -> float:
        """The lower bound on epsilon, whatever the mechanism."""
        return max(point.epsilon(delta) for point in self.points)

    @property
    def best_possible(self) -> float:
        """What so many trials could show at most, had every guess been right."""
        perfect = bounds.at_most(0, self.trials, bounds.ALPHA / (2 * len(self.points)))
        return Point(0.0, 0.0, perfect, perfect).epsilon(0.0)


def play(case: Case, played: Algorithm, trials: int, streams: Streams) -> Game:
    """So many trials of each kind to learn from, and as many to be judged on; `played` may be a broken form."""
    first, second, line = _trials(case, played, 2 * trials, streams)
    features = [_features(seen, line) for seen in (first, second)]
    (learn0, test0), (learn1, test1) = ((rows[:trials], rows[trials:]) for rows in features)
    score = _likelihood_ratio(learn0, learn1)
    chosen = bounds.thresholds(score(learn0), score(learn1))
    scores0, scores1 = score(test0), score(test1)
    estimate = _estimate(test0[:, 0], test1[:, 0])
    return Game(bounds.points(scores0, scores1, chosen), scores0, scores1, trials, estimate)


def _trials(case: Case, played: Algorithm, trials: int, streams: Streams) -> tuple[Seen, Seen, np.ndarray]:
    """What was released on each of two neighbours, and the line on which they differ without noise."""
    match case.where:
        case "steps":
            one, other = step_neighbours(case, streams)
            bare = steps_of(federation(silent(played), [one, other], WIDTH, streams), silent(played))
            held = [one] * trials + [other] * trials
            seen = steps_of(federation(played, held, WIDTH, streams), played)
            halves = (Seen(seen.vectors[rows], seen.extras[rows]) for rows in (slice(trials), slice(trials, None)))
            return (*halves, bare.vectors[1] - bare.vectors[0])
        case _:
            sides = sum_neighbours(case, played, streams)
            noisy = [
                rounds_of(sim, record, trials, place * trials, case.colluding)
                for place, (sim, record) in enumerate(sides)
            ]
            line = np.zeros(2 * WIDTH)
            line[[0, WIDTH]] = (-1, 1)  # the place of the record in which they differ
            return noisy[0], noisy[1], line


def step_neighbours(case: Case, streams: Streams) -> tuple[Holder, Holder]:
    """Two clients' records: one record for its opposite; or, where the noise follows the data, one more of norm C."""
    clip = step_radius(case.record, streams)
    others = [Row(0.0, place) for place in range(1, BATCH)]
    if case.unit == "user":  # zero-out
        return [*of_unit(case, Row(0.0)), *others], [*of_unit(case, Row(FAR * clip)), *others]
    if case.kind == "proven":
        return [Row(0.999 * clip), *others], [Row(FAR * clip, sign=-1), *others]
    if case.record.per_step is not None and case.record.per_step.test is not None:  # one more decides what passes
        against = [Row(0.1 * clip, sign=-1)] * (BATCH - 1)
        return against, [Row(clip), *against]
    others = [Row(0.5 * clip, place) for place in range(1, BATCH)]
    return others, [Row(clip), *others]


def of_unit(case: Case, row: Row) -> list[Row]:
    """The records of the unit, all alike: a user has more than may be used."""
    if case.unit != "user":
        return [row]
    assert case.record.records.max_per_user is not None
    return [replace(row, user=0)] * (MORE * case.record.records.max_per_user)


def step_radius(record: Algorithm, streams: Streams, width: int = WIDTH) -> float:
    """The clip, as the method has it: how far a huge record moves the sum of a batch that it is in once."""
    once = replace(record.records, sampling="fixed-order")
    quiet = replace(silent(record), clients=Clients("all"), records=once, local=Local(steps=1, lr=1.0))
    huge = steps_of(federation(quiet, [[Row(1e4)]], width, streams), quiet)
    return float(np.linalg.norm(huge.vectors[0])) * record.records.batch


def sum_neighbours(
    case: Case, played: Algorithm, streams: Streams
) -> list[tuple[Trainer[SimulatedCohort], Algorithm]]:
    """Two federations, each with its algorithm: the last client is removed, or its records are replaced."""
    count, clip = case.setting.clients, update_radius(case.record, streams)
    rounds = case.setting.rounds

    def made(clients: Sequence[Holder]) -> Trainer[SimulatedCohort]:
        return federation(played, clients, WIDTH, streams, rounds=rounds)

    if case.where == "drift":
        rows = DRIFT_STEPS * DRIFT_BATCH
        nothing, everything = [Row(0.0)] * rows, [Row(FAR * step_radius(case.record, streams))] * rows
        others = [nothing] * (count - 1)
        return [(made([*others, nothing]), played), (made([*others, everything]), played)]
    still = [[Row(0.0, 1 + k)] for k in range(count - 1)]
    if case.kind == "published":  # the median lies between two norms, and one more client moves it
        whole = made([[Row(0.5, 1)], [Row(1.0, 2)], [Row(1.0)]])
        return [(whole, without(played, 2)), (whole, played)]
    here, opposite = [Row(0.999 * clip)], [Row(FAR * clip, sign=-1)]
    if played.clients.replaces:  # another client takes the place of one that is absent
        against = [opposite] * (count - 1)
        other = [*against, opposite] if case.unit == "record" else against
        return [(made(other), played), (made([*against, here]), played)]
    if case.unit == "record":
        return [(made([*still, opposite]), played), (made([*still, here]), played)]
    whole = made([*still, [Row(FAR * clip)]])
    return [(whole, without(played, count - 1)), (whole, played)]


def update_radius(record: Algorithm, streams: Streams) -> float:
    """The clip of whole updates, 1 where there is none."""
    clients: list[Holder] = [[Row(0.0)]] * max(8, record.clients.audited[0])
    if record.per_round is not None:
        record = replace(record, per_round=record.per_round.for_cohort(len(clients)))
    sim = federation(silent(record), clients, WIDTH, streams)
    _, _, metrics = run_round(sim.cohort, sim.params, {}, RoundIndex(0, 1))
    return metrics.get("clip") or 1.0


def _features(seen: Seen, line: np.ndarray) -> Array:
    """Along the line, beside it, and what else was released."""
    length = np.linalg.norm(line)
    unit = line / length if length else line
    along = seen.vectors @ unit
    beside = np.sqrt(np.maximum(np.square(seen.vectors).sum(1) - along**2, 0.0))
    metrics = [along, np.log(np.maximum(beside, 1e-12))]
    if seen.extras.std() > 0:
        metrics += list(seen.extras.T)
    return np.stack(metrics, axis=1)


def _likelihood_ratio(without: Array, with_unit: Array) -> Callable[[Array], Array]:
    """log p1/p0 of two Gaussians fitted to the features."""
    both = np.concatenate([without, with_unit])
    centre, scale = both.mean(0), np.maximum(both.std(0), 1e-12)
    fits = []
    for rows in (without, with_unit):
        held = (rows - centre) / scale
        spread = np.cov(held.T) + 1e-9 * np.eye(held.shape[1])
        fits.append((held.mean(0), np.linalg.inv(spread), np.linalg.slogdet(spread)[1]))

    def score(rows: Array) -> Array:
        held = (rows - centre) / scale
        first, second = (
            np.einsum("nf,fg,ng->n", held - mean, inverse, held - mean) + size for mean, inverse, size in fits
        )
        found: Array = (first - second) / 2
        return found

    return score


def _estimate(without: Array, with_unit: Array) -> float:
    """How far apart the two lie along the line, in standard deviations: an estimate, not a bound.

    Where the unit is only sampled, those trials count that lie beyond all without it.
    """
    spread, centre = max(float(without.std()), 1e-12), float(without.mean())
    beyond = with_unit[(with_unit > without.max()) | (with_unit < without.min())]
    seen = beyond if len(beyond) > 0.05 * len(with_unit) else with_unit
    return abs(float(seen.mean()) - centre) / spread
