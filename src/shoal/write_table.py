"""Columns written as a .csv or .parquet file that only its owner can read: they may be facts about patients."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shoal.data.imported import OWNER_ONLY
from shoal.errors import ConfigError, DataError, nearest
from shoal.extras import optional
from shoal.files import atomic

TYPES = (".csv", ".parquet")


def check_name(path: Path) -> None:
    """Raise a ConfigError where a table cannot be written to this path."""
    if path.suffix not in TYPES:
        raise ConfigError(f"--out {path} must end in .csv or .parquet{nearest(path.suffix, TYPES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {path.absolute().parent}")
    if path.suffix == ".parquet":
        optional("pyarrow.parquet", f"writing {path.name}")


def write_table(columns: Mapping[str, np.ndarray], path: Path) -> None:
    """Write columns of one length, whole or not at all.

    Raises:
        DataError: The file cannot be written.
    """
    try:
        with atomic(path, OWNER_ONLY) as stream:
            if path.suffix == ".parquet":
                pa = optional("pyarrow", "a .parquet file")
                optional("pyarrow.parquet", "a .parquet file").write_table(pa.table(dict(columns)), stream)
            else:
                text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
                rows = csv.writer(text)
                rows.writerow(columns)
                rows.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
                text.flush()
                text.detach()
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
