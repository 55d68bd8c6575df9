"""A table without a schema: a label column, perhaps a client column, the rest features.

Numbers are taken as they are, or put into [0, 1] by public `ranges`. Text is one-hot encoded, a missing text
being the category '?'. A missing number is an error: any way of filling it in would guess for the user, and a schema
(`shoal init`) says how.

The list of categories that occur in a private column is itself information about the rows, outside any
guarantee. Give the public list with `categories`; a value that is not in it becomes a row of zeros. Where
it is read from the data, the data set's notes say so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shoal.data.cell_values import by_name, decoded
from shoal.data.columns import CATEGORY_LIMIT
from shoal.data.table_files import MANY, SIZE_LIMIT, missing_columns
from shoal.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = "?"
NAME_LIMIT = 200  # characters in the name of a class or client
CLIENT = "client"


@dataclass(frozen=True)
class Encoded:
    """A table as arrays.

    Attributes:
        inputs: Float32 [N, F], or int64 [N, T] of tokens.
        targets: The labels, as the task has them where there is a schema; None where they were not read.
        owners: The owner of each row; None where nobody knows.
        features: The names of the F numbers.
        notes: What a reader of results should know.
        users: The users of each row, [N, U], '' where it has fewer; None where rows name none.
    """

    inputs: np.ndarray
    targets: np.ndarray | None
    owners: np.ndarray | None
    features: tuple[str, ...]
    notes: tuple[str, ...]
    users: np.ndarray | None = None


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
    cells = by_name(table)
    held = {name: _held(cells[name], f"{where}: column '{name}'") for name in columns}
    _refuse_gaps(where, {name: column for name, column in held.items() if name not in categories})
    for name, column in held.items():
        block, made, note = _encode_column(column, f"{where}: column '{name}'", name, ranges, categories)
        blocks.append(block)
        features += made
        notes += note
        if len(features) * table.num_rows * 4 > SIZE_LIMIT:
            raise DataError(f"{where}: {len(features)} features of {table.num_rows} rows take too much memory")
    y = _plain(table[label], f"{where}: label column '{label}'")
    owners = None if client is None else _plain(table[client], f"{where}: client column '{client}'")
    return Encoded(np.concatenate(blocks, axis=1), y, owners, tuple(features), tuple(notes))


def encode_again(
    table: pa.Table, where: str, features: Sequence[str], label: str | None, ranges: Mapping[str, tuple[float, float]]
) -> Encoded:
    """New rows as `encode_table` made features of earlier ones; the label where it is there and can be read.

    Raises:
        DataError: Columns are missing, all of which are named, or hold what cannot be read.
    """
    columns = _columns_of(features, table.column_names)
    if lacks := missing_columns(list(columns), table.column_names):
        raise DataError(f"{where}: {lacks}")
    held = {name: _held(table[name], f"{where}: column '{name}'") for name in columns}
    _refuse_gaps(where, {name: held[name] for name, values in columns.items() if not values})
    blocks, unknown = [], Counter[str]()
    for name, values in columns.items():
        here = f"{where}: column '{name}'"
        if values:
            block, _, _ = _one_hot(held[name].cast("string"), here, name, values)
            unknown[name] = int((block.sum(1) == 0).sum())
        elif _is_text(held[name]):
            raise DataError(f"{here} holds text, but the model was trained on numbers there")
        else:
            block = _number(held[name], here, ranges.get(name))
        blocks.append(block)
    counts = ", ".join(f"{name} {count:,}" for name, count in (+unknown).most_common(5))
    notes = [f"values in no known category, taken as none of them: {counts}"] if counts else []
    y = None
    if label in table.column_names:
        try:
            y = _plain(table[label], f"{where}: label column '{label}'")
        except DataError as error:
            notes.append(f"no figures: {error}")
    return Encoded(np.concatenate(blocks, axis=1), y, None, tuple(features), tuple(notes))


def _columns_of(features: Sequence[str], there: Sequence[str]) -> dict[str, list[str]]:
    """The columns that features were made of, each with its categories; none for numbers."""
    found: dict[str, list[str]] = {}
    names = set(there)
    for feature in features:
        parts = feature.split("=")
        splits = [("=".join(parts[:at]), "=".join(parts[at:])) for at in range(1, len(parts))]
        if feature in names or not splits:
            found[feature] = []
        else:
            name, value = next((split for split in splits if split[0] in names), splits[0])
            found.setdefault(name, []).append(value)
    return found


def _refuse_gaps(where: str, columns: Mapping[str, pa.ChunkedArray]) -> None:
    """Raise a DataError that names all columns of numbers with missing ones."""
    gaps = {name: column.null_count for name, column in columns.items() if not _is_text(column) and column.null_count}
    if gaps:
        counts = ", ".join(f"{name} {count:,}" for name, count in list(gaps.items())[:MANY])
        more = f" and {len(gaps) - MANY} more columns" if len(gaps) > MANY else ""
        raise DataError(
            f"{where}: numbers are missing ({counts}{more}); `shoal init` writes a schema that fills them, "
            f"or leave these columns out (drop=..., or `shoal data import --drop`)"
        )


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
    column = _held(column, where)
    if column.null_count:
        raise DataError(f"{where}: {column.null_count} of {len(column)} values are missing; remove these rows")
    if not _is_text(column):
        return np.asarray(column)
    texts = column.to_pylist()
    if (longest := max(map(len, texts))) > NAME_LIMIT:
        raise DataError(f"{where}: a text of {longest} characters is too long for a name (at most {NAME_LIMIT})")
    return np.array(texts, np.str_)


def _held(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    from pyarrow import types

    if types.is_null(column.type):
        raise DataError(f"{where} is empty; leave it out (drop), or say what it is in a schema (`shoal init`)")
    return decoded(column, where)


def _is_text(column: pa.ChunkedArray) -> bool:
    from pyarrow import types

    return bool(types.is_string(column.type))
