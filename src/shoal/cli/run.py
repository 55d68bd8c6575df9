"""`shoal run`: train a model over clients; report its accuracy and what it reveals."""

from __future__ import annotations

import contextlib
import signal
import types
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal.cli.options import Change, JsonWithProgress, NoGuarantee, print_json

if TYPE_CHECKING:
    from shoal.api import Result
    from shoal.config import Config
    from shoal.training.trainer import Trainer


def command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; the default experiment if omitted.")] = None,
    change: Change = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    no_guarantee: NoGuarantee = False,
    as_json: JsonWithProgress = False,
) -> None:
    """Train a model over clients; report its accuracy and what it reveals."""
    import shoal

    console = Console(stderr=as_json)
    watch = Watch(console)
    try:
        result = shoal.run(
            config,
            overrides=change or [],
            resume=resume,
            runs=runs,
            no_guarantee=no_guarantee,
            device=device,
            on_start=watch.start,
            on_round=watch.round,
        )
    finally:
        watch.end()
    if as_json:
        print_json(result.to_json())
    else:
        show(result, console)


class Watch:
    """A progress bar, and a handler for Ctrl-C, which stops the run at its next checkpoint."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("[bold]{task.fields[name]}"),
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("accuracy {task.fields[accuracy]}{task.fields[spent]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
        )
        self._console = console
        self._before: Any = None
        self._task: Any = None
        self._budget: Any = None

    def start(self, config: Config, trainer: Trainer[Any], run: Path) -> None:
        """Print what is run, and start the bar."""
        self._console.print(f"{config.algorithm.name} on {config.data.name}: {_clients(trainer)}, {run}")
        for note in trainer.evaluation.dataset.notes:
            self._console.print(f"note: {note}", highlight=False)
        self._budget = config.budget
        self._task = self.progress.add_task(
            "", name=config.algorithm.name, accuracy="-", spent="", total=trainer.rounds, completed=trainer.done
        )
        self.progress.start()

        def interrupt(_signal: int, _frame: types.FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            trainer.stop()
            self._console.print("stopping at the next checkpoint (Ctrl-C again: at once)")

        with contextlib.suppress(ValueError):  # outside the main thread there is no Ctrl-C to handle
            self._before = signal.signal(signal.SIGINT, interrupt)

    def round(self, line: dict[str, Any]) -> None:
        """Show a round's accuracy and epsilon."""
        from shoal.report.series import figure

        fields: dict[str, Any] = {"accuracy": f"{line['accuracy']:.3f}"} if "accuracy" in line else {}
        for claim in line["proven"]:
            if (claim["unit"], claim["observer"]) == (self._budget.unit, self._budget.observer):
                limit = f"/{self._budget.epsilon:g}" if self._budget.epsilon else ""
                fields["spent"] = f"  epsilon {figure(claim['epsilon'])}{limit}"
        self.progress.update(self._task, completed=line["round"], **fields)

    def end(self) -> None:
        """Stop the bar and restore the signal handler."""
        if self._task is not None:
            self.progress.stop()
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def _clients(trainer: Trainer[Any]) -> str:
    count = trainer.setting.clients
    kind = "simulated clients" if trainer.setting.simulated else "clients" if count != 1 else "client"
    return f"{count} {kind}"


def show(result: Result, console: Console) -> None:
    """Print the result: accuracy, claims, warnings."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("accuracy", f"{result.accuracy:.4f} on held-out data, after {result.rounds} rounds")
    if result.baseline is not None:
        table.add_row("", f"{result.baseline:.4f} without clipping and noise (not private)")
    last = result.metrics[-1] if result.metrics else {}
    if last.get("bad_updates", 0) and last["bad_updates"] >= last.get("clients", 0):
        table.add_row("diverged", "no update of the last round was finite, and each counted as zero: lower local.lr")
    if result.stopped == "budget":
        table.add_row("stopped", "the privacy budget is spent")
    table.add_row("time", f"{result.seconds:.1f} s")
    table.add_row("random", _RANDOM[result.random])
    table.add_row("run", str(result.run))
    table.add_row("page", str(result.run / "report.html"))
    console.print(table)
    console.print()
    show_claims(result.proven, result.published, console)
    for warning in result.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)


def show_claims(proven: list[dict[str, Any]], published: list[dict[str, Any]], console: Console) -> None:
    """Print what is proven and what the paper claims; assumptions that all bounds share are printed once, below."""
    from shoal.report.claim_rows import proven_rows, published_rows, shared_notes

    rows, shared = shared_notes(proven_rows(proven))
    table = Table("unit", "observer", "proven", "", box=None, pad_edge=False)
    for row in rows:
        words = (row["unit"], row["observer"], _figure(row), row["note"])
        table.add_row(*map(escape, words), style=_STYLES[row["tone"]])
    for row in published_rows(published):
        words = (row["unit"], "published, not proven", _figure(row), row["recipe"])
        table.add_row(*map(escape, words), style="italic")
    console.print(table)
    if shared:
        console.print(f"all bounds: {shared}", highlight=False, markup=False)
    if not any(row["epsilon"] for row in rows):
        console.print("nothing is proven: the model is not private", highlight=False)


def _figure(row: dict[str, str]) -> str:
    if not row["epsilon"]:
        return "none"
    if row.get("tone") == "void":
        return f"none in practice ({row['epsilon']})"
    return f"epsilon {row['epsilon']}, delta {row['delta']}"


_STYLES = {"yes": "bold", "weak": "", "void": "dim", "no": "dim"}
_RANDOM = {
    "research": "research: reproducible from the seed",
    "secure": "secure: from the system's entropy, not reproducible",
}
