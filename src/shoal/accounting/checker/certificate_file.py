"""A certificate as a file: how it is written, hashed and signed, and what it is bound to by a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "shoal-certificate-1"


class BadInput(Exception):
    """A file or an option that cannot be read."""


@dataclass(frozen=True)
class Line:
    """`yes`, `no`, `unknown` (cannot be checked) or `absent` (nothing to compare with), and what it is about."""

    verdict: str
    what: str
    words: str


def written(held: Mapping[str, Any]) -> bytes:
    """A certificate as a file: one way to write it, so that no character can change unnoticed."""
    return (json.dumps(held, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def canonical(content: Any) -> bytes:
    """What is hashed, here and in a ledger."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest_of(held: Mapping[str, Any]) -> str:
    """The SHA-256 of all of a certificate but its digest and its signature."""
    body = {key: value for key, value in held.items() if key not in ("digest", "signature")}
    return hashlib.sha256(canonical(body)).hexdigest()


def signed_bytes(digest: str) -> bytes:
    """What the operator's key signs."""
    return f"{FORMAT} {digest}".encode()


def digest_line(held: Mapping[str, Any], raw: bytes) -> Line:
    if digest_of(held) != held.get("digest"):
        return Line("no", "certificate", "it was changed: its digest is not that of its contents")
    if written(held) != raw:
        return Line("no", "certificate", "it was changed: the file is not written as it was made")
    return Line("yes", "certificate", f"unchanged, SHA-256 {held['digest'][:16]}")


def signature_line(held: Mapping[str, Any], public_key: Path | None) -> Line:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    signature = held.get("signature")
    if signature is None:
        return Line("no" if public_key else "absent", "signature", "UNSIGNED: nobody vouches for this certificate")
    try:
        raw, value = bytes.fromhex(signature["public_key"]), bytes.fromhex(signature["value"])
        if signature != {"algorithm": "ed25519", "public_key": raw.hex(), "value": value.hex()}:
            raise ValueError
        Ed25519PublicKey.from_public_bytes(raw).verify(value, signed_bytes(str(held.get("digest"))))
    except (InvalidSignature, ValueError, TypeError, KeyError):
        return Line("no", "signature", "it does not belong to this certificate")
    if public_key is None:
        return Line("yes", "signature", f"valid, by the key {raw.hex()}; give --public-key to compare it")
    if _public(public_key) != raw:
        return Line("no", "signature", f"it is by another key than {public_key}: {raw.hex()}")
    return Line("yes", "signature", f"valid, by the key in {public_key}")


def _public(path: Path) -> bytes:
    """An Ed25519 public key, as `ssh-keygen` writes it or as PEM, as its 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

    content = read_bytes(path)
    try:
        key = load_pem_public_key(content) if content.startswith(b"-----") else load_ssh_public_key(content)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path} is not a public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise BadInput(f"{path} is not an Ed25519 key; `shoal keys operator` makes one")
    return key.public_bytes_raw()


def file_line(what: str, hash: str | None, path: Path | None) -> Line:
    if path is None:
        return Line("absent", what, "not given" if hash else "none is certified, and none was given")
    own = hashlib.sha256(read_bytes(path)).hexdigest()
    if own != hash:
        return Line("no", what, f"the SHA-256 of {path} is {own[:16]}, not {str(hash)[:16]}")
    return Line("yes", what, f"{path} is the certified one")


def refuse(constant: str) -> None:
    raise ValueError(constant)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
