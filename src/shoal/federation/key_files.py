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
import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
LONGEST_DAYS = 3650
SOON = timedelta(days=30)
"""How long before its end a certificate is warned of."""
CA, CA_KEY, SERVER, SERVER_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
Private = ec.EllipticCurvePrivateKey


def now() -> datetime:
    """The time by which certificates are valid."""
    return datetime.now(UTC)


def make_authority(folder: Path, hosts: Sequence[str], days: int, password: bytes | None = None) -> list[Path]:
    """Create an authority and the coordinator's certificate for these host names and addresses; return the files.

    The authority is valid for ten years, as every site has its certificate.
    """
    _require_days(days)
    if not hosts:
        raise ConfigError("give at least one host name or address of the coordinator")
    paths = [folder / name for name in (CA, CA_KEY, SERVER, SERVER_KEY)]
    _refuse_existing(paths)
    _make(folder)
    _make(folder / "sites")
    authority, server = _new(), _new()
    names = x509.SubjectAlternativeName([_name(host) for host in hosts])
    certificates = _authority(authority), _server(server, authority, names, days)
    for path, content, mode in zip(
        paths,
        (_pem(certificates[0]), _private(authority, password), _pem(certificates[1]), _private(server, password)),
        (0o644, 0o600) * 2,
        strict=True,
    ):
        _write(path, content, mode)
    return paths


def renew(folder: Path, days: int, password: bytes | None = None, new_key: bool = False) -> list[Path]:
    """Renew the coordinator's certificate for the same addresses; return the files written.

    The authority's certificate is renewed as well where it would end first: sites then need the new ca.pem. With
    `new_key` the coordinator also gets a new private key. The authority's key stays the same.
    """
    _require_days(days)
    authority = read_site_key(folder / CA_KEY, password)
    (old,) = read_certificates(folder / SERVER)
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    key = _new() if new_key else read_site_key(folder / SERVER_KEY, password)
    content = {SERVER: _pem(_server(key, authority, names, days))}
    if new_key:
        content = {SERVER_KEY: _private(key, password)} | content
    if read_certificates(folder / CA)[0].not_valid_after_utc < now() + timedelta(days=days):
        content[CA] = _pem(_authority(authority))
    for name, text in content.items():
        _replace(folder / name, text, 0o600 if name == SERVER_KEY else 0o644)
    return [folder / name for name in content]


def make_site(folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Create a site's key pair; return the files of the private key, which stays here, and of the public key."""
    return _make_pair(folder, name, _new(), password)


def make_operator(folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Create the key pair that signs certificates of runs; return the files of the private and the public key."""
    return _make_pair(folder, name, Ed25519PrivateKey.generate(), password)


def _make_pair(
    folder: Path, name: str, key: Private | Ed25519PrivateKey, password: bytes | None
) -> tuple[Path, Path]:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"a key's name has letters, digits, '.', '_' and '-', the first a letter or digit; got {name!r}"
        )
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    _refuse_existing([private, public])
    _make(folder)
    encoding, hidden = serialization.Encoding, serialization.NoEncryption()
    plain = key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, hidden)
    _write(private, plain if password is None else _private(key, password), 0o600)
    text = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, text + f" {name}\n".encode(), 0o644)
    return private, public


def rotate_site(folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Replace a site's key pair; the old one is kept as NAME.key.old and NAME.pub.old."""
    for path in (folder / f"{name}.key", folder / f"{name}.pub"):
        if not path.exists():
            raise ConfigError(f"there is no {path} to replace; `shoal keys site {name}` makes one")
        path.rename(path.with_name(f"{path.name}.old"))
    return make_site(folder, name, password)


def revoke(folder: Path, name: str) -> Path:
    """Revoke a site's public key, which the coordinator has in sites/; return where it is kept."""
    public = folder / "sites" / f"{name}.pub"
    if not public.exists():
        others = ", ".join(sorted(path.stem for path in public.parent.glob("*.pub"))) or "none"
        raise ConfigError(f"there is no site {name} in {public.parent}; sites: {others}")
    _make(folder / "revoked")
    kept = folder / "revoked" / f"{name}-{hashlib.sha256(public.read_bytes()).hexdigest()[:8]}.pub"
    public.rename(kept)
    return kept


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


def _new() -> Private:
    return ec.generate_private_key(ec.SECP256R1())


ISSUER = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Shoal federation authority")])


def _authority(key: Private) -> x509.Certificate:
    return _certificate(ISSUER, key, key, LONGEST_DAYS, [x509.BasicConstraints(ca=True, path_length=0)])


def _server(key: Private, authority: Private, names: x509.SubjectAlternativeName, days: int) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Shoal coordinator")])
    use = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    own = [x509.BasicConstraints(ca=False, path_length=None), names, use]
    return _certificate(subject, key, authority, days, own)


def _certificate(
    subject: x509.Name,
    key: Private,
    signer: Private,
    days: int,
    extensions: Sequence[x509.ExtensionType],
) -> x509.Certificate:
    start = now() - timedelta(minutes=5)  # allows for clock skew
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(ISSUER)
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


def _private(key: Private | Ed25519PrivateKey, password: bytes | None) -> bytes:
    hidden: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        hidden = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)


def _load(content: bytes, password: bytes | None) -> object:
    load = load_ssh_private_key if b"OPENSSH" in content else serialization.load_pem_private_key
    return load(content, password)


def _require_days(days: int) -> None:
    if not 1 <= days <= LONGEST_DAYS:
        raise ConfigError(f"--days must be in 1 to {LONGEST_DAYS}, got {days}")


def _refuse_existing(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} already exists and is not overwritten; move it away first")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror or error}; choose another --folder") from None


def _replace(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f"{path.name}.part")
    temporary.unlink(missing_ok=True)
    _write(temporary, content, mode)
    temporary.replace(path)


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)
