"""`shoal runs list|show|delete`: list runs, show one, delete some."""

from __future__ import annotations

import sys
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from shoal.cli.options import Json, bound, print_json, wide_console
from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.report.run_reader import Run

app = typer.Typer(help="List, show and delete runs.", no_args_is_help=True)

Runs = Annotated[Path, typer.Option(help="The folder with run folders.")]


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
    from shoal.report.find import find

    found = find(runs, algorithm=algorithm, dataset=data, since=_day(since), until=_day(until))
    if as_json:
        print_json({"runs": [summary(run) for run in found]})
    elif not found:
        typer.echo(f"no run in {runs} matches")
    else:
        names = ("run", "method", "data", "clients", "rounds", "figure", "proven", "state")
        table = Table(*(Column(name, overflow="fold") for name in names), box=None, pad_edge=False)
        for run in found:
            table.add_row(*map(escape, _row(run)))
        wide_console().print(table)


def _row(run: Run) -> list[str]:
    return [
        run.name,
        run.algorithm,
        run.dataset,
        "simulated" if run.simulated else "real",
        f"{run.done}" if run.done == run.rounds else f"{run.done}/{run.rounds}",
        _score(run),
        _proven(run),
        run.state,
    ]


def _proven(run: Run) -> str:
    """The headline's claim in a column: `epsilon 4 (record)`."""
    from shoal.report.claim_rows import main_claim

    claim = main_claim(run)
    return "none" if claim is None else f"{bound(claim['epsilon'])} ({claim['unit']})"


def _score(run: Run) -> str:
    """The headline figure in a column: `accuracy 0.869 (constant answer: 0.871)`."""
    from shoal.report.scores import short

    scores = run.scores
    if scores.score is None:
        return ""
    constant = "" if scores.learnt or scores.trivial_score is None else f" (constant: {short(scores.trivial_score)})"
    return f"{scores.name} {short(scores.score)}{constant}"


@app.command("show")
def show_command(run: Annotated[str, typer.Argument(help="A run folder, or the beginning of its name.")],
                 runs: Runs = Path("runs"), as_json: Json = False) -> None:  # fmt: skip
    """Show a run: figures, claims, configuration, ledger."""
    from shoal.report.find import one
    from shoal.report.run_reader import read_run

    found = read_run(one(run, runs))
    if as_json:
        ledger = found.ledger.to_json() if found.ledger else None
        print_json(summary(found) | {"config": found.config, "ledger": ledger, "model": _model(found)})
        return
    console = Console(emoji=False)
    table = Table("", Column(overflow="fold"), box=None, show_header=False, pad_edge=False)
    for key, value in _facts(found):
        table.add_row(key, escape(value))
    console.print(table)
    if found.proven:
        from shoal.cli.run import show_claims

        console.print()
        show_claims(found.proven, found.published, console)
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
    """Delete runs with their ledgers, the only record of the privacy spent on the data."""
    from shoal.report.find import delete, one

    paths = list(dict.fromkeys(one(name, runs) for name in run))
    for path in paths:
        typer.echo(str(path))
    if not yes:
        if not sys.stdin.isatty():
            raise RunError("delete asks for confirmation, and there is no terminal; give --yes")
        what = "this run and its ledger" if len(paths) == 1 else f"these {len(paths)} runs and their ledgers"
        typer.confirm(f"Delete {what}, the only record of the privacy spent on the data?", abort=True)
    for path in paths:
        delete(path)


def summary(run: Run) -> dict[str, Any]:
    """A run as one JSON object."""
    scores = run.scores
    return {
        "run": str(run.path),
        "algorithm": run.algorithm,
        "dataset": run.dataset,
        "started": run.started.isoformat(),
        "state": run.state,
        "rounds": run.done,
        "accuracy": scores.figures.get("accuracy"),
        "headline": scores.headline,
        "score": scores.score,
        "figures": dict(scores.figures),
        "trivial": dict(scores.trivial),
        "learnt": scores.learnt,
        "baseline": scores.plain.get(scores.headline),
        "baseline_figures": dict(scores.plain),
        "baseline_diverged": scores.plain_diverged,
        "seconds": run.seconds,
        "simulated_clients": run.simulated,
        "proven": run.proven,
        "published": run.published,
    }


def _facts(run: Run) -> list[tuple[str, str]]:
    from shoal.cli.run import figure_rows

    ledger = "none, so nothing is proven"
    if run.ledger is not None:
        ledger = f"intact, {run.ledger.lines} lines" if run.ledger.whole else f"broken: {run.ledger.because}"
    return [
        ("run", str(run.path)),
        ("state", run.state if run.state != "stopped" else f"stopped; to continue: shoal run --resume {run.path}"),
        ("method", f"{run.algorithm} on {run.dataset}"),
        *([("clients", "simulated: one data set was split over them")] if run.simulated else []),
        ("rounds", f"{run.done} of {run.rounds}"),
        *figure_rows(run.scores),
        ("started", run.started.strftime("%Y-%m-%d %H:%M:%S")),
        ("ledger", ledger),
        ("page", str(run.path / "report.html")),
        ("model", _model_words(run)),
    ]


def _model(run: Run) -> dict[str, Any] | None:
    """What the saved model is; None where the run has none."""
    from shoal.models.bundle import DESCRIPTION, WEIGHTS, read_bundle

    try:
        bundle = read_bundle(run.path)
    except RunError:
        return None
    files = [str(run.path / name) for name in (WEIGHTS, DESCRIPTION) if (run.path / name).is_file()]
    about = {"model": bundle.model, "task": bundle.task.get("kind"), "input_shape": bundle.input_shape}
    about["passed_in_python"] = bundle.passed_in_python
    return about | {"note": bundle.note, "release": bundle.release, "versions": bundle.versions, "files": files}


def _model_words(run: Run) -> str:
    from shoal.models.bundle import PASS_AGAIN

    found = _model(run)
    if found is None:
        return "none that can be read; a run saves it when it ends"
    shapes = found["input_shape"] if isinstance(found["input_shape"], dict) else {"": found["input_shape"]}
    shape = ", ".join(f"{name} {' x '.join(map(str, sizes)) or 1}".strip() for name, sizes in shapes.items())
    use = f"; {PASS_AGAIN}" if found["passed_in_python"] else f"; use it: shoal predict {run.name} FILE"
    return f"{found['model']} for {found['task']}, records of {shape}: {', '.join(found['files'])}{use}"


def _day(text: str | None) -> date | None:
    if text is None:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise ConfigError(f"'{text}' is not a date; write it as 2026-01-31") from None
