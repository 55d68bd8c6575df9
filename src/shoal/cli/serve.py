"""`shoal serve`: coordinate a federation whose data stay at its sites."""

from __future__ import annotations

import ipaddress
import logging
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shoal.cli.options import (
    Change,
    JsonWithProgress,
    LogFormat,
    LogLevel,
    NoGuarantee,
    PasswordFile,
    password_of,
    print_json,
    uncollected_imports,
)
from shoal.cli.round_log import RoundLog
from shoal.cli.run import Watch, show
from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.federation.flower.superlink import SuperLink

INSECURE = (
    "--insecure: without TLS anyone on the network path can read and change models and updates, and without keys "
    "anyone who reaches the port can join"
)


def command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file, as for `shoal run`.")] = None,
    change: Change = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 picks a free one.")] = 8000,
    keys: Annotated[
        Path | None, typer.Option(help="The folder of `shoal keys coordinator`: TLS, and the sites that may join.")
    ] = None,
    password_file: PasswordFile = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys, even beyond loopback.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve /health, /metrics (Prometheus) and a live page here; on loopback where no host is given.",
        ),
    ] = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    no_guarantee: NoGuarantee = False,
    as_json: JsonWithProgress = False,
) -> None:
    """Coordinate a federation: sites `shoal join` it, train on their own data and send protected updates."""
    from shoal.federation.missing import require_flower
    from shoal.result import Interrupted

    require_flower()
    with uncollected_imports():
        from shoal.federation.federated_run import serve
        from shoal.federation.operations.control import ControlSocket
        from shoal.federation.operations.logs import Log
        from shoal.federation.operations.monitor import Monitor
        from shoal.federation.operations.status_server import OperationsServer

    log = Log(log_level, log_format)
    watch = Watch(Console(stderr=True)) if log.on_terminal else RoundLog(log)
    monitor = Monitor(log.write, keys)
    with ExitStack() as open_things:
        link, names = open_link(host, port, keys, insecure, log, password_file)
        open_things.callback(link.close)
        link.on_event = monitor.on_event
        if metrics is not None:
            server = OperationsServer(metrics, monitor)
            open_things.callback(server.close)
            report_metrics(server.host, server.port, log)

        def start(settings: Config, coordinator: Any, run: Path) -> None:
            if settings.federation.seeded:
                log("federation.seeded: the seed determines all noise; for tests only")
            try:
                open_things.callback(ControlSocket(run, monitor).close)
            except RunError as error:  # not every file system has sockets
                log.write(logging.WARNING, f"{error}; `shoal sites` will not work for this run")
            watch.start(settings, coordinator, run)

        open_things.callback(watch.end)
        open_things.enter_context(watching_keys(keys, link, names, log))
        try:
            result = serve(
                link,
                config,
                names=names,
                overrides=change or [],
                resume=resume,
                runs=runs,
                no_guarantee=no_guarantee,
                on_start=start,
                on_round=watch.round,
                monitor=monitor,
            )
        except Interrupted as stopped:
            again = ["shoal", "serve", "--resume", str(stopped.run), "--host", host, "--port", str(link.port)]
            again += ["--keys", str(keys)] if keys else ["--insecure"] if insecure else []
            again += ["--password-file", str(password_file)] if password_file else []
            again += ["--metrics", metrics] if metrics else []
            log(f"stopped after round {stopped.done}; resume with: {shlex.join(again)}")
            raise typer.Exit(stopped.exit_code) from None
    if as_json:
        print_json(result.to_json())
    else:
        show(result, Console())


def report_metrics(host: str, port: int, report: Callable[[str], None]) -> None:
    """Report where metrics are, and who can read them."""
    shown = f"[{host}]" if ":" in host else host
    report(f"metrics and live page on http://{shown}:{port}")
    if not loopback(host):
        report("--metrics: anyone who reaches this address can see which sites take part; it has no password")


def open_link(
    host: str,
    port: int,
    keys: Path | None,
    insecure: bool,
    report: Callable[[str], None],
    password_file: Path | None = None,
) -> tuple[SuperLink, dict[str, str]]:
    """Listen for sites.

    Args:
        host: The address.
        port: The port; 0 for a free one.
        keys: The folder of `shoal keys coordinator`; None for no TLS.
        insecure: Whether no TLS is allowed beyond loopback.
        report: Called with messages.
        password_file: The password of the coordinator's private key, where it has one.

    Returns:
        The link, and the sites' names by the hashes of their keys.

    Raises:
        ConfigError: Without TLS beyond loopback, unless `insecure`; where no site could join; or where a certificate
            has expired.
    """
    with uncollected_imports():
        from shoal.federation.flower.superlink import SuperLink, Tls, identity
    from shoal.federation.key_files import CA, SERVER, SERVER_KEY, read_site_key, read_sites, warn_of_end

    if keys is None:
        if insecure:
            report(INSECURE)
        elif not loopback(host):
            raise ConfigError(
                f"listening on {host} without TLS would expose models and updates; make certificates with "
                f"`shoal keys coordinator` and give --keys, or give --insecure"
            )
        sites: dict[str, Any] = {}
        link = SuperLink(host, port, None, [])
    else:
        sites = read_sites(keys)
        if not sites:
            raise ConfigError(f"no site could join: there is no public key (NAME.pub) in {keys / 'sites'}")
        for name in (SERVER, CA):
            warn_of_end(keys / name, report)
        password = password_of(keys / SERVER_KEY, password_file)
        read_site_key(keys / SERVER_KEY, password)
        tls = Tls(keys / SERVER, keys / SERVER_KEY, password.decode() if password else None)
        link = SuperLink(host, port, tls, list(sites.values()))
    report(f"listening on {host}:{link.port}, {f'TLS, {len(sites)} sites may join' if keys else 'without TLS'}")
    return link, {identity(key): name for name, key in sites.items()}


def watching_keys(
    keys: Path | None, link: SuperLink, names: dict[str, str], report: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Follow the folder of keys while the federation runs."""
    from shoal.federation.flower.superlink import identity
    from shoal.federation.key_watch import KeyWatch, watching

    return nullcontext() if keys is None else watching(KeyWatch(keys, link, names, identity, report))


def loopback(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
