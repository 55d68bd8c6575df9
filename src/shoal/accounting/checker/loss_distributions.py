"""Pairs of distributions as dp-accounting's privacy loss distributions: built, amplified and composed from above."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import log_ndtr, ndtr

POINTS = 25  # grid points in one standard deviation of the loss of a step: an error of about 1e-4
COARSEST, MOST_POINTS = 0.05, 1_000_000
FFT = 1e-15  # what a composition by FFT may lose in delta

Pld: TypeAlias = Any
"""dp-accounting's PrivacyLossDistribution, which has no types."""


@dataclass
class Grid:
    """The losses are multiples of `step`; `needed` is the step that the compositions made so far ask for."""

    step: float
    needed: float = COARSEST
    longest: float = 0.0


@dataclass
class Total:
    """Everything that happened to one unit of a client with `records` records (None: of the worst client)."""

    adjacency: str
    records: int | None = None
    squares: float = 0.0  # of the shifts of unsampled Gaussians, which add up to one
    distance: float = 0.0  # of the noise samplers from their distributions
    reach: float = 0.0  # the largest loss of a step, roughly
    steps: float = 0.0
    parts: dict[str, tuple[Callable[[Grid], Pld], int]] = field(default_factory=dict)

    @property
    def moved(self) -> float:
        """By how many clips the unit moves a sum."""
        return 2.0 if self.adjacency == "replace-one" else 1.0

    def put(
        self, event: Mapping[str, Any], times: int, build: Callable[[Grid], Pld], reach: float, steps: float = 1.0
    ) -> None:
        """Note that the pair which `build` makes was released so many times."""
        key = json.dumps([self.records, event], sort_keys=True)
        self.parts[key] = build, self.parts.get(key, (build, 0))[1] + times
        self.reach, self.steps = max(self.reach, reach), self.steps + times * steps

    def composed(self, grid: Grid) -> Pld:
        """All of it as one distribution."""
        made = [(build(grid), n) for build, n in self.parts.values()]
        if self.squares:
            made.append((gaussian(math.sqrt(self.squares), grid), 1))
        spread = sum(n * max(map(variance, halves(one))) for one, n in made)
        grid.needed = min(grid.needed, math.sqrt(spread / sum(n for _, n in made)) / POINTS)
        whole: Pld | None = None
        for one, n in made:
            many = one.self_compose(n) if n > 1 else one
            whole = many if whole is None else whole.compose(many)
        assert whole is not None
        grid.longest = max(grid.longest, *(half.size * grid.step for half in halves(whole)))
        return whole

    def curve(self) -> Callable[[float], float]:
        """Delta as a function of epsilon, from above."""
        if not self.parts:
            shift = math.sqrt(self.squares)
            return lambda epsilon: gaussian_delta(shift, epsilon)
        reach = max(self.reach, self.squares / 2 + 10 * math.sqrt(self.squares), 1e-6)
        step = max(min(COARSEST, reach / 1000), reach / MOST_POINTS)
        for _ in range(12):
            grid = Grid(step)
            whole = self.composed(grid)
            least = max(grid.needed, grid.longest / MOST_POINTS)
            if step <= 1.1 * least:
                break
            step = least
        slack = FFT * max(self.steps, 10.0)
        return lambda epsilon: float(whole.get_delta_for_epsilon(epsilon)) + slack


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
    found = np.bincount(low - first, mass * (1 - share), size) + np.bincount(low - first + 1, mass * share, size)
    return pld_pmf.DensePLDPmf(grid.step, first, found, infinite, True)
