"""Signed requests: a site signs each of its requests, and the link checks the signature before it reads the body.

Flower's own SuperNodes sign a timestamp only, so that the headers of one request serve for any other. Here a
signature (ECDSA, SHA-256) covers the method, the path, the SHA-256 of the body, the time, a nonce that is used once,
the coordinator's public key (that of its TLS certificate), and the number that the link drew when it started. A
request can be neither changed, nor repeated, nor passed on to another coordinator, nor to this one once restarted or
its clock set back.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

GREETING = "/v1/shoal"  # the path of the one request that is not signed: it asks for the link's number
SKEW = 300.0  # seconds by which the clocks of a site and of the coordinator may differ
KEPT = 3 * SKEW  # seconds to remember a nonce: its time is accepted for two SKEW, and the clock may go back by one
MOST_NONCES = 2**19  # requests of one key that are remembered; a site makes far fewer in that time
NO_TLS = "no TLS"  # in the place of the coordinator's public key
KEY, TIME, NONCE, BODY, SIGNATURE = (f"shoal-{name}" for name in ("key", "time", "nonce", "body", "signature"))
FORMS = {TIME: r"\d{1,11}\.\d{3}", NONCE: r"[0-9a-f]{32}", BODY: r"[0-9a-f]{64}"}
_ALGORITHM = ec.ECDSA(hashes.SHA256())


class Unauthorized(Exception):
    """A request that is not accepted.

    Attributes:
        kind: The event, "key-rejected" or "authentication-failed".
        key: The public key (PEM) that the request names, if any.
    """

    def __init__(self, why: str, kind: str = "authentication-failed", key: bytes = b"") -> None:
        super().__init__(why)
        self.kind, self.key = kind, key


@dataclass(frozen=True)
class Signed:
    """What a valid signature vouches for: the site's public key (PEM), and the SHA-256 of the body to come."""

    key: bytes
    body: str


def coordinator_identity(certificate: bytes) -> str:
    """Return the SHA-256 of the public key in a certificate (DER); it outlives a renewal that keeps the key."""
    key = x509.load_der_x509_certificate(certificate).public_key()
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def sign(
    key: ec.EllipticCurvePrivateKey, coordinator: str, link: str, method: str, path: str, body: bytes
) -> dict[str, str]:
    """Return the headers that sign a request to a coordinator, by its identity, and to a link, by its number."""
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    headers = {
        KEY: b64encode(pem).decode(),
        TIME: f"{time.time():.3f}",
        NONCE: secrets.token_hex(16),
        BODY: hashlib.sha256(body).hexdigest(),
    }
    signature = key.sign(_signed_text(headers, coordinator, link, method, path), _ALGORITHM)
    return headers | {SIGNATURE: b64encode(signature).decode()}


class Verifier:
    """Checks signatures; each is accepted once.

    Attributes:
        link: The number that this link drew when it started, or when its clock was last set back by more than SKEW.
        keys: The public keys (PEM) that are accepted; None accepts any.
    """

    def __init__(self, keys: frozenset[bytes] | None, clock: Callable[[], float] = time.time) -> None:
        self.link, self.keys, self._clock = secrets.token_hex(16), keys, clock
        self._seen: dict[bytes, dict[str, float]] = {}  # by key: nonces, and until when to remember them
        self._latest = clock()

    def check(self, headers: Mapping[str, str], coordinator: str, method: str, path: str) -> Signed:
        """Return what a request's headers vouch for.

        Raises:
            Unauthorized: A header is missing, malformed, forged, used before, or meant for another coordinator.
        """
        if lacking := [name for name in (KEY, TIME, NONCE, BODY, SIGNATURE) if name not in headers]:
            raise Unauthorized(f"the request is not signed: it lacks {', '.join(lacking)}")
        try:
            pem, signature = (b64decode(headers[name], validate=True) for name in (KEY, SIGNATURE))
        except ValueError:
            raise Unauthorized("malformed key or signature") from None
        if self.keys is not None and pem not in self.keys:
            raise Unauthorized("its key is not among those of the sites that may join", "key-rejected", pem)
        for name, form in FORMS.items():
            if not re.fullmatch(form, headers[name]):
                raise Unauthorized(f"malformed header {name}", key=pem)
        if (skew := _skew(headers[TIME], now := self._now())) is not None:
            raise Unauthorized(skew, key=pem)
        try:
            _public(pem).verify(signature, _signed_text(headers, coordinator, self.link, method, path), _ALGORITHM)
        except (InvalidSignature, ValueError, UnsupportedAlgorithm):
            why = "its signature is not valid for this request, this coordinator and this start of the coordinator"
            raise Unauthorized(why, key=pem) from None
        self._use(headers[NONCE], pem, now)
        return Signed(pem, headers[BODY])

    def _now(self) -> float:
        """The time; a new number is drawn where the clock was set back, since forgotten nonces could serve again."""
        now = self._clock()
        if now < self._latest - SKEW:
            self.link, self._seen, self._latest = secrets.token_hex(16), {}, now
        self._latest = max(self._latest, now)
        return now

    def _use(self, nonce: str, key: bytes, now: float) -> None:
        """Refuse a nonce for as long as its time could still be accepted."""
        seen = self._seen.setdefault(key, {})
        while seen and next(iter(seen.values())) < now:  # the oldest comes first
            del seen[next(iter(seen))]
        if nonce in seen:
            raise Unauthorized("the request was sent before", key=key)
        if len(seen) >= MOST_NONCES:
            raise Unauthorized(f"more than {MOST_NONCES:,} requests in {KEPT:g} s", key=key)
        seen[nonce] = now + KEPT


def _signed_text(headers: Mapping[str, str], coordinator: str, link: str, method: str, path: str) -> bytes:
    """No part can hold a line's end, so that no two requests have one text."""
    parts = ("Shoal request 1", coordinator, link, method, path, headers[BODY], headers[TIME], headers[NONCE])
    return "\n".join(parts).encode()


def _skew(theirs: str, ours: float) -> str | None:
    """What is wrong with a request's time."""
    differ = float(theirs) - ours
    if abs(differ) <= SKEW:
        return None
    return (
        f"its clock is {abs(differ):,.0f} s {'ahead of' if differ > 0 else 'behind'} the coordinator's: it was "
        f"{_utc(float(theirs))} at the site and {_utc(ours)} at the coordinator; they may differ by {SKEW:g} s: "
        f"set the clock that is wrong"
    )


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


@lru_cache(maxsize=4096)
def _public(pem: bytes) -> ec.EllipticCurvePublicKey:
    key = load_pem_public_key(pem)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic-curve key")
    return key
