"""`shoal report RUN ...`: the page of one run, or of several compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import ConfigError, RunError

Runs = Annotated[Path, typer.Option(help="Where run folders are looked for by name.")]


def command(
    run: Annotated[
        list[str] | None,
        typer.Argument(help="Run folders, or the beginnings of their names; sweeps. The newest run if left out."),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Where to write the page; for one run, in its folder.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    unit: Annotated[str, typer.Option(help="A comparison's epsilon is for a client or an example ...")] = "client",
    observer: Annotated[str, typer.Option(help="... against the release, the server, or inside.")] = "release",
    runs: Runs = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Make the page of a run again from its folder, or compare several on one page."""
    from shoal.accounting.claims import check_observer, check_unit
    from shoal.report.compare import MOST_LINES, write_comparison
    from shoal.report.find import expand
    from shoal.report.folder import read_run
    from shoal.report.page import run_page, write_page, write_report

    check_unit(unit)
    check_observer(observer)
    names = run or [newest(runs)]
    folders = [folder for name in names for folder in expand(name, runs)]
    if len(folders) == 1 and len(names) == 1:
        page = write_page(to, run_page(read_run(folders[0]))) if to else write_report(folders[0])
    else:
        few = len(folders) <= MOST_LINES
        compared = [read_run(path, every_round=few) for path in folders]
        page = write_comparison(to or Path("comparison.html"), compared, unit, observer)
    if as_json:
        json.dump({"report": str(page), "runs": [str(path) for path in folders]}, sys.stdout)
        print()
    else:
        typer.echo(str(page))
    if show:
        open_page(page)


def newest(runs: Path) -> str:
    from shoal.report.find import find

    found = find(runs)
    if not found:
        raise RunError(f"there is no run in {runs}; start one with `shoal run`, or say where they are: --runs")
    return str(found[-1].path)


def open_page(page: Path) -> None:
    """Show a page in the user's browser."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        raise ConfigError(f"no browser could be started here; open {page} in one yourself")
