"""Privacy curves: delta as a function of epsilon >= 0, for the worst pair of neighbours (P, Q) of one step.

A pair is two curves: H(P||Q) and H(Q||P), where H is the hockey-stick divergence at e^epsilon. Together they
fix the privacy loss completely (Zhu, Dong, Wang 2022), so that sampling is algebra on curves (Balle, Barthe,
Gaboardi 2018) and `pld.py` turns any pair into a distribution that composes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Curve: TypeAlias = Callable[[Array], Array]

_FAR = 13.0  # standard deviations, beyond which a normal distribution has less than 1e-38
_FAINT = 3e-5  # a shift below which two divergences next to each other lose more digits than a trapezoid
_THRESHOLDS = 100_001  # at which the divergences of a user's mixture are computed


@dataclass(frozen=True)
class Pair:
    """Both curves of a pair of neighbours, and the epsilons beyond which they are flat."""

    forward: Curve
    backward: Curve
    end_forward: float = math.inf
    end_backward: float = math.inf

    @property
    def symmetric(self) -> bool:
        """True where both directions are the same curve."""
        return self.forward is self.backward


def gaussian(shift: float) -> Pair:
    """N(shift, 1) against N(0, 1) (Balle & Wang 2018), to a relative 1e-9 as far as delta is above 1e-300.

    With a = shift/2 - epsilon/shift it is e^(-a^2/2) (r(-a) - r(shift - a)) / 2, where r(x) = erfcx(x / sqrt 2). For
    a small shift the difference is the integral of -r', which is convex: the trapezoid over it is an upper bound.
    """
    from scipy.special import erfcx, ndtr

    shift = min(shift, 1e155)  # beyond, delta is 1 at every finite epsilon

    def curve(epsilon: Array) -> Array:
        near = (epsilon / shift - shift / 2 - 2**-51 * shift) / math.sqrt(2)  # less what rounding may have added
        far = near + shift / math.sqrt(2)
        bell = np.exp(-(near**2)) / 2
        if shift < _FAINT:
            slopes = (2 / math.sqrt(math.pi) - 2 * at * erfcx(at) for at in (near, far))
            return _positive(bell * shift / math.sqrt(2) * sum(slopes) / 2)
        upper = np.where(near < 0, ndtr(-math.sqrt(2) * near), bell * erfcx(np.maximum(near, 0.0)))
        return _positive(upper - bell * erfcx(far))

    return Pair(curve, curve)


def negligible(variation: float) -> Pair:
    """Two distributions that differ by no more than a mass of `variation`, at any epsilon."""

    def curve(epsilon: Array) -> Array:
        return np.full_like(epsilon, variation)

    return Pair(curve, curve, 1.0, 1.0)


def amplified(pair: Pair, rate: float) -> Pair:
    """(rate P + (1 - rate) Q, Q): P's data entered with probability `rate`, invisibly."""

    def forward(epsilon: Array) -> Array:
        return rate * pair.forward(_before_sampling(epsilon, rate))

    def backward(epsilon: Array) -> Array:
        within = epsilon < -math.log1p(-rate)
        safe = np.where(within, epsilon, 0.0)
        share = rate - (1 - rate) * np.expm1(safe)
        within &= share > 0
        share = np.where(within, share, rate)
        inner = safe - np.log(share / rate)
        return np.where(within, share * pair.backward(np.maximum(inner, 0.0)), 0.0)

    return Pair(
        forward,
        backward,
        _after_sampling(pair.end_forward, rate),
        min(-math.log1p(-rate), -math.log1p(rate * math.expm1(-pair.end_backward))),
    )


def amplified_both_ways(pair: Pair, rate: float) -> Pair:
    """Either of two units entered with probability `rate`, and a third took its place if not (replace-one).

    P, Q and the third are as far from each other as (P, Q): then both divergences are at most
    rate x H(P||Q) at the epsilon before sampling (Balle et al. 2018, Theorem 9; Zhu et al. 2022, Prop. 30).
    """
    once = amplified(pair, rate)
    return Pair(once.forward, once.forward, once.end_forward, once.end_forward)


def sometimes(pair: Pair, rate: float) -> Pair:
    """(P, Q) with probability `rate`, and else the same output for both; the observer knows which it was."""

    def forward(epsilon: Array) -> Array:
        return rate * pair.forward(epsilon)

    def backward(epsilon: Array) -> Array:
        return rate * pair.backward(epsilon)

    back = forward if pair.symmetric else backward
    return Pair(forward, back, pair.end_forward, pair.end_backward)


def user_sampled(shift: float, rate: float, records: int) -> Pair:
    """Each of a user's records entered with probability `rate`: sum_j Bin(records, rate)(j) N(j shift, 1), N(0, 1).

    The worst pair (Charles et al. 2024). The ratio of the densities rises, so that a divergence is exact at the
    epsilon of each threshold; between two of them the chord bounds it, as it is convex in e^epsilon. Counts j that
    all but never occur are given to an infinite loss.
    """
    from scipy.special import log_ndtr, ndtr
    from scipy.stats import binom

    most = int(np.argmax(binom.sf(np.arange(records + 1), records, rate) < 1e-22))
    at = np.linspace(-_FAR, most * shift + _FAR, _THRESHOLDS)
    loss, under = np.full(at.size, -np.inf), np.zeros(at.size)
    over = np.full(at.size, binom.sf(most, records, rate))
    for j, log_weight in enumerate(log_binomial_law(records, rate, most)):
        loss = np.logaddexp(loss, log_weight + j * shift * at - (j * shift) ** 2 / 2)
        over += np.exp(log_weight) * ndtr(j * shift - at)
        under += np.exp(log_weight) * ndtr(at - j * shift)
    forward = over - np.exp(loss + log_ndtr(-at))
    with np.errstate(divide="ignore"):
        backward = ndtr(at) - np.exp(np.log(under) - loss)
    return Pair(
        _chords(loss, forward),
        _chords(-loss[::-1], backward[::-1]),
        float(loss[-1]),
        -records * math.log1p(-rate),
    )


def _chords(epsilons: Array, deltas: Array) -> Curve:
    """A curve that is known at some epsilons, and is bounded by the chords between them."""
    rising = np.append(True, np.diff(np.maximum.accumulate(epsilons)) > 0)
    known, exact = epsilons[rising], _positive(deltas[rising])

    def curve(epsilon: Array) -> Array:
        place = np.clip(np.searchsorted(known, epsilon), 1, known.size - 1)
        low, high = known[place - 1], known[place]
        at = np.clip(epsilon, low, high)
        share = np.exp(at - high) * np.expm1(low - at) / np.expm1(low - high)  # e^(high - low) may overflow
        found: Array = exact[place - 1] + share * (exact[place] - exact[place - 1])
        return found

    return curve


def poisson_replaced(shift: float, rate: float) -> Pair:
    """One of two opposite units entered with probability `rate` (replace-one under Poisson sampling).

    rate N(shift, 1) + (1 - rate) N(0, 1) against rate N(-shift, 1) + (1 - rate) N(0, 1), the worst pair
    that dp-accounting takes; vectorised here.
    """
    from scipy.special import log_ndtr, ndtr

    log_odds = shift**2 / 2 + math.log1p(-rate) - math.log(rate)

    def curve(epsilon: Array) -> Array:
        half = epsilon / 2
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-epsilon)) - math.log(2)
        exponent = log_odds + log_sinh
        arcsinh = np.where(exponent > 20, exponent + math.log(2), np.arcsinh(np.exp(np.minimum(exponent, 20))))
        cut = -(arcsinh + half) / shift
        apart = ndtr(cut + shift) - np.exp(epsilon + log_ndtr(cut - shift))
        alike = -np.expm1(-epsilon) * np.exp(epsilon + log_ndtr(cut))
        return _positive(rate * apart - (1 - rate) * alike)

    return Pair(curve, curve)


def drawn_with_replacement(shift: float, draws: int, rate: float) -> tuple[Pair, float]:
    """The pair, and its rate, of `draws` draws from draws/rate units: a unit drawn k times shifts by k."""
    from scipy.stats import binom

    each = rate / draws
    hit = -math.expm1(draws * math.log1p(-each))
    most = int(np.argmax(np.append(binom.sf(np.arange(1, draws), draws, each) < 1e-20, True))) + 1
    weights = binom.pmf(np.arange(1, most + 1), draws, each) / hit
    rest = float(binom.sf(most, draws, each)) / hit
    curves = [gaussian(k * shift).forward for k in range(1, most + 1)]

    def curve(epsilon: Array) -> Array:
        total = np.full_like(epsilon, rest)
        for weight, one in zip(weights, curves, strict=True):
            total += weight * one(epsilon)
        return total

    return Pair(curve, curve), hit


def reach(curve: Curve, tail: float, end: float) -> float:
    """The least epsilon at which the curve has fallen to `tail`, or the end where it never does."""
    high = min(1.0, end)
    while not _at(curve, high) <= tail:  # nor where it is no number
        if not high < end:  # nor where the end is none
            return high
        high = min(2 * high, end)
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        if _at(curve, middle) <= tail:
            high = middle
        else:
            low = middle
    return high


def multiples(step: float, low: float, high: float) -> Array:
    """The multiples of `step` from `low` to `high`, for the trapezoid rule.

    np.arange(low, high, step) has (low + step) - low between them, which has lost digits of the step.
    """
    found: Array = step * np.arange(math.floor(low / step), math.ceil(high / step) + 1, dtype=np.float64)
    return found


@lru_cache(maxsize=1024)
def log_binomials(n: int, most: int) -> Array:
    """log C(n, k) for k = 0 to `most`, of whole numbers: a difference of log-gammas loses the digits of n log n."""
    found, chosen = np.zeros(most + 1), 1
    for k in range(most):
        chosen = chosen * (n - k) // (k + 1)
        found[k + 1] = math.log(chosen)
    return found


@lru_cache(maxsize=1024)
def log_binomial_law(n: int, rate: float, most: int) -> Array:
    """log of the probabilities of 0 to `most` of n that each come with this rate."""
    k = np.arange(most + 1)
    found: Array = log_binomials(n, most) + k * math.log(rate) + (n - k) * math.log1p(-rate)
    return found


def variance(pair: Pair, furthest: float) -> float:
    """The variance of the privacy loss under P, from the curves alone (integration by parts)."""
    epsilon = np.concatenate([[0.0], np.geomspace(furthest * 1e-10, furthest, 2000)])
    forward = pair.forward(epsilon)
    shrunk = np.exp(-epsilon) * pair.backward(epsilon)
    mean = float(np.trapezoid(forward + shrunk, epsilon))
    square = float(2 * np.trapezoid((1 + epsilon) * forward + (1 - epsilon) * shrunk, epsilon))
    return max(square - mean**2, 0.0)


def _before_sampling(epsilon: Array, rate: float) -> Array:
    """log(1 + (e^epsilon - 1) / rate), without overflow."""
    small = np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / rate)
    large = epsilon - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(epsilon, 1.0)))
    return np.where(epsilon < 1.0, small, large)


def _after_sampling(epsilon: float, rate: float) -> float:
    """log(1 + rate (e^epsilon - 1)), without overflow."""
    if epsilon < 1:
        return math.log1p(rate * math.expm1(epsilon))
    return epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon))


def _positive(values: Array) -> Array:
    """Rounding may leave a divergence a hair below 0."""
    return np.maximum(values, 0.0)


def _at(curve: Curve, epsilon: float) -> float:
    return float(curve(np.array([epsilon]))[0])
