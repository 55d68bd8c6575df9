"""`shoal join`: take part in a federation with data that stay at this site."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from shoal.cli.options import LogFormat, LogLevel, PasswordFile, password_of, uncollected_imports
from shoal.cli.serve import INSECURE, loopback
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    from shoal.data.schema import Schema

_ENDS = {
    "rounds": "all rounds are done",
    "budget": "the privacy budget is spent",
    "sites": "too few sites are left",
}
"""Why a run ended, in words."""


def command(
    host: Annotated[str, typer.Argument(help="The coordinator: HOST or HOST:PORT (default 8000).")],
    data: Annotated[str, typer.Option(help="Your data: a .csv, .parquet or .npz file; all rows are used.")],
    label: Annotated[
        str | None, typer.Option(help="The label column, if its name differs from the federation's.")
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="Your own TOML file with a schema: refuse a federation that has another one."),
    ] = None,
    part: Annotated[
        int | None, typer.Option(help="For tests: hold only this client's part of a built-in data set.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="This site's name; by default that of its key.")] = None,
    key: Annotated[Path | None, typer.Option(help="This site's private key, from `shoal keys site`.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The coordinator's ca.pem: TLS.")] = None,
    peers: Annotated[
        Path | None, typer.Option(help="A folder with the other sites' NAME.pub: secure sums only with these.")
    ] = None,
    password_file: PasswordFile = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, even beyond loopback.")] = False,
    flower_superlink: Annotated[
        bool, typer.Option("--flower-superlink", help="HOST runs Flower's own SuperLink, not `shoal serve`.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where this site keeps its own ledger.")] = Path("site"),
    policy: Annotated[
        Path | None,
        typer.Option(help="What you accept, site-policy.toml: instead of --require-..., --bound, --unit, --against."),
    ] = None,
    require_epsilon: Annotated[
        float | None, typer.Option(help="The most epsilon to spend, over all runs; refuse rounds that exceed it.")
    ] = None,
    require_delta: Annotated[float | None, typer.Option(help="The delta of that epsilon; 1e-5 if not given.")] = None,
    require_noise: Annotated[
        float | None, typer.Option(help="Refuse a federation with a smaller noise multiplier.")
    ] = None,
    bound: Annotated[
        list[str] | None,
        typer.Option(
            help="Refuse terms outside NAME=LOW:HIGH, such as clip_norm=0.1:10 or rounds=:500; may be repeated. "
            "NAME: clip_norm, lr, steps (a round), rounds, batch, clients, cohort, parameters, weight (the model's "
            "largest), canaries (none by default)."
        ),
    ] = None,
    unit: Annotated[str | None, typer.Option(help="The unit to protect: client (this site), record or user.")] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="The observer: server (the coordinator; the default), release (released models) or client-process."
        ),
    ] = None,
    no_guarantee: Annotated[
        bool, typer.Option("--no-guarantee", help="Take part even if nothing is proven against anybody.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="A module of your own (package.module:Class) that may be used.")
    ] = None,
    allow_plugin: Annotated[
        list[str] | None,
        typer.Option(
            help="A package or module whose algorithms the coordinator may name; may be repeated. Its code runs here "
            "and states what its algorithms cost. Without it only Shoal's own algorithms are accepted."
        ),
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to retry while the coordinator is unreachable.")] = 600.0,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Join a federation: train on your own data, send protected updates, keep your own ledger."""
    from shoal.federation.missing import require_flower

    require_flower()
    with uncollected_imports():
        from shoal.federation.flower.node import Endpoint, run_site
        from shoal.federation.key_files import authorities
        from shoal.federation.operations.logs import Log
        from shoal.federation.policy_file import policy_of, read_policy
        from shoal.federation.site import Owner, Site
        from shoal.federation.site_records import reader

    Log(log_level, log_format)
    _choice("--unit", unit, (None, "client", "record", "user"))
    _choice("--against", against, (None, "release", "server", "client-process"))
    address = _address(host, ca, insecure)
    site_name = name or (key.stem if key else socket.gethostname())
    options = {
        "--require-epsilon": require_epsilon,
        "--require-delta": require_delta,
        "--require-noise": require_noise,
        "--bound": bound,
        "--unit": unit,
        "--against": against,
        "--no-guarantee": no_guarantee or None,
    }
    if policy is not None:
        if twice := [option for option, value in options.items() if value is not None]:
            raise ConfigError(f"--policy and {twice[0]} contradict each other: write it into {policy}")
        accepted = read_policy(policy)
    else:
        accepted = policy_of(
            epsilon=require_epsilon,
            delta=1e-5 if require_delta is None else require_delta,
            noise=require_noise,
            unit=cast(Literal["client", "record", "user"] | None, unit),
            against=cast(Literal["release", "server", "client-process"] | None, against),
            bounds=bound or (),
            no_guarantee=no_guarantee,
        )
    certificate = _certificate(ca)
    accepted.refuse_coordinator([] if ca is None else authorities(ca))
    own = _key(key, folder, password_file)
    read, plugins = reader(data, label, part, _schema(schema)), tuple(allow_plugin or ())
    requirements, bounds = accepted.requirements, accepted.bounds
    site = Site(Owner(site_name, folder, read, requirements, model, own, _peers(peers), bounds, plugins), report)
    endpoint = Endpoint(address, own, certificate, registers=key is None, flower=flower_superlink)
    try:
        ended = run_site(site, endpoint, patience, report)
    finally:
        site.close()
    report(f"the run has ended: {_ENDS.get(ended, ended)}")


def report(words: str) -> None:
    """Log a message; what the site refuses is a warning."""
    level = logging.WARNING if words.startswith("refused:") else logging.INFO
    logging.getLogger("shoal").log(level, "%s", words)


def _address(host: str, ca: Path | None, insecure: bool) -> str:
    found = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:]+)(?::(\d{1,5}))?", host)
    if found is None:
        raise ConfigError(f"{host!r} is not HOST or HOST:PORT")
    name, port = found[1], found[2] or "8000"
    if ca is None and not loopback(name.strip("[]")):
        if not insecure:
            raise ConfigError(
                f"joining {name} without TLS would expose your updates; give --ca (the coordinator's ca.pem), or "
                f"--insecure"
            )
        report(INSECURE)
    return f"{name}:{port}"


def _key(path: Path | None, folder: Path, password_file: Path | None) -> EllipticCurvePrivateKey:
    """The site's key; without one, a new key that is kept in the site's folder."""
    from shoal.federation.key_files import read_site_key
    from shoal.federation.key_making import make_site

    if path is None:
        path = folder / "own.key"
        if not path.exists():
            make_site(folder, "own")
    return read_site_key(path, password_of(path, password_file))


def _peers(folder: Path | None) -> frozenset[bytes] | None:
    from shoal.federation.key_files import read_public

    if folder is None:
        return None
    if not (found := read_public(folder)):
        raise ConfigError(f"--peers {folder} has no public key (NAME.pub)")
    return frozenset(found.values())


def _schema(path: Path | None) -> Schema | None:
    """The schema in a TOML file."""
    if path is None:
        return None
    from shoal.config import configure

    if (found := configure(path).schema) is None:
        raise ConfigError(f"--schema {path} has no section [schema]; `shoal init` writes one")
    return found


def _certificate(ca: Path | None) -> bytes | None:
    """The authority's certificate, which must not have expired."""
    from shoal.federation.key_files import warn_of_end

    if ca is None:
        return None
    warn_of_end(ca, report, "ask the coordinator for its new ca.pem")
    return ca.read_bytes()


def _choice(option: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{option} must be one of {', '.join(str(c) for c in choices if c)}, got {value!r}")
