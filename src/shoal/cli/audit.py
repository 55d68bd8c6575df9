"""`shoal audit`: measure a lower bound on epsilon by attack, and compare it with the claim."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.algorithms.base import Algorithm
    from shoal.audit.auditing import Outcome

VIOLATED = 3
"""Exit code where a claim was refuted."""


def command(
    algorithm: Annotated[
        str | None, typer.Option(help="The method that is audited; `shoal algorithms` lists them.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="A run's folder: its method as it was changed; its page then tells of the audit."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every registered method, on one page.")] = False,
    level: Annotated[
        Literal["client", "example"] | None,
        typer.Option(help="The unit; by itself all that something is claimed of."),
    ] = None,
    claim: Annotated[
        Literal["proven", "published"] | None,
        typer.Option(help="Only what is proven (for a CI), or only what papers claim without proof."),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="The claim that the audit's own small setting is scaled to.")] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials; weaker bounds.")] = False,
    power: Annotated[
        bool, typer.Option("--power", help="Also audit broken forms of the method: which would be caught?")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the audit's random numbers.")] = 0,
    change: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="Change one key of the method.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the folder with table, picture and page is made.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Attack what a method claims, on the code that runs: claim, lower bound, verdict. Exit code 3 if refuted."""
    from shoal.audit import page
    from shoal.audit.auditing import QUICK, THOROUGH, audit

    records, secure = _records(algorithm, run, every, change or [])
    if not 0 < epsilon <= 20:
        raise ConfigError(f"--epsilon must be > 0 and at most 20, got {epsilon:g}")
    console = Console(stderr=as_json)
    outcomes: list[Outcome] = []
    name = "all" if every else records[0].name
    with page.place(run / "audit" if run else page.new_folder(runs, name)) as folder:
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
        if not outcomes:
            raise ConfigError(
                f"nothing that is {claim or 'claimed'} is there to audit{f' at {level} level' if level else ''}; "
                f"leave out --claim and --level"
            )
        title = "all methods" if every else name
        written = page.write(folder, title, outcomes, shlex.join(["shoal", *sys.argv[1:]]))
    if run:
        _into_the_page_of(run)
    if as_json:
        json.dump({"run": str(folder), "rows": [outcome.row() for outcome in outcomes]}, sys.stdout)
        print()
    else:
        show(outcomes, console)
        also = f", and in {run / 'report.html'}" if run else ""
        console.print(f"\npicture and page: {written}{also}", highlight=False, soft_wrap=True)
    if any(outcome.verdict == "VIOLATED" for outcome in outcomes):
        raise typer.Exit(VIOLATED)


def _records(name: str | None, run: Path | None, every: bool, changes: list[str]) -> tuple[list[Algorithm], bool]:
    from shoal.algorithms import algorithms
    from shoal.config import configure

    if [name is not None, run is not None, every].count(True) != 1:
        raise ConfigError("say which method to audit: --algorithm NAME, --run FOLDER, or --all")
    if changes and name is None:
        raise ConfigError(f"-c {changes[0]} belongs to one method: name it with --algorithm")
    if every:
        return list(algorithms().values()), False
    config = configure(_config_of(run) if run else {"algorithm": name}, changes)
    return [config.algorithm], config.random == "secure"


def _config_of(run: Path) -> Path:
    if not (run / "config.toml").is_file():
        raise RunError(f"{run} is no run folder: it has no config.toml; `shoal runs list` shows those there are")
    return run / "config.toml"


def _into_the_page_of(run: Path) -> None:
    """Make the run's page again, unless the run goes on and does so itself."""
    from shoal.report.folder import is_running
    from shoal.report.page import write_report

    if not is_running(run):
        write_report(run)


def show(outcomes: list[Outcome], console: Console) -> None:
    """A table, and, for one method, how its claims were audited."""
    from shoal.audit.page import HEAD, cells, words
    from shoal.audit.picture import COLOURS

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
