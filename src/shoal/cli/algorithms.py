"""`shoal algorithms [NAME]`: what each method does, what it proves, what its paper claims."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shoal.algorithms.base import BOUNDARIES, Algorithm
from shoal.algorithms.charges import proves


def command(
    name: Annotated[str | None, typer.Argument(help="One method; all of them if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """What each method does, what it proves, what its paper claims."""
    from shoal.algorithms import algorithm, algorithms

    shown = [algorithm(name)] if name else list(algorithms().values())
    if as_json:
        print(json.dumps({"algorithms": [_facts(record, detail=name is not None) for record in shown]}))
    elif name:
        _show_one(shown[0])
    else:
        _show_all(shown)


def _facts(record: Algorithm, *, detail: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": record.name,
        "paper": record.paper,
        "summary": record.summary,
        "proves": proves(record),
        "published": record.claims,
    }
    return facts | {"boundaries": _boundaries(record)} if detail else facts


def _boundaries(record: Algorithm) -> dict[str, Any]:
    found = {name: getattr(record, name) for name in BOUNDARIES}
    return {
        name: {field.name: getattr(value, field.name) for field in fields(value)} if is_dataclass(value) else None
        for name, value in found.items()
    }


def _show_all(records: list[Algorithm]) -> None:
    table = Table("method", "paper", "proves", "its paper claims", box=None, pad_edge=False)
    for record in records:
        table.add_row(record.name, record.paper, proves(record), record.claims)
    Console().print(table)


def _show_one(record: Algorithm) -> None:
    console = Console()
    console.print(f"[bold]{record.name}[/bold]: {record.summary}")
    console.print(f"paper:     {record.paper}\nproves:    {proves(record)}\npublished: {record.claims}\n")
    table = Table("boundary", "key", "default", box=None, pad_edge=False)
    for boundary, values in _boundaries(record).items():
        if values is None:
            table.add_row(boundary, "", "nothing happens here", style="dim")
        for key, value in (values or {}).items():
            table.add_row(boundary, f"{boundary}.{key}", "not set" if value is None else str(value))
    console.print(table)
