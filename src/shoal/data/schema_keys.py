"""The schema among the flat keys of a configuration."""

from __future__ import annotations

from typing import Any

from shoal.checked import checked, short
from shoal.data.schema import Schema
from shoal.errors import ConfigError, nearest


def take_schema(given: dict[str, Any]) -> Schema | None:
    """Take the schema out of the keys; `schema.columns.age.missing` changes one setting of one column."""
    found = {key: given.pop(key) for key in list(given) if key.partition(".")[0] == "schema"}
    if isinstance(whole := found.pop("schema", {}), Schema):
        found = {f"schema.{key}": value for key, value in whole.to_mapping().items()} | found
    elif whole != {}:
        raise ConfigError(f"schema cannot be {short(whole)}: it is a section, see `shoal init`")
    columns = dict(checked("schema.columns", found.pop("schema.columns", {}), dict[str, Any]))
    mapping: dict[str, Any] = {}
    for key, value in found.items():
        name = key.removeprefix("schema.")
        if not name.startswith("columns."):
            mapping[name] = value
            continue
        column, _, field = name.removeprefix("columns.").rpartition(".")
        if not isinstance(columns.get(column), dict):
            raise ConfigError(f"{key}: there is no schema.columns.{column}{nearest(column, columns)}")
        columns[column] = columns[column] | {field: value}
    if columns:
        mapping["columns"] = columns
    return Schema.of(mapping) if mapping else None
