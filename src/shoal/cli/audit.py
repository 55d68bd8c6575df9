"""`shoal audit`: measure a lower bound on epsilon by attack, and compare it with the claim."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from shoal.cli.exit_codes import REFUTED, STOPPED
from shoal.cli.options import Change, Json, OutputFolder, command_line, print_json
from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.algorithms.base import Algorithm
    from shoal.audit.auditing import Outcome


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
    repeats: Annotated[
        int, typer.Option(help="Runs with canaries, whose guesses are pooled: tighter bounds for more time.")
    ] = 1,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="With --all: every claim once with few trials, then more runs with canaries where the gap between "
            "proven and measured is widest, for so long (90s, 10m, 2h); what is under way then is finished.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --budget: go on with the newest such audit in --runs.")
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
    from shoal.audit.audit_plot import gaps, picture
    from shoal.audit.auditing import QUICK, THOROUGH, audit

    records, secure = _records(algorithm, run, every, change or [])
    if not 0 < epsilon <= 20:
        raise ConfigError(f"--epsilon must be > 0 and at most 20, got {epsilon:g}")
    if not 1 <= repeats <= 1000:
        raise ConfigError(f"--repeats must be between 1 and 1000, got {repeats}")
    console = Console(stderr=as_json)
    if budget is not None:
        if not every or repeats != 1 or quick:
            raise ConfigError(
                f"--budget {budget} needs --all, and chooses trials and runs itself: omit --repeats and --quick"
            )
        settings = {"epsilon": epsilon, "seed": seed, "power": power, "level": level, "claim": claim}
        _with_budget(records, settings, _seconds(budget), runs, resume, console, as_json)
        return
    if resume:
        raise ConfigError("--resume needs --budget: only such an audit can be resumed")
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
                    effort=replace(QUICK if quick else THOROUGH, repeats=repeats),
                    seed=seed,
                    power=power,
                    secure=secure,
                    progress=status.update,
                )
        rows = [outcome.row() for outcome in outcomes]
        _refuse_none(rows, claim, level)
        drawn = [gaps(rows, narrow) if every else picture(outcomes, narrow) for narrow in (False, True)]
        written = audit_report.write(
            folder, "all methods" if every else name, rows, (drawn[0], drawn[1]), command_line()
        )
    if run:
        _update_page(run)
    _report(rows, written, run, console, as_json)


def _refuse_beside(others: dict[str, object]) -> None:
    if given := [name for name, value in others.items() if value is not None]:
        raise ConfigError(f"--federation audits a run by its own canaries: leave out {given[0]}")


def _with_budget(
    records: list[Algorithm],
    settings: dict[str, Any],
    seconds: float,
    runs: Path,
    resume: bool,
    console: Console,
    as_json: bool,
) -> None:
    """Spend the time; a later call resumes what Ctrl-C stopped, or adds to it."""
    from shoal.audit import audit_report, campaign
    from shoal.audit.audit_plot import gaps
    from shoal.audit.auditing import FIRST_LOOK

    with audit_report.place(campaign.newest(runs) if resume else audit_report.new_folder(runs, "all")) as folder:
        found = campaign.start(folder, records, settings, FIRST_LOOK, resume)
        _refuse_none(list(found.standings), settings["claim"], settings["level"])
        try:
            with console.status("starting") as status:
                found.spend(seconds, status.update)
        except KeyboardInterrupt:
            raise Stopped(f"the audit was stopped; {folder / campaign.LINES} has what was done: --resume") from None
        if not found.rows():
            raise ConfigError("no claim was audited in this time; give a longer --budget")
        rows = found.rows()
        written = audit_report.write(folder, "all methods", rows, (gaps(rows), gaps(rows, True)), command_line())
    if found.left:
        console.print(f"{found.left} of {len(found.standings)} claims were not reached: continue with --resume")
    _report(found.rows(), written, None, console, as_json)


class Stopped(RunError):
    """The user interrupted; what was measured is kept."""

    exit_code = STOPPED


def _seconds(budget: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget)
    if found is None or not float(found[1]):
        raise ConfigError(f"--budget must be a time such as 90s, 10m or 2h, got {budget}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _refuse_none(found: list[Any], claim: str | None, level: str | None) -> None:
    if not found:
        what, where = f"{claim} claim" if claim else "claim", f" at {level} level" if level else ""
        raise ConfigError(f"there is no {what}{where} to audit; omit --claim and --level")


def _report(rows: list[dict[str, Any]], page: Path, run: Path | None, console: Console, as_json: bool) -> None:
    if as_json:
        print_json({"run": str(page.parent), "rows": rows})
    else:
        show(rows, console)
        also = f", and {run / 'report.html'}" if run else ""
        console.print(f"\npage: {page}{also}", highlight=False, soft_wrap=True)
    if any(row["verdict"] == "VIOLATED" for row in rows):
        raise typer.Exit(REFUTED)


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


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a table and, for one method, how each claim was audited."""
    from shoal.audit.audit_plot import COLOURS
    from shoal.audit.audit_report import HEAD, cells, words

    table = Table(*HEAD, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.columns[0].min_width = max(len(row["algorithm"]) for row in rows)  # names are never cut short
    for row in rows:
        colour = COLOURS[row["verdict"]]
        table.add_row(*cells(row), f"[bold {colour}]{row['verdict']}[/]")
    console.print(table)
    if len({row["algorithm"] for row in rows}) == 1:
        for row in rows:
            console.print(f"\n[bold]{row['unit']} level[/]: {row['setting']}", highlight=False)
            for line in words(row):
                console.print(f"  {line}", highlight=False)
