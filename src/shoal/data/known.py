"""What is known of a data set before it is read, and the data sets that can be loaded by name.

A file of this package with `DATASETS` in it, named in `MODULES`, adds a data set; other packages add theirs by entry
points of the group `shoal.datasets`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.scaling import pictures
from shoal.data.sources import File, content, locate, obtain
from shoal.data.split import held_out
from shoal.errors import DataError
from shoal.registry import Registry
from shoal.tasks import Task

EMBEDDED, VERIFIED, MISSING, DAMAGED = "embedded", "verified", "missing", "damaged"
MODULES = ("embedded", "mnist", "cifar10", "adult", "lfw", "heart", "insteval", "movielens", "shakespeare")


@dataclass(frozen=True)
class FileState:
    """One file: its path below the data folder, where it was found, what is wrong with it."""

    path: str
    state: str
    where: str | None = None
    problem: str | None = None


States = tuple[tuple[FileState, ...], tuple[str, ...]]
"""The state of each file, and notes on all of them."""


def state_of(path: str, where: Path | None, read: Callable[[], object]) -> States:
    """The state of one file that is checked by reading it."""
    if where is None:
        return (FileState(path, MISSING),), ()
    try:
        read()
    except DataError as error:
        return (FileState(path, DAMAGED, str(where), str(error)),), ()
    return (FileState(path, VERIFIED, str(where)),), ()


def file_states(known: Known) -> States:
    """Every file of a data set, hashed where it is there; nothing is downloaded."""
    return tuple(map(_file_state, known.files)), ()


@dataclass(frozen=True)
class Known:
    """What is known of a data set before it is read.

    Attributes:
        name: By which it is loaded.
        shape: Of one record, without the batch axis.
        train_rows: How many records there are to train on.
        test_rows: How many are held out.
        class_count: How many classes (or tokens) there are; 0: the targets are numbers.
        source: Who made it.
        licence: On what terms it may be used.
        read: Makes the data set, given this record, a scale (unit, standard or raw) and a mirror (or None).
        files: What it is read from; none: it comes with a library.
        archive: Addresses of one .tar.gz that holds all the files.
        state: The state of its files on this machine.
    """

    name: str
    shape: tuple[int, ...]
    train_rows: int
    test_rows: int
    class_count: int
    source: str
    licence: str
    read: Callable[[Known, str, str | None], Dataset]
    files: tuple[File, ...] = ()
    archive: tuple[str, ...] = ()
    state: Callable[[Known], States] = file_states

    def contents(self, mirror: str | None = None) -> list[bytearray]:
        """What is in each of the files, verified; missing ones are downloaded first."""
        paths = obtain(self.files, archive=self.archive, mirror=mirror)
        return [content(file, path) for file, path in zip(self.files, paths, strict=True)]

    def in_two_parts(
        self,
        train: tuple[np.ndarray, np.ndarray],
        test: tuple[np.ndarray, np.ndarray],
        classes: tuple[str, ...],
        scale: str,
    ) -> Dataset:
        """A data set of pictures that is published in two parts."""
        return Dataset(
            name=self.name,
            train_x=pictures(train[0], scale, name=self.name),
            train_y=torch.from_numpy(train[1].astype(np.int64)),
            test_x=pictures(test[0], scale, name=self.name),
            test_y=torch.from_numpy(test[1].astype(np.int64)),
            classes=classes,
        )

    def in_one_part(self, x: torch.Tensor, y: np.ndarray, classes: tuple[str, ...]) -> Dataset:
        """A data set that is published in one part: the fixed split, each class in proportion."""
        train, test = held_out(y, self.test_rows)
        labels = torch.from_numpy(y.astype(np.int64))
        return Dataset(
            name=self.name,
            train_x=x[train],
            train_y=labels[train],
            test_x=x[test],
            test_y=labels[test],
            classes=classes,
        )

    def with_owners(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        owners: np.ndarray,
        owner_names: tuple[str, ...],
        classes: tuple[str, ...] = (),
        task: Task | None = None,
        linked: bool = False,
    ) -> Dataset:
        """A data set whose records have owners: the fixed split, each owner in proportion."""
        train, test = held_out(owners, self.test_rows)
        return Dataset(
            name=self.name,
            train_x=x[train],
            train_y=y[train],
            test_x=x[test],
            test_y=y[test],
            classes=classes,
            owners=owners[train],
            test_owners=owners[test],
            owner_names=owner_names,
            known_task=task,
            linked=linked,
        )


def _file_state(file: File) -> FileState:
    path = locate(file)
    (state,), _ = state_of(file.path, path, lambda: path and content(file, path))
    return state


def _own() -> dict[str, Known]:
    modules = (import_module(f"shoal.data.{name}") for name in MODULES)
    return {known.name: known for module in modules for known in module.DATASETS}


KNOWN = Registry("data", Known, _own, "shoal.datasets", DataError)
