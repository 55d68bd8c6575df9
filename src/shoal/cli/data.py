"""`shoal data list|check|import|remove`: list data sets, verify their files, import and remove your own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import Json, print_json
from shoal.errors import ConfigError, DataError

if TYPE_CHECKING:
    from shoal.data.catalogue import Entry

app = typer.Typer(help="List and verify data sets; import your own.", no_args_is_help=True)


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """List all data sets, and which of them are on this machine; also copies of your own tables."""
    from shoal.data.catalogue import entries
    from shoal.data.large_tables import copies

    shown, kept = entries(), copies()
    if as_json:
        listed = [{"name": each.name, "where": str(each.where), "source": each.source} for each in kept]
        print_json({"datasets": [entry.as_dict() for entry in shown], "copies": listed})
        return
    _show(shown, as_json)
    for each in kept:
        source = each.source or "a table whose conversion was cut off"
        typer.echo(f"{each.name}: copy of {source}, {each.size / 2**30:.1f} GiB\n    {each.where}")


@app.command("check")
def check_command(
    name: Annotated[str | None, typer.Argument(help="One data set; all on this machine if omitted.")] = None,
    as_json: Json = False,
) -> None:
    """Hash the files of data sets and compare them with the published checksums."""
    from shoal.data.catalogue import entries, inspect
    from shoal.data.known import MISSING

    shown = [inspect(name)] if name else [entry for entry in entries() if entry.state != MISSING]
    _show(shown, as_json)
    problems = [problem for entry in shown for problem in entry.problems]
    if name and shown[0].state == MISSING:
        problems.append(_missing(shown[0]))
    if problems:
        raise DataError("\n".join(problems))


def _missing(entry: Entry) -> str:
    from shoal.data.known import MISSING

    files = ", ".join(file.path for file in entry.files if file.state == MISSING)
    return (
        f"data '{entry.name}': missing {files}; a run downloads them where there is a network, or set SHOAL_DATA to "
        f"the folder that has them"
    )


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="A .csv, .parquet or .npz file.")],
    name: Annotated[str | None, typer.Option(help="Its name; the file's own if omitted.")] = None,
    label: Annotated[str, typer.Option(help="The label column.")] = "label",
    client: Annotated[
        str | None, typer.Option(help="The column with each row's owner; 'client' if there is one.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column to drop; may be repeated.")] = None,
    bounds: Annotated[
        list[str] | None,
        typer.Option("--range", help="COLUMN=LOW:HIGH, public bounds that scale a numeric column to [0, 1]."),
    ] = None,
    test_fraction: Annotated[float, typer.Option(help="The share of rows held out for testing.")] = 0.2,
    replace: Annotated[bool, typer.Option("--replace", help="Replace data of the same name.")] = False,
    as_json: Json = False,
) -> None:
    """Check your own table and copy it into the data folder, so that runs can name it."""
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
    if not as_json:
        typer.echo(
            f"copied to {entry.where}, readable by you alone; `shoal data remove {entry.name}` deletes the copy"
        )


@app.command("remove")
def remove_command(
    name: Annotated[
        str, typer.Argument(help="The name under which it was imported, or the table whose converted copy it is.")
    ],
    as_json: Json = False,
) -> None:
    """Delete the copy of a table of yours, imported or converted; your own file stays."""
    from shoal.data.imported import remove
    from shoal.data.large_tables import remove_copy

    paths = remove_copy(name) or [remove(name)]
    if as_json:
        print_json({"removed": name, "where": ", ".join(map(str, paths))})
    else:
        typer.echo("\n".join(f"removed {path}" for path in paths))


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
        print_json({"datasets": [entry.as_dict() for entry in entries]})
        return
    typer.echo(f"{'name':<16}{'state':<10}{'shape':<10}{'train':>8}{'test':>8}{'classes':>9}")
    for entry in entries:
        shapes = entry.shape.items() if isinstance(entry.shape, dict) else [("", entry.shape)]
        shape = " ".join(f"{name} {'x'.join(map(str, sizes)) or 1}".strip() for name, sizes in shapes)
        rows = f"{entry.train_rows:>8,}{entry.test_rows:>8,}{entry.class_count:>9}"
        typer.echo(f"{entry.name:<16}{entry.state:<10}{shape:<10}{rows}")
        lines = [f"{entry.source} ({entry.licence})", entry.where, *entry.notes]
        for line in filter(None, lines):
            typer.echo(f"    {line}")
