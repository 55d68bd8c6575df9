"""TLS certificates and the keys that identify sites: ECDSA on P-256; only their owner can read private keys.

keys/ca.pem, ca.key            the authority: ca.pem goes to every site, ca.key is kept safe
keys/server.pem, server.key    the coordinator's certificate, for its addresses
keys/sites/NAME.pub            the public keys of the sites that may join, as `ssh-keygen` writes them
NAME.key                       a site's private key, which never leaves the site
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
LONGEST_DAYS = 3650


def make_authority(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Create an authority and the coordinator's certificate for these host names and addresses; return the files."""
    if not 1 <= days <= LONGEST_DAYS:
        raise ConfigError(f"--days must be in 1 to {LONGEST_DAYS}, got {days}")
    if not hosts:
        raise ConfigError("give at least one host name or address of the coordinator")
    paths = [folder / name for name in ("ca.pem", "ca.key", "server.pem", "server.key")]
    _refuse_existing(paths)
    _make(folder)
    _make(folder / "sites")
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Shoal federation authority")])
    ca = _certificate(issuer, issuer, authority, authority, days, [x509.BasicConstraints(ca=True, path_length=0)])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Shoal coordinator")])
    names = x509.SubjectAlternativeName([_name(host) for host in hosts])
    use = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    own = [x509.BasicConstraints(ca=False, path_length=None), names, use]
    certificate = _certificate(subject, issuer, server, authority, days, own)
    for path, content, mode in zip(
        paths, (_pem(ca), _private(authority), _pem(certificate), _private(server)), (0o644, 0o600) * 2, strict=True
    ):
        _write(path, content, mode)
    return paths


def make_site(folder: Path, name: str) -> tuple[Path, Path]:
    """Create a site's key pair; return the files of the private key, which stays here, and of the public key."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"a site's name has letters, digits, '.', '_' and '-', the first a letter or digit; got {name!r}"
        )
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    _refuse_existing([private, public])
    _make(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    encoding, hidden = serialization.Encoding, serialization.NoEncryption()
    _write(private, key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, hidden), 0o600)
    text = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, text + f" {name}\n".encode(), 0o644)
    return private, public


def read_site_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key, made by `shoal keys site` or by `ssh-keygen -t ecdsa`."""
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"other users can read the private key {path}; run: chmod 600 {path}")
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{path} is not an unencrypted private key, as made by `shoal keys site`: {error}"
        ) from None
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}; `shoal keys site` makes one") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not a key on a NIST curve; `shoal keys site` makes one")
    return key


def read_sites(folder: Path) -> dict[str, bytes]:
    """Read the public keys (PEM) of the sites that may join, by name."""
    return read_public(folder / "sites")


def read_public(folder: Path) -> dict[str, bytes]:
    """Read the public keys (PEM) in a folder, by name."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            key = load_ssh_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{path} is not a public key: {error}") from None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError(f"{path} is not a key on a NIST curve; `shoal keys site` makes one")
        pem = public_pem(key)
        if pem in found.values():
            raise ConfigError(f"{path} holds the same key as another site's file; each site needs its own")
        found[path.stem] = pem
    return found


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as PEM."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    extensions: Sequence[x509.ExtensionType],
) -> x509.Certificate:
    start = datetime.now(UTC) - timedelta(minutes=5)  # allows for clock skew
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(signs=key is signer), critical=True)
    )
    for extension in extensions:
        built = built.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return built.sign(signer, hashes.SHA256())


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(f"{host!r} is neither a host name nor an address") from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    pkcs8, hidden = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, pkcs8, hidden)


def _refuse_existing(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} already exists and is not overwritten; move it away first")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror or error}; choose another --folder") from None


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)
