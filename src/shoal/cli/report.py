"""`shoal report RUN ...`: the page of one run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Json, open_page, print_json
from shoal.errors import RunError

Runs = Annotated[Path, typer.Option(help="The folder with run folders.")]


def command(
    run: Annotated[
        list[str] | None,
        typer.Argument(help="Run folders, or the beginnings of their names; sweeps. The newest run if omitted."),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Where to write the page; by default a run's own folder.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    unit: Annotated[
        str | None,
        typer.Option(
            help="The unit of a comparison's epsilon: client, user or record. The largest that has one if omitted."
        ),
    ] = None,
    observer: Annotated[str, typer.Option(help="Its observer: release, server or client-process.")] = "release",
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Make the page of a run from its folder, or compare several on one page."""
    from shoal.accounting.claims import check_observer, check_unit
    from shoal.report.find import expand

    if unit is not None:
        check_unit(unit)
    check_observer(observer)
    names = run or [newest(runs)]
    folders = [folder for name in names for folder in expand(name, runs)]
    one = len(folders) == len(names) == 1
    page = _page(folders[0], to) if one else _comparison(folders, to, unit, observer)
    if as_json:
        print_json({"report": str(page), "runs": [str(path) for path in folders]})
    else:
        typer.echo(str(page))
    if show:
        open_page(page)


def _page(folder: Path, to: Path | None) -> Path:
    from shoal.report.run_page import run_page, write_page, write_report
    from shoal.report.run_reader import read_run

    return write_page(to, run_page(read_run(folder))) if to else write_report(folder)


def _comparison(folders: list[Path], to: Path | None, unit: str | None, observer: str) -> Path:
    from shoal.report.compare import MOST_LINES, write_comparison
    from shoal.report.run_reader import read_run

    runs = [read_run(path, every_round=len(folders) <= MOST_LINES) for path in folders]
    return write_comparison(to or Path("comparison.html"), runs, unit, observer)


def newest(runs: Path) -> str:
    """The newest run.

    Raises:
        RunError: Where there is none.
    """
    from shoal.report.find import find

    found = find(runs)
    if not found:
        raise RunError(f"there is no run in {runs}; start one with `shoal run`, or give their folder with --runs")
    return str(found[-1].path)
