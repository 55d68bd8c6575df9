"""Random allocation: a unit enters one of t rounds, drawn uniformly at random in advance and kept secret.

P = (1/t) sum_i N(e_i, sigma_i^2) against Q = N(0, sigma^2) dominates every adaptive run of t rounds, in the zero-out
sense: from coordinate i and the outputs before it, round i is rebuilt by post-processing (Chua et al. 2025, "Balls
and bins"; Feldman & Shenfeld 2025). A round that is never run, or that the unit misses whatever was drawn, is
post-processing too. P/Q = M, the mean of independent Y_i with log Y_i ~ N(-1/2 sigma_i^2, 1/sigma_i^2) under Q, so

    H(P||Q) = E_Q (M - e^epsilon)+      and      H(Q||P) = E_Q (1 - e^epsilon M)+.

Both are means of convex functions of M. Moving mass to the two neighbouring nodes of a grid, so that its mean stays,
raises the mean of every convex function, within independent sums too. So a discrete law of M that is found in this
way, by doubling, gives one pair that dominates in both directions; its excess falls as 1/nodes^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from shoal.accounting import curves
from shoal.accounting.curves import Array, Pair, multiples
from shoal.accounting.events import Allocated

_NODES = 1200
_WIDTH = 3.0  # standard deviations around 1 in which nodes are next to equally far apart; the best of 1 to 8
_ROWS = 32  # of the pairs of two laws' nodes at a time, which the processor's cache holds
_TAILS = 8.0  # standard deviations of log Y that the grid covers; the rest is charged as an infinite loss
_NEGLIGIBLE = 1e-19  # mass at either end of a law that is moved to 0 and to infinity
_FURTHEST = 600.0  # logarithms beyond this have no exponential: such little noise is not amplified
_LEAST_NOISE = 0.01  # below this the quadrature needs too many points
_MOST_ORDER = 256  # of moments; beyond, the cost is that of a known round
_ROUNDING = 1e-13  # of a logarithm of a moment, for each of its powers
_NOISES = 4  # different noises in one block; more are gathered in bins, each rounded down to the least in it


@dataclass(frozen=True)
class Law:
    """The mean of `rounds` ratios, or what is above it in convex order: `mass` under Q at nodes, of which one is 0.

    `infinite`: what P has beyond all nodes, where Q has nothing.
    """

    nodes: Array
    mass: Array
    infinite: float
    rounds: int


@dataclass(frozen=True)
class Grid:
    """0, and nodes exp(width sinh u) from exp(low) to exp(high), for u in equal steps: finest near 1."""

    width: float
    low: float
    high: float

    @cached_property
    def nodes(self) -> Array:
        """The nodes, in ascending order."""
        first, step = self._steps
        return np.concatenate([[0.0], np.exp(self.width * np.sinh(first + step * np.arange(_NODES)))])

    @property
    def _steps(self) -> tuple[float, float]:
        first, last = math.asinh(self.low / self.width), math.asinh(self.high / self.width)
        return first, (last - first) / (_NODES - 1)

    def spread(self, values: Array, weights: Array) -> Array:
        """The masses of values up to the last node, moved to the nodes on both sides with the same mean."""
        first, step = self._steps
        with np.errstate(divide="ignore"):
            places = (np.arcsinh(np.log(values) / self.width) - first) / step + 1
        cells = np.clip(places, 0, _NODES - 1).astype(np.int64)
        cells -= values < self.nodes[cells]  # rounding may have crossed a node
        cells += (values > self.nodes[cells + 1]) & (cells < _NODES - 1)
        up = weights * (values - self.nodes[cells]) / np.diff(self.nodes)[cells]
        mass = np.zeros(_NODES + 1)
        mass += np.bincount(cells, weights - up, _NODES + 1)
        mass[1:] += np.bincount(cells, up, _NODES + 1)[:-1]
        return mass


def pair(block: Allocated) -> Pair:
    """A pair that dominates the block in both directions."""
    least = min(noise for noise, _ in block.rounds)
    if _reach(least) > _FURTHEST:
        return curves.gaussian(1 / least)  # joint convexity: never more than if the round were known
    law = _mean([_repeated(noise, rounds) for noise, rounds in _gathered(block.rounds)], least)
    return _curves(law)


def _curves(law: Law) -> Pair:
    nodes, mass = law.nodes, law.mass
    above_p, above_q = (np.append(np.cumsum(part[::-1])[::-1], 0.0) for part in (mass * nodes, mass))
    below_p, below_q = (np.append(0.0, np.cumsum(part)) for part in (mass * nodes, mass))

    def forward(epsilon: Array) -> Array:
        cut = np.exp(np.minimum(epsilon, _FURTHEST))
        place = np.searchsorted(nodes, cut, side="right")
        found: Array = law.infinite + np.maximum(above_p[place] - cut * above_q[place], 0.0)
        return found

    def backward(epsilon: Array) -> Array:
        cut = np.exp(-np.minimum(epsilon, _FURTHEST))
        place = np.searchsorted(nodes, cut, side="left")
        return np.maximum(below_q[place] - below_p[place] / cut, 0.0)

    return Pair(forward, backward, math.log(nodes[-1]), -math.log(nodes[1]))


@lru_cache(maxsize=32)
def _repeated(noise: float, rounds: int) -> Law:
    """The mean of so many ratios of the same noise, by doubling."""
    law = one = _single(noise)
    for bit in bin(rounds)[3:]:
        law = _sum(law, law, noise)
        if bit == "1":
            law = _sum(law, one, noise)
    return law


def _mean(laws: Sequence[Law], noise: float) -> Law:
    law, *rest = laws
    for other in rest:
        law = _sum(law, other, noise)
    return law


def _single(noise: float) -> Law:
    """One ratio Y: the mass and the mean of every cell, moved to its two ends."""
    from scipy.special import ndtr

    nodes = Grid(_WIDTH / noise, -_reach(noise), _reach(noise)).nodes
    with np.errstate(divide="ignore"):
        places = noise * np.log(nodes)
    under_q, under_p = (np.diff(ndtr(places + shift)) for shift in (0.5 / noise, -0.5 / noise))
    # The differences of a distribution near 1 are those of its complement near 0.
    upper = places[:-1] > 0
    for mass, shift in ((under_q, 0.5 / noise), (under_p, -0.5 / noise)):
        mass[upper] = -np.diff(ndtr(-(places + shift)))[upper]
    width = np.diff(nodes)
    up = np.clip(under_p - nodes[:-1] * under_q, 0.0, under_q * width) / width
    mass = np.append(under_q - up, 0.0)
    mass[1:] += up
    mass[0] += ndtr(-(places[-1] + 0.5 / noise))
    return _trimmed(nodes, mass, float(ndtr(-(places[-1] - 0.5 / noise))), 1)


def _sum(one: Law, other: Law, noise: float) -> Law:
    """The mean of the ratios of both, moved onto the grid of as many."""
    rounds = one.rounds + other.rounds
    share = one.rounds / rounds
    low, high = (math.log(end(one.nodes[place], other.nodes[place])) for end, place in ((min, 1), (max, -1)))
    spread = math.sqrt(math.expm1(min(1 / noise**2, _FURTHEST)) / rounds)  # the standard deviation of the mean
    grid, mass = Grid(_WIDTH * min(1 / noise, spread), low, high), np.zeros(_NODES + 1)
    for start in range(0, one.nodes.size, _ROWS):
        rows, columns = slice(start, start + _ROWS), slice(start if one is other else 0, None)
        values = np.add.outer(share * one.nodes[rows], (1 - share) * other.nodes[columns])
        weights = np.multiply.outer(one.mass[rows], other.mass[columns])
        if one is other:
            weights[:, _ROWS:] *= 2  # for the columns before
        mass += grid.spread(values.ravel(), weights.ravel())
    return _trimmed(grid.nodes, mass, share * one.infinite + (1 - share) * other.infinite, rounds)


def _reach(noise: float) -> float:
    """How far from 0 the logarithm of a ratio is, but for a negligible mass."""
    return 0.5 / noise**2 + _TAILS / noise


def _trimmed(nodes: Array, mass: Array, infinite: float, rounds: int) -> Law:
    """The law without the nodes at both ends that hold next to nothing: that goes to 0, and to infinity."""
    mass = np.maximum(mass, 0.0)
    under_p = np.cumsum((mass * nodes)[::-1])[::-1]
    last = max(int(np.searchsorted(-under_p, -_NEGLIGIBLE)), 3)
    first = min(max(int(np.searchsorted(np.cumsum(mass[1:]), _NEGLIGIBLE)) + 1, 1), last - 2)
    kept = np.concatenate([[0], np.arange(first, last)])
    left = mass[kept]
    # To the left: onto 0 and the first node that stays, with the same mean.
    up = float(mass[1:first] @ nodes[1:first]) / nodes[first]
    left[0] += float(mass[1:first].sum()) - up + float(mass[last:].sum())
    left[1] += up
    return Law(nodes[kept], left, infinite + float(mass[last:] @ nodes[last:]), rounds)


def _gathered(rounds: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The noises of a block and how often each occurs; many in a few bins, each rounded down to the least in it."""
    counts: dict[float, int] = {}
    for noise, count in sorted(rounds):
        counts[noise] = counts.get(noise, 0) + count
    if len(counts) <= _NOISES:
        return list(counts.items())
    least, most = next(iter(counts)), max(counts)
    bins: dict[int, tuple[float, int]] = {}
    for noise, count in counts.items():
        place = min(int(math.log(noise / least) / math.log(most / least) * _NOISES), _NOISES - 1)
        lowest, before = bins.get(place, (noise, 0))
        bins[place] = lowest, before + count
    return list(bins.values())


def divergence(block: Allocated, orders: Sequence[float]) -> Array:
    """The Renyi divergence of the block at each order: the larger of both directions."""
    rounds = _gathered(block.rounds)
    alpha = np.array(orders, dtype=np.float64)
    known = alpha / (2 * min(noise for noise, _ in rounds) ** 2)  # joint convexity: if the round were known
    few = alpha <= _MOST_ORDER
    if min(noise for noise, _ in rounds) < _LEAST_NOISE:
        return known
    moments = np.maximum(_moments(rounds, alpha[few]), _inverse_moments(rounds, alpha[few] - 1))
    moments += _ROUNDING * alpha[few]
    found = known.copy()
    found[few] = np.minimum(known[few], moments / (alpha[few] - 1))
    return found


def _moments(rounds: Sequence[tuple[float, int]], orders: Array) -> Array:
    """log E_Q M^a: a! t^-a times the coefficient of z^a in prod_i sum_j E Y_i^j z^j / j!, exact at whole orders.

    In between on the chord, since it is convex in a.
    """
    from scipy.special import gammaln

    whole = np.arange(int(np.ceil(orders.max(initial=2.0))) + 1)
    series = np.where(whole == 0, 0.0, -np.inf)
    for noise, count in rounds:
        power = whole * (whole - 1) / (2 * noise**2) - gammaln(whole + 1)
        for bit in reversed(bin(count)[2:]):
            series = _product(series, power) if bit == "1" else series
            power = _product(power, power)
    total = sum(count for _, count in rounds)
    found: Array = np.interp(orders, whole, series + gammaln(whole + 1) - whole * math.log(total))
    return found


def _product(one: Array, other: Array) -> Array:
    """The product of two power series with positive coefficients, given by logarithms."""
    return np.array([np.logaddexp.reduce(one[: n + 1] + other[n::-1]) for n in range(one.size)])


def _inverse_moments(rounds: Sequence[tuple[float, int]], powers: Array) -> Array:
    """log E_Q M^-s = log int u^(s - 1) prod_i phi_i(u/t) du / Gamma(s), phi_i(v) = E e^(-v Y_i); infinite if too far.

    By the trapezoid rule in x = log u, which is exact to rounding here; below the grid phi is taken for 1. The
    integrand is log-concave, so that nothing that counts lies beyond where it has fallen by e^-40.
    """
    from scipy.special import gammaln

    total, step = sum(count for _, count in rounds), 0.04
    x = multiples(step, -30.0, 90.0) + math.log(total)
    log_phi = sum(count * _log_laplace(noise, x - math.log(total)) for noise, count in rounds)
    exponents = powers[:, None] * x + log_phi
    inside = np.logaddexp.reduce(exponents, axis=1) + math.log(step)
    found: Array = np.logaddexp(inside, powers * x[0] - np.log(powers)) - gammaln(powers)
    return np.where(exponents[:, -1] < exponents.max(axis=1) - 40, found, np.inf)


def _log_laplace(noise: float, log_v: Array) -> Array:
    """log E e^(-v Y), by the trapezoid rule around where the integrand is largest."""
    from scipy.special import wrightomega

    peak = -noise * wrightomega(log_v - 0.5 / noise**2 - 2 * math.log(noise))
    step = min(0.25, noise / 4)
    z = peak[:, None] + multiples(step, -9.0, 9.0)
    exponents = -(z**2) / 2 - np.exp(np.minimum(log_v[:, None] + z / noise - 0.5 / noise**2, _FURTHEST))
    found: Array = np.logaddexp.reduce(exponents, axis=1) + math.log(step / math.sqrt(2 * math.pi))
    return found
