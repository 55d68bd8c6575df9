"""The `pld` accountant: privacy loss distributions, discretised from curves and composed by FFT.

Pairs of curves (curves.py) become distributions by connect-the-dots (Doroshenko et al. 2022), always
rounded to the safe side. The grid is as fine as the loss of a single step asks for, so that 10^6 compositions
take a second and stay exact to 1e-4. dp-accounting holds the composed distribution.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.accounting import allocation, curves
from shoal.accounting.curves import Array, Curve, Pair
from shoal.accounting.events import Allocated, Gaussian, Leaf, Sampled, SampledUser, TwoLevel
from shoal.accounting.leaves import leaves
from shoal.accounting.theorems import Adjacency
from shoal.errors import ConfigError

Counts: TypeAlias = tuple[tuple[Leaf, int], ...]

_TAIL = 1e-16  # mass that may go to infinity over the whole composition
_ROUNDING = 1e-15  # what the FFT may lose for each composition, measured against closed forms
_GAUSSIAN = 1e-9  # relative, what the closed form of a Gaussian's divergence may lose
_POINTS_A_STEP = 80  # grid points in one standard deviation of the loss of a step: an error of about 2e-5
_FURTHEST = 1e12  # losses beyond this are taken for infinite
_COARSEST = 0.05  # connect-the-dots keeps the mean of e^-loss: coarser grids shift the loss itself
_MOST_POINTS = 1_000_000  # in one distribution, and three times this in the composed one
_BINS = {Sampled: 100, SampledUser: 100, TwoLevel: 24}  # of noise, for schedules


@dataclass(frozen=True)
class Losses:
    """A discretised loss: mass at `low`, `low` + 1, ... grid points, and at infinity."""

    low: int
    mass: Array
    infinite: float


@dataclass(frozen=True)
class Profile:
    """The whole (epsilon, delta) curve of what was done; every figure read from it is an upper bound.

    Gaussians alone are one `shift` of a unit Gaussian, exactly; anything else is a `distribution`.
    """

    shift: float
    distribution: Any
    variation: float
    rounding: float

    def epsilon(self, delta: float) -> float:
        """The least epsilon at this delta; infinite where delta is too small for this computation."""
        if self.variation <= delta:
            return 0.0
        if self.shift:
            if delta < sys.float_info.min:
                return math.inf
            return curves.reach(curves.gaussian(self.shift).forward, delta * (1 - _GAUSSIAN), math.inf)
        if self.distribution is None or delta < 2 * self.rounding:
            return math.inf
        return max(_least_epsilon(half, delta - self.rounding) for half in _halves(self.distribution))

    def delta(self, epsilon: float) -> float:
        """The least delta at this epsilon."""
        if self.shift:
            return min(float(curves.gaussian(self.shift).forward(np.array([epsilon]))[0]) * (1 + _GAUSSIAN), 1.0)
        if self.distribution is None:
            return self.variation
        found = float(self.distribution.get_delta_for_epsilon(epsilon)) + self.rounding
        return min(found, self.variation, 1.0)


def profile(counts: Mapping[Leaf, int], adjacency: Adjacency) -> Profile:
    """The profile of a multiset of events."""
    return _profile(tuple(counts.items()), adjacency)


def epsilon(counts: Mapping[Leaf, int], adjacency: Adjacency, delta: float) -> float:
    """The epsilon of a multiset of events; figures are kept longer than profiles, which may be of megabytes."""
    return _epsilon(tuple(counts.items()), adjacency, delta)


@lru_cache(maxsize=4096)
def _epsilon(counts: Counts, adjacency: Adjacency, delta: float) -> float:
    return _profile(counts, adjacency).epsilon(delta)


@lru_cache(maxsize=6)
def _profile(counts: Counts, adjacency: Adjacency) -> Profile:
    sensitivity = 2 if adjacency == "replace-one" else 1
    shift = math.hypot(*(sensitivity / leaf.noise * math.sqrt(n) for leaf, n in counts if isinstance(leaf, Gaussian)))
    sampled = [(leaf, n) for leaf, n in counts if not isinstance(leaf, Gaussian)]
    pairs = [(_pair(leaf, adjacency), n) for leaf, n in _binned(sampled)]
    if shift:
        pairs.append((curves.gaussian(shift), 1))
    variation = sum(n * float(pair.forward(np.zeros(1))[0]) for pair, n in pairs)
    if not sampled:
        return Profile(shift, None, variation * (1 + _GAUSSIAN), 0.0)
    rounding = _ROUNDING * max(sum(n for _, n in pairs) + sum(n * _steps_inside(leaf) for leaf, n in sampled), 10)
    return Profile(0.0, None if variation <= _TAIL else _compose(pairs), variation + rounding, rounding)


def _steps_inside(leaf: Leaf) -> float:
    """The compositions within one event, as often as they count."""
    match leaf:
        case TwoLevel(rate):
            return rate * leaf.local_steps
        case Sampled(_, rate, inner) if not isinstance(inner, Gaussian):
            return rate * sum(n * (1 + _steps_inside(each)) for each, n in leaves(inner).items())
        case Allocated():
            return 2 * leaf.length.bit_length()  # sums of laws
    return 0.0


def _pair(leaf: Leaf, adjacency: Adjacency) -> Pair:
    """The worst pair of neighbours for one sampled event: the theorems of theorems.py."""
    replace_one = adjacency == "replace-one"
    # Of a fixed number of draws, one more of the unit is one fewer of another: two clips, whatever the adjacency.
    displaced = curves.amplified if adjacency == "add-or-remove" else curves.amplified_both_ways
    match leaf:
        case Sampled("poisson", rate, Gaussian(noise)) if replace_one:
            return curves.poisson_replaced(1 / noise, rate)
        case Sampled("poisson", rate, Gaussian(noise)):
            return curves.amplified(curves.gaussian(1 / noise), rate)
        case Sampled("poisson", rate, inner) if not replace_one:
            return curves.amplified(_composed_pair(leaves(inner), adjacency), rate)
        case SampledUser(records, rate, noise) if not replace_one:
            return curves.user_sampled(1 / noise, rate, records)
        case Sampled("fixed-size", rate, Gaussian(noise)):
            return displaced(curves.gaussian(2 / noise), rate)
        case Sampled("with-replacement", rate, Gaussian(noise), int(draws)):
            pair, hit = curves.drawn_with_replacement(2 / noise, draws, rate)
            return displaced(pair, hit) if hit < 1 else pair
        case Allocated() if not replace_one:
            return allocation.pair(leaf)
        case TwoLevel(rate):
            hidden = curves.amplified_both_ways if replace_one else curves.amplified
            amplify = curves.sometimes if leaf.participation == "visible" else hidden
            return amplify(_composed_pair(leaves(leaf.local_event), adjacency), rate)
    raise ConfigError(f"the pld accountant does not understand {leaf} under {adjacency}")


def _composed_pair(counts: Mapping[Leaf, int], adjacency: Adjacency) -> Pair:
    """The pair of many events, as it enters the next level of sampling."""
    whole = profile(counts, adjacency)
    if whole.shift:
        return curves.gaussian(whole.shift)
    if whole.distribution is None:
        return curves.negligible(whole.variation)
    found = [_curve(half) for half in _halves(whole.distribution)]
    (forward, end_forward), (backward, end_backward) = found[0], found[-1]
    return Pair(forward, backward, end_forward, end_backward)


def _halves(distribution: Any) -> list[Any]:
    """Both directions, or the one that stands for both; dp-accounting 0.6.0 (pinned) has no public way to them."""
    remove, add = distribution._pmf_remove, distribution._pmf_add
    return [remove] if distribution._symmetric else [remove, add]


def _least_epsilon(dense: Any, delta: float) -> float:
    """Where delta(epsilon), which is upper - e^epsilon lower between two losses, falls to this delta.

    dp-accounting's own walks from loss to loss in Python, which takes as long as the composition.
    """
    first = max(0, 1 - dense._lower_loss)  # the least loss above 0
    losses = (np.arange(first, dense.size)[::-1] + dense._lower_loss) * dense._discretization
    mass = dense._probs[first:][::-1]
    upper = np.cumsum(np.append(dense._infinity_mass, mass))
    if dense._infinity_mass > delta or np.isnan(upper[-1]):
        return math.inf
    lower = np.cumsum(np.append(0.0, mass * np.exp(-losses)))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found = np.log((upper - delta) / lower)  # from all losses above losses[0], losses[1], ..., 0
    found[(upper <= delta) | (lower < 0)] = -np.inf  # below 0 by the rounding of an FFT
    found = np.minimum(found, np.append(np.inf, losses))  # lower may be 0 where e^-loss is
    reached = int(np.append(found[:-1] >= losses, True).argmax())
    return max(0.0, float(found[reached]))


def _curve(dense: Any) -> tuple[Curve, float]:
    """delta(epsilon) of a discretised distribution, and the largest loss in it."""
    losses = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
    positive = losses > 0
    losses, mass = losses[positive], np.maximum(dense._probs[positive], 0.0)
    upper = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
    with np.errstate(divide="ignore"):
        log_lower = np.logaddexp.accumulate((np.log(mass) - losses)[::-1])[::-1]
    log_lower = np.append(log_lower, -np.inf)

    def curve(epsilon: Array) -> Array:
        above = np.searchsorted(losses, epsilon, side="right")
        found: Array = dense._infinity_mass + upper[above] - np.exp(epsilon + log_lower[above])
        return np.maximum(found, 0.0)

    return curve, float(losses[-1])


def _compose(pairs: Sequence[tuple[Pair, int]]) -> Any:
    """One distribution of all pairs, each as often as it happened."""
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    total = sum(n for _, n in pairs)
    reaches = [
        (
            curves.reach(pair.forward, _TAIL / total, min(pair.end_forward, _FURTHEST)),
            curves.reach(pair.backward, _TAIL / total, min(pair.end_backward, _FURTHEST)),
        )
        for pair, _ in pairs
    ]
    interval = _interval(pairs, reaches)
    remove = [
        (_discretised(pair.forward, pair.backward, ahead, behind, interval), n)
        for (pair, n), (ahead, behind) in zip(pairs, reaches, strict=True)
    ]
    if all(pair.symmetric for pair, _ in pairs):
        return PrivacyLossDistribution(_convolved(remove, interval))
    add = [
        (_discretised(pair.backward, pair.forward, behind, ahead, interval), n)
        for (pair, n), (ahead, behind) in zip(pairs, reaches, strict=True)
    ]
    return PrivacyLossDistribution(_convolved(remove, interval), _convolved(add, interval))


def _convolved(parts: Sequence[tuple[Losses, int]], interval: float) -> Any:
    """All parts convolved, each with itself n times over, in one pass through the Fourier domain.

    dp-accounting does this for one part; schedules have many, each with a noise of its own.
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf
    from scipy import fft

    first, last = _range(parts)
    size = fft.next_fast_len(max(last - first + 1, *(part.mass.size for part, _ in parts)), real=True)
    exponent = np.zeros(size // 2 + 1, dtype=np.complex128)
    for part, n in parts:
        transformed = fft.rfft(part.mass, size)
        transformed[transformed == 0] = 1e-300
        exponent += n * np.log(transformed)
    mass = np.roll(fft.irfft(np.exp(exponent), size), -first)[: last - first + 1]
    kept = sum(n * math.log1p(-part.infinite) for part, n in parts)
    low = sum(n * part.low for part, n in parts) + first
    return DensePLDPmf(interval, low, mass, _TAIL - math.expm1(kept), True)


def _range(parts: Sequence[tuple[Losses, int]]) -> tuple[int, int]:
    """First and last place of the convolution that matter: all but _TAIL lies between (Chernoff)."""
    places = [np.arange(part.mass.size) for part, _ in parts]
    log_tail = math.log(2 / _TAIL)
    variance = sum(n * _variance(at, part.mass) for at, (part, n) in zip(places, parts, strict=True))
    longest = max(at.size for at in places)
    variance = max(variance, 1e-300)  # 0 where hardly any noise leaves one loss alone
    best = 2 * math.sqrt(2 * log_tail / variance)  # for a normal distribution; rare large losses ask for less
    sizes = np.minimum(np.geomspace(min(best / 4, 5 / longest), best, 12), 500 / longest)
    orders = np.concatenate([-sizes, sizes])
    generating = np.zeros(orders.size)
    for at, (part, n) in zip(places, parts, strict=True):
        generating += n * np.log([(np.exp(order * at) * part.mass).sum() for order in orders])
    bounds = (generating + log_tail) / orders
    first = max(0, math.floor(bounds[orders < 0].max()))
    end = sum(n * (part.mass.size - 1) for part, n in parts)
    return first, max(min(end, math.ceil(bounds[orders > 0].min())), first)


def _variance(places: npt.NDArray[np.int64], mass: Array) -> float:
    total = mass.sum()
    mean = (places * mass).sum() / total
    return float(((places - mean) ** 2 * mass).sum() / total)


def _interval(pairs: Sequence[tuple[Pair, int]], reaches: Sequence[tuple[float, float]]) -> float:
    """The grid: fine against the loss of a step, but never with more points than can be handled."""
    variance = sum(
        n * curves.variance(pair, max(*reached, 1e-12)) for (pair, n), reached in zip(pairs, reaches, strict=True)
    )
    spread, steps = math.sqrt(variance), sum(n for _, n in pairs)
    wanted = min(spread / math.sqrt(steps) / _POINTS_A_STEP, _COARSEST)
    least = max(max(max(reached) for reached in reaches), 20 * spread) / _MOST_POINTS
    return max(wanted, least, 1e-12)


def _discretised(forward: Curve, backward: Curve, ahead: float, behind: float, interval: float) -> Losses:
    """Connect-the-dots on a grid from -behind to ahead, as dp-accounting does it.

    Only the part of the curve that is not the line 1 - e^epsilon is differenced, so that the many points
    where the curve is next to that line keep their relative precision.
    """
    low, high = -max(1, math.ceil(behind / interval)), max(1, math.ceil(ahead / interval))
    below = np.arange(low, 0, dtype=np.float64) * interval
    above = np.arange(high + 1, dtype=np.float64) * interval
    excess = np.concatenate([np.exp(below) * backward(-below), forward(above)])
    steps = np.diff(excess)
    mass = np.empty_like(excess)
    up, down = math.exp(-interval) / -math.expm1(-interval), math.expm1(-interval)
    mass[1:-1] = steps[1:] * up + steps[:-1] / down
    mass[0] = steps[0] * up - excess[0]
    mass[-1] = steps[-1] / down
    mass[-low] += 1.0  # the corner of max(0, 1 - e^epsilon) at epsilon = 0
    return Losses(low, np.maximum(mass, 0.0), float(excess[-1]))


def _binned(sampled: Sequence[tuple[Leaf, int]]) -> list[tuple[Leaf, int]]:
    """Many noises of one kind of event gathered in bins, each rounded down to the least noise in it."""
    families: dict[Leaf, list[tuple[float, Leaf, int]]] = {}
    for leaf, n in sampled:
        family, noise = _family(leaf)
        families.setdefault(family, []).append((noise, leaf, n))
    binned: list[tuple[Leaf, int]] = []
    for members in families.values():
        bins = _BINS.get(type(members[0][1]), len(members))
        binned += _gathered(sorted(members, key=lambda member: member[0]), bins)
    return binned


def _gathered(members: list[tuple[float, Leaf, int]], bins: int) -> list[tuple[Leaf, int]]:
    if len(members) <= bins:
        return [(leaf, n) for _, leaf, n in members]
    least, most = members[0][0], members[-1][0]
    width = math.log(most / least) / bins
    gathered: dict[int, tuple[Leaf, int]] = {}
    for noise, leaf, n in members:
        place = min(int(math.log(noise / least) / width), bins - 1)
        first, count = gathered.get(place, (leaf, 0))
        gathered[place] = (first, count + n)
    return list(gathered.values())


def _family(leaf: Leaf) -> tuple[Leaf, float]:
    """The event without its noise, and the noise."""
    if isinstance(leaf, Sampled) and isinstance(leaf.event, Gaussian):
        return replace(leaf, event=Gaussian(1.0)), leaf.event.noise
    if isinstance(leaf, SampledUser | TwoLevel):
        return replace(leaf, noise=1.0), leaf.noise
    return leaf, 1.0
