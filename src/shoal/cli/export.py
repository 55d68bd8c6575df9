"""`shoal export`: the model of a run as an ONNX or TorchScript file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Json, PersonalClient, TrustCode, print_json


def command(
    run: Annotated[str, typer.Argument(help="A run folder, or the beginning of its name.")],
    kind: Annotated[str, typer.Option("--format", help="onnx or torchscript.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help="The file; model.onnx or model.pt in the run if omitted.")] = None,
    runs: Annotated[Path, typer.Option(help="The folder with run folders.")] = Path("runs"),
    client: PersonalClient = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Export the model of a run for other programs."""
    import shoal
    from shoal.model_export import export, file_name, takes
    from shoal.report.find import with_model

    folder = with_model(run, runs)
    path = out or folder / file_name(kind)
    model = shoal.load_model(folder, client=client, trust_code=trust_code)
    error = export(model, path, kind)
    about = {"out": str(path), "format": kind, "input_shape": model.bundle.input_shape}
    if as_json:
        print_json(about | {"input_type": model.bundle.input_type, "largest_difference": error})
        return
    typer.echo(f"{path}: takes {takes(model.bundle)}; differs from the model by at most {error:.1g}")
    if model.bundle.note:
        typer.echo(f"note: {model.bundle.note}")
    typer.echo("it holds the network alone: encode records as `shoal predict` does, by the schema in model.json")
