"""Is the noise normal in its tails? Two checks of the sampler itself, which no game with few trials could replace.

`beyond`: random words that begin with zeros give the longest radii. Given u < 2^-k, r^2/2 - k ln 2 is exponential
with mean 1, whatever k: a sampler whose radii have too few bits ends early, or gives few different ones.
`lattice`: radii that come from whole numbers of b bits lie on a lattice, u 2^b = 1/2, 3/2, ...; in the tail it is
coarse enough to be seen through the rounding of the numbers. This one asks nothing of the sampler but numbers.

A sampler of 31 bits, from which one step of two million parameters can be distinguished from its neighbour (epsilon
4.9 where 2 was claimed), fails both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shoal.audit.checks import Check
from shoal.random import discrete_gaussian
from shoal.random.normals import PIECE, add_normals, loop_in_c, normals
from shoal.random.secure_streams import STEPS, SecureGenerator
from shoal.random.streams import Keystream, Streams

ZEROS = (12, 20, 31)  # leading bits of the forced words
ROWS, WIDTH = 16, 2**19  # drawn for the lattice: some 128 pairs lie where one of 31 bits would be seen
BITS = range(23, 34)
COARSE = 16  # a lattice shows where u 2^b < 2^16, in spite of the rounding to float32
CHANCE = 1e-7  # with which a check flags a right sampler

Draw = Callable[[Tensor, Tensor, Sequence[Keystream]], None]
"""As `normals.add_normals`: noise of a scale, from keystreams, added to rows."""


def sampler_checks(streams: Streams, device: torch.device) -> list[Check]:
    """The sampler that a run with these streams would use."""
    if streams.mode == "secure":
        generator = streams.generator("tails")
        return [discrete_tail(generator), discrete_steps(generator)]
    ways = {"in C": loop_in_c(), "by operations": None}
    found = [
        beyond(partial(add_normals, loop=loop), streams, name)
        for name, loop in ways.items()
        if loop is not None or name == "by operations"
    ]
    into = torch.zeros(ROWS, min(WIDTH, PIECE), device=device)
    normals(streams, "tails", (), range(ROWS), into).add(into, into.new_ones(ROWS))
    return [*found, lattice(into.double().cpu().numpy())]


class _Zeros(Keystream):
    """A stream whose 32-bit words all begin with this many zeros, those from `free` on excepted."""

    def __init__(self, stream: Keystream, zeros: int, free: int) -> None:
        self._stream, self._zeros, self._free = stream, zeros, free

    def fill(self, buffer: memoryview) -> None:
        self._stream.fill(buffer)
        words = np.frombuffer(buffer, dtype=np.uint8)[: len(buffer) // 4 * 4].view(np.uint32)
        words[: self._free] >>= np.uint32(self._zeros)


def beyond(draw: Draw, streams: Streams, name: str = "") -> Check:
    """Radii from words that begin with zeros, against their law: Kolmogorov and Smirnov."""
    from scipy.stats import kstest

    pairs, worst = 8, 1.0
    for zeros in ZEROS:
        excess: list[float] = []
        for trial in range(64):
            stream = _Zeros(streams.keystream("beyond", zeros, trial), zeros, pairs)
            into = torch.zeros(1, 2 * pairs)
            draw(into, torch.ones(1), [stream])
            radii = into[0].double().view(2, pairs).square().sum(0)
            excess += (radii / 2 - zeros * math.log(2)).tolist()
        worst = min(worst, float(kstest(excess, "expon").pvalue))
    limit = CHANCE / len(ZEROS)
    words = "the longest radii follow their law" if worst >= limit else "the longest radii are too short, or too few"
    return Check(f"noise tails {name}".strip(), worst, limit, worst < limit, words)


def lattice(numbers: np.ndarray) -> Check:
    """Do radii of pairs, neighbours or the halves of a row, come from whole numbers of b bits, for some b?"""
    from scipy.stats import norm

    limit = float(norm.isf(CHANCE / len(BITS) / 4))
    worst = 0.0
    halves = numbers.reshape(len(numbers), 2, -1).swapaxes(0, 1).reshape(2, -1)
    for first, second in (halves, numbers.reshape(-1, 2).T):
        logs = (first**2 + second**2) / 2
        for bits in BITS:
            whole = np.exp(bits * math.log(2) - logs[logs > (bits - COARSE) * math.log(2)])
            if len(whole) >= 10:  # the mean of cos(2 pi u 2^b) is -1 on the lattice, else 0 +- sqrt(1 / 2n)
                worst = max(worst, abs(float(np.cos(2 * np.pi * whole).mean())) * math.sqrt(2 * len(whole)))
    words = "radii lie on no lattice" if worst <= limit else "radii lie on a lattice of few bits"
    return Check("noise lattice", worst, limit, worst > limit, words)


def discrete_steps(generator: np.random.Generator) -> Check:
    """Noise on a fine grid is a sum of draws, some times a factor: is it whole numbers of every kind? Chi-square."""
    from scipy.stats import chisquare

    assert isinstance(generator, SecureGenerator)
    drawn = generator.whole_normal(STEPS, 2**17)
    factor = max(by for by, _ in discrete_gaussian.parts(STEPS))
    chance = float(chisquare(np.bincount(drawn % factor, minlength=factor)).pvalue)
    spread = abs(float(np.square(drawn / STEPS).mean()) - 1) / math.sqrt(2 / len(drawn))
    flagged = chance < CHANCE or spread > 5.4
    words = "noise on the fine grid takes all its steps" if not flagged else "noise leaves steps of its grid out"
    return Check("noise steps", chance, CHANCE, flagged, words)


def discrete_tail(generator: np.random.Generator, width: float = 64.0) -> Check:
    """Draws whose first 32 bits are all ones, which only the 224 after them decide: chi-square against their law."""
    from scipy.stats import chisquare

    assert isinstance(generator, SecureGenerator)

    def ones(count: int) -> discrete_gaussian.Words:
        words = generator.words((count + 1) // 2).view(np.uint32)[:count].copy()
        words[: count - discrete_gaussian.REST * 64] |= np.uint32(0xFFFFFFFF)
        return words

    drawn = np.concatenate([discrete_gaussian.draw(width, 8, ones) for _ in range(500)])
    places = np.arange(drawn.min(), math.ceil(12 * width))
    mass = np.exp(-(places.astype(float) ** 2) / (2 * width**2))
    start = 2.0**-32 * width * math.sqrt(2 * math.pi)  # all that lies in the last 2^-32
    tail = np.cumsum(mass[::-1])[::-1]
    expected = np.minimum(tail, start) - np.minimum(np.append(tail[1:], 0.0), start)
    counts = np.bincount(drawn - places[0], minlength=len(places)).astype(float)
    kept = expected / start * len(drawn) >= 20
    seen, wanted = (np.append(found[kept], found[~kept].sum()) for found in (counts, expected / start * len(drawn)))
    chance = float(chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue)
    words = (
        "the discrete Gaussian's tail follows its law"
        if chance >= CHANCE
        else "the discrete Gaussian's tail is wrong"
    )
    return Check("noise tails", chance, CHANCE, chance < CHANCE, words)
