"""`shoal keys`: certificates for a federation, and the keys of its sites, from the first day to the last."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Json, PasswordFile, given_password, password_of, print_json, wide_console
from shoal.errors import ConfigError

app = typer.Typer(help="Make, renew, rotate and revoke certificates and keys for a federation.", no_args_is_help=True)

Folder = Annotated[Path, typer.Option(help="The folder of the keys.")]
Days = Annotated[int, typer.Option(help="Days for which the coordinator's certificate is valid.")]
Password = Annotated[
    bool, typer.Option("--password", help="Protect the private key with a password, which a terminal asks for.")
]


@app.command("coordinator")
def coordinator(
    hosts: Annotated[list[str], typer.Argument(help="Host names and addresses of the coordinator.")],
    folder: Folder = Path("keys"),
    days: Days = 365,
    password: Password = False,
    password_file: PasswordFile = None,
) -> None:
    """Make a certificate authority and the coordinator's certificate, for TLS in `shoal serve`."""
    from shoal.federation.key_files import authorities
    from shoal.federation.key_making import make_authority

    ca, secret, *_ = make_authority(folder, hosts, days, _new_password(password, password_file))
    print(f"written to {folder}: give {ca} to every site, keep {secret} safe,")
    print(f"put each site's NAME.pub into {folder / 'sites'}; then: shoal serve CONFIG.toml --keys {folder}")
    print(f"fingerprint for the policies of sites: {authorities(ca)[0]}")


@app.command("site")
def site(
    name: Annotated[str, typer.Argument(help="This site's name.")],
    folder: Folder = Path("keys"),
    password: Password = False,
    password_file: PasswordFile = None,
) -> None:
    """Make this site's key: NAME.key stays here, NAME.pub goes to the coordinator."""
    from shoal.federation.key_making import make_site

    private, public = make_site(folder, name, _new_password(password, password_file))
    print(f"send {public} to the coordinator, and ask for its ca.pem; then:")
    print(f"shoal join HOST --data FILE.csv --key {private} --ca ca.pem")


@app.command("operator")
def operator(
    name: Annotated[str, typer.Argument(help="The name of the key's files.")] = "operator",
    folder: Folder = Path("keys"),
    password: Password = False,
    password_file: PasswordFile = None,
) -> None:
    """Make the key that signs certificates of runs (`shoal certify --key`): NAME.key stays here."""
    from shoal.federation.key_making import make_operator

    private, public = make_operator(folder, name, _new_password(password, password_file))
    print(f"give {public} to whoever checks certificates; sign with: shoal certify RUN --key {private}")


@app.command("renew")
def renew(folder: Folder = Path("keys"), days: Days = 365, password_file: PasswordFile = None) -> None:
    """Renew the coordinator's certificate; a running coordinator takes it up, and sites notice nothing."""
    _written(folder, days, password_file, new_key=False)


@app.command("rotate")
def rotate(
    name: Annotated[str | None, typer.Argument(help="A site; without it, the coordinator.")] = None,
    folder: Folder = Path("keys"),
    days: Days = 365,
    password: Password = False,
    password_file: PasswordFile = None,
) -> None:
    """Replace a private key: a site's by its name, or the coordinator's, with a new certificate."""
    from shoal.federation.key_making import rotate_site

    if name is None:
        _written(folder, days, password_file, new_key=True)
        return
    private, public = rotate_site(folder, name, _new_password(password, password_file))
    print(f"{private} is new, the old one is {private}.old: send {public} to the coordinator, to replace the one in")
    print("sites/; a running coordinator takes it up. Then join again with the new key. Sites that know this one by")
    print(f"--peers need {public} too.")


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="The site, as in sites/NAME.pub.")],
    folder: Folder = Path("keys"),
) -> None:
    """Revoke a site's key at the coordinator: a running one disconnects the site at once."""
    from shoal.federation.key_making import revoke as revoked

    print(f"the key of {name} is revoked, and kept as {revoked(folder, name)}")


@app.command("list")
def show(folder: Folder = Path("keys"), as_json: Json = False) -> None:
    """List the keys of a folder, their fingerprints and when certificates end."""
    from rich.table import Table

    from shoal.federation.key_files import entries

    found = entries(folder)
    if as_json:
        print_json({"keys": [entry.to_json() for entry in found]})
        return
    table = Table("file", "of", "valid until", "state", "fingerprint", box=None)
    for entry in found:
        table.add_row(entry.file, entry.what, entry.ends or "", entry.state, entry.fingerprint)
    wide_console().print(table)


def _written(folder: Path, days: int, password_file: Path | None, *, new_key: bool) -> None:
    from shoal.federation.key_files import CA, CA_KEY
    from shoal.federation.key_making import renew as renewed

    written = renewed(folder, days, password_of(folder / CA_KEY, password_file), new_key)
    print(f"written: {', '.join(map(str, written))}")
    if folder / CA in written:
        print(f"the authority's certificate is new too: give {folder / CA} to every site")


def _new_password(ask: bool, file: Path | None) -> bytes | None:
    """The password for a new key, typed twice where a terminal asks; None for none."""
    given = given_password(file)
    if given is not None or not ask:
        return given
    if not sys.stdin.isatty():
        raise ConfigError("--password needs a terminal: give --password-file, or set SHOAL_KEY_PASSWORD")
    first, second = (getpass.getpass(words) for words in ("New password: ", "The same again: "))
    if first != second or not first:
        raise ConfigError("the passwords differ, or are empty: nothing was written")
    return first.encode()
