"""A table as arrays, by its schema; a value that cannot be used is an error that names column, row and fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.data.cell_values import by_name, decoded, numbers_of, texts_of
from shoal.data.columns import INEXACT, MISSING_TEXTS, Number, Tally, Text, codes_of, owner, plain
from shoal.data.schema import Schema
from shoal.data.table_files import SIZE_LIMIT, missing_columns, read_columns
from shoal.data.tables import NAME_LIMIT, Encoded
from shoal.errors import DataError, listed, nearest
from shoal.tasks.next_token import PADDING

if TYPE_CHECKING:
    import pyarrow as pa

DIGITS = {16: 11, 32: 24, 64: 53}  # binary ones that a float of so many bits holds


def read_by_schema(schema: Schema, path: Path, *, targets: bool = True, owners: bool = True) -> pa.Table:
    """The schema's columns of a .csv or .parquet file.

    Raises:
        DataError: The file cannot be read, or lacks columns; all of them are named.
    """
    return read_columns(path, needed(schema, targets, owners))


def encode_by_schema(
    schema: Schema, table: pa.Table, where: str = "the table", *, targets: bool = True, owners: bool = True
) -> Encoded:
    """Inputs, targets, owners and notes of a table.

    Args:
        schema: What the table's columns are.
        table: What `read_by_schema` gave, or any Arrow table.
        where: The table's name in messages.
        targets: Whether to read the label; not for predictions.
        owners: Whether to read the client column; not at a site, where all rows have one owner.

    Raises:
        DataError: A column is missing, or a value in it cannot be used.
    """
    if lacks := missing_columns(needed(schema, targets, owners), table.column_names):
        raise DataError(f"{where}: {lacks}")
    tally = Tally.new()
    inputs, found = encode_piece(schema, table, where, tally, targets=targets)
    names = owners_in(schema, table, where) if owners and schema.client_column is not None else None
    users = _users_in(schema, table, where) if targets and schema.users else None
    return Encoded(inputs, found, names, schema.features, unconfirmed(schema) + tally.notes(), users)


def encode_piece(
    schema: Schema, table: pa.Table, where: str, tally: Tally, *, targets: bool = True, before: int = 0
) -> tuple[np.ndarray, np.ndarray | None]:
    """Inputs and targets of some rows, `before` which others stand in the file; what is changed is counted."""
    columns = by_name(table)
    inputs = _inputs(schema, columns, table.num_rows, where, tally, before)
    if schema.task == "next-token":
        return inputs[:, :-1], np.where(inputs[:, 1:] == 0, PADDING, inputs[:, 1:])
    return inputs, _targets(schema, columns, where, tally, before) if targets else None


def owners_in(schema: Schema, table: pa.Table, where: str, before: int = 0) -> np.ndarray:
    """The owner of each row, as text."""
    assert schema.client_column is not None
    here = f"{where}: client column '{schema.client_column}'"
    texts = _owners(table[schema.client_column], here)
    _refuse_missing(texts == None, here, before)  # noqa: E711  each element
    return _names(texts, here)


def _users_in(schema: Schema, table: pa.Table, where: str) -> np.ndarray:
    """The users of each row, as text, '' where a row has fewer than others."""
    columns = [_owners(table[name], f"{where}: user column '{name}'") for name in schema.users]
    found = np.stack(columns, axis=1)
    here = f"{where}: user column {' and '.join(map(repr, schema.users))}"
    _refuse_missing((found == None).all(axis=1), here, 0)  # noqa: E711  each element
    found[found == None] = ""  # noqa: E711
    return _names(found, here)


def _owners(column: pa.ChunkedArray, here: str) -> np.ndarray:
    """Clients or users as text, None where a cell is missing."""
    from pyarrow import types

    column = decoded(column, here)
    if types.is_decimal(column.type):  # exact, whatever its digits
        return _cells(column, here)
    if types.is_floating(column.type):
        numbers = np.asarray(column.cast("float64").to_numpy())
        if (large := np.abs(numbers) >= 2 ** DIGITS[column.type.bit_width]).any():
            raise DataError(f"{here}: {INEXACT.format(numbers[large.argmax()])}")
    try:
        return _cells(column, here, clean=owner)
    except DataError as error:
        raise error if str(error).startswith(here) else DataError(f"{here}: {error}") from None


def _names(texts: np.ndarray, here: str) -> np.ndarray:
    if (longest := max(map(len, texts.flat))) > NAME_LIMIT:
        raise DataError(f"{here}: a text of {longest} characters is too long for a name (at most {NAME_LIMIT})")
    return texts.astype(np.str_)


def needed(schema: Schema, targets: bool, owners: bool) -> list[str]:
    """The columns that are read."""
    client = (schema.client_column,) if owners and schema.client_column else ()
    return [*schema.inputs, *((*schema.labels, *schema.users) if targets else ()), *client]


def _inputs(
    schema: Schema, table: dict[str, pa.ChunkedArray], rows: int, where: str, tally: Tally, before: int
) -> np.ndarray:
    width = len(schema.features)
    if width * rows * 4 > SIZE_LIMIT:
        raise DataError(f"{where}: {width:,} features of {rows:,} rows take too much memory; ignore some columns")
    found = np.empty((rows, width), input_type(schema))
    at = 0
    for name, column in schema.inputs.items():
        here = f"{where}: column '{name}'"
        try:
            if isinstance(column, Number):
                block = column.encode(name, numbers_of(table[name], here, before), tally)
            else:
                known, clean = getattr(column, "categories", ()), str if isinstance(column, Text) else plain
                block = column.encode(name, _cells(table[name], here, known, clean), tally)  # type: ignore[union-attr]
        except DataError as error:
            raise error if str(error).startswith(here) else DataError(f"{here}: {error}") from None
        found[:, at : at + block.shape[1]] = block
        at += block.shape[1]
    return found


def input_type(schema: Schema) -> type[np.float32 | np.int64]:
    """Tokens are whole numbers."""
    tokens = any(isinstance(column, Text) and column.tokens for column in schema.inputs.values())
    return np.int64 if tokens else np.float32


def _cells(
    column: pa.ChunkedArray, where: str, known: tuple[str, ...] = (), clean: Callable[[str], str] = plain
) -> np.ndarray:
    """Texts, None where a cell is missing; a category may well be called NA."""

    def cell(text: str) -> str | None:
        text = clean(text)
        return None if text.strip() in MISSING_TEXTS and text not in known else text

    return texts_of(column, where, cell)


def _targets(schema: Schema, table: dict[str, pa.ChunkedArray], where: str, tally: Tally, before: int) -> np.ndarray:
    if schema.task == "classification":
        (label,) = schema.labels
        return _classes(table[label], schema.classes, f"{where}: label column '{label}'", before)
    columns = []
    for label in schema.labels:
        here = f"{where}: label column '{label}'"
        if schema.range is None:
            columns.append(bits_of(table[label], here, before))
            continue
        numbers = numbers_of(table[label], here, before)
        _refuse_missing(np.isnan(numbers), here, before)
        low, high = schema.range
        tally.clipped[label] += int(((numbers < low) | (numbers > high)).sum())
        columns.append(numbers)
    found = np.stack(columns, 1).astype(np.float32)
    return found if schema.task == "multi-label" or isinstance(schema.label, tuple) else found[:, 0]


def bits_of(column: pa.ChunkedArray, where: str, before: int = 0) -> np.ndarray:
    """0 and 1, as the labels of a multi-label task are."""
    from pyarrow import types

    return _classes(column.cast("int8") if types.is_boolean(column.type) else column, ("0", "1"), where, before)


def _classes(column: pa.ChunkedArray, classes: tuple[str, ...], where: str, before: int) -> np.ndarray:
    texts = _cells(column, where, classes)
    _refuse_missing(texts == None, where, before)  # noqa: E711  each element
    codes = codes_of(texts, classes)
    if (codes < 0).any():
        row = int((codes < 0).argmax())
        meant = nearest(texts[row], classes)
        raise DataError(f"{where}: data row {before + row + 1} holds {texts[row]!r}, which is not a class{meant}")
    return codes


def _refuse_missing(absent: np.ndarray, where: str, before: int) -> None:
    if absent.any():
        row = before + int(absent.argmax()) + 1
        raise DataError(
            f"{where}: {absent.sum():,} of {len(absent):,} values are missing, first in data row {row}; remove "
            f"these rows"
        )


def unconfirmed(schema: Schema) -> tuple[str, ...]:
    """A note on what nobody has confirmed yet."""
    if not schema.unconfirmed:
        return ()
    columns = "1 column" if len(schema.unconfirmed) == 1 else f"{len(schema.unconfirmed)} columns"
    return (
        f"ranges or categories of {columns} ({listed(schema.unconfirmed, 5)}) were proposed from the data, outside "
        f"any guarantee: replace them by what is public, then remove their names from schema.unconfirmed",
    )
