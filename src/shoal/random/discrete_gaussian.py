"""The discrete Gaussian, sampled from random bits alone, with a computed bound on the sampler's error.

    P(k) proportional to exp(-k^2 / (2 width^2)), for whole numbers k

By inversion of its distribution function, a table of 256-bit numbers computed in integer arithmetic: 32 random bits
decide most draws, and 224 more the rest. Tables are small. Wider Gaussians are sums,

    x = y + f z,  y of width w, z of width v:  of width sqrt(w^2 + f^2 v^2)

whose probabilities are those of the discrete Gaussian times 1 +- 2 exp(-2 pi^2 s^2), s = w v / sqrt(w^2 + f^2 v^2)
(Peikert 2010; Micciancio & Walter 2017, by Poisson's summation formula), so that s >= 2.8 is practically exact.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.kernels import compiled

Words = npt.NDArray[np.uint32]
Whole = npt.NDArray[np.int64]
Source = Callable[[int], Words]
"""Gives a number of random 32-bit words."""

WIDEST = 2048.0  # of a table
SMOOTH = 2.8  # s above
FURTHEST = 18.7  # standard deviations that a table reaches
BITS = 256
REST = BITS // 32 - 1  # words that follow the first
_GUARD = 64  # more bits, for the arithmetic
_PRECISE = Context(prec=120)
_CHUNK = 2**15  # draws at a time, whose words stay in the cache


@dataclass(frozen=True, eq=False)
class Table:
    """The distribution function at first, first + 1, ..., in units of 2^-256: the leading 32 bits, and the rest."""

    first: int
    high: Words
    rest: Words
    guide: Words

    @classmethod
    def of(cls, bounds: list[int], first: int) -> Table:
        """From the increasing 256-bit numbers themselves."""
        words = np.frombuffer(b"".join([bound.to_bytes(BITS // 8, "big") for bound in bounds]), dtype=">u4")
        words = words.astype(np.uint32).reshape(-1, BITS // 32)
        high = np.ascontiguousarray(words[:, 0])
        cells = np.arange(2**12, dtype=np.uint32) << np.uint32(20)
        guide = np.searchsorted(high, cells, side="left").astype(np.uint32)
        return cls(first, high, np.ascontiguousarray(words[:, 1:]), guide)

    def add_draws(self, into: Whole, factor: int, source: Source, kernels: bool = True) -> None:
        """into += factor times draws from this table."""
        count = len(into)
        spare = REST * (64 + 8 * count * len(self.high) // 2**32)  # more are needed with probability below 1e-80
        words = source(count + spare)
        loop = loop_in_c() if kernels else None
        used = (loop or by_operations)(self, into, factor, words[:count], words[count:])
        if used < 0:
            raise RuntimeError("too few random words for a discrete Gaussian; try again")


Loop = Callable[[Table, Whole, int, Words, Words], int]


def by_operations(table: Table, into: Whole, factor: int, words: Words, spare: Words) -> int:
    """The loop of discrete_gaussian.c, in numpy."""
    place = np.searchsorted(table.high, words, side="left").astype(np.int64)
    past = np.searchsorted(table.high, words, side="right")
    used = 0
    for i in np.flatnonzero(place < past):
        if used + REST > len(spare):
            return -1
        more = tuple(spare[used : used + REST])
        while place[i] < past[i] and more >= tuple(table.rest[place[i]]):
            place[i] += 1
        used += REST
    into += factor * (table.first + place)
    return used


@cache
def loop_in_c() -> Loop | None:
    """The loop in C, where there is a compiler and the compiled loop gives the same numbers."""
    library = compiled(Path(__file__).with_suffix(".c"))
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.add_draws.argtypes = [pointer, number, number, number, *[pointer] * 3, number, pointer, pointer, number]
    library.add_draws.restype = number

    def loop(table: Table, into: Whole, factor: int, words: Words, spare: Words) -> int:
        assert all(array.flags.c_contiguous for array in (into, words, spare))
        entries = table.high.ctypes.data, table.rest.ctypes.data, len(table.high), table.guide.ctypes.data
        place = into.ctypes.data, len(into), factor, table.first, words.ctypes.data
        return int(library.add_draws(*place, *entries, spare.ctypes.data, len(spare)))

    table = table_of(3.0)
    words = np.concatenate([table.high, table.high + np.uint32(1), np.arange(0, 2**32, 2**20, dtype=np.uint32)])
    spare = np.concatenate([table.rest.ravel(), table.rest[::-1].ravel(), np.zeros(300 * REST, dtype=np.uint32)])
    found = [np.zeros(len(words), dtype=np.int64) for _ in range(2)]
    used = [way(table, into, 5, words, spare) for way, into in zip((loop, by_operations), found, strict=True)]
    return loop if used[0] == used[1] and np.array_equal(found[0], found[1]) else None


@lru_cache(maxsize=16)
def table_of(width: float) -> Table:
    """The table of a width, in integers: from exp(-k^2 / (2 w^2)) to the next by exp(-(2k + 1) / (2 w^2))."""
    one = 1 << (BITS + _GUARD)
    square = _PRECISE.multiply(Decimal(width), Decimal(width))
    ratio, falling = (_of_one(_PRECISE.exp(_PRECISE.divide(Decimal(n) / 2, square)), one) for n in (-1, -2))
    furthest = math.ceil(FURTHEST * width) + 1
    masses = [one]
    for _ in range(furthest):
        masses.append(masses[-1] * ratio >> (BITS + _GUARD))
        ratio = ratio * falling >> (BITS + _GUARD)
    total = 2 * sum(masses) - one
    below = [divmod(share << BITS, total) for share in accumulate(masses[:0:-1])]
    # Above is the total less what is below its mirror image, rounded down too; the last entry takes the rest.
    above = [min(2**BITS - share - (left > 0), 2**BITS - 1) for share, left in reversed(below)]
    return Table.of([*(share for share, _ in below), *above], -furthest)


def _of_one(share: Decimal, one: int) -> int:
    return int(_PRECISE.multiply(share, Decimal(one)))


@lru_cache(maxsize=64)
def parts(width: float) -> tuple[tuple[int, float], ...]:
    """(factor, width of a table), ... whose draws, times their factors, add up to a discrete Gaussian."""
    if not 0 < width < 2.0**50:
        raise ValueError(f"a discrete Gaussian must have a width in (0, 2^50), got {width}")
    if width <= WIDEST:
        return ((1, width),)
    factor = math.ceil(width / WIDEST) if width < WIDEST**2 else int(WIDEST)
    narrow = 1.05 * SMOOTH * factor
    wide = math.sqrt(width**2 - narrow**2) / factor
    assert narrow * wide >= SMOOTH * width
    return (*parts(narrow), *((factor * by, of) for by, of in parts(wide)))


def furthest(width: float) -> int:
    """The largest number that can be drawn; 0 for width 0."""
    return sum(factor * (math.ceil(FURTHEST * of) + 1) for factor, of in parts(width)) if width else 0


def distance(width: float) -> float:
    """The total-variation distance, at most, of a draw from the discrete Gaussian of this width.

    A table is rounded to 2^-256 at each entry and truncated at 18.7 standard deviations; sums are not quite smooth.
    """
    tables = [of for _, of in parts(width)]
    rounded = sum(2 * (2 * math.ceil(FURTHEST * of) + 3) * 2.0**-BITS for of in tables)
    ended = len(tables) * 2 * math.exp(-(FURTHEST**2) / 2)
    unsmooth = len(tables) * 2 * math.exp(-2 * (math.pi * SMOOTH) ** 2) * 1.01  # once for `continuous`
    return rounded + ended + unsmooth


def continuous(width: float) -> float:
    """The share of its noise with which a discrete Gaussian of this width may be accounted as a continuous one.

    A continuous Gaussian of width sqrt(w^2 - s^2), randomly rounded to a whole number by a discrete Gaussian of width
    s around it, is the discrete Gaussian of width w, but for a factor of 1 +- 2 exp(-2 pi^2 s^2) in each probability
    (Peikert 2010, Theorem 3.1): the mechanism is post-processing of the continuous one.
    """
    return math.sqrt(max(0.0, 1 - (SMOOTH / width) ** 2))


def draw(width: float, count: int, source: Source, kernels: bool = True) -> Whole:
    """Whole numbers k with probability proportional to exp(-k^2 / (2 width^2))."""
    into = np.zeros(count, dtype=np.int64)
    tables = [(factor, table_of(of)) for factor, of in parts(width)]
    for start in range(0, count, _CHUNK):
        for factor, table in tables:
            table.add_draws(into[start : start + _CHUNK], factor, source, kernels)
    return into
