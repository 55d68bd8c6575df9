"""The split into training and test rows: fixed, public, the same on every machine and library version.

Rows are ordered by a hash of their number (SplitMix64), not by a random generator, whose streams may change
from one version to the next.
"""

from __future__ import annotations

import numpy as np


def held_out(groups: np.ndarray, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (train, test): about `count` test rows, from each group in proportion, never its last row.

    `groups` numbers the group of each row: its class, or its owner. Fewer than `count` rows are held out
    only when every group would otherwise lose its last row.
    """
    sizes = np.bincount(groups)
    quota = _quotas(sizes, count)
    order = np.lexsort((_hash(len(groups), seed), groups))
    start = np.cumsum(sizes) - sizes
    in_group = np.arange(len(groups)) - start[groups[order]]
    is_test = in_group < quota[groups[order]]
    return np.sort(order[~is_test]), np.sort(order[is_test])


def _quotas(sizes: np.ndarray, count: int) -> np.ndarray:
    """Test rows of each group: proportional, rounded by largest remainder, at most its size less one."""
    most = np.maximum(sizes - 1, 0)
    exact = count * sizes / sizes.sum()
    quota: np.ndarray = np.minimum(np.floor(exact).astype(np.int64), most)
    while (rest := count - quota.sum()) > 0:
        free = np.flatnonzero(quota < most)
        if not len(free):
            break
        first = np.argsort(-(exact - quota)[free], kind="stable")[:rest]
        quota[free[first]] += 1
    return quota


def _hash(rows: int, seed: int) -> np.ndarray:
    """SplitMix64 of the numbers 0 to rows - 1, in a sequence chosen by the seed."""
    z: np.ndarray = (np.arange(1, rows + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return z
