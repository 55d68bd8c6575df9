"""Shamir's secret sharing (1979): a secret of 32 bytes as shares, any `threshold` of which give it back.

The secret is the value at 0 of a random polynomial of degree threshold - 1 over the integers modulo a prime; the
share of holder x is its value at x. Fewer shares than the threshold fit every secret equally well.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

PRIME = 2**256 + 297  # the least prime over 2^256
SECRET, SHARE = 32, 33  # bytes


def split(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, int]:
    """A share for each holder, who is a whole number from 1."""
    places = list(holders)
    if len(secret) != SECRET or not 1 <= threshold <= len(places) or min(places) < 1:
        raise ValueError(
            f"a secret of {len(secret)} bytes cannot be split over {len(places)} with {threshold} needed"
        )
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _value(coefficients, place) for place in places}


def join(shares: Mapping[int, int]) -> bytes | None:
    """The secret of these shares, exactly as many as are needed; None where they cannot be shares of one."""
    found = sum(share * _weight(place, shares) for place, share in shares.items()) % PRIME
    return found.to_bytes(SECRET, "big") if found < 2 ** (8 * SECRET) else None


def _value(coefficients: list[int], place: int) -> int:
    found = 0
    for coefficient in reversed(coefficients):
        found = (found * place + coefficient) % PRIME
    return found


def _weight(place: int, places: Iterable[int]) -> int:
    """Lagrange: what the share at this place counts for in the value at 0."""
    above, below = 1, 1
    for other in places:
        if other != place:
            above = above * other % PRIME
            below = below * (other - place) % PRIME
    return above * pow(below, -1, PRIME) % PRIME
