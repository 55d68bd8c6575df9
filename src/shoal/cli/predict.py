"""`shoal predict`: what the model of a run says of new records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shoal.cli.options import Json, PersonalClient, TrustCode, print_json, wide_console
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.saved_model import Predictions

SHOWN = 10  # rows


def command(
    run: Annotated[str, typer.Argument(help="A run folder, or the beginning of its name.")],
    file: Annotated[Path | None, typer.Argument(help="New records: .csv, .parquet, .npz or .npy.")] = None,
    data: Annotated[str | None, typer.Option(help="The test rows of a data set instead, by its name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the predictions to this .csv or .parquet file.")] = None,
    runs: Annotated[Path, typer.Option(help="The folder with run folders.")] = Path("runs"),
    client: PersonalClient = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Predict new records with the model of a run."""
    import shoal
    from shoal.report.find import with_model
    from shoal.write_table import check_name, write_table

    if (file is None) == (data is None):
        raise ConfigError("give a file of new records, or --data NAME, one of the two")
    if out is not None:
        check_name(out)
    folder = with_model(run, runs)
    model = shoal.load_model(folder, client=client, trust_code=trust_code)
    found = model.predict(file if data is None else shoal.load(data, scale=model.bundle.scale))
    if out is not None:
        write_table(found.columns, out)
    if as_json:
        print_json(_json(found, folder, out))
    else:
        _show(found, model.task.headline, out)


def _json(found: Predictions, folder: Path, out: Path | None) -> dict[str, Any]:
    written: dict[str, Any] = {"out": str(out)}
    if out is None:
        written = {"predictions": {name: column.tolist() for name, column in found.columns.items()}}
    facts = {"run": str(folder), "records": len(found), "notes": found.notes}
    return facts | {"figures": found.figures, "trivial": found.trivial} | written


def _show(found: Predictions, headline: str, out: Path | None) -> None:
    from shoal.report.scores import name_of, short

    console = wide_console()
    for note in found.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if out is None:
        table = Table(*map(escape, found.columns), box=None, pad_edge=False)
        for row in list(zip(*found.columns.values(), strict=True))[:SHOWN]:
            table.add_row(*(escape(f"{value:.4g}" if value.dtype.kind == "f" else str(value)) for value in row))
        console.print(table)
        if len(found) > SHOWN:
            console.print(f"... {len(found):,} records in all; --out FILE writes them", highlight=False)
    else:
        console.print(f"{len(found):,} predictions in {out}", markup=False, highlight=False)
    if found.figures:
        first = {headline: found.figures.get(headline)} | found.figures
        for name, value in first.items():
            beside = found.trivial.get(name)
            trivial = "" if beside is None else f" (constant answer: {short(round(beside, 6) + 0.0)})"
            said = "not finite" if value is None else short(value)
            console.print(f"{name_of(name)} {said}{trivial}", markup=False, highlight=False)
