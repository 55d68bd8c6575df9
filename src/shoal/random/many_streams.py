"""Many streams one after another, at a fraction of what a generator for each would cost.

numpy takes longer to make a generator than a client's batches take to draw. Here all seeds are computed at once, as
numpy.random.SeedSequence and numpy's SFC64 do it (O'Neill's seed_seq; a test compares every stream with numpy's own),
and one generator is set to the beginning of each stream in turn. Of FEW streams or fewer numpy makes each sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

WORDS = 8  # of a key
FEW = 24
POOL = 4
INPUT = 0x43B0D7E5, 0x931E8875
"""The first constant of a hash, and the factor from each to the next."""
OUTPUT = 0x8B51F9DD, 0x58F38DED
MIX = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
WARM_UP = 12
SHIFT, LEFT, TURN = np.uint64(11), np.uint64(3), np.uint64(24)
"""The constants of SFC64."""


def generator_of(key: bytes) -> np.random.Generator:
    """The generator of a key's stream."""
    seed = np.random.SeedSequence(np.frombuffer(key, "<u4"))
    return np.random.Generator(np.random.SFC64(seed))  # the fastest of numpy's for normal numbers


def generators(keys: Sequence[bytes]) -> Iterator[np.random.Generator]:
    """The generator of each key's stream. It may be one object: use each before the next is asked for."""
    if len(keys) <= FEW:
        yield from map(generator_of, keys)
        return
    source = np.random.SFC64(0)
    generator = np.random.Generator(source)
    for state in sfc64_states(np.frombuffer(b"".join(keys), "<u4").reshape(-1, WORDS)):
        source.state = {"bit_generator": "SFC64", "state": {"state": state}, "has_uint32": 0, "uinteger": 0}
        yield generator


def sfc64_states(entropy: Words) -> npt.NDArray[np.uint64]:
    """The first state of SFC64 for each row of entropy, seeded by SeedSequence."""
    a, b, c = _seeds(entropy, 3)
    count = np.ones_like(a)
    for _ in range(WARM_UP):
        drawn = a + b + count
        a, b, c = b ^ b >> SHIFT, c + (c << LEFT), (c << TURN | c >> np.uint64(64) - TURN) + drawn
        count += np.uint64(1)
    return np.stack([a, b, c, count], 1)


def _seeds(entropy: Words, count: int) -> list[npt.NDArray[np.uint64]]:
    """The first 64-bit words of SeedSequence(row).generate_state, for each row."""
    hashed = Hash(*INPUT)
    pool = [hashed(word) for word in entropy.T[:POOL]]
    for source in range(POOL):
        for target in (place for place in range(POOL) if place != source):
            pool[target] = _mixed(pool[target], hashed(pool[source]))
    for word in entropy.T[POOL:]:
        pool = [_mixed(held, hashed(word)) for held in pool]
    hashed = Hash(*OUTPUT)
    halves = [hashed(pool[place % POOL]).astype(np.uint64) for place in range(2 * count)]
    return [low | high << np.uint64(32) for low, high in zip(halves[::2], halves[1::2], strict=True)]


class Hash:
    """SeedSequence's hash of words, whose constant changes with each use."""

    def __init__(self, first: int, factor: int) -> None:
        self._constant, self._factor = first, factor

    def __call__(self, words: Words) -> Words:
        """The hash of each word."""
        words = words ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor % 2**32
        words = words * np.uint32(self._constant)
        return words ^ words >> np.uint32(16)


def _mixed(x: Words, y: Words) -> Words:
    mixed: Words = MIX[0] * x - MIX[1] * y
    return mixed ^ mixed >> np.uint32(16)
