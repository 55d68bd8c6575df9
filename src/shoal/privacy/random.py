"""Where every random number comes from: named, independent streams that are made anew from one seed.

A stream is named by its purpose and a few numbers (round, client, attempt). Two streams of different names
share nothing, whatever the order in which they are drawn, so that the simulator and a site of a real
federation draw the same batches for the same client, and no noise is ever drawn twice.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Streams:
    """Research mode: every stream follows from the seed, so that a run can be repeated."""

    seed: int

    def generator(self, purpose: str, *numbers: int) -> np.random.Generator:
        """The stream of this name, from its beginning."""
        name = ":".join([str(self.seed), purpose, *map(str, numbers)])
        key = hashlib.blake2b(name.encode(), digest_size=32).digest()
        seed = np.random.SeedSequence(int.from_bytes(key, "little"))
        return np.random.Generator(np.random.SFC64(seed))  # the fastest of numpy's for normal numbers

    def number(self, purpose: str, *numbers: int) -> int:
        """One 63-bit number of that name, for libraries that take a seed of their own."""
        return int(self.generator(purpose, *numbers).integers(2**63))
