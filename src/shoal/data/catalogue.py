"""What `shoal data list|check|import` show: each data set, where it is, and whether its checksum is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.data import imported
from shoal.data.known import DAMAGED, EMBEDDED, KNOWN, MISSING, VERIFIED, FileState, Known
from shoal.data.load import FILE_TYPES, load
from shoal.data.table_files import other_type
from shoal.errors import DataError, nearest
from shoal.inputs import InputShape


@dataclass(frozen=True)
class Entry:
    """One data set, as it stands on this machine."""

    name: str
    state: str
    shape: InputShape
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
        raise DataError(
            f"cannot import {path}: it must be a file that ends with {', '.join(FILE_TYPES)}{other_type(path)}"
        )
    dataset = load(path.absolute(), label=label, client=client, drop=drop, ranges=ranges, test_fraction=test_fraction)
    name = path.stem if name is None else name
    imported.save(dataset, name, source=path.name, overwrite=overwrite)
    return inspect(name)


def _known_entry(known: Known) -> Entry:
    files, notes = known.state(known)
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
