"""TLS certificates and the keys that identify sites: ECDSA on P-256; only their owner can read private keys.

keys/ca.pem, ca.key            the authority: ca.pem goes to every site, ca.key is kept safe
keys/server.pem, server.key    the coordinator's certificate, for its addresses
keys/sites/NAME.pub            the public keys of the sites that may join, as `ssh-keygen` writes them
keys/revoked/                  the public keys that may not join any more, wherever else they are
NAME.key                       a site's private key, which never leaves the site
operator.key, operator.pub     signs certificates of runs (`shoal certify`): Ed25519

Private keys may have a password (PKCS #8). Whoever holds ca.key is the coordinator to every site: it is known by the
fingerprint of that key, which stays the same when certificates are renewed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from shoal.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
SOON = timedelta(days=30)
"""How long before its end a certificate is warned of."""
CA, CA_KEY, SERVER, SERVER_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
Private = ec.EllipticCurvePrivateKey


def now() -> datetime:
    """The time by which certificates are valid."""
    return datetime.now(UTC)


def read_site_key(path: Path, password: bytes | None = None) -> Private:
    """Read a private key, of `shoal keys` or of `ssh-keygen -t ecdsa`; `password` is ignored where it has none."""
    key = _read_private(path, password)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not a key on a NIST curve; `shoal keys site` makes one")
    return key


def read_operator_key(path: Path, password: bytes | None = None) -> Ed25519PrivateKey:
    """Read the key that signs certificates, of `shoal keys operator` or of `ssh-keygen -t ed25519`."""
    key = _read_private(path, password)
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key, which signs certificates; `shoal keys operator` makes one")
    return key


def _read_private(path: Path, password: bytes | None) -> object:
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"other users can read the private key {path}; run: chmod 600 {path}")
        locked = has_password(path)
        if locked and password is None:
            raise ConfigError(
                f"{path} has a password: give --password-file, set SHOAL_KEY_PASSWORD, or use a terminal"
            )
        return _load(path.read_bytes(), password if locked else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        why = "or the password is wrong" if locked else "as made by `shoal keys`"
        raise ConfigError(f"{path} is not a private key, {why}: {error}") from None
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}; `shoal keys` makes one") from None


def has_password(path: Path) -> bool:
    """Whether a private key is encrypted."""
    try:
        _load(path.read_bytes(), None)
    except TypeError:
        return True
    except (ValueError, UnsupportedAlgorithm):
        pass
    return False


def read_sites(folder: Path, unreadable: Callable[[ConfigError], None] | None = None) -> dict[str, bytes]:
    """Read the public keys (PEM) of the sites that may join, by name: those in sites/ that are not revoked."""
    revoked = read_revoked(folder, unreadable)
    return {name: key for name, key in read_public(folder / "sites", unreadable).items() if key not in revoked}


def read_revoked(folder: Path, unreadable: Callable[[ConfigError], None] | None = None) -> set[bytes]:
    """Read the public keys (PEM) that may not join any more; a key may be there under several names."""
    return {key for _, key in _read_keys(folder / "revoked", unreadable)}


def read_public(folder: Path, unreadable: Callable[[ConfigError], None] | None = None) -> dict[str, bytes]:
    """Read the public keys (PEM) in a folder, by name.

    A file that cannot be used raises a ConfigError, or is left out where `unreadable` takes the error.
    """
    found: dict[str, bytes] = {}
    for path, pem in _read_keys(folder, unreadable):
        if pem not in found.values():
            found[path.stem] = pem
            continue
        error = ConfigError(f"{path} holds the same key as another site's file; each site needs its own")
        if unreadable is None:
            raise error
        unreadable(error)
    return found


def _read_keys(folder: Path, unreadable: Callable[[ConfigError], None] | None) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(folder.glob("*.pub")):
        try:
            yield path, public_pem(read_public_key(path))
        except ConfigError as error:
            if unreadable is None:
                raise
            unreadable(error)


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Read a public key, as `ssh-keygen` writes it."""
    try:
        return parse_public_key(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path} is not a public key: {error}") from None


def parse_public_key(content: bytes, name: str) -> ec.EllipticCurvePublicKey:
    """Parse what the file `name` of a public key holds, whoever wrote it."""
    try:
        key = load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm, NotImplementedError) as error:  # the last for compressed points
        raise ConfigError(f"{name} is not a public key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{name} is not a key on a NIST curve; `shoal keys site` makes one")
    return key


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Read the certificates in a PEM file."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the certificate {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate: {error}") from None


def warn_of_end(path: Path, report: Callable[[str], None], fix: str = "run: shoal keys renew") -> None:
    """Report a certificate that ends within 30 days; raise a ConfigError where it is not valid now."""
    for certificate in read_certificates(path):
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now() >= end:
            raise ConfigError(f"the certificate {path} expired on {end:%Y-%m-%d}; {fix}")
        if now() < start:
            raise ConfigError(
                f"the certificate {path} is valid from {start:%Y-%m-%d %H:%M} UTC; check the clock here"
            )
        if now() + SOON >= end:
            report(f"the certificate {path} expires in {(end - now()).days} days, on {end:%Y-%m-%d}; {fix}")


def fingerprint(key: Any) -> str:
    """The SHA-256 hash of a public key, as `ssh-keygen -l` prints it."""
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return "SHA256:" + base64.b64encode(hashlib.sha256(base64.b64decode(text.split()[1])).digest()).decode().rstrip(
        "="
    )


def authorities(path: Path) -> list[str]:
    """The fingerprints of the authorities in a PEM file: whoever holds their keys may speak as the coordinator."""
    return [fingerprint(certificate.public_key()) for certificate in read_certificates(path)]


@dataclass(frozen=True)
class Entry:
    """A key in a folder, as `shoal keys list` shows it; site keys do not end."""

    file: str
    what: str
    fingerprint: str
    ends: str | None = None
    state: str = "valid"

    def to_json(self) -> dict[str, str | None]:
        """The fields."""
        return asdict(self)


def entries(folder: Path) -> list[Entry]:
    """All certificates and public keys in a folder of `shoal keys`."""
    found = []
    for name, what in ((CA, "authority"), (SERVER, "coordinator")):
        for certificate in read_certificates(folder / name) if (folder / name).exists() else ():
            end = certificate.not_valid_after_utc
            left = (end - now()).days
            soon = f"expires in {left} days" if now() + SOON >= end else "valid"
            state = "expired" if now() >= end else soon
            found.append(Entry(name, what, fingerprint(certificate.public_key()), f"{end:%Y-%m-%d}", state))
    revoked = read_revoked(folder)
    for where, what in (("", "own site"), ("sites", "site"), ("revoked", "site")):
        for path in sorted((folder / where).glob("*.pub")):
            if not where and (operator := _operator(path)) is not None:
                found.append(Entry(path.name, "operator", fingerprint(operator)))
                continue
            key = read_public_key(path)
            state = "revoked" if public_pem(key) in revoked else "valid"
            found.append(Entry(str(path.relative_to(folder)), what, fingerprint(key), None, state))
    if not found:
        raise ConfigError(f"there are no keys in {folder}; `shoal keys coordinator` or `shoal keys site` makes some")
    return found


def _operator(path: Path) -> Ed25519PublicKey | None:
    """The key that certificates are signed with, if the file holds one."""
    with suppress(OSError, ValueError, UnsupportedAlgorithm, NotImplementedError):
        key = load_ssh_public_key(path.read_bytes())
        return key if isinstance(key, Ed25519PublicKey) else None
    return None


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as PEM."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _load(content: bytes, password: bytes | None) -> object:
    load = load_ssh_private_key if b"OPENSSH" in content else serialization.load_pem_private_key
    return load(content, password)
