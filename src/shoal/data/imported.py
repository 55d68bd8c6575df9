"""The user's own data kept by name: `imported/NAME.npz` below the data folder, with a checksum beside it.

They may be patients' data, so that folder and files are for their owner alone: nobody else can list or read them.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.arrays import read_own_npz
from shoal.data.dataset import Dataset
from shoal.data.known import KNOWN
from shoal.data.sources import CHUNK, folders, writable_folder
from shoal.errors import ConfigError, DataError, nearest
from shoal.files import atomic
from shoal.inputs import InputShape, parts, read_shape

FOLDER = "imported"
OWNER_ONLY, OWNER_ONLY_FOLDER = 0o600, 0o700
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Record:
    """What is kept beside an imported data set, in NAME.json, which is written last."""

    name: str
    source: str
    sha256: str
    shape: InputShape
    train_rows: int
    test_rows: int
    class_count: int
    owner_count: int
    notes: tuple[str, ...]
    read_classes: bool = False
    held_out: bool = True


def save(dataset: Dataset, name: str, source: str, *, overwrite: bool = False) -> Path:
    """Keep a data set under a name; where it lies."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"name '{name}' must be letters, digits, '-' and '_', at most 64, beginning with no sign")
    if name in KNOWN:
        raise ConfigError(f"name '{name}' belongs to a data set that Shoal knows; choose another")
    if not overwrite and (old := find(name)) is not None:
        raise ConfigError(f"data '{name}' already exists ({old}); choose another name, or replace it")
    path = writable_folder() / FOLDER / f"{name}.npz"
    arrays: dict[str, Any] = {
        "train_y": dataset.train_y.numpy(),
        "test_y": dataset.test_y.numpy(),
        "classes": np.array(dataset.classes),
    }
    for key, x in (("train_x", dataset.train_x), ("test_x", dataset.test_x)):
        arrays |= {f"{key}.{part}" if part else key: values.numpy() for part, values in parts(x).items()}
    if dataset.owners is not None:
        arrays["train_client"] = dataset.owners
        arrays["client_names"] = np.array(dataset.owner_names)
    if dataset.users is not None:
        arrays["train_user"] = dataset.users
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(OWNER_ONLY_FOLDER)
        with atomic(path, OWNER_ONLY) as stream:
            np.savez(stream, **arrays)
        record = Record(
            name=name,
            source=source,
            sha256=_sha256(path),
            shape=dataset.input_shape,
            train_rows=len(dataset.train_y),
            test_rows=len(dataset.test_y),
            class_count=dataset.class_count,
            owner_count=len(dataset.owner_names),
            notes=dataset.notes,
            read_classes=dataset.read_classes,
            held_out=dataset.held_out,
        )
        with atomic(path.with_suffix(".json"), OWNER_ONLY) as stream:
            stream.write(json.dumps(asdict(record), indent=2).encode() + b"\n")
    except OSError as error:
        raise DataError(
            f"data '{name}' cannot be written to {path}: {error}; set SHOAL_DATA to a folder of yours"
        ) from error
    return path


def remove(name: str) -> Path:
    """Delete an imported data set; where it lay.

    Raises:
        DataError: There is none of that name, or it cannot be deleted.
    """
    path = find(name)
    if path is None:
        kept = nearest(name, names()) if names() else "; nothing is imported"
        raise DataError(f"there is no imported data '{name}'{kept}")
    try:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)  # last, so that what is left can be removed again
    except OSError as error:
        raise DataError(f"data '{name}' cannot be removed from {path.parent}: {error.strerror or error}") from error
    return path


def names() -> list[str]:
    """The names of all imported data sets."""
    return sorted({path.stem for folder in folders() for path in (folder / FOLDER).glob("*.json")} - set(KNOWN))


def find(name: str) -> Path | None:
    """The .npz of an imported data set, or None."""
    if not NAME.fullmatch(name):
        return None
    places = (folder / FOLDER / f"{name}.json" for folder in folders())
    return next((place.with_suffix(".npz") for place in places if place.is_file()), None)


def at(path: Path) -> Path | None:
    """The .npz of an imported data set, named by its path or by a link to it, or None."""
    file = path.resolve()
    own = file.suffix == ".npz" and any(file.parent == (folder / FOLDER).resolve() for folder in folders())
    return file if own and file.with_suffix(".json").is_file() else None


def record(path: Path) -> Record:
    """What was noted when the data set at this path was imported."""
    beside = path.with_suffix(".json")
    try:
        kept = json.loads(beside.read_text("utf-8"))
        kept["shape"], kept["notes"] = read_shape(kept["shape"]), tuple(kept["notes"])
        return Record(**kept)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{beside} is damaged: {error}; import the data again") from error


def check(path: Path) -> Record:
    """The record, after hashing the file; DataError if it was changed."""
    kept = record(path)
    digest = _sha256(path)
    if digest != kept.sha256:
        raise DataError(
            f"{path} was changed since its import: SHA-256 {digest}, expected {kept.sha256}; import it again"
        )
    return kept


def read(path: Path, *, scale: str) -> Dataset:
    """An imported data set, checked."""
    kept = check(path)
    dataset = read_own_npz(path, classes=None, test_fraction=0.2, scale=scale, name=kept.name)
    return replace(
        dataset, notes=kept.notes, read_classes=kept.read_classes, held_out=kept.held_out,
        read_columns=bool(kept.notes),  # a table without a schema has no others
    )  # fmt: skip


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; import the data again") from error
    return digest.hexdigest()
