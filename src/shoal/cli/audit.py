"""`shoal audit`: measure a lower bound on epsilon by attack, and compare it with the claim."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from shoal.cli.exit_codes import REFUTED
from shoal.cli.options import Change, Json, OutputFolder, command_line, print_json
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.algorithms.base import Algorithm
    from shoal.audit.auditing import Outcome

"""Exit code where a claim was refuted."""


def command(
    algorithm: Annotated[str | None, typer.Option(help="The method to audit; `shoal algorithms` lists them.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="A run's folder: audit its method in its setting, and add the result to its page."),
    ] = None,
    federation: Annotated[
        Path | None,
        typer.Option(help="The run folder of a federation with canary clients: measure by them, in no other run."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every registered method, on one page.")] = False,
    level: Annotated[
        Literal["client", "record", "user"] | None, typer.Option(help="The unit; by default all that have a claim.")
    ] = None,
    claim: Annotated[
        Literal["proven", "published"] | None, typer.Option(help="Only proven claims, or only published ones.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="The epsilon that the audit's small setting claims.")] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials; weaker bounds.")] = False,
    power: Annotated[
        bool, typer.Option("--power", help="Also audit broken variants of the method: which are caught?")
    ] = False,
    seed: Annotated[int, typer.Option(help="The audit's seed.")] = 0,
    change: Change = None,
    runs: OutputFolder = Path("runs"),
    as_json: Json = False,
) -> None:
    """Attack a method's claims on the code that runs: claim, lower bound, verdict. Exit code 3 if one is refuted."""
    if federation is not None:
        from shoal.cli.audit_federation import report

        _refuse_beside(
            {"--algorithm": algorithm, "--run": run, "--all": every or None, "--level": level, "-c": change}
        )
        return report(federation, as_json)
    from shoal.audit import audit_report
    from shoal.audit.auditing import QUICK, THOROUGH, audit

    records, secure = _records(algorithm, run, every, change or [])
    if not 0 < epsilon <= 20:
        raise ConfigError(f"--epsilon must be > 0 and at most 20, got {epsilon:g}")
    console = Console(stderr=as_json)
    outcomes: list[Outcome] = []
    name = "all" if every else records[0].name
    with audit_report.place(run / "audit" if run else audit_report.new_folder(runs, name)) as folder:
        with console.status("starting") as status:
            for record in records:
                outcomes += audit(
                    record,
                    level=level,
                    kind=claim,
                    epsilon=epsilon,
                    effort=QUICK if quick else THOROUGH,
                    seed=seed,
                    power=power,
                    secure=secure,
                    progress=status.update,
                )
        _refuse_none(outcomes, claim, level)
        written = audit_report.write(folder, "all methods" if every else name, outcomes, command_line())
    if run:
        _update_page(run)
    _report(outcomes, written, run, console, as_json)
    if any(outcome.verdict == "VIOLATED" for outcome in outcomes):
        raise typer.Exit(REFUTED)


def _refuse_beside(others: dict[str, object]) -> None:
    if given := [name for name, value in others.items() if value is not None]:
        raise ConfigError(f"--federation audits a run by its own canaries: leave out {given[0]}")


def _refuse_none(outcomes: list[Outcome], claim: str | None, level: str | None) -> None:
    if not outcomes:
        what, where = f"{claim} claim" if claim else "claim", f" at {level} level" if level else ""
        raise ConfigError(f"there is no {what}{where} to audit; omit --claim and --level")


def _report(outcomes: list[Outcome], page: Path, run: Path | None, console: Console, as_json: bool) -> None:
    if as_json:
        print_json({"run": str(page.parent), "rows": [outcome.row() for outcome in outcomes]})
        return
    show(outcomes, console)
    also = f", and {run / 'report.html'}" if run else ""
    console.print(f"\npage: {page}{also}", highlight=False, soft_wrap=True)


def _records(name: str | None, run: Path | None, every: bool, changes: list[str]) -> tuple[list[Algorithm], bool]:
    from shoal.algorithms import algorithms
    from shoal.config import configure
    from shoal.report.run_reader import read_config

    if [name is not None, run is not None, every].count(True) != 1:
        raise ConfigError("name the method to audit: --algorithm NAME, --run FOLDER, or --all")
    if changes and name is None:
        raise ConfigError(f"-c {changes[0]} needs one method: name it with --algorithm")
    if every:
        return list(algorithms().values()), False
    if run:
        read_config(run)  # raises where it is no run folder
    config = configure(run / "config.toml" if run else {"algorithm": name}, changes)
    return [config.algorithm], config.random == "secure"


def _update_page(run: Path) -> None:
    """Make the run's page again, unless the run is still going and does so itself."""
    from shoal.report.run_page import write_report
    from shoal.report.run_reader import is_running

    if not is_running(run):
        write_report(run)


def show(outcomes: list[Outcome], console: Console) -> None:
    """Print a table and, for one method, how each claim was audited."""
    from shoal.audit.audit_plot import COLOURS
    from shoal.audit.audit_report import HEAD, cells, words

    table = Table(*HEAD, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.columns[0].min_width = max(len(outcome.algorithm) for outcome in outcomes)  # names are never cut short
    for outcome in outcomes:
        colour = COLOURS[outcome.verdict]
        table.add_row(*cells(outcome), f"[bold {colour}]{outcome.verdict}[/]")
    console.print(table)
    if len({outcome.algorithm for outcome in outcomes}) == 1:
        for outcome in outcomes:
            console.print(f"\n[bold]{outcome.case.unit} level[/]: {outcome.case.note}", highlight=False)
            for line in words(outcome):
                console.print(f"  {line}", highlight=False)
