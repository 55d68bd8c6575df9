"""`shoal sweep`: the same experiment over a grid of settings, side by side, and what choosing among them costs."""

from __future__ import annotations

import fcntl
import json
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.sweep.outcome import Outcome
    from shoal.sweep.plan import Plan

FAILED = 4
"""Exit code where a cell failed; the others are whole."""


def command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; the default experiment if left out.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=A,B,C", help="The values of a key; LOW..HIGH with --random."),
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="Change one key in all cells.")
    ] = None,
    random: Annotated[int | None, typer.Option(help="So many cells drawn from the grid, not all of it.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Cells at a time; by itself what cores and memory allow.")] = None,
    charge: Annotated[bool, typer.Option("--charge", help="Say what all cells together cost.")] = False,
    private: Annotated[
        bool,
        typer.Option("--private-selection", help="Random number of trials; the best is released, at a known cost."),
    ] = False,
    trials: Annotated[
        float | None, typer.Option(help="Expected number of trials of a private selection; that of the cells.")
    ] = None,
    shape: Annotated[
        float,
        typer.Option(help="Shape of the number of trials: 0 logarithmic, 1 geometric, above it nearer to fixed."),
    ] = 0.0,
    resume: Annotated[Path | None, typer.Option(help="Go on with the sweep in this folder.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the sweep's folder is made.")] = Path("runs"),
    no_guarantee: Annotated[
        bool, typer.Option("--no-guarantee", help="Run methods that claim privacy but prove none.")
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page at the end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output; progress on standard error.")
    ] = False,
) -> None:
    """Run a grid of settings in parallel; compare accuracy and proven epsilon. It can be stopped and resumed."""
    from dataclasses import replace

    from shoal.sweep.cost import planned_cells
    from shoal.sweep.outcome import outcome_of, write_sweep_page
    from shoal.sweep.plan import Plan, base_settings, grid_of, make_plan

    console = Console(stderr=as_json, emoji=False)
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be >= 1, got {jobs}")
    if resume is not None:
        if config or grid or change or random or private:
            raise ConfigError("a resumed sweep keeps its own cells: give --resume without a config, --grid or -c")
        folder, plan = resume, Plan.read(resume)
        plan = replace(plan, charge=plan.charge or charge)
    else:
        if not grid:
            raise ConfigError("a sweep needs at least one --grid, for example --grid local.lr=.05,.1,.2")
        if (trials is not None or shape != 0) and not private:
            raise ConfigError("--trials and --shape are for --private-selection; give that too")
        values = grid_of(grid)
        plan = make_plan(
            base_settings(config, change or [], values),
            values,
            random=random,
            no_guarantee=no_guarantee,
            charge=charge,
            private=private,
            expected_trials=trials,
            shape=shape,
        )
        planned_cells(plan)
        folder = _new_folder(runs)
        plan.write(folder)
    with _locked(folder):
        _play(folder, plan, jobs, console)
        outcome = outcome_of(folder, plan)
        page = write_sweep_page(outcome)
    if as_json:
        json.dump(outcome.to_json(), sys.stdout)
        print()
    else:
        tell(outcome, console)
        console.print(f"page   {escape(str(page))}", highlight=False)
    if show:
        from shoal.cli.report import open_page

        open_page(page)
    if outcome.failed:
        raise typer.Exit(FAILED)


def _play(folder: Path, plan: Plan, jobs: int | None, console: Console) -> None:
    """The bar over cells; Ctrl-C stops the cells at their checkpoints and says how to go on."""
    from shoal.sweep.cells import Pool, sensible_jobs

    count = len(plan.cells)
    at_once = jobs or sensible_jobs(count, plan.config(0).engine.device)
    what = "a private selection" if plan.selection else f"{count} cells"
    console.print(f"{what}, {min(at_once, count)} at a time, {escape(str(folder))}", highlight=False)
    progress = Progress(
        TextColumn("cells {task.fields[done]}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[failed]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
    )
    task = progress.add_task("", total=count, done=0, failed="")

    def look(done: int, failed: int, share: float) -> None:
        progress.update(task, completed=share, done=done, failed=f"{failed} failed" if failed else "")

    endings = (signal.SIGTERM, signal.SIGHUP)  # as with Ctrl-C: no cell is left behind
    before = [signal.signal(ending, signal.default_int_handler) for ending in endings]
    try:
        with progress:
            Pool(folder, plan, at_once).run(look)
    except KeyboardInterrupt:
        from shlex import quote

        raise Stopped(f"the sweep was stopped; go on with: shoal sweep --resume {quote(str(folder))}") from None
    finally:
        for ending, handler in zip(endings, before, strict=True):
            signal.signal(ending, handler)


class Stopped(RunError):
    """The user stopped the sweep; its cells stand at their checkpoints."""

    exit_code = 130


def tell(outcome: Outcome, console: Console) -> None:
    """The closing table; under private selection only the chosen one."""
    from shoal.accounting.rounding import up
    from shoal.report.compare import word
    from shoal.report.plots import OBSERVERS, whose
    from shoal.sweep.outcome import LOOKING_COSTS, ONLY_THE_BEST, frontier

    private = outcome.plan.selection is not None
    entries = [entry for entry in outcome.entries if entry.best] if private else outcome.entries
    best = {entry.name for entry in frontier(outcome)}
    keys = list(outcome.entries[0].choice)
    table = Table("cell", *map(escape, keys), "accuracy", "proven for a client", "", box=None, pad_edge=False)
    for entry in entries:
        run = entry.run
        epsilon = run.epsilon("client", "release") if run else None
        row = [
            entry.name,
            *(word(value) for value in entry.choice.values()),
            f"{run.accuracy:.4f}" if run and run.accuracy is not None else "",
            "none" if epsilon is None else f"epsilon {up(epsilon)}",
            entry.failed or ("on the frontier" if entry.name in best and not private else ""),
        ]
        table.add_row(*map(escape, row), style="red" if entry.failed else "bold" if entry.best else None)
    console.print(table)
    if private and not entries:
        console.print("no trial came to an end: nothing was chosen")
    console.print()
    if outcome.proven:
        console.print("the chosen model:" if private else "all cells together:")
        for claim in outcome.proven:
            if claim.epsilon is not None:
                whom = f"{whose(claim.to_json())}, against {OBSERVERS[claim.observer]}"
                console.print(f"  {whom}: {escape(claim.words())}", highlight=False)
        if all(claim.epsilon is None for claim in outcome.proven):
            console.print(f"  nothing is proven: {escape(str(outcome.proven[0].because))}", highlight=False)
        console.print()
    console.print(escape(ONLY_THE_BEST if private else LOOKING_COSTS), highlight=False)
    console.print(f"sweep  {escape(str(outcome.folder))}", highlight=False)


def _new_folder(runs: Path) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 10_000):
        path = runs / (f"{stamp}-sweep" if number == 1 else f"{stamp}-sweep-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"the sweep's folder cannot be made in {runs}: {error}") from None
        return path
    raise RunError(f"there are too many sweeps of this second in {runs}")


def _locked(folder: Path) -> IO[str]:
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RunError(f"{folder} is in use by another process; wait until that sweep has ended") from None
    return file
