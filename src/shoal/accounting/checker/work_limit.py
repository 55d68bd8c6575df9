"""How much work a certificate may ask for, counted before it is done: a stranger's file must not take hours.

One unit is about a microsecond.
"""

from __future__ import annotations

from typing import Any

MOST = 50_000_000
"""What is done for one certificate: one claim for a schedule of 1,000 noises at a rate of 0.01 takes most of it."""


class TooMuch(Exception):
    """More work than this checker does for one certificate."""


class Work:
    """What may still be done for a certificate, `times` as much as usual, and what has been found for some events."""

    def __init__(self, times: float = 1.0) -> None:
        self.left = times * MOST
        self.found: dict[str, Any] = {}

    def take(self, units: float, what: str) -> None:
        """Count some units, before they are done."""
        self.left -= units
        if not self.left >= 0:
            raise TooMuch(what)


def too_much(error: TooMuch) -> str:
    """What a line says of it."""
    return f"cannot be checked: too much work, for {error}; --work 10 allows ten times as much"
