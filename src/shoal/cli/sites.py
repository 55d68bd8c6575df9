"""`shoal sites`: the sites of a running federation, at its coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Json, print_json, wide_console
from shoal.errors import ConfigError

app = typer.Typer(
    help="List, drop and invite sites while `shoal serve` is running, on the same machine and as the same user.",
    no_args_is_help=True,
)
Run = Annotated[Path | None, typer.Option("--run", help="The run's folder; by default the one running in --runs.")]
Runs = Annotated[Path, typer.Option(help="Where run folders are made.")]


@app.command("list")
def list_sites(run: Run = None, runs: Runs = Path("runs"), as_json: Json = False) -> None:
    """List the sites, and what each is doing."""
    from rich.markup import escape
    from rich.table import Table

    from shoal.federation.operations.control import ask

    found = ask(_running(run, runs), command="list")
    if as_json:
        print_json(found)
        return
    console = wide_console()
    about = f"{found['run']}: {found['rounds_done']} of {found['rounds']} rounds done; {found['doing']}"
    console.print(about, highlight=False, markup=False)
    table = Table("site", "key", "state", "bad answers", "last problem", box=None, pad_edge=False)
    for site in found["sites"]:
        words = (site["name"], site["key"], site["state"], str(site["strikes"]), site["problem"])
        table.add_row(*(escape(_one_line(each)) for each in words))
    console.print(table)


@app.command("drop")
def drop(
    site: Annotated[str, typer.Argument(help="The site's name, or its key as `shoal sites list` shows it.")],
    end: Annotated[
        bool, typer.Option("--end", help="If too few sites are left for a round, end the run with its model.")
    ] = False,
    run: Run = None,
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Drop a site for good: it is no longer asked or waited for, and its place is free."""
    _ask(_running(run, runs), as_json, command="drop", site=site, end=end)


@app.command("invite")
def invite(
    key: Annotated[Path, typer.Argument(help="The site's public key, NAME.pub, made by `shoal keys site`.")],
    run: Run = None,
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Let another site join, without a restart; its key is kept with the coordinator's keys."""
    try:
        text = key.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key {key} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    _ask(_running(run, runs), as_json, command="invite", name=key.stem, key=text)


def _ask(run: Path, as_json: bool, **request: object) -> None:
    from shoal.federation.operations.control import ask

    answer = ask(run, **request)
    if as_json:
        print_json(answer)
    else:
        print(_one_line(str(answer["message"])))


def _running(run: Path | None, runs: Path) -> Path:
    from shoal.federation.operations.control import running

    if run is not None:
        return run
    found = running(runs)
    if not found:
        raise ConfigError(f"no coordinator is running in {runs}: start `shoal serve`, or name its run with --run")
    if len(found) > 1:
        raise ConfigError(f"several coordinators are running in {runs}: choose one with --run {found[0]}")
    return found[0]


def _one_line(text: str) -> str:
    from shoal.federation.text import one_line

    return one_line(text)
