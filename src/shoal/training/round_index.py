"""The index of a round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundIndex:
    """Round t of `total`, and the retry index of this attempt."""

    t: int
    total: int
    attempt: int = 0
