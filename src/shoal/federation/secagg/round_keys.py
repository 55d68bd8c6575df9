"""Keys of one round of secure aggregation: made for it, signed by the sites' own keys, and discarded after it.

Each site makes two X25519 keys: `sealing`, to encrypt the shares sent to it (ChaCha20-Poly1305), and `masking`, from
which its pairwise masks are derived. It sends both to the others in a bundle, signed with the key that identifies it
(`keys`). Everything is bound to the run, its terms, the round and the attempt (`context`), and derived keys also to
the whole list of bundles (`digest`), so nothing from one round, or one list, is valid in another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from shoal.federation.key_files import public_pem
from shoal.federation.messages import InvalidMessage

_HASHED = ec.ECDSA(Prehashed(hashes.SHA256()))
MOST_KEY = 1000  # bytes: more than a public key (PEM) on the largest NIST curve


@dataclass(frozen=True)
class KeyBundle:
    """A site's signed public keys for a round; `identity` is the public key (PEM) that identifies it."""

    number: int
    identity: bytes
    sealing: bytes
    masking: bytes
    signature: bytes

    def refuse_forged(self, context: bytes) -> None:
        """Raise InvalidMessage unless the keys are well-formed and signed by the site."""
        if len(self.sealing) != 32 or len(self.masking) != 32:
            raise InvalidMessage(f"site {self.number}'s keys for the round are not X25519 keys")
        content = encoded("keys", context, self.number, self.sealing, self.masking)
        verify(self.identity, self.signature, content, f"site {self.number}'s keys for the round")

    def refuse_unusable(self) -> None:
        """Raise InvalidMessage where no secret can be agreed on with these keys: all other sites would refuse."""
        own = X25519PrivateKey.generate()
        for key in (self.sealing, self.masking):
            _derived(own, key, b"")


@dataclass(frozen=True)
class Keys:
    """A site's private keys for a round."""

    sealing: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    masking: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)

    def bundle(self, number: int, context: bytes, key: ec.EllipticCurvePrivateKey) -> KeyBundle:
        """Return the public keys, signed with the site's own key."""
        sealing, masking = (each.public_key().public_bytes_raw() for each in (self.sealing, self.masking))
        signature = sign(key, encoded("keys", context, number, sealing, masking))
        return KeyBundle(number, public_pem(key.public_key()), sealing, masking, signature)


def context(run: str, terms: str, t: int, attempt: int) -> bytes:
    """Return a hash that identifies an attempt at a round."""
    return hashlib.sha256(json.dumps([run, terms, t, attempt]).encode()).digest()


def digest(bundles: Mapping[int, KeyBundle], context: bytes) -> bytes:
    """Return a hash that identifies a round with these sites and keys."""
    listed = [
        [number, bundle.identity.hex(), bundle.sealing.hex(), bundle.masking.hex()]
        for number, bundle in sorted(bundles.items())
    ]
    return hashlib.sha256(context + json.dumps(listed).encode()).digest()


def survivors_message(digest: bytes, agreed: set[int], survivors: set[int]) -> bytes:
    """Return what sites sign before they unmask: the sites that share masks, and those of them in the sum."""
    return encoded("survivors", digest, json.dumps([sorted(agreed), sorted(survivors)]).encode())


def dealers_message(digest: bytes, agreed: Iterable[int]) -> bytes:
    """Return what a site in a sparse round signs with its numbers: the sites that dealt shares, as it was told."""
    return encoded("dealers", digest, json.dumps(sorted(agreed)).encode())


def mask_seed(own: X25519PrivateKey, other: bytes, pair: tuple[int, int], digest: bytes, bound: float) -> bytes:
    """Return the seed of a pairwise mask, equal for both sites only if both received the same clip norm.

    Noise shares scale with the clip norm: those made for a small one would not hide an update under a large one.
    """
    return _derived(own, other, encoded("mask", digest, min(pair), max(pair), bound.hex().encode()))


def seal(own: X25519PrivateKey, other: bytes, way: tuple[int, int], digest: bytes, content: bytes) -> bytes:
    """Encrypt content that only site way[1] can read and only site way[0] can have written; a key is used once."""
    return ChaCha20Poly1305(_derived(own, other, encoded("share", digest, *way))).encrypt(bytes(12), content, None)


def unseal(own: X25519PrivateKey, other: bytes, way: tuple[int, int], digest: bytes, sealed: bytes) -> bytes | None:
    """Decrypt content sealed by site way[0] for site way[1]; None where it was modified, or is none."""
    try:
        return ChaCha20Poly1305(_derived(own, other, encoded("share", digest, *way))).decrypt(bytes(12), sealed, None)
    except (InvalidTag, InvalidMessage):
        return None


def sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    """Return the signature of content."""
    return key.sign(_hash(content), _HASHED)


def verify(identity: bytes, signature: bytes, content: bytes, what: str) -> None:
    """Raise InvalidMessage, naming `what`, unless the owner of this public key signed the content."""
    try:
        _public_key(identity).verify(signature, _hash(content), _HASHED)
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        raise InvalidMessage(f"{what}: invalid signature") from None


@lru_cache(8)
def _hash(content: bytes) -> bytes:
    """The hash that is signed; many sites sign one list, whose hash is computed once."""
    return hashlib.sha256(content).digest()


@lru_cache(4096)
def _public_key(identity: bytes) -> ec.EllipticCurvePublicKey:
    key = load_pem_public_key(identity) if len(identity) <= MOST_KEY else None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError
    return key


def encoded(what: str, *parts: bytes | int) -> bytes:
    """Return an injective encoding of the parts."""
    found = [b"shoal secure aggregation: ", what.encode()]
    for part in parts:
        plain = part if isinstance(part, bytes) else b"%d" % part
        found += [len(plain).to_bytes(8, "big"), plain]
    return b"".join(found)


def _derived(own: X25519PrivateKey, other: bytes, use: bytes) -> bytes:
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # a point of small order
        raise InvalidMessage("a key for the round is not a valid X25519 public key") from None
    return HKDF(hashes.SHA256(), 32, None, use).derive(secret)
