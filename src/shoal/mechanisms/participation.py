"""When a client may take part, where that is public, and what noise on the sum then costs, correlated or not.

A round releases a weighted sum of the sums so far, with fresh noise (see `correlated`). A client moves it by its
`reach`: |c_{d_1}| + |c_{d_2}| + ... clips, where it took part d_1, d_2, ... rounds ago. Over a run these are one
Gaussian mechanism, whose squared shift is the sum of (reach / noise)^2. What is the largest over all clients?

- `regular`: rounds are multiples of the separation apart. A client that leaves none out reaches furthest.
- otherwise, as many bands as the separation or fewer: no two of its rounds meet (Choquette-Choo et al. 2023).
- otherwise, c >= 0 and non-increasing: it comes in rounds 0, b, 2b, ... (Kalinin & Lampert 2024). Any other
  c is replaced by its majorant max_{j >= i} |c_j|, which moves no reach down.

The last two hold for noise that never falls: <C e_i, C e_j> grows if both come earlier, and closer together. Where it
falls, each round counts with the least noise from it on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Participation:
    """When a client may take part.

    Attributes:
        rounds: The planned number of rounds.
        separation: The least number of rounds from one participation to the next.
        most: The most rounds in which a client takes part; None where the separation alone bounds them.
        regular: Participations are multiples of the separation apart.
    """

    rounds: int
    separation: int = 1
    most: int | None = None
    regular: bool = False

    @property
    def times(self) -> int:
        """How often a client takes part at most."""
        fit = -(-self.rounds // self.separation)
        return fit if self.most is None else min(self.most, fit)

    def over(self, rounds: int) -> Participation:
        """The same over this many rounds."""
        return Participation(rounds, self.separation, self.most, self.regular)

    def refused(self, t: int, before: Iterable[int]) -> str | None:
        """Why a client that took part in these rounds may not take part in round t; None where it may.

        A round may be run again.
        """
        others = sorted(set(before) - {t})
        close = [s for s in others if abs(t - s) < self.separation]
        if close:
            return (
                f"round {t + 1} is too close to round {close[-1] + 1}, in which it took part: there must be "
                f"{self.separation} rounds from one to the next"
            )
        if self.most is not None and len(others) >= self.most:
            return f"it has taken part in {len(others)} rounds, and may in {self.most}"
        return None

    def weights(self, coefficients: Array) -> Array:
        """The coefficients, for each round, by which the client that comes as often as it may reaches furthest."""
        found = np.zeros(self.rounds)
        found[: len(coefficients)] = np.abs(coefficients[: self.rounds])
        return majorant(found) if self.overlaps(len(coefficients)) else found

    def overlaps(self, bands: int) -> bool:
        """May two participations meet in one weighted sum, any number of rounds apart?"""
        return not self.regular and bands > self.separation

    def repeated(self, series: Array) -> Array:
        """The series begun anew every `separation` rounds, as often as a client takes part, added up."""
        padded = np.zeros((-(-self.rounds // self.separation), self.separation))
        padded.ravel()[: self.rounds] = series
        total = padded.cumsum(axis=0)
        total[self.times :] -= total[: -self.times].copy()
        found: Array = total.ravel()[: self.rounds]
        return found

    def reach(self, coefficients: Array) -> Array:
        """By how many clips, at most, a client moves each round that takes part from round 0 on."""
        return self.repeated(self.weights(coefficients))


class Weighted(Protocol):
    """Noise on a weighted sum of the rounds' sums (see `correlated`)."""

    def multiplier(self, t: int, total: int) -> float:
        """The noise multiplier of round t."""

    def coefficients(self, participation: Participation, rounds: int) -> Array:
        """The coefficients 1, c_1, c_2, ... of the correlated noise, over this many rounds."""

    def __hash__(self) -> int: ...


def majorant(series: Array) -> Array:
    """The least series that never rises and is nowhere below this one."""
    found: Array = np.maximum.accumulate(series[::-1])[::-1]
    return found


def price(noise: Weighted, participation: Participation, t: int, again: bool = False, rounding: float = 0.0) -> float:
    """What round t costs: (reach / noise)^2 of one client, which over all rounds is the squared shift of a Gaussian.

    Clients start in different rounds, so at any time some have lost more than others. New rounds come in order, and
    each is charged the increase of the largest client's sum. A round that is run `again` is charged what it costs the
    client that it affects most. So no client loses more than was charged.
    `rounding`: by how many clips rounding may move a weighted sum beyond that, for each unit of noise.
    """
    first, once_more = _prices(noise, participation, max(participation.rounds, t + 1), rounding)
    return float((once_more if again else first)[t])


def price_of(
    noise: Weighted, participation: Participation, t: int, before: tuple[int, ...], rounding: float = 0.0
) -> float:
    """What taking part in round t costs a client that took part in the rounds `before`, over the whole run."""
    rounds = max(participation.rounds, t + 1, *(s + 1 for s in before))
    plan = _plan(noise, participation, rounds)

    def cost(starts: tuple[int, ...]) -> float:
        moved, reached = (_from(starts, each, rounds) for each in plan.pulse)
        return float(_squares(moved, reached, plan, rounding).sum())

    return cost((*before, t)) - cost(before)


def costliest(noise: Weighted, participation: Participation) -> int:
    """The round in which taking part once costs a client most, in that round and all later ones."""
    plan = _plan(noise, participation, participation.rounds)
    cost = np.convolve(plan.weight[::-1], plan.pulse[0] ** 2)[: participation.rounds][::-1]
    return int(np.argmax(cost))


def block_price(noise: Weighted, participation: Participation, t: int, rounding: float = 0.0) -> float:
    """What one participation costs a client, at most, that comes in one of the `separation` rounds from t on."""
    return max(
        price_of(noise, participation, start, (), rounding)
        for start in range(t, max(t + 1, min(t + participation.separation, participation.rounds)))
    )


def _from(starts: tuple[int, ...], series: Array, rounds: int) -> Array:
    """The series begun in each of these rounds, added up."""
    found = np.zeros(rounds)
    for start in starts:
        found[start : start + len(series)] += series[: rounds - start]
    return found


@dataclass(frozen=True, eq=False)
class _Plan:
    """The noise of each round, 1/noise^2, and |c| with where it may be other than 0."""

    scales: Array
    weight: Array
    pulse: tuple[Array, Array]


@lru_cache(maxsize=8)
def _plan(noise: Weighted, participation: Participation, rounds: int) -> _Plan:
    scales = np.array([noise.multiplier(t, participation.rounds) for t in range(rounds)])
    # A round without noise has no price: the ledger records that nothing is proven for it.
    weight = np.divide(1.0, scales**2, out=np.zeros(rounds), where=scales > 0)
    size = np.abs(noise.coefficients(participation, rounds)[:rounds])
    return _Plan(scales, weight, (size, np.ones(len(size))))


def _squares(moved: Array, reached: Array, plan: _Plan, rounding: float, start: int = 0) -> Array:
    """What each round from `start` on costs a client that moves it so far; all that it may reach is also rounded."""
    rows = slice(start, start + len(moved))
    found: Array = (moved + (reached > 0.5) * rounding * plan.scales[rows]) ** 2 * plan.weight[rows]
    return found


@lru_cache(maxsize=8)
def _prices(noise: Weighted, participation: Participation, rounds: int, rounding: float) -> tuple[Array, Array]:
    plan, longer = _plan(noise, participation, rounds), participation.over(rounds)
    size, support = plan.pulse
    moved, reached = longer.reach(size), longer.reach(support)
    if not participation.regular:
        falling = replace(plan, weight=majorant(plan.weight))
        largest = majorant(longer.weights(size))[:: longer.separation][: longer.times].cumsum()
        at_once = largest[np.minimum(np.arange(rounds) // longer.separation, longer.times - 1)]
        return _squares(moved, reached, falling, rounding), _squares(at_once, np.ones(rounds), plan, rounding)
    costliest, hardest = np.zeros(rounds), np.zeros(rounds)
    for start in range(min(longer.separation, rounds)):
        cost = _squares(moved[: rounds - start], reached[: rounds - start], plan, rounding, start)
        costliest[start:] = np.maximum(costliest[start:], np.cumsum(cost))
        hardest[start:] = np.maximum(hardest[start:], cost)
    return np.diff(costliest, prepend=0.0), hardest
