"""When a round is played."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundIndex:
    """When a round is played: round t of `total`, and the how-manieth attempt at it this is."""

    t: int
    total: int
    attempt: int = 0
