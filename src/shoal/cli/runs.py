"""`shoal runs list|show|delete`: which runs there are, what each came to, and how to be rid of one."""

from __future__ import annotations

import json
import sys
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.report.folder import Run

app = typer.Typer(help="Find, look at and delete runs.", no_args_is_help=True)

Runs = Annotated[Path, typer.Option(help="Where run folders are.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]


@app.command("list")
def list_command(
    algorithm: Annotated[str | None, typer.Option(help="Only runs of this method.")] = None,
    data: Annotated[str | None, typer.Option(help="Only runs on this data set.")] = None,
    since: Annotated[str | None, typer.Option(help="Only runs from this day on, as 2026-01-31.")] = None,
    until: Annotated[str | None, typer.Option(help="Only runs up to this day.")] = None,
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs by method, data set and date; the newest last."""
    from shoal.accounting.rounding import up
    from shoal.report.find import find

    found = find(runs, algorithm=algorithm, dataset=data, since=_day(since), until=_day(until))
    if as_json:
        json.dump({"runs": [summary(run) for run in found]}, sys.stdout)
        print()
        return
    if not found:
        typer.echo(f"no run in {runs} fits")
        return
    names = ("run", "method", "data", "rounds", "accuracy", "proven for a client", "state")
    table = Table(*(Column(name, overflow="fold") for name in names), box=None, pad_edge=False)
    for run in found:
        epsilon = run.epsilon("client", "release")
        row = [
            run.name,
            run.algorithm,
            run.dataset,
            f"{run.done}" if run.done == run.rounds else f"{run.done}/{run.rounds}",
            "" if run.accuracy is None else f"{run.accuracy:.4f}",
            "none" if epsilon is None else f"epsilon {up(epsilon)}{', simulated clients' if run.simulated else ''}",
            run.state,
        ]
        table.add_row(*map(escape, row))
    console = Console(emoji=False)
    # What is not a terminal has no edge to break lines at.
    (console if console.is_terminal else Console(emoji=False, width=200)).print(table)


@app.command("show")
def show_command(run: Annotated[str, typer.Argument(help="A run folder, or the beginning of its name.")],
                 runs: Runs = Path("runs"), as_json: Json = False) -> None:  # fmt: skip
    """Tell what is known of a run: how good it is, what is proven, its configuration, its ledger."""
    from shoal.report.find import one
    from shoal.report.folder import read_run

    found = read_run(one(run, runs))
    if as_json:
        ledger = found.ledger.to_json() if found.ledger else None
        json.dump(summary(found) | {"config": found.config, "ledger": ledger}, sys.stdout)
        print()
        return
    console = Console(emoji=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in _told(found):
        table.add_row(key, escape(value))
    console.print(table)
    if found.proven:
        from shoal.cli.run import privacy_table

        console.print()
        console.print(privacy_table(found.proven, found.published))
    for warning in (found.result or {}).get("warnings", []):
        console.print(f"warning: {warning}", markup=False, highlight=False)
    console.print()
    for key, value in found.flat_config().items():
        console.print(f"{escape(key)} = {escape(str(value))}", highlight=False)


@app.command("delete")
def delete_command(
    run: Annotated[list[str], typer.Argument(help="Run folders, or the beginnings of their names.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Delete runs for good, with their ledgers: the only record of what was spent on the data."""
    from shoal.report.find import delete, one

    paths = list(dict.fromkeys(one(name, runs) for name in run))
    for path in paths:
        typer.echo(str(path))
    if not yes:
        if not sys.stdin.isatty():
            raise RunError("deleting asks first, and nobody is there to answer; say --yes")
        said = "run, and its ledger" if len(paths) == 1 else f"{len(paths)} runs, and their ledgers"
        typer.confirm(f"Delete this {said}: what was spent on the data is forgotten?", abort=True)
    for path in paths:
        delete(path)


def summary(run: Run) -> dict[str, Any]:
    """A run in one JSON object."""
    return {
        "run": str(run.path),
        "algorithm": run.algorithm,
        "dataset": run.dataset,
        "started": run.started.isoformat(),
        "state": run.state,
        "rounds": run.done,
        "accuracy": run.accuracy,
        "baseline": run.plain_accuracy,
        "seconds": run.seconds,
        "simulated_clients": run.simulated,
        "proven": run.proven,
        "published": run.published,
    }


def _told(run: Run) -> list[tuple[str, str]]:
    ledger = "there is none: nothing can be proven of this run"
    if run.ledger is not None:
        ledger = f"whole, {run.ledger.lines} lines" if run.ledger.whole else f"broken: {run.ledger.because}"
    return [
        ("run", str(run.path)),
        ("state", run.state),
        ("method", f"{run.algorithm} on {run.dataset}"),
        *([("clients", "simulated: records were dealt to them")] if run.simulated else []),
        ("rounds", f"{run.done} of {run.rounds}"),
        ("accuracy", "not known" if run.accuracy is None else f"{run.accuracy:.4f} on held-out data"),
        ("started", run.started.strftime("%Y-%m-%d %H:%M:%S")),
        ("ledger", ledger),
        ("page", str(run.path / "report.html")),
    ]


def _day(text: str | None) -> date | None:
    if text is None:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise ConfigError(f"'{text}' is no day; write it as 2026-01-31") from None
