"""Named, independent random streams, all derived from one seed.

A stream is named by its purpose and a few numbers (round, client, attempt). Streams of different names are
independent, in whatever order they are drawn, so that the simulator and a site of a real federation draw the same
batches for the same client, and no noise is ever drawn twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from shoal.random.many_streams import generator_of, generators


@dataclass(frozen=True)
class Streams:
    """Research mode: every stream is derived from the seed, so that a run can be repeated."""

    seed: int
    mode: ClassVar[str] = "research"

    def generator(self, purpose: str, *numbers: int) -> np.random.Generator:
        """The stream of this name, from its beginning."""
        return generator_of(self._key(purpose, *numbers))

    def generators(self, purpose: str, *numbers: int, last: Sequence[int]) -> Iterator[np.random.Generator]:
        """The streams of these names, one for each last number; use each before the next is asked for."""
        return generators([self._key(purpose, *numbers, number) for number in last])

    def keystream(self, purpose: str, *numbers: int) -> Keystream:
        """The stream of this name as bits: many and fast, for noise."""
        return Keystream(self._key(purpose, *numbers)[:16])

    def _key(self, purpose: str, *numbers: int) -> bytes:
        return self._hashed(":".join([str(self.seed), purpose, *map(str, numbers)]))

    @staticmethod
    def _hashed(name: str, secret: bytes = b"") -> bytes:
        return hashlib.blake2b(name.encode(), digest_size=32, key=secret).digest()

    def key(self, purpose: str, *numbers: int) -> int:
        """A 63-bit key of that name, for a stream on another device."""
        return int.from_bytes(self._key(purpose, *numbers)[:8], "little") >> 1

    def number(self, purpose: str, *numbers: int) -> int:
        """One 63-bit number of that name, for libraries that take a seed."""
        return int(self.generator(purpose, *numbers).integers(2**63))


class Keystream:
    """Random bits: AES-128 in counter mode under a key. Three times as fast as numpy's generators, and in threads."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def fill(self, buffer: memoryview) -> None:
        """Fill all of the buffer but its last SLACK bytes with the next bits of the stream."""
        self._encryptor.update_into(memoryview(_zeros(len(buffer)))[: len(buffer) - SLACK], buffer)


SLACK = 15  # spare bytes that the cipher requires after its output


@cache
def _zero_blocks(blocks: int) -> bytes:
    return bytes(blocks * _BLOCK)


def _zeros(size: int) -> bytes:
    return _zero_blocks(-(-size // _BLOCK))


_BLOCK = 2**16
