"""`shoal run`: train a model over clients; report how good it is and what it reveals."""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal.cli.options import Change, JsonWithProgress, NoGuarantee, print_json
from shoal.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from shoal.config import Config
    from shoal.report.scores import Scores
    from shoal.result import Result
    from shoal.training.trainer import Trainer


def command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; the default experiment if omitted.")] = None,
    change: Change = None,
    resume: Annotated[Path | None, typer.Option(help="Resume this run: its folder, or its name.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Share the work among N processes, on GPUs one for each.")
    ] = 1,
    no_guarantee: NoGuarantee = False,
    as_json: JsonWithProgress = False,
) -> None:
    """Train a model over clients; report how good it is and what it reveals."""
    import shoal
    from shoal.training.ranks import leave, planned, started

    ranks = planned()
    if ranks.count > 1 and processes > 1:
        raise ConfigError(f"--processes {processes}: torchrun has started {ranks.count} already; leave it out")
    if ranks.rank:  # Ctrl-C may reach it too, but rank 0 decides when to stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    console = Console(stderr=as_json)
    watch = Watch(console)
    if resume is not None and resume.name == str(resume):
        from shoal.report.find import one

        resume = one(resume, runs)
    others = started(processes, _words(config, change, resume, device, no_guarantee))
    try:
        with others if processes > 1 else contextlib.nullcontext():
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
            leave()
    finally:
        watch.end()
    if ranks.rank:
        return
    if as_json:
        print_json(result.to_json())
    else:
        show(result, console)


def _words(
    config: Path | None, change: list[str] | None, resume: Path | None, device: str | None, no_guarantee: bool
) -> list[str]:
    """The command line of the other ranks, which write and print nothing."""
    words = ["run", *(f"-c{key}" for key in change or [])]
    words += [f"--{name}={value}" for name, value in (("resume", resume), ("device", device)) if value is not None]
    words += ["--no-guarantee"] if no_guarantee else []
    return words if config is None else [*words, "--", str(config)]


class Watch:
    """A progress bar, and a handler for Ctrl-C, which stops the run at its next checkpoint."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figure]} {task.fields[score]}{task.fields[spent]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
        )
        self._console = console
        self._restore: Callable[[], None] = lambda: None
        self._task: Any = None
        self._budget: Any = None
        self._headline = ""

    def start(self, config: Config, trainer: Trainer[Any], run: Path) -> None:
        """Print what is run, and start the bar."""
        words = f"{config.algorithm.name} on {config.data.name}: {_clients(trainer)}, {run}"
        self._console.print(words, soft_wrap=True, markup=False)  # a path that is cut in two cannot be copied
        if trainer.done:
            self._console.print(f"continues after round {trainer.done} of {trainer.rounds}", highlight=False)
        if (found := trainer.cohort.gradients) and found["way"] != "rules":
            because = f": {found['because']}" if found["because"] else ""
            self._console.print(f"gradients by {found['way']}{because}", highlight=False, markup=False)
        if said := _about_ranks(trainer.params.device):
            self._console.print(said, highlight=False, markup=False)
        for note in trainer.notes:
            self._console.print(f"note: {note}", highlight=False, markup=False)
        from shoal.report.scores import name_of

        self._budget, self._headline = config.budget, trainer.evaluation.dataset.task.headline
        self._task = self.progress.add_task(
            "",
            figure=name_of(self._headline),
            score="-",
            spent="",
            total=trainer.rounds,
            completed=trainer.done,
        )
        self.progress.start()

        self._restore = stop_on_signal(trainer, self._console.print, signal.SIGINT)

    def round(self, line: dict[str, Any]) -> None:
        """Show a round's headline figure and epsilon."""
        from shoal.report.scores import short
        from shoal.report.series import figure

        score = line.get(self._headline)
        fields: dict[str, Any] = {} if score is None else {"score": short(score)}
        for claim in line["proven"]:
            if (claim["unit"], claim["observer"]) == (self._budget.unit, self._budget.observer):
                limit = f"/{self._budget.epsilon:g}" if self._budget.epsilon else ""
                fields["spent"] = f"  epsilon {figure(claim['epsilon'])}{limit} ({claim['unit']})"
        self.progress.update(self._task, completed=line["round"], **fields)

    def end(self) -> None:
        """Stop the bar and restore the signal handler."""
        if self._task is not None:
            self.progress.stop()
        self._restore()


def stop_on_signal(trainer: Trainer[Any], say: Callable[[str], None], *signals: int) -> Callable[[], None]:
    """Let Ctrl-C, or another signal, stop the run at its next checkpoint; returns what restores the handlers."""
    before: dict[int, Any] = {}

    def stop(number: int, _frame: types.FrameType | None) -> None:
        interrupted = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if interrupted else signal.SIG_DFL)
        trainer.stop()
        say(f"stopping at the next checkpoint ({'Ctrl-C' if interrupted else 'the signal'} again: at once)")

    with contextlib.suppress(ValueError):  # outside the main thread there is no signal to handle
        before |= {number: signal.signal(number, stop) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def _about_ranks(device: torch.device) -> str:
    """Over how many ranks the run is spread; of a machine with several GPUs, how to use them all."""
    from torch import cuda

    from shoal.training.ranks import planned

    gpus = cuda.device_count() if device.type == "cuda" else 1
    if (count := planned().count) > 1:
        return f"over {count} ranks"
    return f"on one of {gpus} GPUs; to use all: shoal run --processes {gpus}" if gpus > 1 else ""


def _clients(trainer: Trainer[Any]) -> str:
    count = trainer.setting.clients
    kind = "simulated clients" if trainer.setting.simulated else "clients" if count != 1 else "client"
    return f"{count} {kind}"


def show(result: Result, console: Console) -> None:
    """Print the result: figures, claims, warnings."""
    from shoal.report.scores import Scores

    table = Table(box=None, show_header=False, pad_edge=False)
    scores = Scores.of(result.to_json())
    for name, value in figure_rows(scores):
        table.add_row(name, escape(value))
    if result.stopped == "budget":
        table.add_row("stopped", "the privacy budget is spent")
    if result.stopped == "early":
        table.add_row("stopped", f"{scores.name} got no better; the claims count all planned rounds")
    if result.stopped == "sites":
        table.add_row("stopped", "too few sites are left")
    rounds = "1 round" if result.rounds == 1 else f"{result.rounds} rounds"
    table.add_row("time", f"{result.seconds:.1f} s, {rounds}")
    table.add_row("random", _RANDOM[result.random])
    table.add_row("run", str(result.run))
    table.add_row("page", str(result.run / "report.html"))
    console.print(table)
    console.print()
    show_claims(result.proven, result.published, console)
    for warning in result.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)


def figure_rows(scores: Scores) -> list[tuple[str, str]]:
    """The figures as rows: the headline beside the constant answer, the others, and the spread over clients."""
    from shoal.report.scores import DIVERGED, name_of, short

    if scores.score is None and scores.learnt:
        return [("figures", "unknown")]
    score, trivial = ("not finite" if each is None else short(each) for each in (scores.score, scores.trivial_score))
    constant = "" if scores.trivial_score is None else f" ({scores.trivial_answer}: {trivial})"
    rows = [(scores.name, f"{score} on held-out data{constant}")]
    if scores.others:
        rows.append(("", ", ".join(f"{name_of(name)} {short(value)}" for name, value in scores.others.items())))
    if scores.plain_diverged:
        rows.append(
            ("", f"without clipping and noise (not private): {DIVERGED}, as its gradients need a lower local.lr")
        )
    elif scores.plain_score is not None:
        plain = ", ".join(
            f"{name_of(name)} {short(value)}" for name, value in scores.plain.items() if value is not None
        )
        rows.append(("", f"without clipping and noise (not private): {plain}"))
    if scores.clients:
        worst = ", ".join(f"{each.name} {short(each.score)} ({each.records} records)" for each in scores.worst)
        rows.append(("by client", f"median {short(scores.median)} of {len(scores.clients)}; the worst: {worst}"))
    if not scores.learnt:
        rows.append(("warning", scores.verdict()))
    return rows


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
