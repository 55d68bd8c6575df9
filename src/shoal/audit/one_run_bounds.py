"""What guesses about the canaries of one run prove, by f-DP (Mahloujifar, Melis & Chaudhuri 2024, arXiv:2410.22235).

There are m canaries, each with a fair coin of its own; the adversary guesses c of the coins, and V guesses are right.
Let the mechanism be f-DP in each coin, F = 1 - f, and p_i = P[V = i]. Turn coin j round: where its guess was right
and V = i, it is now wrong and V = i - 1. Averaged over all coins, as F is concave, for every set T of {1, ..., c}

    sum over T of (i/m) p_i  <=  F(sum over T of ((c - i + 1)/m) p_(i-1)).

If P[V >= v] were tau, these inequalities for T = {i, ..., c}, from i = v down to 1, would need so much probability
below v that all of it exceeds 1, unless tau is small: the least tau that is refuted so is a p-value. It holds
whatever the mechanism, and however the scores of canaries depend on one another. c must not depend on the coins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import chdtrc, ndtr, ndtri

from shoal.audit.bounds import Array, Tradeoff, at_most, epsilon_of_shift, tradeoff_at

SHARE, FEWEST = 0.05, 200  # of all canaries, and how many at least, are guessed; but never more than half
LEAST = 1e-12  # p-values below this count as this
POINTS = 17  # of a grid
Inverse = Callable[[Array], Array]
"""F^-1: the least rate of false positives that allows a rate of true positives."""


@dataclass(frozen=True)
class Count:
    """How the guesses about the canaries of one run went."""

    canaries: int
    guesses: int
    right: int


def guesses_of(canaries: int) -> int:
    """How many to guess: a fixed rule, so that nobody looks at the answers to choose it. It is even."""
    return 2 * max(1, min(canaries // 2, max(FEWEST, round(SHARE * canaries))) // 2)


def rejected(inverse: Inverse, count: Count, tau: Array) -> Array:
    """Is it impossible that so many guesses are right with a probability of tau?"""
    m, c, v = count.canaries, count.guesses, count.right
    r, h = tau * v / m, tau * (c - v) / m
    with np.errstate(invalid="ignore", over="ignore"):
        for i in range(v - 1, -1, -1):
            g = np.maximum(h, inverse(r))
            r, h = r + i / (c - i) * (g - h), g
        return np.asarray(~(r + h <= c / m))  # what is no number lies beyond the curve's end


def p_value(inverse: Inverse, count: Count, shape: tuple[int, ...] = ()) -> Array:
    """The least tau, from a grid, that is rejected; `shape`: that of a family of curves, 1 where none is rejected."""
    low, high = np.full(shape, math.log(LEAST)), np.zeros(shape)
    for _ in range(3):  # each time a grid within a step of the last one
        grid = low + np.linspace(0, 1, POINTS).reshape(-1, *(1 for _ in shape)) * (high - low)
        refuted = rejected(inverse, count, np.exp(grid))
        first = np.where(refuted.any(0), refuted.argmax(0), POINTS - 1)
        high = np.take_along_axis(grid, first[None], 0)[0]
        low = np.take_along_axis(grid, np.maximum(first - 1, 0)[None], 0)[0]
    return np.exp(high)


def p_value_of(curve: Tradeoff, counts: Sequence[Count]) -> float:
    """How likely so many right guesses in these runs are at most, if the mechanism keeps to a symmetric curve."""
    return float(fisher([p_value(lambda r: curve(1 - r), count) for count in counts]))


def fisher(p_values: Sequence[Array]) -> Array:
    """Fisher's method: one p-value of those of independent runs."""
    sums = -2 * np.sum(np.log(p_values), axis=0)
    found: Array = chdtrc(2 * len(p_values), sums)
    return found


def epsilon(counts: Sequence[Count], delta: float, alpha: float) -> float:
    """The largest epsilon such that the counts refute the Gaussian mechanism that has it at this delta.

    Each run may be of other canaries and guesses; together they are wrong with a probability of alpha.
    """
    return epsilon_of_shift(shift(tuple(counts), alpha), delta)


def epsilon_at(count: Count, delta: float, alpha: float) -> float:
    """The largest epsilon such that the count refutes (epsilon, delta) itself, whatever the mechanism."""
    low, high = 0.0, 20.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        curve = tradeoff_at(middle, delta)
        refuted = rejected(lambda r, curve=curve: curve(1 - r), count, np.array(alpha))  # type: ignore[misc]
        low, high = (middle, high) if refuted else (low, middle)
    return low


def shift(counts: tuple[Count, ...], alpha: float) -> float:
    """The same as the distance mu of two Gaussians."""
    low, high = 0.0, 16.0
    for _ in range(4):
        refuted = _refuted(counts, low, high, alpha)
        if not refuted[0]:
            return low
        last = POINTS - 2 if refuted.all() else int(refuted.argmin()) - 1
        low, high = (float(mu) for mu in np.linspace(low, high, POINTS)[last : last + 2])
    return low


def _refuted(counts: tuple[Count, ...], low: float, high: float, alpha: float) -> Array:
    """Which of the Gaussian mechanisms with a mu between these are refuted."""
    if len(counts) == 1:
        mu = np.linspace(low, high, POINTS)
        return rejected(lambda r: ndtr(ndtri(r) - mu), counts[0], np.full(POINTS, alpha))
    return np.asarray(fisher([_p_values(count, low, high) for count in counts]) <= alpha)


@cache
def _p_values(count: Count, low: float, high: float) -> Array:
    mu = np.linspace(low, high, POINTS)
    return p_value(lambda r: ndtr(ndtri(r) - mu), count, mu.shape)


def independent_epsilon(counts: Sequence[Count], delta: float, alpha: float) -> float:
    """The same where all canaries are guessed and their scores are *assumed* to be independent of one another.

    Then the right guesses are binomial, and a Gaussian mechanism allows a share of Phi(mu/2) of them.
    """
    guesses, right = sum(count.guesses for count in counts), sum(count.right for count in counts)
    least = 1 - at_most(guesses - right, guesses, alpha)
    return epsilon_of_shift(2 * float(ndtri(least)), delta)
