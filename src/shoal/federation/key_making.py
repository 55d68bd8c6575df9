"""Makes, renews and revokes the keys and TLS certificates whose files `key_files` describes and reads."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.errors import ConfigError
from shoal.federation import key_files
from shoal.federation.key_files import CA, CA_KEY, NAME, SERVER, SERVER_KEY, Private, read_certificates, read_site_key

LONGEST_DAYS = 3650


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
    if read_certificates(folder / CA)[0].not_valid_after_utc < key_files.now() + timedelta(days=days):
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
    start = key_files.now() - timedelta(minutes=5)  # allows for clock skew
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
