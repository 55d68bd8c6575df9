"""The user's own tables, .csv and .parquet: a label column, perhaps a client column, the rest features.

Numbers are taken as they are, or put into [0, 1] by public `ranges`. Text is one-hot encoded, a missing text
being the category '?'. A missing number is an error: any way of filling it in would guess for the user.

The list of categories that occur in a private column is itself information about the rows, outside any
guarantee. Give the public list with `categories`; a value that is not in it becomes a row of zeros. Where
it is read from the data, the data set's notes say so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.errors import ConfigError, DataError, nearest
from shoal.extras import optional

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = "?"
MISSING_TEXTS = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")
CATEGORY_LIMIT = 1000
NAME_LIMIT = 200  # characters in the name of a class or client
SIZE_LIMIT = 8 << 30  # bytes of features in float32
CLIENT = "client"


@dataclass(frozen=True)
class Encoded:
    """A table as arrays: features `[N, F]` with their names, labels, owners."""

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None
    features: tuple[str, ...]
    notes: tuple[str, ...]


def read_table(path: Path) -> pa.Table:
    """A .csv or .parquet file as an Arrow table with at least one row.

    Raises:
        DataError: The file is damaged, has no rows, or two columns of one name.
        ConfigError: pyarrow is not installed.
    """
    pa = optional("pyarrow", f"reading {path.name}")
    try:
        table = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
        table.validate(full=True)
        names = table.column_names
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(f"{path}: cannot be read as a table: {error}") from error
    if not table.num_rows:
        raise DataError(f"{path}: has no rows")
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{path}: has several columns named {', '.join(map(repr, twice))}; rename them")
    return table


def encode_table(
    table: pa.Table,
    where: str,
    *,
    label: str = "label",
    client: str | None = None,
    drop: Sequence[str] = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
) -> Encoded:
    """Features, labels and owners of a table.

    Args:
        table: What `read_table` gave.
        where: The table's name in messages.
        label: The column that is to be predicted.
        client: The column of owners; None takes a column named 'client' if there is one.
        drop: Columns that are left out.
        ranges: Public bounds (low, high) of numeric columns, which are scaled to [0, 1] by them.
        categories: Public lists of the values of columns, which are one-hot encoded.

    Raises:
        DataError: A column is missing, or holds what cannot be read.
        ConfigError: `ranges` or `categories` name no feature, or label and client are the same column.
    """
    ranges, categories = ranges or {}, categories or {}
    names = table.column_names
    if client is None and CLIENT in names and label != CLIENT:
        client = CLIENT
    _check_roles(names, where, label, client, drop)
    columns = [name for name in names if name not in (label, client, *drop)]
    _check_options(columns, where, ranges, categories)
    if not columns:
        raise DataError(f"{where}: has no feature columns besides {', '.join(names)}")
    blocks, features, notes = [], [], []
    for name in columns:
        column = _decoded(table[name], f"{where}: column '{name}'")
        block, made, note = _encode_column(column, f"{where}: column '{name}'", name, ranges, categories)
        blocks.append(block)
        features += made
        notes += note
        if len(features) * table.num_rows * 4 > SIZE_LIMIT:
            raise DataError(f"{where}: {len(features)} features of {table.num_rows} rows take too much memory")
    y = _plain(table[label], f"{where}: label column '{label}'")
    owners = None if client is None else _plain(table[client], f"{where}: client column '{client}'")
    return Encoded(np.concatenate(blocks, axis=1), y, owners, tuple(features), tuple(notes))


def _check_roles(names: list[str], where: str, label: str, client: str | None, drop: Sequence[str]) -> None:
    for role, wanted in (("label", label), ("client", client), *(("drop", name) for name in drop)):
        if wanted is not None and wanted not in names:
            raise DataError(f"{where}: there is no {role} column '{wanted}'{nearest(wanted, names)}")
    if label == client:
        raise ConfigError(f"{where}: column '{label}' cannot be both label and client")


def _check_options(
    columns: list[str], where: str, ranges: Mapping[str, object], categories: Mapping[str, object]
) -> None:
    for option, given in (("ranges", ranges), ("categories", categories)):
        for name in given:
            if name not in columns:
                raise ConfigError(f"{where}: {option} names column '{name}'{nearest(name, columns)}")


def _read_csv(path: Path) -> pa.Table:
    from pyarrow import csv

    return csv.read_csv(
        path,
        convert_options=csv.ConvertOptions(
            null_values=list(MISSING_TEXTS), strings_can_be_null=True, quoted_strings_can_be_null=True
        ),
    )


def _read_parquet(path: Path) -> pa.Table:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        claimed = file.metadata.num_rows * file.metadata.num_columns
        if claimed * 4 > SIZE_LIMIT:
            raise ValueError(f"claims {file.metadata.num_rows:,} rows of {file.metadata.num_columns:,} columns")
        return file.read()


def _encode_column(
    column: pa.ChunkedArray,
    where: str,
    name: str,
    ranges: Mapping[str, tuple[float, float]],
    categories: Mapping[str, Sequence[str]],
) -> tuple[np.ndarray, list[str], list[str]]:
    """One column as float32 `[N, f]`, the names of its features, and what is to be noted."""
    if not _is_text(column) and name not in categories:
        return _number(column, where, ranges.get(name)), [name], []
    if name in ranges:
        raise ConfigError(f"{where} is text, so it has no range")
    return _one_hot(column.cast("string"), where, name, categories.get(name))


def _number(column: pa.ChunkedArray, where: str, bounds: tuple[float, float] | None) -> np.ndarray:
    if column.null_count:
        raise DataError(
            f"{where}: {column.null_count} of {len(column)} numbers are missing; fill them in with a public "
            "value, or leave the column out (drop=..., or `shoal data import --drop`)"
        )
    values = column.cast("float64", safe=False).to_numpy()
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise DataError(f"{where}: row {row} holds {values[row]}; fill in or remove such values first")
    if bounds is not None:
        low, high = bounds
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"{where}: a range must be two numbers low < high, got {low}, {high}")
        values = np.clip((values - low) / (high - low), 0, 1)
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32)[:, None]


def _one_hot(
    column: pa.ChunkedArray, where: str, name: str, public: Sequence[str] | None
) -> tuple[np.ndarray, list[str], list[str]]:
    coded = column.fill_null(MISSING).combine_chunks().dictionary_encode()
    found, codes = coded.dictionary.to_pylist(), coded.indices.to_numpy()
    if public is not None:
        listed = [str(value) for value in public]
    elif len(found) > CATEGORY_LIMIT:
        raise DataError(
            f"{where}: {len(found)} different texts, too many for categories (at most {CATEGORY_LIMIT}); "
            "leave it out (drop)"
        )
    else:
        listed = sorted(found)
    place = {value: at for at, value in enumerate(listed)}
    placed = np.array([place.get(value, -1) for value in found])[codes]
    one_hot = (placed[:, None] == np.arange(len(listed))).astype(np.float32)
    note = f"the {len(listed)} categories of column '{name}' were read from the data, itself a release"
    return one_hot, [f"{name}={value}" for value in listed], [note] if public is None else []


def _plain(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """A label or client column as whole numbers, floats or text, nothing missing."""
    column = _decoded(column, where)
    if column.null_count:
        raise DataError(f"{where}: {column.null_count} of {len(column)} values are missing; remove these rows")
    if not _is_text(column):
        return np.asarray(column)
    texts = column.to_pylist()
    if (longest := max(map(len, texts))) > NAME_LIMIT:
        raise DataError(f"{where}: a text of {longest} characters is no name (at most {NAME_LIMIT})")
    return np.array(texts, np.str_)


def _decoded(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """A column of numbers or of text, whatever way it is stored; DataError for anything else."""
    import pyarrow as pa
    from pyarrow import types

    held = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_null(held):
        raise DataError(f"{where} is empty; leave it out (drop)")
    is_text = types.is_string(held) or types.is_large_string(held) or types.is_string_view(held)
    if not (is_text or types.is_boolean(held) or types.is_integer(held) or types.is_floating(held)):
        raise DataError(
            f"{where} is of type {column.type}; only numbers and text are read, turn it into one or drop it"
        )
    try:
        return column.cast(pa.string() if is_text else held)
    except pa.ArrowException as error:
        raise DataError(f"{where} cannot be read: {error}") from error


def _is_text(column: pa.ChunkedArray) -> bool:
    from pyarrow import types

    return bool(types.is_string(column.type))
