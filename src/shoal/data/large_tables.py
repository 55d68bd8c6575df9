"""Tables too large for memory: encoded once by their schema into arrays on disk, from which clients are read.

A copy is a folder `tables/NAME` in the cache that its owner alone can read:

    x.npy, y.npy, client.npy                   training rows, one client after the other
    test_x.npy, test_y.npy, test_client.npy    held-out rows
    about.json                                 written last: what the copy was made of

When the table, its schema or the split are others, it is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.cache import cache_folder
from shoal.data.array_parts import split
from shoal.data.columns import Tally, refuse_alike
from shoal.data.dataset import Dataset
from shoal.data.mapped import MappedFile, release, stamp_of
from shoal.data.schema import Schema
from shoal.data.schema_encoding import encode_piece, input_type, needed, owners_in, unconfirmed
from shoal.data.table_files import read_pieces, row_count
from shoal.errors import DataError
from shoal.tasks import TaskSettings, choose

IN_MEMORY = 1 << 29  # bytes of encoded rows, or of a .csv, that are held; more are converted
PIECE = 8 << 20  # bytes of encoded rows at once; Arrow takes many times that where columns are many
FORMAT = 1
FILES = ("x", "y", "client", "test_x", "test_y", "test_client")
ABOUT, PART = "about.json", ".part"


@dataclass(frozen=True)
class Copy:
    """A converted table; `source` is None for one whose conversion was cut off."""

    name: str
    where: Path
    source: str | None
    size: int


def is_large(path: Path, schema: Schema) -> bool:
    """Would a table, or its rows as the schema encodes them, take too much memory?"""
    encoded = row_count(path) * _row_bytes(schema)
    return encoded > IN_MEMORY or (path.suffix == ".csv" and path.stat().st_size > IN_MEMORY)


def read_large(path: Path, schema: Schema, *, test_fraction: float, owners: bool) -> Dataset:
    """The data set in a table whose rows stay on disk; it is converted first where that was not done yet.

    Raises:
        DataError: The table cannot be read or used, or the copy cannot be written.
    """
    path = path.resolve()
    facts = {"format": FORMAT, "source": str(path), "stamp": _stamp(path), "schema": schema.digest}
    facts |= {"client": schema.client_column if owners else None, "test_fraction": test_fraction}
    folder = _folder(path)
    try:
        with _locked(folder):
            about = _about(folder)
            if about is None or about["facts"] != facts:
                _convert(path, schema, folder, facts)
                about = _about(folder)
            assert about is not None
            return _dataset(path, schema, folder, about)
    except OSError as error:
        raise DataError(
            f"{path}: its copy cannot be kept in {folder.parent}: {error.strerror or error}; set SHOAL_CACHE to a "
            f"folder of yours"
        ) from error


def encoded_pieces(
    path: Path, schema: Schema, tally: Tally, *, targets: bool
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """The rows of a table in their order, piece by piece: inputs, and targets where wanted; changes are counted."""
    rows = 0
    for piece in read_pieces(path, needed(schema, targets, False), max(1, PIECE // _row_bytes(schema))):
        x, y = encode_piece(schema, piece, str(path), tally, targets=targets, before=rows)
        rows += len(x)
        yield x, y
    if not rows:
        raise DataError(f"{path}: has no rows")


def copies() -> list[Copy]:
    """All copies in the cache, also what is left of conversions that were cut off."""
    found = []
    for where in sorted(path for path in _root().glob("*") if path.is_dir()):
        about = _about(where)
        size = sum(file.stat().st_size for file in where.iterdir())
        name = where.name.removeprefix(".").removesuffix(PART)
        found.append(Copy(name, where, about["facts"]["source"] if about else None, size))
    return found


def remove_copy(name: str) -> list[Path]:
    """Delete the copy of a table, by its own name or by the table's path; where it lay, empty if there is none."""
    removed = []
    for own in {each.name for each in copies()} & {name, _folder(Path(name).expanduser().resolve()).name}:
        folder = _root() / own
        with _locked(folder):
            for where in filter(Path.is_dir, (folder, _part(folder))):
                shutil.rmtree(where)
                removed.append(where)
    return removed


def _root() -> Path:
    return cache_folder() / "tables"


def _folder(path: Path) -> Path:
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", path.stem)[:40]
    return _root() / f"{stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _part(folder: Path) -> Path:
    """Where a copy lies until it is whole."""
    return folder.with_name(f".{folder.name}{PART}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time converts a table, and others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    lock = folder.parent / f".{folder.name[-8:]}.lock"
    with os.fdopen(os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _about(folder: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / ABOUT).read_text("utf-8"))
        return found if {"facts", "notes", "clients"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _convert(path: Path, schema: Schema, folder: Path, facts: dict[str, Any]) -> None:
    part = _part(folder)
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    print(
        f"converting {path} into {folder}, readable by you alone; done once, and again when it changes; "
        f"`shoal data remove {path}` deletes the copy",
        file=sys.stderr,
    )
    part.mkdir(mode=0o700)
    try:
        for name in (*(f"{each}.npy" for each in FILES), ABOUT):
            (part / name).touch(0o600)  # from their first byte on: what is written into them keeps that
        owners, names = _owners(path, schema, by_client=facts["client"] is not None)
        _refuse_full(path, len(owners) * _row_bytes(schema), part)
        notes = _write(path, schema, part, owners, facts["test_fraction"])
        if _stamp(path) != facts["stamp"]:
            raise DataError(f"{path} was changed while it was converted; leave it as it is, and start again")
        (part / ABOUT).write_text(json.dumps({"facts": facts, "notes": notes, "clients": names}), "utf-8")
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _stamp(path: Path) -> list[int]:
    """When a table was last changed, its size, and when the system last saw a change: `cp -p` sets the first back."""
    return [*stamp_of(path), path.stat().st_ctime_ns]


def _owners(path: Path, schema: Schema, *, by_client: bool) -> tuple[np.ndarray, list[str]]:
    """The owner of each row, numbered in the order of their names; all 0 where nobody knows."""
    wanted = [schema.client_column] if by_client and schema.client_column else [next(iter(schema.inputs))]
    numbers: dict[str, int] = {}
    found, rows = [], 0
    for piece in read_pieces(path, wanted, 1 << 16):
        if by_client:
            there, codes = np.unique(owners_in(schema, piece, str(path), rows), return_inverse=True)
            own = np.array([numbers.setdefault(str(name), len(numbers)) for name in there])
            found.append(own[codes].astype(np.int32))
        else:
            found.append(np.zeros(piece.num_rows, np.int32))
        rows += piece.num_rows
    if not rows:
        raise DataError(f"{path}: has no rows")
    names = sorted(numbers)
    refuse_alike(names, str(path))
    order = np.argsort(np.argsort(list(numbers))) if numbers else np.zeros(1)
    return order.astype(np.int64)[np.concatenate(found)], names


def _write(path: Path, schema: Schema, part: Path, owners: np.ndarray, test_fraction: float) -> list[str]:
    """The arrays of all rows; returns notes on what their public constants changed."""
    place, held_out, sizes = _places(owners, test_fraction, str(path))
    tally, rows, files = Tally.new(), 0, {}
    for x, y in encoded_pieces(path, schema, tally, targets=True):
        assert y is not None
        for key, test in (("", False), ("test_", True)):
            chosen = np.flatnonzero(held_out[rows : rows + len(x)] == test)
            for name, values in ((f"{key}x", x), (f"{key}y", y)):
                if name not in files:
                    shape = (sizes[test], *values.shape[1:])
                    files[name] = np.lib.format.open_memmap(part / f"{name}.npy", "w+", values.dtype, shape)
                files[name][place[rows + chosen]] = values[chosen]
                release(files[name])
        rows += len(x)
    for file in files.values():
        file.flush()
    for name, rows_of in (("client", ~held_out), ("test_client", held_out)):
        np.save(part / f"{name}.npy", np.sort(owners[rows_of]))
    return list(tally.notes())


def _places(owners: np.ndarray, test_fraction: float, where: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Where each row goes, one client after the other; whether it is held out; how many are not, and how many are."""
    place, held_out = np.empty(len(owners), np.int64), np.zeros(len(owners), np.bool_)
    sides = split(owners, test_fraction, where)
    for rows in sides:
        place[rows[np.argsort(owners[rows], kind="stable")]] = np.arange(len(rows))
    held_out[sides[1]] = True
    return place, held_out, [len(rows) for rows in sides]


def _dataset(path: Path, schema: Schema, folder: Path, about: dict[str, Any]) -> Dataset:
    files = {name: MappedFile.of(folder / f"{name}.npy") for name in FILES}
    tensors, names = {name: file.tensor for name, file in files.items()}, tuple(about["clients"])
    return Dataset(
        name=path.stem,
        train_x=tensors["x"],
        train_y=tensors["y"],
        test_x=tensors["test_x"],
        test_y=tensors["test_y"],
        classes=schema.outputs,
        owners=np.array(files["client"].array) if names else None,
        owner_names=names,
        notes=unconfirmed(schema) + tuple(about["notes"]),
        test_owners=np.array(files["test_client"].array) if names else None,
        known_task=choose(TaskSettings(kind=schema.task, range=schema.range), tensors["y"], schema.outputs),
        features=schema.features,
        schema=schema,
        files=tuple(files.values()),
        held_out=True,
        read_columns=bool(schema.unconfirmed),
    )


def _row_bytes(schema: Schema) -> int:
    return len(schema.features) * np.dtype(input_type(schema)).itemsize


def _refuse_full(path: Path, size: int, where: Path) -> None:
    free = shutil.disk_usage(where).free
    if size > free:
        raise DataError(
            f"{path}: its copy takes {size / 2**30:.1f} GiB, but {where.parent} has {free / 2**30:.1f} GiB left; set "
            f"SHOAL_CACHE to a folder on a larger disk"
        )
