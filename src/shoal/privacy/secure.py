"""Secure mode: random numbers that nobody can foretell, and noise on a grid whose low bits tell nothing.

Keys come from the system's entropy (os.urandom) and are kept nowhere; bits are those of AES in counter mode under
such a key, a cryptographic generator. (ChaCha would do as well; AES-CTR is here already, for research mode's noise.)
Who is sampled comes from the same bits, for amplification rests on it being secret.

Floats leak through their last bits (Mironov 2012). So what is clipped is rounded towards 0 onto a public grid, a
power of two, which makes no norm longer, and noise is added on that grid: at the server a Gaussian of 53 bits,
rounded to it, which is Gaussian noise and then rounding; where an update leaves its client a discrete Gaussian
(Canonne, Kamath & Steinke 2020), drawn from a table of its distribution in units of 2^-64.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.privacy.platform import require_platform
from shoal.privacy.random import SLACK, Keystream, Streams

Words = npt.NDArray[np.uint64]
Whole = npt.NDArray[np.int64]

FINE = 12  # the grid is 2^-12 to 2^-13 of the noise, or of the clip
FURTHEST = 10  # standard deviations of the discrete Gaussian's table: 2e-23 lies beyond


class SecureStreams(Streams):
    """Streams whose keys follow from fresh entropy of the system: no run can be repeated, nor its noise be known.

    The seed is for what is not private, such as a baseline without noise.
    """

    mode: ClassVar[str] = "secure"

    def __init__(self, seed: int = 0) -> None:
        require_platform()
        super().__init__(seed)
        object.__setattr__(self, "_secret", os.urandom(64))

    def __repr__(self) -> str:
        return "SecureStreams()"

    def _key(self, purpose: str, *numbers: int) -> bytes:
        return self._hashed(":".join([purpose, *map(str, numbers)]), secret=self.__dict__["_secret"])

    def generator(self, purpose: str, *numbers: int) -> np.random.Generator:
        return SecureGenerator(self.keystream(purpose, *numbers))


class SecureGenerator(np.random.Generator):
    """The few draws that Shoal makes, from a cipher's bits; what is not here cannot be drawn."""

    _DRAWS: ClassVar[frozenset[str]] = frozenset(
        {"random", "integers", "permutation", "choice", "bytes", "standard_normal", "words"}
    )

    def __init__(self, keystream: Keystream) -> None:
        super().__init__(np.random.SFC64(0))  # numpy asks for one; nothing is drawn from it
        self._keystream = keystream

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in SecureGenerator._DRAWS:
            raise AttributeError(f"secure mode draws no '{name}': add it to SecureGenerator")
        return super().__getattribute__(name)

    def words(self, count: int) -> Words:
        """So many random 64-bit words."""
        held = np.empty(8 * count + SLACK, dtype=np.uint8)
        self._keystream.fill(held.data)
        return held[: 8 * count].view(np.uint64)

    def bytes(self, length: int) -> bytes:
        return self.words(-(-length // 8)).tobytes()[:length]

    def random(self, size: Any = None, *_: Any, **__: Any) -> Any:
        """Multiples of 2^-53 in [0, 1)."""
        shape = () if size is None else size
        drawn = (self.words(int(np.prod(shape, dtype=int))) >> np.uint64(11)) * 2.0**-53
        return float(drawn[0]) if size is None else drawn.reshape(shape)

    def integers(self, low: Any, high: Any = None, size: Any = None, *_: Any, **__: Any) -> Any:
        """Whole numbers in [low, high), each as likely as another: words beyond the last multiple are drawn again."""
        first, last = (0, int(low)) if high is None else (int(low), int(high))
        span, shape = last - first, () if size is None else size
        limit = np.uint64(2**64 - 1 - 2**64 % span)
        drawn = self.words(int(np.prod(shape, dtype=int)))
        while (over := drawn > limit).any():
            drawn[over] = self.words(int(over.sum()))
        found = (drawn % np.uint64(span)).astype(np.int64) + first
        return int(found[0]) if size is None else found.reshape(shape)

    def permutation(self, x: Any, axis: int = 0) -> Any:
        """By the order of random words; two of 64 bits are hardly ever equal."""
        values = np.arange(x) if isinstance(x, int | np.integer) else np.asarray(x)
        return values[np.argsort(self.words(len(values)), kind="stable")]

    def choice(self, a: Any, size: Any = None, replace: bool = True, *_: Any, **__: Any) -> Any:
        count = int(a) if isinstance(a, int | np.integer) else len(a)
        places = self.integers(count, size=size) if replace else self.permutation(count)[:size]
        return places if isinstance(a, int | np.integer) else np.asarray(a)[places]

    def standard_normal(self, size: Any = None, *_: Any, **__: Any) -> Any:
        """Box and Muller's formula on 53 bits each: the greatest is 8.6."""
        shape = () if size is None else size
        count = int(np.prod(shape, dtype=int))
        half = (count + 1) // 2
        radius = np.sqrt(-2 * np.log1p(-self.random(half)))
        angle = 2 * math.pi * self.random(half)
        drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
        return float(drawn[0]) if size is None else drawn.reshape(shape)


def grid(scale: float) -> float:
    """A power of two that is 2^-12 to 2^-13 of a scale; it depends on nothing else, so that it is public."""
    return 0.0 if scale <= 0 else 2.0 ** (math.floor(math.log2(scale)) - FINE)


def toward_zero(values: Tensor, step: float) -> Tensor:
    """Multiples of the step, none of which is further from 0 than before."""
    return values if step == 0 else (values.double() / step).trunc().mul(step).to(values.dtype)


def rounded(values: Tensor, step: float) -> Tensor:
    """The nearest multiples of the step."""
    return values if step == 0 else (values.double() / step).round().mul(step).to(values.dtype)


def gaussian_on_grid(values: Tensor, scale: float, step: float, generator: SecureGenerator) -> Tensor:
    """Values on the grid, plus N(0, scale^2) rounded to it: as private as the Gaussian before it was rounded."""
    noise = np.rint(generator.standard_normal(values.numel()) * (scale / step)) if step else np.zeros(values.numel())
    return _added(values, noise, step)


def discrete_on_grid(values: Tensor, scale: float, generator: SecureGenerator) -> Tensor:
    """Values rounded towards 0 onto the grid of this scale, plus a discrete Gaussian on it."""
    step = grid(scale)
    if step == 0:
        return values
    noise = discrete_gaussian(scale / step, values.numel(), generator)
    return _added(toward_zero(values, step), noise.astype(np.float64), step)


def _added(values: Tensor, noise: npt.NDArray[np.float64], step: float) -> Tensor:
    """In float64, where multiples of the grid add up exactly; what rounding there is comes after the noise."""
    on_grid = values.double() if step == 0 else (values.double() / step).round()
    total = on_grid + torch.from_numpy(noise).view(values.shape).to(values.device)
    return (total * (step or 1.0)).to(values.dtype)


def discrete_gaussian(scale: float, count: int, generator: SecureGenerator) -> Whole:
    """Whole numbers k with probability proportional to exp(-k^2 / (2 scale^2)), by a table of its distribution."""
    bounds = _table(scale)
    drawn: Whole = np.searchsorted(bounds, generator.words(count), side="right") - len(bounds) // 2
    return drawn


@lru_cache(maxsize=4)
def _table(scale: float) -> Words:
    """The distribution function at -n .. n-1, in units of 2^-64, for n = 10 standard deviations."""
    furthest = math.ceil(FURTHEST * scale) + 1
    places = np.arange(-furthest, furthest + 1).astype(np.longdouble)
    below = np.cumsum(np.exp(-(places**2) / (2 * np.longdouble(scale) ** 2)))
    shares = below[:-1] / below[-1] * np.longdouble(2.0**64)
    table: Words = np.minimum(np.floor(shares), np.longdouble(2.0**64 - 2048)).astype(np.uint64)
    return table
