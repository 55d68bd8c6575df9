"""Secure mode: unpredictable random numbers, and noise on a grid whose low bits reveal nothing.

Keys come from the system's entropy (os.urandom) and are never stored; bits come from AES in counter mode under such a
key, a cryptographic generator. (ChaCha would do as well; AES-CTR is there already, for research mode's noise.)
Sampling uses the same bits, since amplification requires that it is secret.

Floats leak through their last bits (Mironov 2012). So noisy values are integer multiples of the step of a public
grid: clipped values are rounded onto it, towards 0, and a discrete Gaussian is added (Canonne, Kamath & Steinke 2020;
sampled in `discrete_gaussian`). All later rounding is post-processing. Updates are rounded one by one, which makes
none longer. The sum of a batch is rounded as a whole, which lets one record move it by up to a step more in every
coordinate: `charged` counts that, and the difference between a discrete and a continuous Gaussian.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.random import discrete_gaussian
from shoal.random.discrete_gaussian import Whole
from shoal.random.platform_checks import require_platform
from shoal.random.streams import SLACK, Keystream, Streams

Words = npt.NDArray[np.uint64]

FINE = 12  # the grid is 2^-12 to 2^-13 of the noise, or of the clip
STEPS = 2.0**20  # of the grid in the noise of a sum that is rounded as a whole
FINEST = 2.0**32  # the same for correlated noise, whose every round is rounded
_MOST = 2.0**52  # the most steps from 0: integers that float64 represents


class SecureStreams(Streams):
    """Streams whose keys come from fresh system entropy: no run can be repeated, and its noise cannot be known.

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
        """The stream of this name, drawn by a cipher under a secret key."""
        return SecureGenerator(self.keystream(purpose, *numbers))

    def generators(self, purpose: str, *numbers: int, last: Sequence[int]) -> Iterator[np.random.Generator]:
        """The streams of these names, one for each last number."""
        return (self.generator(purpose, *numbers, number) for number in last)


class SecureGenerator(np.random.Generator):
    """The few kinds of draws that Shoal needs, from a cipher's bits; all others are refused."""

    _DRAWS: ClassVar[frozenset[str]] = frozenset(
        {"random", "integers", "permutation", "choice", "bytes", "standard_normal", "whole_normal", "words"}
    )

    def __init__(self, keystream: Keystream) -> None:
        super().__init__(np.random.SFC64(0))  # numpy requires one; nothing is drawn from it
        self._keystream = keystream

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in SecureGenerator._DRAWS:
            raise AttributeError(f"secure mode draws no '{name}': add it to SecureGenerator")
        return super().__getattribute__(name)

    def words(self, count: int) -> Words:
        """So many random 64-bit words."""
        buffer = np.empty(8 * count + SLACK, dtype=np.uint8)
        self._keystream.fill(buffer.data)
        return buffer[: 8 * count].view(np.uint64)

    def bytes(self, length: int) -> bytes:
        """So many random bytes."""
        return self.words(-(-length // 8)).tobytes()[:length]

    def random(self, size: Any = None, *_: Any, **__: Any) -> Any:
        """Multiples of 2^-53 in [0, 1)."""
        shape = () if size is None else size
        drawn = (self.words(int(np.prod(shape, dtype=int))) >> np.uint64(11)) * 2.0**-53
        return float(drawn[0]) if size is None else drawn.reshape(shape)

    def integers(self, low: Any, high: Any = None, size: Any = None, *_: Any, **__: Any) -> Any:
        """Uniform integers in [low, high): words beyond the last multiple of the span are drawn again."""
        first, last = (0, int(low)) if high is None else (int(low), int(high))
        span, shape = last - first, () if size is None else size
        limit = np.uint64(2**64 - 1 - 2**64 % span)
        drawn = self.words(int(np.prod(shape, dtype=int)))
        while (over := drawn > limit).any():
            drawn[over] = self.words(int(over.sum()))
        found = (drawn % np.uint64(span)).astype(np.int64) + first
        return int(found[0]) if size is None else found.reshape(shape)

    def permutation(self, x: Any, axis: int = 0) -> Any:
        """A permutation by sorting random words; two of 64 bits are hardly ever equal."""
        values = np.arange(x) if isinstance(x, int | np.integer) else np.asarray(x)
        return values[np.argsort(self.words(len(values)), kind="stable")]

    def choice(self, a: Any, size: Any = None, replace: bool = True, *_: Any, **__: Any) -> Any:
        """`size` elements of `a`, with or without replacement."""
        count = int(a) if isinstance(a, int | np.integer) else len(a)
        places = self.integers(count, size=size) if replace else self.permutation(count)[:size]
        return places if isinstance(a, int | np.integer) else np.asarray(a)[places]

    def standard_normal(self, size: Any = None, *_: Any, **__: Any) -> Any:
        """A discrete Gaussian on a grid of 2^-20."""
        shape = () if size is None else size
        drawn = self.whole_normal(STEPS, int(np.prod(shape, dtype=int))) / STEPS
        return float(drawn[0]) if size is None else drawn.reshape(shape)

    def whole_normal(self, width: float, count: int) -> Whole:
        """Whole numbers of a discrete Gaussian of this width."""
        return discrete_gaussian.draw(
            width, count, lambda words: self.words((words + 1) // 2).view(np.uint32)[:words]
        )


def grid(scale: float, fine: int = FINE) -> float:
    """A power of two that is 2^-12 to 2^-13 of a scale; it depends on public numbers alone."""
    return 0.0 if scale <= 0 else 2.0 ** (math.floor(math.log2(scale)) - fine)


def toward_zero(values: Tensor, step: float) -> Tensor:
    """Multiples of the step, none of which is further from 0 than before."""
    return values if step == 0 else (values.double() / step).trunc().mul(step).to(values.dtype)


def on_grid(values: Tensor, scale: float, step: float, generator: SecureGenerator) -> Tensor:
    """Values that are multiples of the step, plus a discrete Gaussian of this scale on its grid, in float64."""
    steps = (values.double() / step).round_().clamp_(-_MOST, _MOST)
    return _with_noise(steps, scale / step, generator).mul_(step)


def rounded_sum(values: Tensor, scale: float, generator: SecureGenerator) -> Tensor:
    """Any values, rounded towards 0 onto a grid of STEPS to the noise, plus a discrete Gaussian on it, in float64."""
    step = scale / STEPS
    steps = (values.double() / step).trunc_().clamp_(-_MOST, _MOST)
    return _with_noise(steps, STEPS, generator).mul_(step)


def _with_noise(steps: Tensor, width: float, generator: SecureGenerator) -> Tensor:
    noise = torch.from_numpy(generator.whole_normal(width, steps.numel()))
    return steps.add_(noise.view(steps.shape).to(steps.device))


def discrete_on_grid(values: Tensor, scale: float, generator: SecureGenerator) -> Tensor:
    """Values rounded towards 0 onto the grid of this scale, plus a discrete Gaussian on it."""
    step = grid(scale)
    if step == 0:
        return values
    return on_grid(toward_zero(values, step), scale, step, generator).to(values.dtype)


def charged(noise: float, width: float, coordinates: int = 0) -> float:
    """The noise, in clips, of the continuous Gaussian as which discrete noise of a width in steps is accounted.

    `coordinates`: those of a sum that was rounded as a whole, so that rounding moves it by up to a step in each.
    """
    moved = 1 + 1.001 * math.sqrt(coordinates) * noise / width if coordinates else 1.0
    return noise * discrete_gaussian.continuous(width) / moved
