"""From an adversary's guesses to epsilon: lower bounds that hold with a stated confidence.

Two distributions are (epsilon, delta)-close exactly where no test beats the trade-off curve between its false
positives and its false negatives (Dong, Roth & Su 2022). So a test whose error rates lie below the claimed curve,
with the confidence of Clopper & Pearson, refutes the claim, whatever the mechanism (Jagielski et al. 2020; Nasr et
al. 2023). Bounds from many guesses about one run are in `one_run_bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from shoal.accounting import accountants, pld
from shoal.accounting.events import Event
from shoal.accounting.leaves import without_sampler
from shoal.accounting.theorems import Adjacency, counted

Array = npt.NDArray[np.float64]
Tradeoff = Callable[[Array], Array]
"""The least rate of false negatives at each rate of false positives."""

ALPHA = 1e-4  # how often a whole audit may flag what is right
CONFIDENCE = 1 - ALPHA
TARGETS = (0.5, 0.3, 0.15, 0.05, 0.01, 0.0)  # false positives, or negatives, that thresholds aim at


@dataclass(frozen=True)
class Point:
    """A test: its error rates as counted, and upper bounds on them."""

    false_positives: float
    false_negatives: float
    most_false_positives: float
    most_false_negatives: float

    def epsilon(self, delta: float) -> float:
        """The least epsilon that allows such a test at this delta."""
        a, b = self.most_false_positives, self.most_false_negatives
        found = [math.log((1 - delta - y) / x) for x, y in ((a, b), (b, a)) if 1 - delta - y > 0]
        return max(0.0, *found) if found else 0.0


def points(without: Array, with_unit: Array, thresholds: Array, alpha: float = ALPHA) -> list[Point]:
    """The test 'score > threshold' at each threshold; all bounds hold together but for a probability of alpha.

    A score that is NaN is above nothing.
    """
    share = alpha / (2 * len(thresholds))
    found = []
    for threshold in thresholds:
        wrong, missed = int((without > threshold).sum()), int((~(with_unit > threshold)).sum())
        found.append(
            Point(
                wrong / len(without),
                missed / len(with_unit),
                at_most(wrong, len(without), share),
                at_most(missed, len(with_unit), share),
            )
        )
    return found


def thresholds(without: Array, with_unit: Array) -> Array:
    """Those that reach a few target rates of errors, from scores that are not used again."""
    high = [np.quantile(without, 1 - share) for share in TARGETS]
    low = [np.quantile(with_unit, share) for share in TARGETS]
    return np.unique(np.array(high + low))


def at_most(hits: int, trials: int, alpha: float) -> float:
    """Clopper & Pearson: the rate is at most this, but for a probability of alpha."""
    from scipy.stats import beta

    return 1.0 if hits >= trials else float(beta.ppf(1 - alpha, hits + 1, trials - hits))


def epsilon_of_shift(shift: float, delta: float) -> float:
    """What two Gaussians at this distance cost at this delta."""
    if shift <= 0:
        return 0.0
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    return float(get_epsilon_gaussian(1 / shift, delta))


@cache
def tradeoff(event: Event, adjacency: Adjacency) -> Tradeoff:
    """The curve that no test may pass if the event is what was done: the envelope of its (epsilon, delta) lines."""
    profiles = [pld.profile(without_sampler(counts)[0], adjacency) for counts in counted(event, adjacency).values()]
    epsilons = np.concatenate([[0.0], np.geomspace(1e-3, 30.0, 300)])
    deltas = np.array([max(profile.delta(float(value)) for profile in profiles) for value in epsilons])
    return _envelope(epsilons, deltas)


def renyi_tradeoff(event: Event, adjacency: Adjacency) -> Tradeoff:
    """The same, wider, for a claim of no more than the event's Renyi divergences."""
    epsilons = np.concatenate([[0.0], np.geomspace(1e-2, 30.0, 300)])
    found = (accountants.delta(event, float(value), "rdp", adjacency).delta for value in epsilons)
    return _envelope(epsilons, np.array([1.0 if delta is None else delta for delta in found]))


def tradeoff_at(epsilon: float, delta: float) -> Tradeoff:
    """The same of one (epsilon, delta) alone."""
    return _envelope(np.array([0.0, epsilon]), np.array([1.0, delta]))


def _envelope(epsilons: Array, deltas: Array) -> Tradeoff:
    def curve(false_positives: Array) -> Array:
        x = np.asarray(false_positives, dtype=np.float64)[..., None]
        steep = 1 - deltas - np.exp(np.minimum(epsilons, 700)) * x
        flat = np.exp(-epsilons) * (1 - deltas - x)
        found: Array = np.maximum(np.maximum(steep, flat).max(-1), 0.0)
        return found

    return curve


def passes(found: list[Point], curve: Tradeoff) -> bool:
    """Is one of these tests better than the curve allows?"""
    rates = np.array([point.most_false_positives for point in found])
    missed = np.array([point.most_false_negatives for point in found])
    return bool((missed < curve(rates)).any())
