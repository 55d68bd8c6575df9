"""The cells of an Arrow column as numbers or texts, whatever way they are stored; nothing is guessed."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

from shoal.checked import short
from shoal.data.columns import MISSING_TEXTS
from shoal.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*(,\d+|(,\d{3})+(\.\d+)?|(\.\d{3})+,\d+)\s*", re.ASCII)
WRITE_POINTS = "write 12.5 for 12,5 and 1234 for 1,234; in Python: pandas.read_csv(FILE, sep=';', decimal=',')"


def by_name(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The columns of a table; each lookup in the table itself would go through all of them."""
    return dict(zip(table.column_names, table.columns, strict=True))


def numbers_of(column: pa.ChunkedArray, where: str, before: int = 0) -> np.ndarray:
    """Float64 [N], NaN where a cell is missing; this many rows stand `before` them in the file.

    Raises:
        DataError: A cell is no finite number, or the column holds something else.
    """
    from pyarrow import types

    column = decoded(column, where)
    if types.is_string(column.type):
        fast = _cast(column)
        return _parsed(texts_of(column, where, _number_text), where, before) if fast is None else fast
    found = np.asarray(column.cast("float64", safe=False).to_numpy(), np.float64)
    if np.isinf(found).any():
        row = int(np.isinf(found).argmax())
        raise DataError(f"{where}: data row {before + row + 1} holds {found[row]}; write a number, or leave it empty")
    return found


def texts_of(
    column: pa.ChunkedArray, where: str, change: Callable[[str], str | None] = lambda text: text
) -> np.ndarray:
    """An array of str and None, each different text changed once."""
    import pyarrow as pa
    from pyarrow import types

    try:
        column = decoded(column, where)
        coded = column.cast("string").combine_chunks().dictionary_encode()
    except pa.ArrowException as error:
        raise DataError(f"{where} cannot be read as text: {error}") from None
    different = coded.dictionary.to_pylist()
    if types.is_decimal(column.type):  # Arrow writes 0E-10
        different = [None if text is None else format(Decimal(text), "f") for text in different]
    found = np.array([None if text is None else change(text) for text in different] + [None], object)
    texts: np.ndarray = found[coded.indices.fill_null(len(found) - 1).to_numpy()]
    return texts


def has_commas(texts: set[str]) -> bool:
    """Are these numbers, and do some have a comma?"""
    written = [DECIMAL_COMMA.fullmatch(text) is not None for text in texts]
    return any(written) and all(
        comma or NUMBER.fullmatch(text.strip()) for text, comma in zip(texts, written, strict=True)
    )


def decoded(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """A column of numbers or of text; DataError for anything else."""
    import pyarrow as pa
    from pyarrow import types

    held = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_null(held):
        held = pa.string()
    is_text = types.is_string(held) or types.is_large_string(held) or types.is_string_view(held)
    is_number = types.is_boolean(held) or types.is_integer(held) or types.is_floating(held) or types.is_decimal(held)
    if not (is_text or is_number):
        raise DataError(
            f"{where} is of type {column.type}; only numbers and text are read, turn it into one or leave it out"
        )
    try:
        return column.cast(pa.string() if is_text else held)
    except pa.ArrowException as error:
        raise DataError(f"{where} cannot be read: {error}") from error


def _number_text(text: str) -> str | None:
    text = text.strip()
    return None if text in MISSING_TEXTS else text


def _cast(column: pa.ChunkedArray) -> np.ndarray | None:
    """Texts as numbers at Arrow's speed, where all are plain ones; None where each has to be looked at."""
    import pyarrow as pa
    from pyarrow import compute

    texts = compute.utf8_trim_whitespace(column)
    texts = compute.if_else(compute.is_in(texts, value_set=pa.array(sorted(MISSING_TEXTS))), None, texts)
    try:
        found = np.asarray(texts.cast("float64").to_numpy(), np.float64)
    except pa.ArrowException:
        return None
    return found if np.isfinite(found).sum() + texts.null_count == len(found) else None


def _parsed(texts: np.ndarray, where: str, before: int) -> np.ndarray:
    numbers = {text: _number(text) for text in set(texts)}
    found = np.array([numbers[text] for text in texts], np.float64)
    if np.isinf(found).any():
        row = int(np.isinf(found).argmax())
        fix = "write one such as 12.5, leave it empty, or give the column another kind"
        raise DataError(
            f"{where}: data row {before + row + 1} holds {short(texts[row])}, which is not a number; "
            f"{WRITE_POINTS if DECIMAL_COMMA.fullmatch(texts[row]) else fix}"
        )
    return found


def _number(text: str | None) -> float:
    """The number, NaN for a missing cell, infinity for what is no finite number."""
    if text is None:
        return np.nan
    return float(text) if NUMBER.fullmatch(text) else np.inf
