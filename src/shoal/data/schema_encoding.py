"""A table as arrays, by its schema; a value that cannot be used is an error that names column, row and fix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.data.cell_values import by_name, numbers_of, texts_of
from shoal.data.columns import MISSING_TEXTS, Number, Tally, Text, codes_of, plain
from shoal.data.table_files import SIZE_LIMIT, missing_columns, read_columns
from shoal.data.tables import NAME_LIMIT, Encoded
from shoal.errors import DataError, nearest
from shoal.tasks.next_token import PADDING

if TYPE_CHECKING:
    import pyarrow as pa

    from shoal.data.schema import Schema


def read(schema: Schema, path: Path, *, targets: bool, owners: bool) -> pa.Table:
    """The columns of a file that the schema needs."""
    return read_columns(path, _needed(schema, targets, owners))


def encode(schema: Schema, table: pa.Table, where: str, *, targets: bool, owners: bool) -> Encoded:
    """Inputs, targets, owners and notes of a table."""
    if lacks := missing_columns(_needed(schema, targets, owners), table.column_names):
        raise DataError(f"{where}: {lacks}")
    tally, columns = Tally.new(), by_name(table)
    inputs = _inputs(schema, columns, table.num_rows, where, tally)
    found = None
    if schema.task == "next-token":
        inputs, found = inputs[:, :-1], np.where(inputs[:, 1:] == 0, PADDING, inputs[:, 1:])
    elif targets:
        found = _targets(schema, columns, where, tally)
    names = None
    if owners and schema.client_column is not None:
        names = _owners(columns[schema.client_column], f"{where}: client column '{schema.client_column}'")
    return Encoded(inputs, found, names, schema.features, _unconfirmed(schema) + tally.notes())


def _needed(schema: Schema, targets: bool, owners: bool) -> list[str]:
    client = (schema.client_column,) if owners and schema.client_column else ()
    return [*schema.inputs, *(schema.labels if targets else ()), *client]


def _inputs(schema: Schema, table: dict[str, pa.ChunkedArray], rows: int, where: str, tally: Tally) -> np.ndarray:
    width = len(schema.features)
    if width * rows * 4 > SIZE_LIMIT:
        raise DataError(f"{where}: {width:,} features of {rows:,} rows take too much memory; ignore some columns")
    tokens = any(isinstance(column, Text) and column.tokens for column in schema.inputs.values())
    found = np.empty((rows, width), np.int64 if tokens else np.float32)
    at = 0
    for name, column in schema.inputs.items():
        here = f"{where}: column '{name}'"
        try:
            if isinstance(column, Number):
                block = column.encode(name, numbers_of(table[name], here), tally)
            else:
                known = getattr(column, "categories", ())
                block = column.encode(name, _cells(table[name], here, known), tally)  # type: ignore[union-attr]
        except DataError as error:
            raise error if str(error).startswith(here) else DataError(f"{here}: {error}") from None
        found[:, at : at + block.shape[1]] = block
        at += block.shape[1]
    return found


def _cells(column: pa.ChunkedArray, where: str, known: tuple[str, ...] = ()) -> np.ndarray:
    """Texts, None where a cell is missing; a category may well be called NA."""

    def cell(text: str) -> str | None:
        text = plain(text)
        return None if text in MISSING_TEXTS and text not in known else text

    return texts_of(column, where, cell)


def _targets(schema: Schema, table: dict[str, pa.ChunkedArray], where: str, tally: Tally) -> np.ndarray:
    if schema.task == "classification":
        (label,) = schema.labels
        return _classes(table[label], schema.classes, f"{where}: label column '{label}'")
    columns = []
    for label in schema.labels:
        here = f"{where}: label column '{label}'"
        if schema.range is None:
            columns.append(_classes(_as_bits(table[label]), ("0", "1"), here))
            continue
        numbers = numbers_of(table[label], here)
        _refuse_missing(np.isnan(numbers), here)
        low, high = schema.range
        tally.clipped[label] += int(((numbers < low) | (numbers > high)).sum())
        columns.append(numbers)
    found = np.stack(columns, 1).astype(np.float32)
    return found if schema.task == "multi-label" or isinstance(schema.label, tuple) else found[:, 0]


def _as_bits(column: pa.ChunkedArray) -> pa.ChunkedArray:
    from pyarrow import types

    return column.cast("int8") if types.is_boolean(column.type) else column


def _classes(column: pa.ChunkedArray, classes: tuple[str, ...], where: str) -> np.ndarray:
    texts = _cells(column, where, classes)
    _refuse_missing(texts == None, where)  # noqa: E711  each element
    codes = codes_of(texts, classes)
    if (codes < 0).any():
        row = int((codes < 0).argmax())
        raise DataError(
            f"{where}: data row {row + 1} holds {texts[row]!r}, which is no class{nearest(texts[row], classes)}"
        )
    return codes


def _owners(column: pa.ChunkedArray, where: str) -> np.ndarray:
    texts = _cells(column, where)
    _refuse_missing(texts == None, where)  # noqa: E711  each element
    if (longest := max(map(len, texts))) > NAME_LIMIT:
        raise DataError(f"{where}: a text of {longest} characters is no name (at most {NAME_LIMIT})")
    return texts.astype(np.str_)


def _refuse_missing(absent: np.ndarray, where: str) -> None:
    if absent.any():
        row = int(absent.argmax()) + 1
        raise DataError(
            f"{where}: {absent.sum():,} of {len(absent):,} values are missing, first in data row {row}; remove "
            f"these rows"
        )


def _unconfirmed(schema: Schema) -> tuple[str, ...]:
    if not schema.unconfirmed:
        return ()
    first = ", ".join(schema.unconfirmed[:5]) + (", ..." if len(schema.unconfirmed) > 5 else "")
    return (
        f"ranges or categories of {len(schema.unconfirmed)} columns ({first}) were proposed from the data, outside "
        f"any guarantee: replace them by what is public, then remove their names from schema.unconfirmed",
    )
