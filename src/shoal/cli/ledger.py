"""`shoal ledger verify|show RUN`: verify and print the record of the privacy that was spent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.exit_codes import REFUTED
from shoal.cli.options import Json, print_json
from shoal.errors import LedgerError

if TYPE_CHECKING:
    from shoal.accounting.hash_chain import Line, Verification

app = typer.Typer(help="Verify and print the ledger of a run.", no_args_is_help=True)

Run = Annotated[Path, typer.Argument(help="A run's folder, or its ledger.jsonl.")]


@app.command("verify")
def verify_command(
    run: Run,
    head: Annotated[
        str | None,
        typer.Option(
            help="A hash that must be in the ledger, which detects truncation; by default the one in the run's "
            "checkpoint."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify the hash chain: an edited, removed or reordered line is named, with exit code 3."""
    from shoal.accounting.hash_chain import verify
    from shoal.report.proof import check
    from shoal.report.run_reader import read_result

    path = _ledger(run)
    found = check(run, read_result(run)) if head is None and run.is_dir() else None
    found = found or verify(path, head)
    if as_json:
        print_json({"ledger": str(path), **found.to_json()})
    else:
        typer.echo(_verdict(path, found))
    if not found.whole:
        raise typer.Exit(REFUTED)


@app.command("show")
def show_command(run: Run, as_json: Json = False) -> None:
    """Print the ledger line by line, up to the first line that fails verification."""
    from shoal.accounting.hash_chain import read

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
        print_json({"ledger": str(path), **found.to_json(), "entries": lines})
    elif not found.whole:
        typer.echo(_verdict(path, found))
    if not found.whole:
        raise typer.Exit(REFUTED)


def _ledger(run: Path) -> Path:
    from shoal.accounting.privacy_ledger import FILE

    path = run / FILE if run.is_dir() else run
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}; name a run's folder or its {FILE}")
    return path


def _verdict(path: Path, found: Verification) -> str:
    if not found.whole:
        return f"{path} is broken: {found.because}"
    torn = "; an incomplete last line, left by a crash, is ignored" if found.torn else ""
    return f"{path} is intact: {found.lines} lines, head {found.head[:16]}{torn}"


def _sentence(line: Line) -> str:
    """A line of the ledger as text; values are printed as JSON, so that no control character gets through."""
    body = {key: value for key, value in line.body.items() if key != "charges"}
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in body.items())
    text = f"{line.number + 1:>6}  {line.kind:<10.10} {words}"
    for charge in line.body.get("charges", []):
        text += f"\n{'':>18}{_charge(charge)}"
    return text


def _charge(charge: dict[str, Any]) -> str:
    """`client, release (zero-out): gaussian, noise 4.74`; --json has every digit."""
    whom = f"{charge.get('unit')}, {charge.get('observer')} ({charge.get('adjacency')})"
    return json.dumps(f"{whom}: {_event(charge.get('event'))}", ensure_ascii=True)[1:-1].replace('\\"', '"')


def _event(event: Any) -> str:
    """An event in words: its kind, then what it holds."""
    if isinstance(event, list):
        return "; ".join(map(_event, event))
    if not isinstance(event, dict):
        return f"{event:.4g}" if isinstance(event, float) else str(event)
    held = [
        f"[{_event(value)}]" if isinstance(value, dict | list) else f"{key} {_event(value)}"
        for key, value in event.items()
        if key != "event" and value is not None
    ]
    return ", ".join([str(event.get("event")), *held])
