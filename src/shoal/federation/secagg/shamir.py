"""Shamir's secret sharing (1979): a 32-byte secret as shares, any `threshold` of which reconstruct it.

The secret is the value at 0 of a random polynomial of degree threshold - 1 over the integers modulo a prime; the
share of holder x is its value at x. Fewer shares than the threshold are equally likely under every secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

PRIME = 2**256 + 297  # the smallest prime above 2^256
SECRET, SHARE = 32, 33  # bytes


def split(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, int]:
    """Return a share for each holder; holders are integers >= 1."""
    points = list(holders)
    if len(secret) != SECRET or not 1 <= threshold <= len(points) or min(points) < 1:
        raise ValueError(
            f"a secret of {len(secret)} bytes cannot be split into {len(points)} shares with threshold {threshold}"
        )
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {point: _value(coefficients, point) for point in points}


def join(shares: Mapping[int, int]) -> bytes | None:
    """Return the secret of exactly `threshold` shares; None where they are inconsistent."""
    found = sum(share * _weight(point, shares) for point, share in shares.items()) % PRIME
    return found.to_bytes(SECRET, "big") if found < 2 ** (8 * SECRET) else None


def _value(coefficients: list[int], point: int) -> int:
    found = 0
    for coefficient in reversed(coefficients):
        found = found * point + coefficient  # grows by the few bits of a point: one division at the end is cheaper
    return found % PRIME


def _weight(point: int, points: Iterable[int]) -> int:
    """The Lagrange coefficient, at 0, of the share at this point."""
    above, below = 1, 1
    for other in points:
        if other != point:
            above = above * other % PRIME
            below = below * (other - point) % PRIME
    return above * pow(below, -1, PRIME) % PRIME
