"""`shoal serve`: coordinate a federation whose data stay at its sites."""

from __future__ import annotations

import ipaddress
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shoal.cli.run import Watch, show
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.deploy.superlink import SuperLink

INSECURE = (
    "--insecure: without TLS everybody on the way can read and change models and updates, and without keys anybody "
    "who reaches the port can join"
)


def command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file, as for `shoal run`.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="Change one key of the configuration.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = 8000,
    keys: Annotated[
        Path | None, typer.Option(help="The folder that `shoal keys coordinator` made: TLS, and who may join.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no keys, on other addresses than loopback too.")
    ] = False,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    no_guarantee: Annotated[
        bool, typer.Option("--no-guarantee", help="Run a method that claims privacy but proves none.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output; progress on standard error.")
    ] = False,
) -> None:
    """Coordinate a federation: sites `shoal join` it, train on their own data, and send only what may leave them."""
    from shoal.api import Interrupted
    from shoal.deploy.missing import require_flower

    require_flower()
    from shoal.deploy.serve import serve

    console = Console(stderr=as_json)
    tell = lambda words: console.print(words, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    link, names = opened(host, port, keys, insecure, tell)
    watch = Watch(console)

    def start(settings: Config, coordinator: Any, run: Path) -> None:
        if settings.federation.seeded:
            tell("federation.seeded: whoever knows the seed knows all noise; for tests only")
        watch.start(settings, coordinator, run)

    try:
        result = serve(
            link,
            config,
            names=names,
            tell=tell,
            overrides=change or [],
            resume=resume,
            runs=runs,
            no_guarantee=no_guarantee,
            on_start=start,
            on_round=watch.round,
        )
    except Interrupted as stopped:
        again = ["shoal", "serve", "--resume", str(stopped.run), "--host", host, "--port", str(link.port)]
        again += ["--keys", str(keys)] if keys else ["--insecure"] if insecure else []
        tell(f"stopped after round {stopped.done}; go on with: {shlex.join(again)}")
        raise typer.Exit(stopped.exit_code) from None
    finally:
        watch.end()
        link.close()
    if as_json:
        json.dump(result.to_json(), sys.stdout)
        print()
    else:
        show(result, console)


def opened(host: str, port: int, keys: Path | None, insecure: bool, tell: Any) -> tuple[SuperLink, dict[str, str]]:
    """The link, and what sites are called by the hash of their keys; refuses to be open to everybody by mistake."""
    from shoal.deploy.keys import read_sites
    from shoal.deploy.superlink import SuperLink, Tls, identity

    if keys is None:
        if insecure:
            tell(INSECURE)
        elif not loopback(host):
            raise ConfigError(
                f"listening on {host} without TLS would show everybody models and updates; make certificates with "
                f"`shoal keys coordinator`, give --keys, or say --insecure"
            )
        link, sites = SuperLink(host, port, None, []), {}
    else:
        sites = read_sites(keys)
        if not sites:
            raise ConfigError(f"there is no public key in {keys / 'sites'}: no site could join")
        link = SuperLink(host, port, Tls(keys / "server.pem", keys / "server.key"), list(sites.values()))
    tell(f"listening on {host}:{link.port}, {f'TLS, {len(sites)} sites may join' if keys else 'without TLS'}")
    return link, {identity(key): name for name, key in sites.items()}


def loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
