"""Keys of one round of secure aggregation: made for it, signed by the sites' own keys, and forgotten after it.

Each site makes two X25519 keys: `sealing`, under which shares are sent to it (ChaCha20-Poly1305), and `masking`, from
which the masks of its pairs follow. Both go to the others on a card that is signed with the key by which the site is
known (`keys`). Everything is bound to the run, its terms, the round and the attempt (`context`), and what is derived
also to the whole list of cards (`digest`), so that nothing of one round, or of one list, is of use in another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from shoal.federation.keys import public_pem
from shoal.federation.messages import InvalidMessage

MOST_KEY = 1000  # characters of a public key (PEM) on the largest NIST curve, and some


@dataclass(frozen=True)
class KeyBundle:
    """What a site makes known of itself for a round; `identity` is the public key by which it is known (PEM)."""

    number: int
    identity: bytes
    sealing: bytes
    masking: bytes
    signature: bytes

    def refuse_forged(self, context: bytes) -> None:
        if len(self.sealing) != 32 or len(self.masking) != 32:
            raise InvalidMessage(f"site {self.number}'s keys for the round are no X25519 keys")
        words = _said("keys", context, self.number, self.sealing, self.masking)
        verify(self.identity, self.signature, words, f"site {self.number}'s keys for the round")


@dataclass(frozen=True)
class Keys:
    """A site's own for a round."""

    sealing: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    masking: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)

    def bundle(self, number: int, context: bytes, key: ec.EllipticCurvePrivateKey) -> KeyBundle:
        sealing, masking = (each.public_key().public_bytes_raw() for each in (self.sealing, self.masking))
        signature = sign(key, _said("keys", context, number, sealing, masking))
        return KeyBundle(number, public_pem(key.public_key()), sealing, masking, signature)


def context(run: str, terms: str, t: int, attempt: int) -> bytes:
    """By what a round is told from every other."""
    return hashlib.sha256(json.dumps([run, terms, t, attempt]).encode()).digest()


def digest(bundles: Mapping[int, KeyBundle], context: bytes) -> bytes:
    """By what a round with these sites and these keys is told from every other."""
    listed = [
        [number, bundle.identity.hex(), bundle.sealing.hex(), bundle.masking.hex()]
        for number, bundle in sorted(bundles.items())
    ]
    return hashlib.sha256(context + json.dumps(listed).encode()).digest()


def survivors_said(digest: bytes, agreed: set[int], survivors: set[int]) -> bytes:
    """What sites sign before they unmask: who had agreed on masks, and who of them is in the sum."""
    return _said("survivors", digest, json.dumps([sorted(agreed), sorted(survivors)]).encode())


def mask_seed(own: X25519PrivateKey, other: bytes, pair: tuple[int, int], digest: bytes, bound: float) -> bytes:
    """The seed of a pair's mask, the same for both where both were told the same clip: shares of noise are in units
    of it, and some that were made for a small one would not hide an update under a large one.
    """
    return _derived(own, other, _said("mask", digest, min(pair), max(pair), bound.hex().encode()))


def seal(own: X25519PrivateKey, other: bytes, way: tuple[int, int], digest: bytes, content: bytes) -> bytes:
    """Content that only site way[1] can read, and that only site way[0] can have written. A key seals once."""
    return ChaCha20Poly1305(_derived(own, other, _said("share", digest, *way))).encrypt(bytes(12), content, None)


def unseal(own: X25519PrivateKey, other: bytes, way: tuple[int, int], digest: bytes, sealed: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(_derived(own, other, _said("share", digest, *way))).decrypt(bytes(12), sealed, None)
    except InvalidTag:
        raise InvalidMessage(f"the share from site {way[0]} was changed on its way") from None


def sign(key: ec.EllipticCurvePrivateKey, words: bytes) -> bytes:
    return key.sign(words, ec.ECDSA(hashes.SHA256()))


def verify(identity: bytes, signature: bytes, words: bytes, what: str) -> None:
    """Spoilt unless the owner of this public key has signed these words."""
    try:
        if len(identity) > MOST_KEY:
            raise ValueError
        key = load_pem_public_key(identity)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError
        key.verify(signature, words, ec.ECDSA(hashes.SHA256()))
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        raise InvalidMessage(f"{what}: the signature is not its own") from None


def _said(what: str, *parts: bytes | int) -> bytes:
    """Parts put together so that no other parts give the same bytes."""
    plain = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"shoal secure aggregation: " + what.encode() + b"".join(len(p).to_bytes(8, "big") + p for p in plain)


def _derived(own: X25519PrivateKey, other: bytes, use: bytes) -> bytes:
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # a point of small order
        raise InvalidMessage("a key for the round is none that a secret can be shared with") from None
    return HKDF(hashes.SHA256(), 32, None, use).derive(secret)
