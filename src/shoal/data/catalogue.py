"""What `shoal data list|check|import` show: each data set, where it is, and whether its checksum is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.data import imported, lfw
from shoal.data.known import KNOWN, Known
from shoal.data.load import FILE_TYPES, load
from shoal.data.sources import File, content, locate
from shoal.errors import DataError, nearest

EMBEDDED, VERIFIED, MISSING, DAMAGED = "embedded", "verified", "missing", "damaged"


@dataclass(frozen=True)
class FileState:
    """One file: its path below the data folder, where it was found, what is wrong with it."""

    path: str
    state: str
    where: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Entry:
    """One data set, as it stands on this machine."""

    name: str
    state: str
    shape: tuple[int, ...]
    train_rows: int
    test_rows: int
    class_count: int
    source: str
    licence: str
    where: str | None = None
    files: tuple[FileState, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        return [file.problem for file in self.files if file.problem]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def entries() -> list[Entry]:
    """All data sets that can be loaded by name; every file that is there is hashed, nothing is downloaded."""
    return [inspect(name) for name in (*KNOWN, *imported.names())]


def inspect(name: str) -> Entry:
    """One data set, its files hashed."""
    if name in KNOWN:
        return _known_entry(KNOWN[name])
    path = imported.find(name)
    if path is None:
        raise DataError(f"data '{name}' is not known{nearest(name, (*KNOWN, *imported.names()))}")
    return _imported_entry(name, path)


def import_file(
    file: str | Path,
    name: str | None = None,
    *,
    label: str = "label",
    client: str | None = None,
    drop: Sequence[str] = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
    test_fraction: float = 0.2,
    overwrite: bool = False,
) -> Entry:
    """Copy a user's table into the data folder, checked, so that its name loads it."""
    path = Path(file).expanduser()
    if path.suffix not in FILE_TYPES or not path.is_file():
        raise DataError(f"cannot import {path}: it must be a file that ends with {', '.join(FILE_TYPES)}")
    dataset = load(path.absolute(), label=label, client=client, drop=drop, ranges=ranges, test_fraction=test_fraction)
    name = path.stem if name is None else name
    imported.save(dataset, name, source=path.name, overwrite=overwrite)
    return inspect(name)


def _known_entry(known: Known) -> Entry:
    if known.name == "lfw":
        files, notes = _lfw_state()
    else:
        files, notes = tuple(_file_state(file) for file in known.files), ()
    states = {file.state for file in files}
    state = next((s for s in (DAMAGED, MISSING, VERIFIED) if s in states), EMBEDDED)
    places = sorted({str(Path(file.where).parent) for file in files if file.where})
    return Entry(
        name=known.name,
        state=state,
        shape=known.shape,
        train_rows=known.train_rows,
        test_rows=known.test_rows,
        class_count=known.class_count,
        source=known.source,
        licence=known.licence,
        where=", ".join(places) or None,
        files=files,
        notes=notes,
    )


def _file_state(file: File) -> FileState:
    path = locate(file)
    if path is None:
        return FileState(file.path, MISSING)
    try:
        content(file, path)
    except DataError as error:
        return FileState(file.path, DAMAGED, str(path), str(error))
    return FileState(file.path, VERIFIED, str(path))


def _lfw_state() -> tuple[tuple[FileState, ...], tuple[str, ...]]:
    path = lfw.locate()
    if path is None:
        return (FileState(lfw.PATH, MISSING),), ()
    try:
        images, _, _ = lfw.read(path)
    except DataError as error:
        return (FileState(lfw.PATH, DAMAGED, str(path), str(error)),), ()
    same = lfw.has_reference_pixels(images)
    notes = () if same else ("labels and names verified; pixels were resized elsewhere and differ in detail",)
    return (FileState(lfw.PATH, VERIFIED, str(path)),), notes


def _imported_entry(name: str, path: Path) -> Entry:
    where = f"{imported.FOLDER}/{name}.npz"
    try:
        kept = imported.record(path)
    except DataError as error:
        file = FileState(where, DAMAGED, str(path), str(error))
        return Entry(name, DAMAGED, (), 0, 0, 0, "imported", "yours", str(path.parent), (file,))
    try:
        imported.check(path)
        file = FileState(where, VERIFIED, str(path))
    except DataError as error:
        file = FileState(where, DAMAGED, str(path), str(error))
    return Entry(
        name=name,
        state=file.state,
        shape=kept.shape,
        train_rows=kept.train_rows,
        test_rows=kept.test_rows,
        class_count=kept.class_count,
        source=f"imported from {kept.source}",
        licence="yours",
        where=str(path.parent),
        files=(file,),
        notes=kept.notes,
    )
