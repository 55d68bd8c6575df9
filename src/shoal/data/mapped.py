"""Data larger than memory: a folder of .npy files, read row by row when a client trains.

    x.npy (or x.NAME.npy for several inputs), y.npy, client.npy, and held-out rows in test_x.npy, test_y.npy

Features stay on disk as they are, float32 or int64; targets and owners are in memory.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from shoal.data.array_parts import owners_of, targets_of
from shoal.data.dataset import Dataset
from shoal.errors import DataError
from shoal.inputs import Inputs, count

X, Y, CLIENT, TEST_X, TEST_Y = "x", "y", "client", "test_x", "test_y"


@dataclass(frozen=True, eq=False)
class MappedFile:
    """An array on disk; its pages are in memory once they are read, until they are released.

    `stamp` is when it was last changed, and its size: a ledger states the digest of the rows that were there then.
    """

    array: np.memmap
    path: Path
    stamp: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> MappedFile:
        """The array of a .npy file."""
        stamp, array = stamp_of(path), _read(path, "r")
        fits = array.dtype in (np.float32, np.int64) and array.flags.c_contiguous
        if not isinstance(array, np.memmap) or not fits:
            raise DataError(
                f"{path}: must be float32 or int64 in C order to be read from disk, got {array.dtype} {array.shape}: "
                f"np.save(path, np.ascontiguousarray(x, np.float32))"
            )
        return cls(array, path, stamp)

    @property
    def tensor(self) -> torch.Tensor:
        """The same memory as a tensor, for reading."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            return torch.from_numpy(self.array)

    def refuse_changed(self) -> None:
        """Raise a DataError where the file was changed since."""
        if stamp_of(self.path) != self.stamp:
            raise DataError(f"{self.path} was changed during the run; leave it as it is, and start again")

    def release(self) -> None:
        """Let the system have the pages back; they are read again when they are needed."""
        release(self.array)


def release(array: np.memmap) -> None:
    """Let the system have the pages of an array back; what was written to them is not lost."""
    mapping: mmap.mmap = array._mmap  # type: ignore[attr-defined]
    if hasattr(mapping, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def is_folder(path: Path) -> bool:
    """Is it a folder of arrays?"""
    return path.is_dir() and bool(_files(path, X))


def read_folder(path: Path, *, classes: Sequence[str] | None = None) -> Dataset:
    """The data set of a folder; its features stay on disk.

    Args:
        path: The folder.
        classes: The classes' names; else the different labels, in order.

    Raises:
        DataError: A file is missing or malformed.
    """
    missing = [f"{name}.npy" for name in (Y, TEST_X, TEST_Y) if not _files(path, name)]
    if missing:
        raise DataError(f"{path}: lacks {', '.join(missing)}; rows on disk need them beside x.npy, test rows too")
    where = f"data '{path.name}'"
    files, train_x = _mapped(path, X)
    others, test_x = _mapped(path, TEST_X)
    targets = [_read(path / f"{name}.npy", None) for name in (Y, TEST_Y)]
    (train_y, test_y), names = targets_of(targets, [count(train_x), count(test_x)], classes, where)
    owners: np.ndarray | None = None
    owner_names: tuple[str, ...] = ()
    if _files(path, CLIENT):
        owners, owner_names = owners_of(_read(path / f"{CLIENT}.npy", None), count(train_x), where)
    return Dataset(
        name=path.name,
        train_x=train_x,
        train_y=torch.from_numpy(train_y),
        test_x=test_x,
        test_y=torch.from_numpy(test_y),
        classes=names,
        owners=owners,
        owner_names=owner_names,
        files=(*files, *others),
        read_classes=classes is None and bool(names),
    )


def _mapped(path: Path, key: str) -> tuple[list[MappedFile], Inputs]:
    found = {name: MappedFile.of(file) for name, file in _files(path, key).items()}
    tensors = {name: file.tensor for name, file in found.items()}
    return list(found.values()), tensors.get("", tensors)


def _files(path: Path, key: str) -> dict[str, Path]:
    """KEY.npy, under no name, or each KEY.NAME.npy under its own."""
    if (path / f"{key}.npy").is_file():
        return {"": path / f"{key}.npy"}
    return {file.name[len(key) + 1 : -4]: file for file in sorted(path.glob(f"{key}.*.npy"))}


def stamp_of(path: Path) -> tuple[int, int]:
    """When a file was last changed, and its size."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return found.st_mtime_ns, found.st_size


def _read(path: Path, mode: Literal["r"] | None) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, mmap_mode=mode, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array: {error}") from None
    return array
