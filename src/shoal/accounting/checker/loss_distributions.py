"""Pairs of distributions as dp-accounting's privacy loss distributions: built, amplified and composed from above."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import common, pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import log_ndtr, ndtr

from .work_limit import Work

POINTS = 25  # grid points in one standard deviation of the loss of a step: an error of about 1e-4
COARSEST, MOST_POINTS = 0.05, 1_000_000
FFT = 1e-15  # what a composition by FFT may lose in delta
BINS, BINS_OF_ROUNDS = 100, 24  # of noise: more, as schedules have them, are rounded down
BUILT, COMPOSED, POWERED = 4, 0.1, 0.4  # units of work of a point: as dp-accounting builds it, composes it, and often
READ = 0.02  # of one delta
LONGEST = 5 * MOST_POINTS  # of a composition: a gigabyte or so

Pld: TypeAlias = Any
"""dp-accounting's PrivacyLossDistribution, which has no types."""


@dataclass
class Grid:
    """The losses are multiples of `step`; `needed` is the step that the compositions made so far ask for."""

    step: float
    needed: float = COARSEST
    longest: float = 0.0


@dataclass
class Part:
    """A pair that was released so many times: what makes it on a grid, and how long that takes.

    `reach` is its largest loss, roughly, and `effort` how many pairs of Gaussians each of its points is made of.
    `bins`: into how many bins more noises than that are gathered.
    """

    build: Callable[[Grid], Pld]
    times: int
    reach: float
    effort: float
    bins: int


@dataclass
class Total:
    """Everything that happened to one unit of a client with `records` records (None: of the worst client)."""

    adjacency: str
    records: int | None = None
    work: Work = field(default_factory=Work)
    squares: float = 0.0  # of the shifts of unsampled Gaussians, which add up to one
    distance: float = 0.0  # of the noise samplers from their distributions
    reach: float = 0.0  # the largest loss of a step, roughly
    steps: float = 0.0
    parts: dict[str, dict[float, Part]] = field(default_factory=dict)  # alike but for their noise, and by it

    @property
    def moved(self) -> float:
        """By how many clips the unit moves a sum."""
        return 2.0 if self.adjacency == "replace-one" else 1.0

    def put(
        self,
        alike: list[Any],
        noise: float,
        times: int,
        build: Callable[[Grid], Pld],
        reach: float,
        steps: float = 1.0,
        effort: float = 1.0,
        bins: int = BINS,
    ) -> None:
        """Note that the pair which `build` makes was released so many times; `alike`: all of it but its noise."""
        kept = self.parts.setdefault(json.dumps([self.records, *alike], sort_keys=True), {})
        part = kept.setdefault(noise, Part(build, 0, reach, effort, bins))
        part.times += times
        self.reach, self.steps = max(self.reach, reach), self.steps + times * steps

    def composed(self, grid: Grid) -> Pld:
        """All of it as one distribution."""
        return self._joined(self._made(grid))

    def _made(self, grid: Grid) -> list[tuple[Pld, int]]:
        """Every pair, and how often it was released; the grid notes what they need, and how long all of it is."""
        made = []
        for part in (part for kept in self.parts.values() for part in _binned(kept)):
            self.work.take(BUILT * part.effort * (part.reach / grid.step + 1000), "so large losses or many events")
            made.append((dense(part.build(grid)), part.times))
        if self.squares:
            shift = math.sqrt(self.squares)
            self.work.take(BUILT * (shift**2 / 2 + 10 * shift) / grid.step, "so large losses")
            made.append((dense(gaussian(shift, grid)), 1))
        spread = sum(n * max(map(variance, halves(one))) for one, n in made)
        grid.needed = min(grid.needed, math.sqrt(spread / sum(n for _, n in made)) / POINTS)
        ends = [(n, max(half.size for half in halves(one)) * grid.step) for one, n in made]
        most = 20 * math.sqrt(spread) + max(end for _, end in ends)
        grid.longest = max(grid.longest, min(most, sum(n * end for n, end in ends)))
        return made

    def _joined(self, made: list[tuple[Pld, int]]) -> Pld:
        whole: Pld | None = None
        for one, n in made:
            many = self._many(one, n) if n > 1 else one
            if whole is not None:
                size = sum(half.size for half in halves(whole) + halves(many))
                _refuse_long(size // 4)  # of four, on the average
                self.work.take(COMPOSED * (size + 10_000), "so long a composition")
            whole = many if whole is None else whole.compose(many)
        assert whole is not None
        return whole

    def _many(self, one: Pld, times: int) -> Pld:
        """A distribution composed with itself, once it is known how long that is."""
        for half in halves(one):
            self.work.take(COMPOSED * 80 * half.size, "so long a composition")
            first, last = common.compute_self_convolve_bounds(half._probs, times, FFT)
            _refuse_long(last - first)
            self.work.take(POWERED * max(last - first, half.size), "so long a composition")
        return one.self_compose(times)

    def curve(self) -> Callable[[float], float]:
        """Delta as a function of epsilon, from above."""
        if not self.parts:
            shift = math.sqrt(self.squares)
            return lambda epsilon: gaussian_delta(shift, epsilon)
        reach = max(self.reach, self.squares / 2 + 10 * math.sqrt(self.squares), 1e-6)
        step = max(min(COARSEST, reach / 1000), reach / MOST_POINTS)
        for _ in range(12):
            grid = Grid(step)
            made = self._made(grid)
            least = max(grid.needed, grid.longest / MOST_POINTS)
            if least / 4 <= step <= 1.1 * least:
                break
            step = least
        whole = self._joined(made)
        size = sum(half.size for half in halves(whole))
        slack = FFT * max(self.steps, 10.0)

        def delta(epsilon: float) -> float:
            self.work.take(READ * size, "so many claims")
            return float(whole.get_delta_for_epsilon(epsilon)) + slack

        return delta


def _refuse_long(points: int) -> None:
    if points > LONGEST:
        raise ValueError(f"a composition of {points:,} points")


def _binned(kept: dict[float, Part]) -> Iterator[Part]:
    """Parts that are alike but for their noise, in few bins: each has the least noise of its own."""
    least, most = min(kept), max(kept)
    several, bins = kept[least].bins, dict[int, list[Part]]()
    for noise in sorted(kept):
        scale = several / math.log(most / least) if len(kept) > several else 0.0
        place = min(math.floor(math.log(noise / least) * scale + 1e-9), several - 1) if scale else len(bins)
        bins.setdefault(place, []).append(kept[noise])
    for parts in bins.values():
        yield replace(parts[0], times=sum(part.times for part in parts))


def dense(one: Pld) -> Pld:
    """The same with every loss of its grid: dp-accounting composes few losses, many times, one by one."""
    return pld.PrivacyLossDistribution(*halves(one))


def halves(one: Pld) -> list[Any]:
    """The distributions of both directions, dense; one where they are equal."""
    both = [one._pmf_remove] if one._symmetric else [one._pmf_remove, one._pmf_add]
    return [half.to_dense_pmf() for half in both]


def finite(pmf: Any) -> tuple[Any, Any]:
    """The finite losses, in steps of the grid, and the mass of each."""
    return np.arange(pmf.size) + pmf._lower_loss, np.maximum(pmf._probs, 0.0)


def variance(pmf: Any) -> float:
    """The variance of the finite losses."""
    at, mass = finite(pmf)
    mean = float(at @ mass / mass.sum())
    return float(pmf._discretization**2 * ((at - mean) ** 2 @ mass) / mass.sum())


def gaussian_delta(shift: float, epsilon: float) -> float:
    """N(shift, 1) against N(0, 1): Balle & Wang 2018, Theorem 8."""
    if shift == 0:
        return 0.0
    return float(ndtr(shift / 2 - epsilon / shift) - np.exp(epsilon + log_ndtr(-shift / 2 - epsilon / shift)))


def gaussian(shift: float, grid: Grid, rate: float = 1.0, *, replaced: bool = False) -> Pld:
    """(rate N(shift, 1) + (1 - rate) N(0, 1), N(0, 1)), in both directions.

    Where a unit is replaced, the second is rate N(-shift, 1) + (1 - rate) N(0, 1).
    """
    relation = pld.NeighborRel.REPLACE_ONE if replaced else pld.NeighborRel.ADD_OR_REMOVE_ONE
    return pld.from_gaussian_mechanism(
        1 / shift, value_discretization_interval=grid.step, sampling_prob=rate, neighboring_relation=relation
    )


def both_ways(one: Pld, grid: Grid) -> Pld:
    """The pair whose divergences are, in both directions, the first of `one`.

    Losses above 0 stay. By the other direction's divergence P has e^-loss of their mass at -loss, and the rest at 0.
    """
    ahead = halves(one)[0]
    at, p = finite(ahead)
    at, p = at[at > 0], p[at > 0]
    mirrored = np.exp(np.log(np.maximum(p, 1e-300)) - at * grid.step)
    rest = max(0.0, 1 - ahead._infinity_mass - float(p.sum() + mirrored.sum()))
    far = int(at.max(initial=0))
    mass = np.zeros(2 * far + 1)
    mass[far + at], mass[far - at], mass[far] = p, mirrored, rest
    return pld.PrivacyLossDistribution(pld_pmf.DensePLDPmf(grid.step, -far, mass, ahead._infinity_mass, True))


def amplified(one: Pld, rate: float, grid: Grid) -> Pld:
    """From (P, Q) to (rate P + (1 - rate) Q, Q): the unit entered with probability `rate`, in secret."""
    ahead, *other = halves(one)
    back = other[0] if other else ahead
    at, p = finite(ahead)
    at = at * grid.step
    q = np.exp(np.log(np.maximum(p, 1e-300)) - at)
    # the error of a composition, far below, would be more than all of Q: such losses are raised until it is not
    above, below = np.append(np.cumsum(q[::-1])[-2::-1], 0.0), np.cumsum(p)
    cut = int(np.argmax(above + below * np.exp(-at) <= 1 + 1e-9))
    at, p = at[cut:], np.append(below[cut], p[cut + 1 :])
    q = p * np.exp(-at)
    alone = max(0.0, 1 - float(q.sum()))  # of Q, where P has nothing
    up = np.append(np.logaddexp(math.log(rate) + at, math.log1p(-rate)), math.log1p(-rate))
    remove = spread(up, np.append(rate * p + (1 - rate) * q, (1 - rate) * alone), rate * ahead._infinity_mass, grid)
    at, p = finite(back)
    down = np.append(-np.logaddexp(math.log(rate) - at * grid.step, math.log1p(-rate)), -math.log1p(-rate))
    return pld.PrivacyLossDistribution(remove, spread(down, np.append(p, back._infinity_mass), 0.0, grid))


def spread(at: Any, mass: Any, infinite: float, grid: Grid) -> Any:
    """Masses at any losses, moved to the grid's points on both sides of each: connect-the-dots.

    The shares leave both distributions of the pair with the mass they had, so no divergence shrinks (Doroshenko et
    al. 2022).
    """
    low = np.floor(at / grid.step).astype(np.int64)
    share = np.clip(np.expm1(low * grid.step - at) / math.expm1(-grid.step), 0.0, 1.0)
    first = int(low.min())
    size = int(low.max()) - first + 2
    _refuse_long(size)
    found = np.bincount(low - first, mass * (1 - share), size) + np.bincount(low - first + 1, mass * share, size)
    return pld_pmf.DensePLDPmf(grid.step, first, found, infinite, True)
