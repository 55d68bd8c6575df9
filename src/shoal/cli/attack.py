"""`shoal attack`: play the adversary against a method, and see what it gets."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.attacks.leakage import Aim, Outcome
    from shoal.attacks.recipes import Recipe
    from shoal.config import Config

WHERE = {
    0: "at the server: the client's update as the server holds it",
    1: "at the client: its update before it is sent",
    2: "inside the client: one record's gradient during local training",
}


def command(
    context: typer.Context,
    algorithm: Annotated[str, typer.Option(help="The method that is attacked; `shoal algorithms` lists them.")] = (
        "fedavg"
    ),
    kind: Annotated[int, typer.Option("--type", help="0 at the server, 1 at the client, 2 in local training.")] = 2,
    attack: Annotated[str, typer.Option(help="dlg, idlg, cpl, gradinv or gradinv-lbfgs.")] = "cpl",
    dataset: Annotated[str, typer.Option(help="digits, mnist, lfw, adult, ...; or your own file.")] = "digits",
    count: Annotated[int, typer.Option(help="Victims.")] = 20,
    records: Annotated[
        int | None,
        typer.Option(
            help="Records that one update is made of; 3 at types 0 and 1, as in 004. With --membership: the pool, of "
            "which each model is trained on a random half; all records by itself."
        ),
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="At most so many; the attack's own limit by itself.")] = None,
    honest: Annotated[
        bool, typer.Option("--honest", help="Types 0 and 1: a real update after all local steps.")
    ] = False,
    naive: Annotated[
        bool, typer.Option("--naive", help="An attacker that does not reckon with public clips, as in the papers.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Every method of 004 against every type, on one page.")
    ] = False,
    membership: Annotated[
        bool, typer.Option("--membership", help="Was a record trained on? Asked of the final model.")
    ] = False,
    models: Annotated[int, typer.Option(help="With --membership: models that are trained.")] = 16,
    change: Annotated[
        list[str] | None, typer.Option("-c", metavar="KEY=VALUE", help="Change one key of the configuration.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by itself the GPU where there is one.")] = "auto",
    runs: Annotated[Path, typer.Option(help="Where the folder with table, picture and page is made.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Attack a method as 004 does, and see what leaks: a table, a picture, a page."""
    from shoal.attacks.leakage import Aim
    from shoal.attacks.recipes import recipe
    from shoal.config import configure

    if every and membership:
        raise ConfigError("--all and --membership are two questions: ask one of them")
    if every and algorithm != "fedavg":
        raise ConfigError(f"--all attacks the methods of 004's tables: leave out --algorithm {algorithm}")
    _refuse_idle(context, every, membership)
    base: dict[str, Any] = {"data.name": dataset, "engine.device": device}
    config = configure(base | {"algorithm": algorithm}, change or [])
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{runs} cannot be made: {error.strerror or error}; choose another --runs") from None
    console = Console(stderr=as_json)
    if every:
        chosen, aim = _limited(recipe(attack), iterations), Aim(0, count, records, honest, not naive)
        folder, told = _matrix(console, base, chosen, aim, change or [], runs)
    elif membership:
        folder, told = _membership(console, config, models, records, runs)
    else:
        aim = Aim(kind, count, records, honest, not naive)  # type: ignore[arg-type]
        folder, told = _one(console, config, _limited(recipe(attack), iterations), aim, runs)
    if as_json:
        json.dump({"run": str(folder)} | told, sys.stdout)
        print()
    else:
        console.print(f"\npicture and page: {folder / 'report.html'}", highlight=False, soft_wrap=True)


IDLE = {
    "--membership": ("kind", "attack", "count", "iterations", "honest", "naive"),
    "--all": ("kind", "models"),
    "a reconstruction": ("models",),
}


def _refuse_idle(context: typer.Context, every: bool, membership: bool) -> None:
    """Refuse options that were given and would do nothing."""
    asked = "--membership" if membership else "--all" if every else "a reconstruction"
    for name in IDLE[asked]:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--type" if name == "kind" else f"--{name}"
            raise ConfigError(f"{option} does nothing with {asked}: leave it out")


def _limited(chosen: Recipe, iterations: int | None) -> Recipe:
    return chosen if iterations is None else replace(chosen, iterations=iterations)


def _one(console: Console, config: Config, chosen: Recipe, aim: Aim, runs: Path) -> tuple[Path, dict[str, Any]]:
    from shoal.attacks import page
    from shoal.attacks.leakage import attack
    from shoal.attacks.picture import picture

    name = config.algorithm.name
    console.print(f"{chosen.name} ({chosen.paper}) against {name} on {config.data.name}, {WHERE[aim.kind]}")
    with console.status("observing") as status:

        def progress(iteration: int, left: int) -> None:
            status.update(f"iteration {iteration} of at most {chosen.iterations}, {left} victims not done")

        outcome = attack(config, chosen, aim, progress=progress)
    row = outcome.row()
    show([row], console)
    verdict = f"{100 * row['success']:.0f}% of {aim.count * aim.each} records were reconstructed"
    console.print(f"{verdict} ({_success(outcome)}).")
    folder = page.write(
        runs,
        f"{name}-type{aim.kind}-{chosen.name}",
        title=f"{chosen.name} against {name} on {outcome.dataset}, type {aim.kind}",
        words=[
            f"Attacker {WHERE[aim.kind]}. {verdict} ({_success(outcome)}).",
            config.algorithm.summary,
            page.caveats(row["model"]),
        ],
        rows=[row],
        png=picture(outcome),
        about="Records above, what the attacker made of them below, with the error of each",
        facts={"algorithm": name, "dataset": outcome.dataset},
        command=_command(),
    )
    return folder, {"rows": [row]}


def _success(outcome: Outcome) -> str:
    if outcome.quality.ssim is not None:
        return "RMSE below .15 and SSIM above .5"
    return "RMSE below .15" + (", and below half of the mean record's" if outcome.quality.typical is not None else "")


def _matrix(
    console: Console, base: dict[str, Any], chosen: Recipe, aim: Aim, changes: list[str], runs: Path
) -> tuple[Path, dict[str, Any]]:
    from shoal.attacks import page
    from shoal.attacks.matrix import LEAKS, cell, matrix
    from shoal.attacks.picture import grid

    with console.status("starting") as status:
        cells = list(
            matrix(
                base,
                chosen,
                aim,
                changes=tuple(changes),
                on_cell=lambda label, kind: status.update(f"{label}, type {kind}"),
            )
        )
    rows = [cell(method, outcome) for method, outcome in cells]
    show(rows, console)
    name, labels = cells[0][1].dataset, {method.label for method, _ in cells}
    folder = page.write(
        runs,
        f"all-{name}-{chosen.name}",
        title=f"{chosen.name} against {len(labels)} methods on {name}, types 0, 1 and 2",
        words=[
            *(f"Type {kind}: {where}." for kind, where in WHERE.items()),
            f"Success: {_success(cells[0][1])}. A method is called resilient where fewer than {100 * LEAKS:.0f}% of "
            f"the records are reconstructed, a limit of our own; here anything above 0% is red.",
            page.caveats(rows[0]["model"]),
        ],
        rows=rows,
        png=grid(cells),
        about="A column a method, a row a type of attacker, always the same victim",
        facts={"dataset": name},
        command=_command(),
    )
    return folder, {"rows": rows}


def _membership(
    console: Console, config: Config, models: int, records: int | None, runs: Path
) -> tuple[Path, dict[str, Any]]:
    from shoal.attacks import page
    from shoal.attacks.membership import membership
    from shoal.attacks.picture import curve

    name = config.algorithm.name
    console.print(f"membership inference against {name} on {config.data.name}, {models} models")
    with console.status("training") as status:
        found = membership(
            config,
            models=models,
            records=records,
            progress=lambda done, total: status.update(f"{done} of {total} models trained"),
        )
    rows = found.rows()
    show(rows, console)
    rounds = "1 round" if found.rounds == 1 else f"{found.rounds} rounds"
    trained = f"{models} models, each trained for {rounds} on a random half of {found.records} records"
    if found.rounds < config.rounds:
        trained += f" (budget.epsilon {config.budget.epsilon:g} pays for no more)"
    accuracy = f"accuracy {found.train_accuracy:.3f} on members, {found.test_accuracy:.3f} on held-out data"
    console.print(f"{trained}; {accuracy}", highlight=False)
    if found.warning:
        console.print(f"warning: {found.warning}", style="bold yellow", highlight=False)
    folder = page.write(
        runs,
        f"{name}-membership",
        title=f"Membership inference against {name} on {found.dataset}",
        words=[
            f"{trained}; {accuracy}." + (f" Warning: {found.warning}." if found.warning else ""),
            f"Scores that know nothing have an advantage too, as the best of all thresholds: guessing reaches "
            f"{page.shown(found.threshold.guessing)} (threshold) and {page.shown(found.lira.guessing)} (lira).",
            f"The models (model={config.model}) were trained for this page; none is one of your runs. "
            f"{page.PROVES_NOTHING}",
        ],
        rows=rows,
        png=curve({"loss threshold": found.threshold.points, "LiRA": found.lira.points}),
        about="True positives against false positives",
        facts=found.facts(),
        command=_command(),
    )
    return folder, {"rows": rows} | found.facts()


BRIEF = ("method", "attack", "type", "success", "rmse", "ssim", "label_hits", "iterations", "advantage", "guessing",
         "auc", "tpr_at_1_percent_fpr")  # fmt: skip


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """One attack: everything, a line a figure. Several: what fits into a terminal; the page has the rest."""
    from shoal.attacks.page import columns, shown

    chosen = columns(rows)
    if len(rows) == 1:
        table = Table(box=None, show_header=False, pad_edge=False)
        for key, name in chosen.items():
            table.add_row(name, escape(shown(rows[0].get(key))))
    else:
        chosen = {key: name for key, name in chosen.items() if key in BRIEF}
        table = Table(*chosen.values(), box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(escape(shown(row.get(key))) for key in chosen))
    console.print(table)


def _command() -> str:
    return shlex.join(["shoal", *sys.argv[1:]])
