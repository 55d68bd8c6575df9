"""`shoal join`: take part in a federation with data that stay here."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from shoal.cli.serve import INSECURE, loopback
from shoal.errors import ConfigError


def command(
    host: Annotated[str, typer.Argument(help="The coordinator: HOST or HOST:PORT (8000 if left out).")],
    data: Annotated[str, typer.Option(help="Your data: a .csv, .parquet or .npz file, all of whose rows are yours.")],
    label: Annotated[
        str | None, typer.Option(help="The column that is to be learnt, if not the federation's.")
    ] = None,
    part: Annotated[
        int | None, typer.Option(help="For tries: hold only this client's part of a data set that Shoal knows.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What this site is called; that of its key if left out.")] = None,
    key: Annotated[Path | None, typer.Option(help="This site's private key, made by `shoal keys site`.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The coordinator's ca.pem: TLS.")] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="A folder with the NAME.pub of the other sites: with nobody else is a sum shared."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, beyond loopback too.")] = False,
    folder: Annotated[Path, typer.Option(help="Where this site keeps its own ledger.")] = Path("site"),
    require_epsilon: Annotated[
        float | None, typer.Option(help="Never spend more than this, over all runs; refuse rounds that would.")
    ] = None,
    require_delta: Annotated[float, typer.Option(help="The delta of that epsilon.")] = 1e-5,
    require_noise: Annotated[
        float | None, typer.Option(help="Refuse a federation with less noise than this (in units of the clip).")
    ] = None,
    bound: Annotated[
        list[str] | None,
        typer.Option(
            help="Refuse terms outside NAME=LOW:HIGH, such as clip=0.1:10 or rounds=:500; several may be given. "
            "NAME: clip, lr, steps (a round), rounds, batch, clients, parameters, weight (the model's greatest)."
        ),
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="What is protected: client (this site) or example (a record).")
    ] = None,
    against: Annotated[
        str, typer.Option(help="From whom: release (those who see models) or server (the coordinator as well).")
    ] = "release",
    model: Annotated[
        str | None, typer.Option(help="Your own module (package.module:Class), if it may be used.")
    ] = None,
    allow_plugin: Annotated[
        list[str] | None,
        typer.Option(
            help="A package or module whose algorithms the coordinator may name; several may be given. Its code runs "
            "here, and says what its algorithms cost. Without it only those of Shoal are taken."
        ),
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to try again when the coordinator is away.")] = 600.0,
) -> None:
    """Join a federation: train on your own data, send only what the method lets leave, keep your own ledger."""
    from shoal.deploy.missing import require_flower

    require_flower()
    from shoal.deploy.consent import Wishes
    from shoal.deploy.node import Door, attend
    from shoal.deploy.policy import Bounds
    from shoal.deploy.records import reader
    from shoal.deploy.site import Owner, Site

    _choice("--unit", unit, (None, "client", "example"))
    _choice("--against", against, ("release", "server", "inside"))
    address = _address(host, ca, insecure)
    called = name or (key.stem if key else socket.gethostname())
    wishes = Wishes(
        require_epsilon,
        require_delta,
        require_noise,
        cast(Literal["client", "example"] | None, unit),
        cast(Literal["release", "server", "inside"], against),
    )
    bounds = Bounds.read(bound or ())
    own = _key(key, folder)
    read, plugins = reader(data, label, part), tuple(allow_plugin or ())
    site = Site(Owner(called, folder, read, wishes, model, own, _peers(peers), bounds, plugins), tell)
    door = Door(address, own, _certificate(ca), registers=key is None)
    try:
        ended = attend(site, door, patience, tell)
    finally:
        site.close()
    tell(f"the run is over ({ended})")


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _address(host: str, ca: Path | None, insecure: bool) -> str:
    found = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:]+)(?::(\d{1,5}))?", host)
    if found is None:
        raise ConfigError(f"{host!r} is no HOST or HOST:PORT")
    name, port = found[1], found[2] or "8000"
    if ca is None and not loopback(name.strip("[]")):
        if not insecure:
            raise ConfigError(
                f"joining {name} without TLS would show your updates to everybody on the way; give --ca (the "
                f"coordinator's ca.pem), or say --insecure"
            )
        tell(INSECURE)
    return f"{name}:{port}"


def _key(path: Path | None, folder: Path):  # type: ignore[no-untyped-def]
    """The site's key; without one a key of its own is made and kept, so that it is known again."""
    from shoal.deploy.keys import make_site, read_site_key

    if path is None:
        path = folder / "own.key"
        if not path.exists():
            make_site(folder, "own")
    return read_site_key(path)


def _peers(folder: Path | None) -> frozenset[bytes] | None:
    from shoal.deploy.keys import read_public

    if folder is None:
        return None
    if not (found := read_public(folder)):
        raise ConfigError(f"there is no public key (NAME.pub) in --peers {folder}")
    return frozenset(found.values())


def _certificate(ca: Path | None) -> bytes | None:
    try:
        return None if ca is None else ca.read_bytes()
    except OSError as error:
        raise ConfigError(f"the certificate {ca} cannot be read: {error.strerror}") from None


def _choice(option: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{option} is one of {', '.join(str(c) for c in choices if c)}, got {value!r}")
