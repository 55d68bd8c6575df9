"""The commented experiment.toml that `shoal init` writes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from shoal.data.columns import Column
from shoal.data.propose import Proposal
from shoal.errors import listed
from shoal.suggest import Plan
from shoal.toml_text import toml_key, toml_word

HEAD = """\
# Written by `shoal init {file}` from the names and types of its columns, and from a look at its values.
# CONFIRM marks what was read from the data, which no guarantee covers: put in its place what is publicly known, and
# remove the name from `unconfirmed`.
"""


def experiment(file: Path, proposal: Proposal, plan: Plan) -> str:
    """The text of the file."""
    clients = {"clients": len(proposal.sizes)} if proposal.sizes else {}
    tables = {"": plan.keys[""], "data": {"name": str(file)} | clients}
    tables |= {name: keys for name, keys in plan.keys.items() if name}
    why = plan.why | {"data.clients": "how many there are, a public number; for `shoal serve` the number of sites"}
    lines = [HEAD.format(file=file.name)]
    for name, keys in tables.items():
        lines += [f"[{name}]"] if name else []
        lines += [_line(key, value, why.get(f"{name}.{key}" if name else key)) for key, value in keys.items()]
        lines += [""]
    return "\n".join([*lines, *_schema(proposal)]) + "\n"


def settings_of(column: Column) -> str:
    """What a schema says of a column besides its kind, in words."""
    found = []
    for key in ("range", "categories", "buckets", "tokens", "missing"):
        if (value := getattr(column, key, None)) is None:
            continue
        if key == "range":
            found.append(f"{value[0]:g} to {value[1]:g}")
        elif key == "categories":
            found.append(listed(value, 5))
        else:
            found.append(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
    return "; ".join(found)


def _schema(proposal: Proposal) -> list[str]:
    mapping, why = proposal.schema.to_mapping(), proposal.why
    columns, unconfirmed = mapping.pop("columns"), set(proposal.schema.unconfirmed)
    notes = {"label": reason(proposal.schema.labels[0], why, unconfirmed) if proposal.schema.labels else None}
    notes["unconfirmed"] = "ranges and categories that were read from the data" if unconfirmed else None
    lines = [
        "[schema]",
        *(_line(key, value, notes.get(key)) for key, value in mapping.items()),
        "",
        "[schema.columns]",
    ]
    texts = {name: f"{toml_key(name)} = {toml_word(_tidy(each))}" for name, each in columns.items()}
    width = min(60, max(map(len, texts.values())))
    return lines + [f"{text:<{width}}  # {reason(name, why, unconfirmed)}" for name, text in texts.items()]


def reason(name: str, why: dict[str, str], unconfirmed: Collection[str]) -> str:
    """Why a column is what it is, marked where that was read from the data."""
    return f"CONFIRM: {why[name]}, read from the data" if name in unconfirmed else why[name]


def _line(key: str, value: Any, comment: str | None) -> str:
    text = f"{key} = {toml_word(_tidy(value))}"
    return text if comment is None else f"{text:<40}  # {comment}"


def _tidy(value: Any) -> Any:
    """Whole numbers without a fraction, for people."""
    if isinstance(value, dict):
        return {key: _tidy(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_tidy(each) for each in value]
    return int(value) if isinstance(value, float) and value == int(value) and abs(value) < 1e15 else value
