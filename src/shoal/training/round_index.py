"""The index of a round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundIndex:
    """Round t of `total`, the retry index of this attempt, and whether the round was charged before (`again`).

    Rounds that are charged together share an attempt, though only some of them may have been charged before.
    """

    t: int
    total: int
    attempt: int = 0
    again: bool = False
