"""`shoal algorithms [NAME]`: list methods, what each of them proves and what its paper claims."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.options import Json, print_json

if TYPE_CHECKING:
    from shoal.algorithms.base import Algorithm


def command(
    name: Annotated[str | None, typer.Argument(help="One method; all of them by default.")] = None,
    as_json: Json = False,
) -> None:
    """List methods: what each of them does, what it proves, what its paper claims."""
    from shoal.algorithms import algorithm, algorithms

    shown = [algorithm(name)] if name else list(algorithms().values())
    if as_json:
        print_json({"algorithms": [_facts(record, detail=name is not None) for record in shown]})
    elif name:
        _show_one(shown[0])
    else:
        _show_all(shown)


def _facts(record: Algorithm, *, detail: bool) -> dict[str, Any]:
    from shoal.algorithms import REGISTRY
    from shoal.algorithms.charges import proves
    from shoal.bibliography import cited

    facts: dict[str, Any] = {
        "name": record.name,
        "paper": record.paper,
        "references": list(map(str, cited(record.paper))),
        "summary": record.summary,
        "from": REGISTRY.origin(record.name),
        "proves": proves(record),
        "published": record.claims,
    }
    return facts | {"boundaries": _boundaries(record)} if detail else facts


def _boundaries(record: Algorithm) -> dict[str, Any]:
    from shoal.algorithms.base import BOUNDARIES

    found = {name: getattr(record, name) for name in BOUNDARIES}
    return {
        name: {field.name: getattr(value, field.name) for field in fields(value)} if is_dataclass(value) else None
        for name, value in found.items()
    }


def _show_all(records: list[Algorithm]) -> None:
    from shoal.algorithms import REGISTRY
    from shoal.algorithms.charges import proves

    table = Table("method", "paper", "proves", "its paper claims", box=None, pad_edge=False)
    for record in records:
        origin = REGISTRY.origin(record.name)
        paper = record.paper if origin == "shoal" else f"{record.paper} (from {origin})"
        table.add_row(*map(escape, (record.name, paper, proves(record), record.claims)))
    Console(emoji=False).print(table)


def _show_one(record: Algorithm) -> None:
    from shoal.algorithms import REGISTRY
    from shoal.algorithms.charges import proves
    from shoal.bibliography import cited

    console = Console(emoji=False)
    console.print(f"[bold]{record.name}[/bold]: {record.summary}")
    origin = REGISTRY.origin(record.name)
    console.print(f"from:      {origin}\npaper:     {record.paper}", markup=False)
    console.print(f"proves:    {proves(record)}\npublished: {record.claims}", markup=False)
    for reference in cited(record.paper):
        console.print(f"reference: {reference}", markup=False, highlight=False)
    console.print()
    table = Table("boundary", "key", "default", box=None, pad_edge=False)
    for boundary, values in _boundaries(record).items():
        table.add_row(boundary, "", escape(_summary(getattr(record, boundary))), style="dim")
        for key, value in (values or {}).items():
            table.add_row("", f"{boundary}.{key}", "not set" if value is None else escape(str(value)))
    console.print(table)


def _summary(value: object) -> str:
    """What happens at a boundary: the first paragraph of its record's docstring."""
    if value is None:
        return "nothing happens here"
    from shoal.mechanisms.statements import summary

    return summary(value)
