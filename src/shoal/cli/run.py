"""`shoal run`: train a model over clients, watch it, and see at the end what it reveals."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from shoal.api import Result
    from shoal.config import Config
    from shoal.engine.trainer import Trainer


def command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; the default experiment if left out.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="Change one key of the configuration.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by itself the GPU where there is one.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    no_guarantee: Annotated[
        bool, typer.Option("--no-guarantee", help="Run a method that claims privacy but proves none.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output; progress on standard error.")
    ] = False,
) -> None:
    """Train a model over clients; see how good it is and what it reveals."""
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
        json.dump(result.to_json(), sys.stdout)
        print()
    else:
        show(result, console)


class Watch:
    """The progress bar; and Ctrl-C, which ends the run at its next checkpoint."""

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
        self._console.print(f"{config.algorithm.name} on {config.data.name}: {_clients(trainer)}, {run}")
        for note in trainer.evaluation.dataset.notes:
            self._console.print(f"note: {note}", highlight=False)
        self._budget = config.budget
        self._task = self.progress.add_task(
            "",
            name=config.algorithm.name,
            accuracy="-",
            spent="",
            total=trainer.rounds,
            completed=trainer.done,
        )
        self.progress.start()

        def interrupt(_signal: int, _frame: types.FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            trainer.stop()
            self._console.print("stopping at the next checkpoint (Ctrl-C again: at once)")

        with contextlib.suppress(ValueError):  # not in the main thread: then there is no Ctrl-C to catch
            self._before = signal.signal(signal.SIGINT, interrupt)

    def round(self, line: dict[str, Any]) -> None:
        from shoal.report.series import figure

        fields = {"accuracy": f"{line['accuracy']:.3f}"} if "accuracy" in line else {}
        for claim in line["proven"]:
            if (claim["unit"], claim["observer"]) == (self._budget.unit, self._budget.observer):
                limit = f"/{self._budget.epsilon:g}" if self._budget.epsilon else ""
                fields["spent"] = f"  epsilon {figure(claim['epsilon'])}{limit}"
        self.progress.update(self._task, completed=line["round"], **fields)

    def end(self) -> None:
        if self._task is not None:
            self.progress.stop()
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def _clients(trainer: Trainer[Any]) -> str:
    count = trainer.setting.clients
    kind = "simulated clients" if trainer.setting.simulated else "clients" if count != 1 else "client"
    return f"{count} {kind}"


def show(result: Result, console: Console) -> None:
    """The closing table: how good, and what is proven against whom."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("accuracy", f"{result.accuracy:.4f} on held-out data, after {result.rounds} rounds")
    if result.baseline is not None:
        table.add_row("", f"{result.baseline:.4f} with neither clip nor noise (a figure that is not private)")
    last = result.metrics[-1] if result.metrics else {}
    if last.get("bad_updates", 0) and last["bad_updates"] >= last.get("clients", 0):
        table.add_row("diverged", "in the last round no update was finite, and each counted as zero: lower local.lr")
    if result.stopped == "budget":
        table.add_row("stopped", "the privacy budget does not pay for another round")
    table.add_row("time", f"{result.seconds:.1f} s")
    table.add_row("random", _RANDOM[result.random])
    table.add_row("run", str(result.run))
    table.add_row("page", str(result.run / "report.html"))
    console.print(table)
    console.print()
    console.print(privacy_table(result.proven, result.published))
    for warning in result.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)


def privacy_table(proven: list[dict[str, Any]], published: list[dict[str, Any]]) -> Table:
    """What is proven of whom against whom; what is not, grouped by the reason; what the paper says."""
    from shoal.accounting.claims import Proven, Published
    from shoal.report.plots import OBSERVERS, UNITS, whose

    table = Table("privacy of", "against", "proven", box=None, pad_edge=False)
    reasons: dict[str, list[Proven]] = {}
    for claim in (Proven(**claim) for claim in proven):
        if claim.epsilon is None:
            reasons.setdefault(claim.words(), []).append(claim)
        else:
            table.add_row(whose(claim.to_json()), OBSERVERS[claim.observer], claim.words(), style="bold")
    for words, claims in reasons.items():
        units = " and ".join(dict.fromkeys(UNITS[claim.unit] for claim in claims))
        observers = ", ".join(dict.fromkeys(OBSERVERS[claim.observer] for claim in claims))
        everybody = len(claims) == len(proven)
        table.add_row(units, "anybody" if everybody else observers, f"not private: {words}" if everybody else words)
    for claim in (Published(**claim) for claim in published):
        table.add_row(UNITS[claim.unit], "as its paper counts", claim.words(), style="italic")
    return table


_RANDOM = {
    "research": "research: everything follows from the seed",
    "secure": "secure: from the system's entropy, nothing can be repeated",
}
