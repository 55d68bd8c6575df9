"""`shoal attack`: attack a method and measure what leaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.options import Change, Json, OutputFolder, command_line, print_json
from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.attacks.attack_recipes import Recipe
    from shoal.attacks.leakage import Aim, Outcome
    from shoal.attacks.membership import Membership
    from shoal.config import Config

WHERE = {
    0: "at the server: sees the client's update",
    1: "at the client: sees its update before it is sent",
    2: "inside the client: sees one record's gradient during local training",
}


def command(
    context: typer.Context,
    algorithm: Annotated[str, typer.Option(help="The method to attack; `shoal algorithms` lists them.")] = ("fedavg"),
    kind: Annotated[int, typer.Option("--type", help="0 at the server, 1 at the client, 2 in local training.")] = 2,
    attack: Annotated[
        str, typer.Option(help="dlg, idlg, cpl, cpl-tv, cpl-group, gradinv, gradinv-lbfgs, imprint or trap-weights.")
    ] = "cpl",
    dataset: Annotated[str, typer.Option(help="digits, mnist, lfw, adult, ...; or your own file.")] = "digits",
    count: Annotated[int, typer.Option(help="Number of victims.")] = 20,
    records: Annotated[
        int | None,
        typer.Option(
            help="Records in one update; 3 at types 0 and 1, as in Wei et al. (2023). With --membership: the pool, "
            "of which each model is trained on a random half; all records by default."
        ),
    ] = None,
    sites: Annotated[
        int,
        typer.Option(
            help="With imprint or trap-weights: the server sees only the sum of this many clients' updates."
        ),
    ] = 1,
    iterations: Annotated[int | None, typer.Option(help="Iterations; by default the attack's own limit.")] = None,
    honest: Annotated[
        bool, typer.Option("--honest", help="Types 0 and 1: attack a real update, after all local steps.")
    ] = False,
    naive: Annotated[
        bool, typer.Option("--naive", help="An attacker that ignores public clip norms, as in the papers.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Every method of Wei et al. (2023), every type, on one page.")
    ] = False,
    membership: Annotated[
        bool, typer.Option("--membership", help="Membership inference on the final model.")
    ] = False,
    models: Annotated[
        int, typer.Option(help="With --membership: the models to train; each has all others as shadows.")
    ] = 33,
    change: Change = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = "auto",
    runs: OutputFolder = Path("runs"),
    as_json: Json = False,
) -> None:
    """Attack a method and measure what leaks: gradient leakage as in Wei et al. (2023), or membership inference."""
    from shoal.attacks.attack_recipes import recipe
    from shoal.attacks.leakage import Aim
    from shoal.config import configure

    _refuse(context, every, membership, algorithm)
    base: dict[str, Any] = {"data.name": dataset, "engine.device": device}
    config = configure(base | {"algorithm": algorithm}, change or [])
    _make(runs)
    console = Console(stderr=as_json)
    if every:
        chosen, aim = _limited(recipe(attack), iterations), Aim(0, count, records, honest, not naive)
        folder, results = _matrix(console, base, chosen, aim, change or [], runs)
    elif membership:
        folder, results = _membership(console, config, models, records, runs)
    else:
        aim = Aim(kind, count, records, honest, not naive, sites)  # type: ignore[arg-type]
        folder, results = _one(console, config, _limited(recipe(attack), iterations), aim, runs)
    if as_json:
        print_json({"run": str(folder)} | results)
    else:
        console.print(f"\npage: {folder / 'report.html'}", highlight=False, soft_wrap=True)


IDLE = {
    "--membership": ("kind", "attack", "count", "iterations", "honest", "naive", "sites"),
    "--all": ("kind", "models", "sites"),
    "a reconstruction": ("models",),
}


def _make(runs: Path) -> None:
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{runs} cannot be made: {error.strerror or error}; choose another --runs") from None


def _refuse(context: typer.Context, every: bool, membership: bool, algorithm: str) -> None:
    """Refuse options that contradict each other or have no effect."""
    if every and membership:
        raise ConfigError("--all and --membership exclude each other: give one of them")
    if every and algorithm != "fedavg":
        raise ConfigError(f"--all attacks the methods of Wei et al. (2023): omit --algorithm {algorithm}")
    asked = "--membership" if membership else "--all" if every else "a reconstruction"
    for name in IDLE[asked]:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--type" if name == "kind" else f"--{name}"
            raise ConfigError(f"{option} has no effect with {asked}: omit it")


def _limited(chosen: Recipe, iterations: int | None) -> Recipe:
    return chosen if iterations is None else replace(chosen, iterations=iterations)


def _one(console: Console, config: Config, chosen: Recipe, aim: Aim, runs: Path) -> tuple[Path, dict[str, Any]]:
    from shoal.attacks import attack_report
    from shoal.attacks.attack_plots import picture
    from shoal.attacks.leakage import attack

    name = config.algorithm.name
    console.print(f"{chosen.name} ({chosen.paper}) against {name} on {config.data.name}, {WHERE[aim.kind]}")
    with console.status("observing") as status:

        def progress(iteration: int, left: int) -> None:
            status.update(f"iteration {iteration} of at most {chosen.iterations}, {left} victims left")

        outcome = attack(config, chosen, aim, progress=progress)
    row = outcome.row()
    show([row], console)
    verdict = f"{100 * row['success']:.0f}% of {aim.count * aim.sites * aim.each} records were reconstructed"
    console.print(f"{verdict} ({_success(outcome)}).")
    folder = attack_report.write(
        runs,
        f"{name}-type{aim.kind}-{chosen.name}",
        title=f"{chosen.name} against {name} on {outcome.dataset}, type {aim.kind}",
        words=[
            f"Attacker {WHERE[aim.kind]}. {verdict} ({_success(outcome)}).",
            config.algorithm.summary,
            attack_report.caveats(row["model"]),
        ],
        rows=[row],
        png=picture(outcome),
        about="Above: records. Below: their reconstructions, with the error of each",
        facts={"algorithm": name, "dataset": outcome.dataset},
        command=command_line(),
    )
    return folder, {"rows": [row]}


def _success(outcome: Outcome) -> str:
    if outcome.quality.ssim is not None:
        return "RMSE below 0.15 and SSIM above 0.5"
    half = "" if outcome.quality.typical is None else ", and below half of the mean record's"
    return f"RMSE below 0.15{half}"


def _matrix(
    console: Console, base: dict[str, Any], chosen: Recipe, aim: Aim, changes: list[str], runs: Path
) -> tuple[Path, dict[str, Any]]:
    from shoal.attacks import attack_report
    from shoal.attacks.attack_plots import grid
    from shoal.attacks.matrix import LEAKS, cell, matrix

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
    folder = attack_report.write(
        runs,
        f"all-{name}-{chosen.name}",
        title=f"{chosen.name} against {len(labels)} methods on {name}, types 0, 1 and 2",
        words=[
            *(f"Type {kind}: {where}." for kind, where in WHERE.items()),
            f"Success: {_success(cells[0][1])}. A method counts as resilient if fewer than {100 * LEAKS:.0f}% of the "
            f"records are reconstructed, a limit of our own; anything above 0% is red here.",
            attack_report.caveats(rows[0]["model"]),
        ],
        rows=rows,
        png=grid(cells),
        about="Columns: methods. Rows: attack types. Always the same victim",
        facts={"dataset": name},
        command=command_line(),
    )
    return folder, {"rows": rows}


def _membership(
    console: Console, config: Config, models: int, records: int | None, runs: Path
) -> tuple[Path, dict[str, Any]]:
    from shoal.attacks import attack_report
    from shoal.attacks.attack_plots import curve
    from shoal.attacks.membership import membership

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
        trained += f" (all that budget.epsilon {config.budget.epsilon:g} allows)"
    accuracy = f"accuracy {found.train_accuracy:.3f} on members, {found.test_accuracy:.3f} on held-out data"
    console.print(f"{trained}; {accuracy}", highlight=False)
    if found.warning:
        console.print(f"warning: {found.warning}", style="bold yellow", highlight=False)
    folder = attack_report.write(
        runs,
        f"{name}-membership",
        title=f"Membership inference against {name} on {found.dataset}",
        words=[
            f"{trained}; {accuracy}." + (f" Warning: {found.warning}." if found.warning else ""),
            f"Uninformed scores have an advantage too, since it is the best over all thresholds: guessing reaches "
            f"{attack_report.shown(found.threshold.guessing)} (threshold) and "
            f"{attack_report.shown(found.lira.guessing)} (lira).",
            _allows(found),
            f"The models (model={config.model}) were trained for this page; they are not your runs. "
            f"{attack_report.PROVES_NOTHING}",
        ],
        rows=rows,
        png=curve({name: roc.points for name, roc in found.rocs.items()}, found.allowed),
        about="True positives against false positives",
        facts=found.facts(),
        command=command_line(),
    )
    return folder, {"rows": rows} | found.facts()


def _allows(found: Membership) -> str:
    if found.allowed is None:
        return f"No epsilon bounds what an attack may find here: {found.unbounded}."
    return (
        f"For a record, against who sees released models: {found.allowed.claim.words()}. No attack passes the curve."
    )


BRIEF = ("method", "attack", "type", "success", "rmse", "ssim", "label_hits", "iterations", "advantage", "guessing",
         "auc", "tpr_at_0_1_percent_fpr", "tpr_at_1_percent_fpr")  # fmt: skip


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print one attack in full, or a table of several with the columns that fit a terminal."""
    from shoal.attacks.attack_report import columns, shown

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
