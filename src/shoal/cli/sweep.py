"""`shoal sweep`: an experiment over a grid of settings, and what choosing among them costs."""

from __future__ import annotations

import signal
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal.cli.exit_codes import CELL_FAILED, STOPPED
from shoal.cli.options import JsonWithProgress, NoGuarantee, bound, open_page, print_json
from shoal.cli.run import show_claims
from shoal.errors import ConfigError, RunError
from shoal.files import locked

if TYPE_CHECKING:
    from shoal.report.compare import Entry
    from shoal.report.run_reader import Run
    from shoal.sweep.outcome import Outcome
    from shoal.sweep.plan import Plan, Range


def command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; the default experiment if omitted.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=A,B,C", help="The values of a key; LOW..HIGH with --random."),
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="Change one key in all cells.")
    ] = None,
    random: Annotated[int | None, typer.Option(help="Number of cells to draw at random from the grid.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Cells at a time; by default what cores and memory allow.")] = None,
    charge: Annotated[bool, typer.Option("--charge", help="Report what all cells together cost.")] = False,
    private: Annotated[
        bool,
        typer.Option("--private-selection", help="Random number of trials; the best is released, at a known cost."),
    ] = False,
    trials: Annotated[
        float | None, typer.Option(help="Expected trials of a private selection; by default one a cell.")
    ] = None,
    shape: Annotated[
        float,
        typer.Option(help="Distribution of the number of trials: 0 logarithmic, 1 geometric, more: nearer to fixed."),
    ] = 0.0,
    resume: Annotated[Path | None, typer.Option(help="Resume the sweep in this folder.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the sweep's folder is made.")] = Path("runs"),
    no_guarantee: NoGuarantee = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page at the end.")] = False,
    as_json: JsonWithProgress = False,
) -> None:
    """Run a grid of settings in parallel; compare figures and proven epsilon. It can be interrupted and resumed."""
    from shoal.sweep.cost import planned_cells
    from shoal.sweep.outcome import chosen_before, outcome_of, write_sweep_page
    from shoal.sweep.plan import make_plan

    console = Console(stderr=as_json, emoji=False)
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be >= 1, got {jobs}")
    if resume is not None:
        if any((config, grid, change, random, private)):
            raise ConfigError("a resumed sweep keeps its own cells: give --resume without a config, --grid or -c")
        folder, plan = resume, _resumed(resume, charge)
    else:
        if (trials is not None or shape != 0) and not private:
            raise ConfigError("--trials and --shape are for --private-selection; give that too")
        plan = make_plan(
            *_grid(config, grid, change or []),
            random=random,
            no_guarantee=no_guarantee,
            charge=charge,
            private=private,
            expected_trials=trials,
            shape=shape,
        )
        planned_cells(plan)  # finds a cell that cannot run before any has run
        folder = _new_folder(runs)
        plan.write(folder)
    with locked(folder, "wait for that sweep to end"):
        if chosen_before(folder, plan) is None:
            _play(folder, plan, jobs, console)
        outcome = outcome_of(folder, plan)
        page = write_sweep_page(outcome)
    _report(outcome, page, console, as_json)
    if show:
        open_page(page)
    if outcome.failed:
        raise typer.Exit(CELL_FAILED)


def _resumed(folder: Path, charge: bool) -> Plan:
    from shoal.sweep.plan import Plan

    plan = Plan.read(folder)
    return replace(plan, charge=plan.charge or charge)


def _grid(
    config: Path | None, grid: list[str] | None, changes: list[str]
) -> tuple[dict[str, Any], dict[str, list[Any] | Range]]:
    """The settings that all cells share, and the values of the grid."""
    from shoal.sweep.plan import base_settings, grid_of

    if not grid:
        raise ConfigError("a sweep needs at least one --grid, for example --grid local.lr=0.05,0.1,0.2")
    values = grid_of(grid)
    return base_settings(config, changes, values), values


def _report(outcome: Outcome, page: Path, console: Console, as_json: bool) -> None:
    if as_json:
        print_json(outcome.to_json())
        return
    show_outcome(outcome, console)
    console.print(f"page   {escape(str(page))}", highlight=False)


def _play(folder: Path, plan: Plan, jobs: int | None, console: Console) -> None:
    """Run the cells under a progress bar; Ctrl-C stops them at their checkpoints."""
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

    endings = (signal.SIGTERM, signal.SIGHUP)  # like Ctrl-C, so that no cell keeps running
    before = [signal.signal(ending, signal.default_int_handler) for ending in endings]
    try:
        with progress:
            Pool(folder, plan, at_once).run(look)
    except KeyboardInterrupt:
        from shlex import quote

        raise Stopped(f"the sweep was stopped; resume with: shoal sweep --resume {quote(str(folder))}") from None
    finally:
        for ending, handler in zip(endings, before, strict=True):
            signal.signal(ending, handler)


class Stopped(RunError):
    """The user interrupted the sweep; its cells are at their checkpoints."""

    exit_code = STOPPED


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Print the cells and what they cost; after a private selection only the chosen one."""
    from shoal.sweep.outcome import LOOKING_COSTS, ONLY_THE_BEST

    private = outcome.plan.selection is not None
    console.print(_cells(outcome, private))
    if private and outcome.best is None:
        console.print("no trial finished, or their headline figures differ: nothing was chosen")
        for entry in outcome.failed[:1]:  # the others fail alike, as a rule
            console.print(escape(f"{entry.name} {entry.failed}"), highlight=False)
    console.print()
    if outcome.proven:
        console.print("the chosen model:" if private else "all cells together:")
        show_claims([claim.to_json() for claim in outcome.proven], [], console)
        console.print()
    console.print(escape(ONLY_THE_BEST if private else LOOKING_COSTS), highlight=False)
    console.print(f"sweep  {escape(str(outcome.folder))}", highlight=False)


def _cells(outcome: Outcome, private: bool) -> Table:
    from shoal.report.compare import by_headline
    from shoal.report.plots import unit_in_words
    from shoal.report.scores import name_of
    from shoal.sweep.outcome import frontier, whom

    entries = [entry for entry in outcome.entries if entry.best] if private else outcome.entries
    best = set() if private else {entry.name for entry in frontier(outcome)}
    keys = list(outcome.entries[0].choice)
    figures = list(by_headline(outcome.entries)) or ["score"]
    unit, observer = whom(outcome.plan)
    whose = unit_in_words(unit, *(entry.run for entry in entries))
    head = [*keys, *map(name_of, figures), f"proven epsilon, {whose}"]
    table = Table("cell", *map(escape, head), "", box=None, pad_edge=False)
    for entry in entries:
        style = "red" if entry.failed else "bold" if entry.best else None
        table.add_row(*map(escape, _row(entry, figures, (unit, observer), entry.name in best)), style=style)
    return table


def _row(entry: Entry, figures: list[str], whom: tuple[str, str], on_frontier: bool) -> list[str]:
    from shoal.report.compare import NOTHING_LEARNT, word

    run = entry.run
    note = "on the frontier" if on_frontier else "" if run is None or run.scores.learnt else NOTHING_LEARNT
    epsilon = run.epsilon(*whom) if run else None
    return [
        entry.name,
        *(word(value) for value in entry.choice.values()),
        *(_score(run, name) for name in figures),
        bound(epsilon),
        entry.failed or note,
    ]


def _score(run: Run | None, figure: str) -> str:
    from shoal.report.scores import short

    score = run.scores.of_headline(figure) if run else None
    return "" if score is None else short(score)


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
    raise RunError(f"too many sweeps started in this second in {runs}")
