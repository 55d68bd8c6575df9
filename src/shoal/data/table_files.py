"""Tables in .csv and .parquet files: read whole, or only the columns that are wanted, or piece by piece.

A .csv is UTF-8 text with a header; its columns are separated by commas, or by semicolons or tabs where the header has
no comma. Wanted columns are read as the text that is there, so that a code such as 007 stays one.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.columns import MISSING_TEXTS
from shoal.errors import DataError, listed, nearest
from shoal.extras import optional

if TYPE_CHECKING:
    import pyarrow as pa

COLUMN_LIMIT = 100_000  # columns that are read, at most
SIZE_LIMIT = 8 << 30  # bytes of features in float32
HEADER_LIMIT = 64 << 20  # characters
BLOCK = 1 << 20  # bytes that pyarrow reads at once, at least
BUFFERS = 64 << 20  # bytes, for all columns of a .parquet that is read piece by piece
PIECE = 1 << 21  # cells that are read at once of a table of which only some rows are kept


@dataclass(frozen=True)
class Header:
    """The first line of a .csv."""

    names: tuple[str, ...]
    delimiter: str
    size: int


def read_table(path: Path) -> pa.Table:
    """A .csv or .parquet file as an Arrow table with at least one row, types as Arrow infers them.

    Raises:
        DataError: The file is damaged, has no rows, or two columns of one name.
        ConfigError: pyarrow is not installed.
    """
    return _read(path, None)


def read_columns(path: Path, wanted: Sequence[str]) -> pa.Table:
    """These columns of a file, those of a .csv as text.

    Raises:
        DataError: As `read_table`, or columns are missing; all of them are named.
    """
    return _read(path, list(dict.fromkeys(wanted)))


def read_pieces(path: Path, wanted: Sequence[str], rows: int) -> Iterator[pa.Table]:
    """As `read_columns`, piece by piece: those of a .parquet have at most this many rows.

    Raises:
        DataError: As `read_columns`.
    """
    pa, wanted = optional("pyarrow", f"reading {path.name}"), list(dict.fromkeys(wanted))
    try:
        for batch in _parquet_pieces(path, wanted, rows) if path.suffix == ".parquet" else _csv_pieces(path, wanted):
            piece = pa.Table.from_batches([batch])
            piece.validate(full=True)
            if piece.num_rows:
                yield piece
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise unreadable(path, error) from error


def read_some(path: Path, wanted: Sequence[str], every: int) -> pa.Table:
    """As `read_columns`, but only one row of this many, evenly spaced."""
    pa, rows, found = optional("pyarrow", f"reading {path.name}"), 0, []
    for piece in read_pieces(path, wanted, max(1, PIECE // max(1, len(wanted)))):
        found.append(piece.take(pa.array(range(-rows % every, piece.num_rows, every), "int64")))
        rows += piece.num_rows
    if not rows:
        raise DataError(f"{path}: has no rows")
    return pa.concat_tables(found)


def row_count(path: Path) -> int:
    """How many rows a .parquet has; of a .csv an estimate from its size and its first lines."""
    pa = optional("pyarrow", f"reading {path.name}")
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return int(parquet.read_metadata(path).num_rows)
        with path.open("rb") as stream:
            first = stream.read(BLOCK)
        return path.stat().st_size * first.count(b"\n") // max(1, len(first))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable(path, error) from error


def column_names(path: Path) -> list[str]:
    """The names of a file's columns; no row is read."""
    optional("pyarrow", f"reading {path.name}")
    return list(_parquet_names(path) if path.suffix == ".parquet" else header(path).names)


def header(path: Path) -> Header:
    """The header of a .csv."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            line = stream.readline(HEADER_LIMIT)
            while line.count('"') % 2 and len(line) < HEADER_LIMIT and (more := stream.readline(HEADER_LIMIT)):
                line += more  # a quoted name may hold a line break
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error.object[error.start]) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(line) >= HEADER_LIMIT:
        raise DataError(f"{path}: the header has more than {HEADER_LIMIT:,} characters; is it a .csv?")
    if line.lower().startswith("sep="):
        raise DataError(f"{path}: its first line is {line.strip()!r}, which only Excel reads; remove that line")
    unquoted = re.sub(r'"(?:[^"]|"")*"', "", line)
    delimiter = next((mark for mark in ",;\t" if mark in unquoted), ",")
    try:
        names = next(csv.reader(line.splitlines(keepends=True), delimiter=delimiter, strict=True), [])
    except csv.Error as error:
        raise DataError(f"{path}: the header cannot be read: {error}") from None
    return Header(tuple(names), delimiter, len(line.encode()))


def missing_columns(wanted: Sequence[str], there: Sequence[str]) -> str | None:
    """What to say of wanted columns that are not there, all at once; None where none is missing."""
    held, there = set(there), [name if name.isprintable() else " ".join(name.split()) for name in there]
    lacks = [name for name in wanted if name not in held]
    if not lacks:
        return None
    shown = listed([f"'{name}'" for name in lacks])
    if len(there) > 1000:
        return f"there is no column {shown}"
    if len(lacks) == 1:
        return f"there is no column {shown}{nearest(lacks[0], there)}"
    return f"there are no columns {shown}; it has {listed(there)}"


def other_type(path: Path) -> str:
    """How a file that is no .csv or .parquet becomes one; empty where nobody knows."""
    kind = path.suffix.lower()
    if kind in (".xlsx", ".xlsm", ".xls", ".ods", ".numbers"):
        return "; save its sheet as 'CSV UTF-8'"
    if kind in (".csv", ".tsv", ".tab", ".txt"):
        return f"; rename it to {path.stem}.csv: commas, semicolons and tabs are understood"
    return ""


def refuse_wide(path: Path, columns: int) -> None:
    """Raise a DataError for more columns than are read, before any row is."""
    if columns > COLUMN_LIMIT:
        raise DataError(
            f"{path}: has {columns:,} columns, more than {COLUMN_LIMIT:,}; keep those that you need, or name them "
            f"in a schema"
        )


def refuse_names(path: Path, names: Sequence[str]) -> None:
    """Raise a DataError where two columns have one name, or a name has several lines."""
    if broken := next((name for name in names if "".join(name.splitlines()) != name), None):
        raise DataError(f"{path}: the name of column {broken!r} holds a line break; rename it")
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{path}: has several columns named {listed([*map(repr, twice)])}; rename them")


def _read(path: Path, wanted: list[str] | None) -> pa.Table:
    pa = optional("pyarrow", f"reading {path.name}")
    try:
        table = _read_parquet(path, wanted) if path.suffix == ".parquet" else _read_csv(path, wanted)
        table.validate(full=True)
        names = table.column_names
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise unreadable(path, error) from error
    if not table.num_rows:
        raise DataError(f"{path}: has no rows")
    refuse_names(path, names)
    return table


def _read_csv(path: Path, wanted: list[str] | None) -> pa.Table:
    from pyarrow import csv as arrow_csv

    return arrow_csv.read_csv(path, **_csv_options(path, wanted, BLOCK))


def _csv_pieces(path: Path, wanted: list[str]) -> Iterator[pa.RecordBatch]:
    from pyarrow import csv as arrow_csv

    with arrow_csv.open_csv(path, **_csv_options(path, wanted, 16 * BLOCK)) as pieces:
        yield from pieces


def _csv_options(path: Path, wanted: list[str] | None, block: int) -> dict[str, Any]:
    from pyarrow import csv as arrow_csv
    from pyarrow import string

    first = header(path)
    refuse_wide(path, len(first.names if wanted is None else wanted))
    options: dict[str, Any] = {
        "null_values": sorted(MISSING_TEXTS), "strings_can_be_null": True, "quoted_strings_can_be_null": True
    }  # fmt: skip
    if wanted is not None:
        _refuse_missing(path, wanted, first.names)
        options = {"include_columns": wanted, "column_types": dict.fromkeys(wanted, string())}
    return {
        "read_options": arrow_csv.ReadOptions(block_size=max(block, 16 * first.size)),
        "parse_options": arrow_csv.ParseOptions(delimiter=first.delimiter, newlines_in_values=True),
        "convert_options": arrow_csv.ConvertOptions(**options),
    }


def _read_parquet(path: Path, wanted: list[str] | None) -> pa.Table:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if wanted is not None:
            _refuse_missing(path, wanted, names)
        refuse_wide(path, len(names if wanted is None else wanted))
        rows, columns = file.metadata.num_rows, len(names if wanted is None else wanted)
        if rows * columns * 4 > SIZE_LIMIT:
            raise ValueError(f"claims {rows:,} rows of {columns:,} columns")
        return file.read(columns=wanted)


def _parquet_pieces(path: Path, wanted: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    from pyarrow import parquet

    buffer = max(4096, BUFFERS // max(1, len(wanted)))  # bytes of each column; else a row group would be read at once
    with parquet.ParquetFile(path, buffer_size=buffer) as file:
        _refuse_missing(path, wanted, file.schema_arrow.names)
        refuse_wide(path, len(wanted))
        for group in range(file.num_row_groups):  # one iterator for all of them would hold what it has read
            yield from file.iter_batches(rows, row_groups=[group], columns=wanted)


def _parquet_names(path: Path) -> list[str]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return list(parquet.read_schema(path).names)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _refuse_missing(path: Path, wanted: Sequence[str], names: Sequence[str]) -> None:
    held = set(wanted)
    refuse_names(path, [name for name in names if name in held])
    if lacks := missing_columns(wanted, names):
        raise DataError(f"{path}: {lacks}")


def unreadable(path: Path, error: BaseException) -> DataError:
    """What to say of a file that Arrow cannot read."""
    words = _one_line(error)
    fix = "; quote values that hold the separator, and write 12.5 for 12,5" if "columns, got" in words else ""
    return DataError(f"{path}: cannot be read as a table: {words}{fix}")


def _not_utf8(path: Path, byte: int) -> DataError:
    return DataError(f"{path}: is not UTF-8 text (byte 0x{byte:02x}); save it as UTF-8 (in Excel: 'CSV UTF-8')")


def _one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if len(words) <= 300 else words[:297] + "..."
