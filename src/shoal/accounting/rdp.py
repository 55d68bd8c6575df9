"""Renyi accounting: the `rdp` accountant, the papers' moments accountant, and a running one for stopping.

The divergence of the Poisson-sampled Gaussian (Mironov, Talwar, Zhang 2019) is computed for many noises at
once, and so is that of sampling without replacement, so that a schedule costs milliseconds a round; both are
tested against dp-accounting, from which the conversion to (epsilon, delta) comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.accounting import allocation
from shoal.accounting.curves import Array
from shoal.accounting.events import Allocated, Event, Gaussian, Leaf, Sampled, SampledUser, TwoLevel, Unbounded
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.sampler_error import epsilon_beside
from shoal.accounting.theorems import Adjacency, counted
from shoal.errors import ConfigError, nearest

Orders: TypeAlias = tuple[float, ...]

DEFAULT: Orders = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)
GRIDS: dict[str, Orders] = {
    "tf72": (1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, *range(5, 64), 128, 256, 512),
    "2-32": tuple(range(2, 33)),
    "2-33": tuple(range(2, 34)),
}
_CHUNK = 256  # noises at a time: bounds the memory
_LEAST_NOISE = 0.1  # below this the quadrature needs too many points
_MOST_MOMENT = 64  # moments beyond these are bounded, not computed
_MOST_SHIFT = 4096.0  # standard deviations over which a user's integrals run
_ROUNDING = 5e-15  # of a logarithm near 0: added, so that many faint steps are not taken for none


def grid(name: str) -> Orders:
    """The orders that a name such as `tf72` stands for."""
    if name not in GRIDS:
        raise ConfigError(f"no grid of orders is called '{name}'{nearest(name, GRIDS)}")
    return GRIDS[name]


def total(counts: Mapping[Leaf, int], adjacency: Adjacency, orders: Orders = DEFAULT) -> Array:
    """The Renyi divergence of all events together, at each order."""
    summed = np.zeros(len(orders))
    poisson: dict[float, list[tuple[float, int]]] = {}
    for leaf, n in counts.items():
        if isinstance(leaf, Sampled) and (simple := _as_poisson(leaf, adjacency)) is not None:
            poisson.setdefault(simple[0], []).append((simple[1], n))
        else:
            summed += n * divergence(leaf, adjacency, orders)
    for rate, members in poisson.items():
        noises, times = np.array(members, dtype=np.float64).T
        summed += times @ poisson_gaussian(rate, noises, orders)
    return summed


@lru_cache(maxsize=4096)
def divergence(leaf: Leaf, adjacency: Adjacency, orders: Orders = DEFAULT) -> Array:
    """The Renyi divergence of one event, at each order."""
    sensitivity = 2 if adjacency == "replace-one" else 1
    if isinstance(leaf, Sampled) and (simple := _as_poisson(leaf, adjacency)) is not None:
        one: Array = poisson_gaussian(simple[0], np.array([simple[1]]), orders)[0]
        return one
    match leaf:
        case Gaussian(noise):
            return np.array(orders) * sensitivity**2 / (2 * noise**2)
        case Sampled("poisson", rate, Gaussian(noise)) if noise >= _LEAST_NOISE:
            return _poisson_replaced(rate, noise, orders)
        case Sampled("poisson" | "fixed-size", rate, Gaussian(noise)):
            # Replace-one, or zero-out of a fixed-size sample. The bound asks only that the outputs with the unit,
            # with the other (or its place left empty) and with neither are pairwise at most two clips apart.
            return _without_replacement(rate, noise / 2, orders)
        case Sampled("poisson", rate, inner) if adjacency != "replace-one":
            return _amplified(rate, total(leaves(inner), adjacency, orders), orders)
        case SampledUser(records, rate, noise) if noise >= _LEAST_NOISE and adjacency != "replace-one":
            return _user_sampled(rate, records, noise, orders)
        case Allocated() if adjacency != "replace-one":
            return allocation.divergence(leaf, orders)
        case TwoLevel(rate) if leaf.participation == "visible" or adjacency != "replace-one":
            amplify = _sometimes if leaf.participation == "visible" else _amplified
            return amplify(rate, total(leaves(leaf.local_event), adjacency, orders), orders)
    raise ConfigError(f"the rdp accountant does not understand {leaf} under {adjacency}; use pld")


def _sometimes(rate: float, inside: Array, orders: Orders) -> Array:
    """The divergence of what happened with probability `rate`, where the observer knows whether it did."""
    less_one = np.array(orders) - 1
    grown = less_one * inside
    small = np.log1p(rate * np.expm1(np.minimum(grown, 30.0)))
    large = np.logaddexp(math.log1p(-rate), math.log(rate) + grown)
    mixed: Array = np.where(grown < 30.0, small, large) / less_one
    return mixed


def _as_poisson(leaf: Sampled, adjacency: Adjacency) -> tuple[float, float] | None:
    """The (rate, noise) of the Poisson-sampled Gaussian that this event amounts to, if it does."""
    if adjacency == "replace-one" or not isinstance(leaf.event, Gaussian):
        return None
    if leaf.kind == "poisson":
        return leaf.rate, leaf.event.noise
    # A unit that is added to a sample of fixed size pushes another out: the sum moves by twice the clip.
    displaces = leaf.kind == "fixed-size" and adjacency == "add-or-remove"
    return (leaf.rate, leaf.event.noise / 2) if displaces else None


def poisson_gaussian(rate: float, noises: Array, orders: Orders) -> Array:
    """The divergence of the Poisson-sampled Gaussian, one row a noise and one column an order."""
    noises = noises.astype(np.float64)
    if rate == 1:
        return np.outer(0.5 / noises**2, np.array(orders))
    distinct, places = np.unique(noises, return_inverse=True)  # a staircase has few
    found = np.empty((distinct.size, len(orders)))
    for start in range(0, distinct.size, _CHUNK):
        chunk = distinct[start : start + _CHUNK]
        found[start : start + _CHUNK] = _chunk(rate, chunk, orders)
    alpha = np.array(orders)
    safe: Array = np.maximum(found, 0.0) + _ROUNDING * alpha / (alpha - 1)
    return safe[places]


def _chunk(rate: float, noises: Array, orders: Orders) -> Array:
    found = np.empty((noises.size, len(orders)))
    broken = [place for place, order in enumerate(orders) if float(order) != int(order)]
    for place in sorted(set(range(len(orders))) - set(broken)):
        found[:, place] = _whole_order(rate, noises, int(orders[place]))
    if broken:
        chosen = [float(orders[place]) for place in broken]
        found[:, broken] = np.array([_broken_orders(rate, float(noise), chosen) for noise in noises])
    return found


def _whole_order(rate: float, noises: Array, order: int) -> Array:
    """log sum_k C(order, k) rate^k (1 - rate)^(order - k) e^(k (k - 1) / 2 noise^2) / (order - 1)."""
    k = np.arange(order + 1)
    return _log_sum(_log_binomial_law(order, rate) + (k * (k - 1) / 2) * noises[:, None] ** -2) / (order - 1)


def _broken_orders(rate: float, noise: float, orders: list[float]) -> Array:
    """The same for orders that are not whole, by the trapezoid rule, which is exact to rounding here."""
    if noise < _LEAST_NOISE:
        return _by_library(rate, noise, orders)
    step = min(0.25, noise / 2)
    y = np.arange(-12.0, max(orders) / noise + 12.0, step)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + y / noise - 0.5 / noise**2)
    alpha = np.array(orders)
    exponent = alpha[:, None] * log_ratio - y**2 / 2
    found: Array = (_log_sum(exponent) + math.log(step / math.sqrt(2 * math.pi))) / (alpha - 1)
    return found


def _by_library(rate: float, noise: float, orders: list[float]) -> Array:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders).compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)))
    found: Array = accountant.rdp
    return found


def _poisson_replaced(rate: float, noise: float, orders: Orders) -> Array:
    """Poisson sampling under replace-one, for the pair that pld takes too (curves.poisson_replaced).

    A pair that dominates in every hockey-stick divergence does so in Renyi's. By the trapezoid rule, as above, up to
    where the integrand is largest at a rate near 1.
    """
    alpha, step = np.array(orders), min(0.25, noise / 2)
    y = np.arange(-12.0, 2 * alpha.max() / noise + 12.0, step)
    one, other = (
        np.logaddexp(math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + sign * y / noise - 0.5 / noise**2)
        for sign in (1, -1)
    )
    log_density, log_ratio = other - y**2 / 2 + math.log(step / math.sqrt(2 * math.pi)), one - other
    ends = np.searchsorted(y, 2 * alpha / noise + 12.0)
    summed = np.array([_log_sum(log_density[:n] + a * log_ratio[:n]) for a, n in zip(alpha, ends, strict=True)])
    found: Array = np.maximum(summed, 0.0) / (alpha - 1) + _ROUNDING * alpha / (alpha - 1)
    return found


def _user_sampled(rate: float, records: int, noise: float, orders: Orders) -> Array:
    """Poisson sampling of each of a user's records (curves.user_sampled), the larger of both directions.

    By the trapezoid rule, as above: all zeros of the ratio, a polynomial in e^(y / noise), are real and negative.
    Infinite at orders whose integrals would take too many points.
    """
    j, found = np.arange(records + 1), np.full(len(orders), np.inf)
    step = min(0.25, noise / 2)
    furthest = max((order for order in orders if order * records / noise <= _MOST_SHIFT), default=0.0)
    lowest = -12.0 - math.sqrt(-2 * max(furthest - 1, 0.0) * records * math.log1p(-rate))
    y = np.arange(lowest, furthest * records / noise + 12.0, step)
    log_ratio = np.full(y.size, -np.inf)
    for k, weight in zip(j, _log_binomial_law(records, rate), strict=True):
        log_ratio = np.logaddexp(log_ratio, weight + k * y / noise - 0.5 * (k / noise) ** 2)
    log_density = math.log(step / math.sqrt(2 * math.pi)) - y**2 / 2
    for place, order in enumerate(orders):
        if order <= furthest:
            both = _log_sum(np.array([log_density + power * log_ratio for power in (order, 1 - order)]))
            found[place] = (max(float(both.max()), 0.0) + _ROUNDING * order) / (order - 1)
    return found


def _without_replacement(rate: float, noise: float, orders: Orders) -> Array:
    """Sampling without replacement, under replace-one (Wang, Balle, Kasiviswanathan 2019, Theorem 27).

    As dp-accounting has it, but vectorised: at whole orders, and in between on the chord, since (order - 1)
    times the divergence is convex.
    """
    whole = sorted({n for order in orders for n in (math.floor(order), math.ceil(order)) if n > 1})
    ternary = _log_ternary(noise, whole[-1])
    at = {1: 0.0}
    for n in whole:
        j = np.arange(2, n + 1)
        terms = _log_binomial(n, j) + j * math.log(rate) + ternary[2 : n + 1]
        at[n] = float(np.logaddexp(0.0, _log_sum(terms)))
    chords = []
    for order in orders:
        low, high = math.floor(order), math.ceil(order)
        chords.append(at[low] + (at[high] - at[low]) * (order - low))
    found: Array = np.array(chords) / (np.array(orders) - 1)
    return found


def _log_ternary(noise: float, most: int) -> Array:
    """log of the bound on E|(p - q)/r|^j for Gaussians that are pairwise at most a shift apart, j = 0..most."""
    j = np.arange(most + 1)
    bound = math.log(2) + j * (j - 1) / (2 * noise**2)
    if noise < _LEAST_NOISE:
        return bound
    even = np.arange(2, min(most, _MOST_MOMENT) + 2, 2)
    step = min(0.25, noise / 2)
    loss = np.arange(-12.0, even[-1] / noise + 12.0, step) / noise - 0.5 / noise**2
    with np.errstate(divide="ignore"):
        log_distance = np.maximum(loss, 0.0) + np.log(-np.expm1(-np.abs(loss)))  # log |e^loss - 1|
    log_density = -((noise * loss + 0.5 / noise) ** 2) / 2 + math.log(step / math.sqrt(2 * math.pi))
    moments = _log_sum(even[:, None] * log_distance + log_density)
    # An odd moment lies between the even ones next to it (Cauchy and Schwarz).
    known = j[2 : min(even[-1], most) + 1]
    exact = math.log(4) + (moments[known // 2 - 1] + moments[(known + 1) // 2 - 1]) / 2
    bound[known] = np.minimum(bound[known], exact)
    return bound


def _amplified(rate: float, inside: Array, orders: Orders) -> Array:
    """Poisson sampling of any mechanism, at whole orders (Zhu & Wang 2019, Theorem 6); infinite at others."""
    at = {int(order): value for order, value in zip(orders, inside, strict=True) if order == int(order)}
    found = np.full(len(orders), np.inf)
    for place, order in enumerate(orders):
        if order != int(order) or any(k not in at for k in range(2, int(order) + 1)):
            continue
        k = np.arange(2, int(order) + 1)
        terms = _log_binomial(int(order), k) + k * math.log(rate) + (order - k) * math.log1p(-rate)
        terms = terms + (k - 1) * np.array([at[int(i)] for i in k]) + np.where(k > 2, math.log(3), 0.0)
        none = (order - 1) * math.log1p(-rate) + math.log1p(order * rate - rate)
        found[place] = (max(float(_log_sum(np.append(terms, none))), 0.0) + _ROUNDING * order) / (order - 1)
    return found


def _log_binomial(n: int, k: npt.NDArray[np.int64]) -> Array:
    from scipy.special import gammaln

    found: Array = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
    return found


@lru_cache(maxsize=1024)
def _log_binomial_law(n: int, rate: float) -> Array:
    """log of the probabilities of 0 to n of n that each come with this rate."""
    k = np.arange(n + 1)
    found: Array = _log_binomial(n, k) + k * math.log(rate) + (n - k) * math.log1p(-rate)
    return found


def _log_sum(exponents: Array) -> Array:
    """log of the sum of exponentials over the last axis."""
    most = exponents.max(axis=-1)
    below = exponents - most[..., None]
    summed: Array = most + np.log(np.exp(below, out=below).sum(axis=-1))
    return summed


def epsilon(orders: Orders, divergences: Array, delta: float) -> float:
    """The conversion of Canonne, Kamath, Steinke 2020, as dp-accounting and Opacus use it today.

    dp-accounting's own takes six times as long, and a run asks after every round.
    """
    order = np.array(orders)
    with np.errstate(divide="ignore"):
        found = divergences + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)
    found[order <= 1.01] = np.inf  # where the conversion is not stable
    found[delta**2 + np.expm1(-divergences) > 0] = 0.0  # by the KL divergence: delta is at least sqrt(1 - e^-KL)
    found[np.isnan(found)] = np.inf  # an order that overflowed says nothing
    return float(np.maximum(found.min(), 0.0))


def delta(orders: Orders, divergences: Array, epsilon: float) -> float:
    """The same conversion the other way."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    return float(compute_delta(orders, _not_too_faint(divergences), epsilon)[0])


def _not_too_faint(divergences: Array) -> Array:
    """dp-accounting takes logarithms of 1 - e^-divergence, which is 0 where it is positive but below 1e-16."""
    known = np.where(np.isnan(divergences), np.inf, divergences)
    return np.where(known > 0, np.maximum(known, 1e-15), 0.0)


def classic_epsilon(orders: Orders, divergences: Array, delta: float) -> float:
    """The conversion of Mironov 2017, which the papers used: the least rdp + ln(1/delta)/(order - 1)."""
    return float((divergences + math.log(1 / delta) / (np.array(orders) - 1)).min())


def classic_delta(orders: Orders, divergences: Array, epsilon: float) -> float:
    """The same conversion the other way."""
    return min(1.0, float(np.exp(((np.array(orders) - 1) * (divergences - epsilon)).min())))


@dataclass
class Running:
    """What a run has spent so far, by RDP: a query a round costs a few milliseconds, whatever came before.

    Where clients are of several kinds (BySize) each has an account of its own, by its least number of records.
    """

    adjacency: Adjacency = "add-or-remove"
    orders: Orders = DEFAULT
    because: str | None = None
    distance: float = 0.0
    spent: dict[int, Array] = field(init=False)

    def __post_init__(self) -> None:
        self.spent = {0: np.zeros(len(self.orders))}

    def add(self, event: Event) -> None:
        """Charge an event."""
        self.spent, self.distance, because = self._with(event)
        self.because = self.because or because

    def epsilon(self, delta: float) -> float | None:
        """What is spent, by the kind of client that spent most; None where nothing is proven (`because` says why)."""
        return None if self.because else self._greatest(self.spent, self.distance, delta)

    def epsilon_with(self, event: Event, delta: float) -> float | None:
        """What would be spent after this event as well, without charging it."""
        spent, distance, because = self._with(event)
        return None if self.because or because else self._greatest(spent, distance, delta)

    def _greatest(self, spent: dict[int, Array], distance: float, delta: float) -> float:
        return max(epsilon_beside(partial(epsilon, self.orders, each), delta, distance) for each in spent.values())

    def _with(self, event: Event) -> tuple[dict[int, Array], float, str | None]:
        costs = counted(event, self.adjacency)
        distance = self.distance + without_sampler(leaves(event))[1]
        spent = {}
        for records in sorted({*self.spent, *costs}):
            cost, because = self._cost(costs[max(size for size in costs if size <= records)])
            if because is not None:
                return self.spent, distance, because
            spent[records] = self.spent[max(size for size in self.spent if size <= records)] + cost
        return spent, distance, None

    def _cost(self, counts: Mapping[Leaf, int]) -> tuple[Array, str | None]:
        cost = np.zeros(len(self.orders))
        for leaf, n in without_sampler(counts)[0].items():
            if isinstance(leaf, Unbounded):
                return cost, leaf.because
            cost = cost + n * divergence(leaf, self.adjacency, self.orders)
        return cost, None
