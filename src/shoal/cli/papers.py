"""`shoal papers list|show|run|prove|compare`: the papers' tables and figures, published and ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Shown

from shoal.cli.exit_codes import CELL_FAILED, STOPPED
from shoal.cli.options import Json, print_json, wide_console
from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.papers.comparing import Compared
    from shoal.papers.table import Cell, Line, Table

app = typer.Typer(help="Every table and figure of the papers: run it, and compare published figures with ours.")

WIDE = 220
"""Exit code where a cell failed."""
FORMATS = ("text", "markdown", "csv", "html")

Name = Annotated[str, typer.Argument(help="A table or figure, for example geyer-table1 (see `shoal papers list`).")]
Quick = Annotated[bool, typer.Option("--quick", help="A small version: minutes on two cores.")]


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """List all tables and figures, the data they need and roughly how long they take."""
    from shoal.papers import tables
    from shoal.papers.table import PAPERS

    if as_json:
        print_json({"tables": [_facts(table) for table in tables().values()]})
        return
    shown = Shown("name", "paper", "cells", "needs", "H200 minutes", "what", box=None, pad_edge=False)
    for table in tables().values():
        minutes = f"{table.minutes:g}" if table.cells else ""
        words = (table.name, table.paper, str(len(table.cells)), ", ".join(table.needs), minutes, table.title)
        shown.add_row(*map(escape, words))
    console = wide_console(WIDE)
    console.print(shown)
    console.print("\nMinutes are a rough guess for one seed of all cells.\n", highlight=False)
    for reference in PAPERS.values():
        console.print(str(reference), highlight=False, markup=False)


@app.command("show")
def show_command(name: Name, quick: Quick = False, as_json: Json = False) -> None:
    """Show one table: its published figures, its cells and their settings."""
    from shoal.papers import table as find
    from shoal.papers.render import figure

    table = find(name)
    if as_json:
        cells = [
            {"name": cell.name, "measures": cell.measures, "change": cell.change, "settings": _settings(cell, quick)}
            for cell in table.cells
        ]
        print_json(_facts(table) | {"published": table.published, "cells": cells})
        return
    console = wide_console(WIDE)
    _show_title(table, console)
    for measure, rows in table.published.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        shown = Shown(measure, *map(escape, columns), box=None, pad_edge=False)
        for row, values in rows.items():
            shown.add_row(*map(escape, (row, *(figure(values.get(column), measure) for column in columns))))
        console.print(shown)
        console.print()
    for cell in table.cells:
        console.print(f"{escape(cell.name)}: {escape(_settings(cell, quick))}", highlight=False)


@app.command("run")
def run_command(
    name: Name,
    rows: Annotated[
        str, typer.Option(metavar="REGEX", help="Only cells whose name matches; if none does, whose data set does.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds (0, 1, 2, ...); only new ones are run.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quick: Quick = False,
    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time, each in its own process.")] = 1,
    results: Annotated[Path | None, typer.Option(help="The results file; papers/NAME.jsonl by default.")] = None,
) -> None:
    """Measure the cells that have not been measured yet. It can be interrupted and run again."""
    from shoal.papers import table as find
    from shoal.papers.running import chosen, plan, play, read_lines, results_file

    table = find(name)
    path = results_file(name, quick, results)
    cells = chosen(table, rows)
    todo = plan(cells, seeds, quick, read_lines(path))
    console = wide_console(WIDE)
    console.print(
        f"{name}: {len(cells)} cells, {len(todo)} measurements to make, {escape(str(path))}", highlight=False
    )
    progress, update = _progress(console, len(todo))
    try:
        with progress:
            written = play(todo, table, path, device, quick, update, jobs)
    except KeyboardInterrupt:
        raise Stopped("stopped; what is done is kept: give the same command to continue") from None
    failed = [line for line in written if "failed" in line]
    for line in failed:
        console.print(
            f"failed  {escape(line['cell'])}, seed {line['seed']}: {escape(line['failed'])}", highlight=False
        )
    more = " --quick" if quick else ""
    more += f" --results {results}" if results else ""
    console.print(f"see it with: shoal papers compare {name}{escape(more)}", highlight=False)
    if failed:
        raise typer.Exit(CELL_FAILED)


@app.command("prove")
def prove_command(
    results: Annotated[list[Path], typer.Argument(help="Files, for example docs/results/geyer-table1.jsonl.")],
) -> None:
    """Prove what measured runs reveal again, by this version, and rewrite the files. Nothing is run."""
    from shoal.papers.running import prove_again, read_lines

    console = wide_console(WIDE)
    for path in results:
        if not path.is_file():
            raise RunError(f"there is no results file {path}; `shoal papers run` makes one")
        lines = len(read_lines(path))
        progress, update = _progress(console, lines)
        with progress:
            changed, unknown, foreign = prove_again(path, update)
        console.print(f"{escape(str(path))}: {changed} of {lines} lines have other claims now", highlight=False)
        if unknown:
            console.print(f"{unknown} lines do not hold the noise of their run: their claims stay", highlight=False)
        if foreign:
            words = "lines are of no cell of a table, or of one with other settings: their claims stay"
            console.print(f"{foreign} {words}", highlight=False)


def _progress(console: Console, total: int) -> tuple[Progress, Callable[[str, int, float], None]]:
    """A bar of so many cells, and what moves it."""
    progress = Progress(
        TextColumn("{task.fields[done]}/{task.total}"),
        BarColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left  {task.fields[cell]}", markup=False),
        console=console,
    )
    task = progress.add_task("", total=total, done=0, cell="")

    def update(cell: str, done: int, share: float) -> None:
        progress.update(task, completed=share, done=done, cell=cell)

    return progress, update


@app.command("compare")
def compare_command(
    name: Annotated[str, typer.Argument(help="A table or figure, for example geyer-table1.")] = "",
    form: Annotated[str, typer.Option("--format", help="text, markdown, csv or html.")] = "text",
    results: Annotated[
        list[Path] | None,
        typer.Option(help="Results files; may be repeated. Default: docs/results/*.jsonl and papers/NAME.jsonl."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compare the small version.")] = False,
    to: Annotated[Path | None, typer.Option(help="A file to write to; standard output by default.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All tables; with --write.")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Regenerate the tables of the pages there (docs/results).")
    ] = None,
) -> None:
    """Compare published figures with ours: the difference, what is proven, and a verdict on each claim."""
    if every != (write is not None) or every == bool(name):
        raise ConfigError("give the name of a table, or --all with --write FOLDER")
    if write is not None:
        _write_pages(write, results)
        return
    if form not in FORMATS:
        raise ConfigError(f"--format must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got '{form}'")
    _compare_one(name, form, results or [], quick, to)


def _compare_one(name: str, form: str, results: list[Path], quick: bool, to: Path | None) -> None:
    from shoal.papers import table as find
    from shoal.papers.comparing import compare
    from shoal.papers.running import known_files, read_lines

    table = find(name)
    for path in results:
        if not path.is_file():
            raise RunError(f"there is no results file {path}; `shoal papers run {name}` makes one")
    lines = [line for path in results or known_files(name, quick) for line in read_lines(path)]
    found = compare(table, lines, quick)
    if form == "text" and to is None:
        _show(table, found)
        if _nothing_measured(table, lines, quick):
            more = "" if quick or results else " (or run this in the repository's root, whose docs/results it reads)"
            hint = f"nothing measured yet: shoal papers run {name}{' --quick' * quick}{more}"
            wide_console(WIDE).print(hint, highlight=False)
    else:
        _output(_rendered(table, found, lines, form), to)


def _nothing_measured(table: Table, lines: list[Line], quick: bool) -> bool:
    from shoal.papers.comparing import measured

    runs = [found for cell, found in measured(table, lines, quick) if not cell.work.instant]
    return bool(runs) and not any(runs)


def _rendered(table: Table, found: list[Compared], lines: list[Line], form: str) -> str:
    from shoal.papers.render import to_csv, to_html, to_markdown

    if form == "csv":
        return to_csv(found)
    return to_html(table, found, lines) if form == "html" else to_markdown(table, found)


def _output(text: str, to: Path | None) -> None:
    if to is None:
        print(text, end="")
        return
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{to} cannot be written: {error}") from None
    typer.echo(str(to))


def _write_pages(folder: Path, results: list[Path] | None) -> None:
    from shoal.papers.pages import write
    from shoal.papers.running import read_lines

    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}; the pages are in docs/results of the repository")
    lines = [line for path in results or sorted(folder.glob("*.jsonl")) for line in read_lines(path)]
    for path in write(folder, lines):
        typer.echo(str(path))


def _show_title(table: Table, console: Console) -> None:
    console.print(f"{table.name}, {table.paper}: {escape(table.title)}", highlight=False)
    if table.about:
        console.print(f"published: {escape(table.about)}", highlight=False)


def _show(table: Table, found: list[Compared]) -> None:
    from shoal.papers.render import COLOURS, HEADINGS, QUICK, cells, summary

    console = wide_console(WIDE)
    _show_title(table, console)
    if any(row.quick for row in found):
        console.print(QUICK, style="bold")
    shown = Shown(*HEADINGS, box=None, pad_edge=False)
    for row in found:
        *words, claim = map(escape, cells(row))
        colour = COLOURS.get(row.light)
        shown.add_row(*words, f"[{colour}]{claim}[/{colour}]" if colour else claim)
    console.print(shown)
    console.print(summary(found), highlight=False)


class Stopped(RunError):
    """The user interrupted; finished cells are kept."""

    exit_code = STOPPED


def _facts(table: Table) -> dict[str, Any]:
    from shoal.bibliography import cited

    names = ("name", "paper", "title", "needs", "minutes", "about")
    references = list(map(str, cited(table.paper)))
    return {name: getattr(table, name) for name in names} | {"references": references, "cells": len(table.cells)}


def _settings(cell: Cell, quick: bool) -> str:
    """How the cell is measured, in one line."""
    from shoal.papers.work import Account, Leak, Run

    if isinstance(cell.work, Run):
        return " ".join(f"{key}={value}" for key, value in cell.work.settings(quick).items())
    if isinstance(cell.work, Account):
        return f"recipe {cell.work.key(quick)}"
    assert isinstance(cell.work, Leak)
    return f"attack {cell.work.attack} type {cell.work.kind} on {cell.work.algorithm} {' '.join(cell.work.changes)}"
