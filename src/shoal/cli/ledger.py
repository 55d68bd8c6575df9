"""`shoal ledger verify|show RUN`: has anybody touched the record of what was spent, and what does it say?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.errors import LedgerError

if TYPE_CHECKING:
    from shoal.accounting.chain import Line, Verification

app = typer.Typer(help="Check and read the ledger of a run.", no_args_is_help=True)

BROKEN = 3
"""Exit code where the chain does not hold."""

Run = Annotated[Path, typer.Argument(help="A run's folder, or its ledger.jsonl.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]


@app.command("verify")
def verify_command(
    run: Run,
    head: Annotated[
        str | None,
        typer.Option(
            help="A hash that must be in the ledger, to notice that its end was cut off; by itself the one that the "
            "run's checkpoint names."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the chain: an edited, dropped or reordered line is found and named, with exit code 3."""
    from shoal.accounting.chain import verify
    from shoal.report.folder import read_result
    from shoal.report.proof import check

    path = _ledger(run)
    found = check(run, read_result(run)) if head is None and run.is_dir() else None
    found = found or verify(path, head)
    if as_json:
        sys.stdout.write(json.dumps({"ledger": str(path), **found.to_json()}) + "\n")
    else:
        typer.echo(_verdict(path, found))
    if not found.whole:
        raise typer.Exit(BROKEN)


@app.command("show")
def show_command(run: Run, as_json: Json = False) -> None:
    """Print what the ledger says, line by line, up to the first line that cannot be trusted."""
    from shoal.accounting.chain import read

    path = _ledger(run)
    lines: list[dict[str, Any]] = []

    def take(line: Line) -> None:
        if as_json:
            lines.append({"n": line.number, "kind": line.kind, "hash": line.hash, **line.body})
        else:
            typer.echo(_sentence(line))

    with path.open("rb") as file:
        found, _ = read(file, take)
    if as_json:
        sys.stdout.write(json.dumps({"ledger": str(path), **found.to_json(), "entries": lines}) + "\n")
    elif not found.whole:
        typer.echo(_verdict(path, found))
    if not found.whole:
        raise typer.Exit(BROKEN)


def _ledger(run: Path) -> Path:
    from shoal.accounting.ledger import FILE

    path = run / FILE if run.is_dir() else run
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}; name a run's folder or its {FILE}")
    return path


def _verdict(path: Path, found: Verification) -> str:
    if not found.whole:
        return f"{path} is broken: {found.because}"
    torn = "; a last line that a crash left half written does not count" if found.torn else ""
    return f"{path} is whole: {found.lines} lines, head {found.head[:16]}{torn}"


def _sentence(line: Line) -> str:
    """A line of the ledger for people; what it holds is printed as JSON, so that nothing in it can act."""
    body = {key: value for key, value in line.body.items() if key != "charges"}
    said = " ".join(f"{key}={json.dumps(value)}" for key, value in body.items())
    text = f"{line.number + 1:>6}  {line.kind:<10.10} {said}"
    for charge in line.body.get("charges", []):
        text += f"\n{'':>18}{json.dumps(charge)}"
    return text
