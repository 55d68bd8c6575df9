"""Toeplitz factorisations A = B C of what a server does to its rounds' sums, for correlated noise C^-1 z.

With c(x) = 1 + c_1 x + c_2 x^2 + ... for C, and A = 1 / ((1 - x) (1 - momentum x)): prefix sums, through the server's
momentum. The model of round t has noise of standard deviation sens(C) (B_0^2 + ... + B_t^2)^(1/2) at a noise
multiplier of 1 for the whole run, where B = A / c and `participation.Participation` gives sens(C).

    square-root     c = A^(1/2), its first `bands` terms                            Kalinin & Lampert 2024
    banded          `bands` terms of c with the least mean square error             Choquette-Choo et al. 2023
    blt             c_i = w_1 a_1^(i-1) + ... + w_d a_d^(i-1), d `buffers`            McMahan et al. 2024
    bisr            1/c = A^(-1/2), its first `bands` terms                         Kalinin et al. 2025
    band-inverse    `bands` terms of 1/c with the least mean square error           Kalinin et al. 2025

Optimised ones minimise log(error x sens^2) by L-BFGS in float64, from the square root; whatever they find, the cost
is computed from it. BLT: c = prod (1 - p_j x) / prod (1 - a_j x) with 1 > a_1 > p_1 > a_2 > ... > p_d > 0. Then all
w_j > 0 and c never rises, so that sens(C) is exact; d vectors are all that is kept, however many the rounds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.mechanisms.participation import Array, Participation

Kind: TypeAlias = Literal["square-root", "banded", "blt", "bisr", "band-inverse"]
Objective: TypeAlias = Callable[[Array], tuple[float, Array]]
OPTIMISED: tuple[Kind, ...] = ("banded", "blt", "band-inverse")
"""What is found numerically: on another platform, or with other libraries, its last digits may be others."""
STEP = 0.01  # the length of the first step: after a longer one, 1/c may grow with every round
OVERFLOW = 2000.0  # an objective that no float64 reaches
LARGEST = 20.0  # of a free number: the ratio of two decays is then still below 1


class Factorisation(ABC):
    """C, and how the noise C^-1 z is drawn round by round, in units of the clip, from vectors `kept` [n, P]."""

    @abstractmethod
    def coefficients(self, rounds: int) -> Array:
        """1, c_1, c_2, ... over this many rounds; fewer where the rest is 0."""

    @abstractmethod
    def inverse(self, rounds: int) -> Array:
        """The coefficients of C^-1 over this many rounds; fewer where the rest is 0."""

    @property
    @abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """What defines it, as `given` takes it."""

    @property
    @abstractmethod
    def vectors(self) -> int:
        """How many vectors are kept from round to round, at most."""

    @abstractmethod
    def share(self, kept: Tensor) -> Tensor:
        """What the noise so far adds to this round's noise."""

    @abstractmethod
    def following(self, kept: Tensor, share: Tensor, noise: Tensor) -> Tensor:
        """What is kept for the next round, after this round's `noise`, of which `share` was a part."""

    def cancelled(self, rounds: int) -> float:
        """How large the terms are that cancel in a `share`, at most, in units of fresh noise."""
        return float(np.abs(self.coefficients(rounds)).sum() * np.abs(self.inverse(rounds)).max())


@dataclass(frozen=True, eq=False)
class Banded(Factorisation):
    """w_t = z_t - c_1 w_{t-1} - ... - c_{b-1} w_{t-b+1}: the last b - 1 noises are kept, newest first."""

    bands: Array

    def coefficients(self, rounds: int) -> Array:
        return self.bands

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(self.bands.tolist())

    def inverse(self, rounds: int) -> Array:
        return inverse(self.bands, rounds)

    @property
    def vectors(self) -> int:
        return len(self.bands) - 1

    def share(self, kept: Tensor) -> Tensor:
        return torch.as_tensor(-self.bands[1 : len(kept) + 1]).to(kept) @ kept

    def following(self, kept: Tensor, share: Tensor, noise: Tensor) -> Tensor:
        return torch.cat([noise.unsqueeze(0), kept])[: self.vectors]


@dataclass(frozen=True, eq=False)
class BandInverse(Factorisation):
    """w_t = z_t + d_1 z_{t-1} + ... + d_{b-1} z_{t-b+1}: the last b - 1 of z are kept, newest first."""

    bands: Array

    def coefficients(self, rounds: int) -> Array:
        return inverse(self.bands, rounds)

    def inverse(self, rounds: int) -> Array:
        return self.bands

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(self.bands.tolist())

    @property
    def vectors(self) -> int:
        return len(self.bands) - 1

    def share(self, kept: Tensor) -> Tensor:
        return torch.as_tensor(self.bands[1 : len(kept) + 1]).to(kept) @ kept

    def following(self, kept: Tensor, share: Tensor, noise: Tensor) -> Tensor:
        return torch.cat([(noise - share).unsqueeze(0), kept])[: self.vectors]

    def cancelled(self, rounds: int) -> float:
        return float(np.abs(self.bands).sum())  # of fresh noises


@dataclass(frozen=True, eq=False)
class Buffered(Factorisation):
    """w_t = z_t - weights . s; s <- decays s + w_t: one buffer s_j for each decay."""

    decays: Array
    zeros: Array

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(np.stack([self.decays, self.zeros], axis=1).ravel().tolist())

    def coefficients(self, rounds: int) -> Array:
        return _exponentials(self.decays, self.zeros, rounds)

    def inverse(self, rounds: int) -> Array:
        return _exponentials(self.zeros, self.decays, rounds)

    @property
    def vectors(self) -> int:
        return len(self.decays)

    def share(self, kept: Tensor) -> Tensor:
        weights = _partial_fractions(self.decays, self.zeros)
        return torch.as_tensor(-weights[: len(kept)]).to(kept) @ kept

    def following(self, kept: Tensor, share: Tensor, noise: Tensor) -> Tensor:
        if not len(kept):
            return noise.expand(self.vectors, -1).clone()
        return torch.as_tensor(self.decays).to(kept).unsqueeze(1) * kept + noise


@lru_cache(maxsize=32)
def factorise(kind: Kind, size: int, momentum: float, participation: Participation) -> Factorisation:
    """The factorisation of a kind, with this many bands or buffers, for these rounds and participation."""
    rounds = participation.rounds
    if kind == "blt":
        return _buffered(size, momentum, participation)
    bands = min(size, rounds)
    if kind == "square-root":
        return Banded(_root(size, momentum))
    if kind == "bisr":
        return BandInverse(_root(bands, momentum, 0.5))
    if kind == "banded":
        return Banded(_optimised(_root(bands, momentum), _of_bands(momentum, participation)))
    return BandInverse(_optimised(_root(bands, momentum, 0.5), _of_inverse_bands(momentum, participation)))


@lru_cache(maxsize=32)
def given(kind: Kind, numbers: tuple[float, ...]) -> Factorisation:
    """The factorisation with these numbers: a_1, p_1, a_2, ... of `blt`, else the bands of c or, by kind, of 1/c.

    Raises:
        ConfigError: They are not those of such a factorisation.
    """
    values = np.array(numbers)
    if kind == "blt":
        if len(values) % 2 or not (np.diff(values, prepend=1.0, append=0.0) < 0).all():
            raise ConfigError(
                "per_round.numbers of factorisation blt must be pairs that fall from below 1 to above 0"
            )
        return Buffered(values[::2], values[1::2])
    if kind not in OPTIMISED:
        raise ConfigError(f"per_round.numbers are of {', '.join(OPTIMISED)}; {kind} has none: leave them out")
    if values[0] != 1:
        raise ConfigError(f"per_round.numbers must begin with 1, got {numbers[0]:g}")
    return Banded(values) if kind == "banded" else BandInverse(values)


def errors(found: Factorisation, participation: Participation, momentum: float = 0.0) -> tuple[float, float]:
    """The noise of models at a noise multiplier of 1 for the whole run: root mean square over rounds, and largest."""
    rounds = participation.rounds
    squares = np.square(_filtered([1.0], _workload(momentum), _padded(found.inverse(rounds), rounds))).cumsum()
    shift = np.linalg.norm(participation.reach(found.coefficients(rounds)))
    return float(shift * math.sqrt(squares.mean())), float(shift * math.sqrt(squares[-1]))


def inverse(series: Array, rounds: int) -> Array:
    """The power series 1/series, to this many terms."""
    return _filtered([1.0], series, _padded(np.ones(1), rounds))


def _filtered(above: Sequence[float], below: Sequence[float] | Array, series: Array) -> Array:
    """The power series above/below times a series, to as many terms as that has."""
    from scipy.signal import lfilter  # which takes a second to load, and few runs need it

    found: Array = lfilter(above, below, series)
    return found


def _root(bands: int, momentum: float, power: float = -0.5) -> Array:
    """((1 - x) (1 - momentum x))^power."""
    j = np.arange(1, bands)
    root = np.concatenate([[1.0], np.cumprod((j - 1 - power) / j)])
    found: Array = np.convolve(root, root * momentum ** np.arange(bands))[:bands]
    return found


def _workload(momentum: float) -> Array:
    """(1 - x) (1 - momentum x)."""
    return np.array([1.0, -1.0 - momentum, momentum])


def _padded(series: Array, rounds: int) -> Array:
    found = np.zeros(rounds)
    found[: len(series)] = series[:rounds]
    return found


def _partial_fractions(poles: Array, zeros: Array) -> Array:
    """w of prod (1 - zero x) / prod (1 - pole x) = 1 + sum_j w_j x / (1 - pole_j x)."""
    others = poles[:, None] - poles + np.eye(len(poles))
    found: Array = (poles[:, None] - zeros).prod(axis=1) / others.prod(axis=1)
    return found


def _exponentials(poles: Array, zeros: Array, rounds: int) -> Array:
    """prod (1 - zero x) / prod (1 - pole x)."""
    powers = poles ** np.arange(rounds - 1)[:, None]
    return np.concatenate([[1.0], powers @ _partial_fractions(poles, zeros)])


def _log_error(inverse: Array, momentum: float) -> tuple[float, Array]:
    """The log of the mean square error before scaling, and its gradient by the coefficients of C^-1."""
    rounds, workload = len(inverse), _workload(momentum)
    noise = _filtered([1.0], workload, inverse)  # the coefficients of B
    counted = np.arange(rounds, 0, -1) * noise
    total = float(counted @ noise)
    return math.log(total / rounds), _filtered([1.0], workload, 2 * counted[::-1])[::-1] / total


def _log_sensitivity(coefficients: Array, participation: Participation, bands: int) -> tuple[float, Array]:
    """The log of sens(C)^2, and its gradient by the coefficients of C, the first `bands` of which are not 0."""
    reach = participation.reach(coefficients[:bands])
    total = float(reach @ reach)
    slope = participation.repeated(2 * reach[::-1] / total)[::-1]
    if participation.overlaps(bands):  # in the majorant's place, the coefficient that it is counts
        size, rounds = np.abs(coefficients)[::-1], len(slope)
        place = np.maximum.accumulate(np.where(size == np.maximum.accumulate(size), np.arange(rounds), 0))
        slope = np.asarray(np.bincount(rounds - 1 - place[::-1], slope, rounds), dtype=np.float64)
    return math.log(total), slope * np.sign(coefficients)


def _through_inverse(slope: Array, series: Array) -> Array:
    """The gradient by a series, from that by its inverse."""
    return -_filtered([1.0], series, _filtered([1.0], series, slope[::-1]))[::-1]


def _of_bands(momentum: float, participation: Participation) -> Objective:
    """log(error x sens^2) by the bands of C after the first, which is 1."""

    def objective(free: Array) -> tuple[float, Array]:
        bands, rounds = np.concatenate([[1.0], free]), participation.rounds
        error, by_inverse = _log_error(inverse(bands, rounds), momentum)
        shift, slope = _log_sensitivity(_padded(bands, rounds), participation, len(bands))
        return error + shift, (slope + _through_inverse(by_inverse, bands))[1 : len(bands)]

    return objective


def _of_inverse_bands(momentum: float, participation: Participation) -> Objective:
    """The same by the bands of C^-1."""

    def objective(free: Array) -> tuple[float, Array]:
        bands, rounds = np.concatenate([[1.0], free]), participation.rounds
        error, slope = _log_error(_padded(bands, rounds), momentum)
        shift, by_inverse = _log_sensitivity(inverse(bands, rounds), participation, rounds)
        return error + shift, (slope + _through_inverse(by_inverse, bands))[1 : len(bands)]

    return objective


def _of_chain(momentum: float, participation: Participation) -> Objective:
    """The same by the ratios of the chain 1 > a_1 > p_1 > a_2 > ... > 0, each the logistic function of a number."""

    def objective(free: Array) -> tuple[float, Array]:
        chain, rounds = _chain(free), participation.rounds
        poles, zeros = chain[::2], chain[1::2]
        series, inverted = _exponentials(poles, zeros, rounds), _exponentials(zeros, poles, rounds)
        error, by_inverse = _log_error(inverted, momentum)
        shift, by_series = _log_sensitivity(series, participation, rounds)
        slope = np.empty(len(chain))
        for i, root in enumerate(chain):  # d log c / da = x / (1 - a x), and its negative for a zero
            moved = (_filtered([0.0, 1.0], [1.0, -root], each) for each in (series, inverted))
            slope[i] = (1 - 2 * (i % 2)) * (by_series @ next(moved) - by_inverse @ next(moved))
        return error + shift, np.cumsum((slope * chain)[::-1])[::-1] / (1 + np.exp(free))

    return objective


def _chain(free: Array) -> Array:
    return np.asarray(np.cumprod(1 / (1 + np.exp(-free))), dtype=np.float64)


def _buffered(buffers: int, momentum: float, participation: Participation) -> Buffered:
    slowest = min(0.1, 1 / min(participation.separation, participation.rounds))
    begun = np.array([1.0, *(1 - np.geomspace(slowest, 0.5, 2 * buffers + 2)[1:-1])])
    ratio = begun[1:] / begun[:-1]
    chain = _chain(_least(np.log(ratio / (1 - ratio)), _of_chain(momentum, participation), LARGEST))
    return Buffered(chain[::2], chain[1::2])


def _optimised(start: Array, objective: Objective) -> Array:
    return np.concatenate([[1.0], _least(start[1:], objective)]) if len(start) > 1 else start


def _least(start: Array, objective: Objective, largest: float = math.inf) -> Array:
    """Where the objective is least, by L-BFGS from a start; at a point no worse than that."""
    first = objective(start)[0]

    def moved(steps: Array) -> tuple[float, Array]:
        with np.errstate(over="ignore", invalid="ignore"):
            value, slope = objective(start + STEP * steps)
        return (value, STEP * slope) if np.isfinite(slope).all() else (OVERFLOW, np.zeros_like(steps))

    options = {"maxiter": 2000, "maxfun": 4000, "maxcor": 30, "ftol": 1e-13, "gtol": 1e-12}
    bounds = [((-largest - x) / STEP, (largest - x) / STEP) for x in start]
    from scipy.optimize import minimize

    found = minimize(moved, np.zeros_like(start), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    better: Array = start + STEP * found.x if found.fun < first else start
    return better
