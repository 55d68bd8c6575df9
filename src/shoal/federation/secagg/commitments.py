"""Commitments to what a site shares: a holder that opens another share than was dealt is found, and so is a dealer
whose shares do not give its secrets.

With its shares a dealer publishes the SHA-256 hash of its self-mask seed and of each share. (Its masking key has a
commitment already: the public key.) A holder compares what it was dealt with the dealer's commitments and disputes a
share that does not match; the coordinator compares every share that is opened.

They are binding because SHA-256 has no known collisions. They hide, with SHA-256 as a random oracle, because each
hashed value is as hard to guess as a key. The seed is 32 uniform bytes. A share is uniform modulo PRIME given fewer
than a threshold of the others; with exactly one less than the threshold it is as hard to guess as the secret itself,
which for the masking key means a discrete logarithm on Curve25519. Each hash is bound to the round, the dealer, the
holder and the kind of secret, so no guess can be tested against two of them, and opening one secret of a site says
nothing about its other one. A coordinator that shows a holder a false commitment learns that it does not match,
which it knew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.federation.secagg.round_keys import encoded
from shoal.federation.secagg.shamir import SHARE

HASH = 32  # bytes
Shares = tuple[int, int]
"""The shares that one holder has of one dealer: of its masking key, and of its self-mask seed."""
MASKING, SEED = 0, 1


@dataclass(frozen=True)
class Dealt:
    """What a dealer sends: sealed shares and commitments to them, by holder, and the commitment to its seed."""

    sealed: Mapping[int, bytes]
    commitments: Mapping[int, bytes]
    seed: bytes


def of_seed(seed: bytes, digest: bytes, dealer: int) -> bytes:
    """Return the commitment to a dealer's self-mask seed."""
    return hashlib.sha256(encoded("commitment to a seed", digest, dealer, seed)).digest()


def of_shares(shares: Shares, digest: bytes, dealer: int, holder: int) -> bytes:
    """Return the commitments to both shares of one holder."""
    return b"".join(_of_share(kind, shares[kind], digest, dealer, holder) for kind in (MASKING, SEED))


def opens(commitments: bytes, kind: int, share: int, digest: bytes, dealer: int, holder: int) -> bool:
    """Whether this is the share of that kind to which the dealer is committed."""
    return commitments[kind * HASH :][:HASH] == _of_share(kind, share, digest, dealer, holder)


def _of_share(kind: int, share: int, digest: bytes, dealer: int, holder: int) -> bytes:
    content = encoded("commitment to a share", digest, dealer, holder, kind, share.to_bytes(SHARE, "big"))
    return hashlib.sha256(content).digest()
