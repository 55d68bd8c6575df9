"""`shoal data list|check|import`: what is available, from where, whether it is whole; and your own data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.errors import ConfigError, DataError

if TYPE_CHECKING:
    from shoal.data.catalogue import Entry

app = typer.Typer(help="What data are available, from where; your own data.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """List all data sets that can be named, and check those that are here."""
    from shoal.data.catalogue import entries

    _show(entries(), as_json)


@app.command("check")
def check_command(
    name: Annotated[str | None, typer.Argument(help="One data set; all that are here if left out.")] = None,
    as_json: Json = False,
) -> None:
    """Hash the files of data sets anew and compare them with the published checksums."""
    from shoal.data.catalogue import MISSING, entries, inspect

    shown = [inspect(name)] if name else [entry for entry in entries() if entry.state != MISSING]
    _show(shown, as_json)
    problems = [problem for entry in shown for problem in entry.problems]
    if name and shown[0].state == MISSING:
        missing = [file.path for file in shown[0].files if file.state == MISSING]
        problems.append(
            f"data '{name}': not here are {', '.join(missing)}; a run gets them where there is a network, "
            "or set SHOAL_DATA to the folder that holds them"
        )
    if problems:
        raise DataError("\n".join(problems))


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="A .csv, .parquet or .npz file.")],
    name: Annotated[str | None, typer.Option(help="Name under which it is kept; the file's own if left out.")] = None,
    label: Annotated[str, typer.Option(help="Column with the label.")] = "label",
    client: Annotated[
        str | None, typer.Option(help="Column with the owner of each row; 'client' if there is one.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Column to leave out; may be given again.")] = None,
    bounds: Annotated[
        list[str] | None,
        typer.Option("--range", help="COLUMN=LOW:HIGH, public bounds that put a column of numbers into [0, 1]."),
    ] = None,
    test_fraction: Annotated[float, typer.Option(help="Share of the rows that is held out for testing.")] = 0.2,
    replace: Annotated[bool, typer.Option("--replace", help="Replace data of the same name.")] = False,
    as_json: Json = False,
) -> None:
    """Copy your own table into the data folder, checked, so that its name can be used in a run."""
    from shoal.data.catalogue import import_file

    entry = import_file(
        file,
        name,
        label=label,
        client=client,
        drop=drop or (),
        ranges=dict(_range(text) for text in bounds or ()),
        test_fraction=test_fraction,
        overwrite=replace,
    )
    _show([entry], as_json)


def _range(text: str) -> tuple[str, tuple[float, float]]:
    """`age=0:100` as ('age', (0.0, 100.0))."""
    column, _, pair = text.rpartition("=")
    low, _, high = pair.partition(":")
    try:
        return column, (float(low), float(high))
    except ValueError as error:
        raise ConfigError(f"--range must be COLUMN=LOW:HIGH, for example age=0:100, got '{text}'") from error


def _show(entries: list[Entry], as_json: bool) -> None:
    if as_json:
        found: dict[str, Any] = {"datasets": [entry.as_dict() for entry in entries]}
        sys.stdout.write(json.dumps(found) + "\n")
        return
    typer.echo(f"{'name':<16}{'state':<10}{'shape':<10}{'train':>8}{'test':>8}{'classes':>9}")
    for entry in entries:
        shape = "x".join(map(str, entry.shape))
        rows = f"{entry.train_rows:>8,}{entry.test_rows:>8,}{entry.class_count:>9}"
        typer.echo(f"{entry.name:<16}{entry.state:<10}{shape:<10}{rows}")
        lines = [f"{entry.source} ({entry.licence})", entry.where, *entry.notes]
        for line in filter(None, lines):
            typer.echo(f"    {line}")
