"""`shoal init`: a first experiment.toml for your own table, with a schema, a method and a budget."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shoal.cli.options import Json, print_json
from shoal.errors import ConfigError, DataError, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shoal.data.propose import Proposal
    from shoal.data.schema import TaskKind
    from shoal.suggest import Plan

SHOWN = 40  # columns that the terminal lists
NONE = "none"


def command(
    file: Annotated[Path, typer.Argument(help="Your table: a .csv or .parquet file.")],
    label: Annotated[
        list[str] | None, typer.Option(help="The column to predict; several for a multi-label task.")
    ] = None,
    client_column: Annotated[
        str | None,
        typer.Option(help="The column with each row's owner, such as hospital; 'none' where there is none."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="classification, multi-label or regression.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The privacy budget; by default what suits the number of clients or rows.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("experiment.toml"),
    replace: Annotated[bool, typer.Option("--replace", help="Replace the file if it is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write experiment.toml for your own table: its schema, a method and a privacy budget to start with."""
    from shoal.data.propose import propose
    from shoal.data.table_files import column_names, other_type
    from shoal.experiment_file import experiment
    from shoal.suggest import suggest

    if not file.is_file():
        raise DataError(f"there is no file {file}")
    if file.suffix not in (".csv", ".parquet"):
        raise DataError(f"{file}: a table must be a .csv or .parquet file{other_type(file)}")
    if task not in (None, "classification", "multi-label", "regression"):
        raise ConfigError(f"--task cannot be {task!r}: it is one of classification, multi-label, regression")
    if epsilon is not None and not 0 < epsilon < math.inf:
        raise ConfigError(f"--epsilon must be > 0 and finite, got {epsilon:g}")
    if out.exists() and not replace:
        raise ConfigError(f"{out} already exists; give --replace, or another file with --out")
    names = column_names(file)
    labels = label or [_label(file, names)]
    client = _client(file, [name for name in names if name not in labels], client_column)
    proposal = propose(file, labels, client, cast("TaskKind | None", task))
    plan = suggest(proposal.rows, proposal.sizes, proposal.schema.task, proposal.parameters, epsilon=epsilon)
    try:
        out.write_text(experiment(file, proposal, plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; give another file with --out") from None
    if as_json:
        print_json({"file": str(out), "schema": proposal.schema.to_mapping(), "why": proposal.why, "plan": plan.keys})
    else:
        _show(file, out, proposal, plan, [] if label else names)


def _label(file: Path, names: Sequence[str]) -> str:
    from shoal.data.common_columns import find_label

    return find_label(names) or _asked(file, "which column is to be predicted?", "--label NAME")


def _client(file: Path, names: Sequence[str], given: str | None) -> str | None:
    from shoal.data.common_columns import find_client

    ask = "which column names the owner of each row (none: all rows have one owner)?"
    flag = f"--client-column NAME, or --client-column {NONE} where all rows have one owner"
    found = given or find_client(names) or _asked(file, ask, flag)
    return None if found == NONE else found


def _other_label(label: str, searched: Sequence[str]) -> Iterator[str]:
    """A hint, where the label was found by its name among others that could be meant."""
    from shoal.data.common_columns import find_label

    if other := find_label([name for name in searched if name != label]):
        yield f"if '{other}' is the label: add --label {shlex.quote(other)} --replace"


def _asked(file: Path, question: str, flag: str) -> str:
    """The answer of whoever sits at the terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{file}: {question} No column's name says so; give {flag}")
    return str(typer.prompt(f"{file}: {question}", err=True))


def _show(file: Path, out: Path, proposal: Proposal, plan: Plan, searched: Sequence[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from shoal.cli.options import wide_console
    from shoal.experiment_file import reason, settings_of

    console, schema = wide_console(), proposal.schema
    table = Table("column", "kind", "public facts", "where they come from", box=None, pad_edge=False)
    shown = list(schema.columns.items())
    for name, column in shown[:SHOWN]:
        why = reason(name, proposal.why, schema.unconfirmed)
        table.add_row(*map(escape, (name, column.kind, settings_of(column), why)))
    console.print(table)
    if len(shown) > SHOWN:
        console.print(f"and {len(shown) - SHOWN:,} more columns, all in {out}", highlight=False, markup=False)
    console.print()
    why = reason(schema.labels[0], proposal.why, schema.unconfirmed)
    words = {"label": f"{', '.join(schema.labels)}: {schema.task}, {why}"}
    owners = f"{len(proposal.sizes):,}, named by column '{schema.client_column}'"
    words["clients"] = owners if schema.client_column else "one: no column names the owner of a row"
    budget = plan.keys["budget"]
    words["privacy"] = f"{plan.why['budget.unit']}; epsilon {budget['epsilon']:g}, delta {budget['delta']:g}"
    words["method"] = f"{plan.keys['']['algorithm']}, {plan.keys['']['rounds']} rounds: {plan.why['algorithm']}"
    for key, value in words.items():
        console.print(f"{key:<9}{value}", highlight=False, markup=False)
    for hint in (*_other_label(schema.labels[0], searched), *proposal.hints):
        console.print(f"note     {hint}", highlight=False, markup=False)
    if schema.unconfirmed:
        console.print(
            f"\nConfirm what was read from the data ({listed(schema.unconfirmed, 8)}): no guarantee covers it.\n"
            f"In {out} put in its place what is publicly known, and remove the names from `unconfirmed`.",
            highlight=False, markup=False,
        )  # fmt: skip
    console.print(f"\nwrote {out}; next: shoal run {out}", highlight=False, markup=False)
