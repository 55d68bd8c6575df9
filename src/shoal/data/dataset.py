"""One data set in memory: training and test rows, classes and, where known, who owns each training row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from shoal.errors import DataError
from shoal.html_text import html_table
from shoal.inputs import Inputs, InputShape, digest, parts, pieces, shape_of
from shoal.tasks import Task, TaskSettings, choose

if TYPE_CHECKING:
    from shoal.data.schema import Schema

NOT_FINITE = "holds NaN or Inf, or numbers too large for float32; fill, remove or scale such values first"


def first_bad_row(x: torch.Tensor, after: Callable[[], None] = lambda: None) -> int | None:
    """The first row with a number that is not finite, or so large that the row's sum is not.

    `after` is called after every piece that was read.
    """
    if not x.is_floating_point():
        return None
    for rows in pieces(x):
        bad = ~torch.isfinite(x[rows].flatten(1).sum(1) if x.dim() > 1 else x[rows])
        after()
        if bad.any():
            return int(rows.start) + int(bad.nonzero()[0])
    return None


class Released(Protocol):
    """A file whose pages can be given back."""

    def refuse_changed(self) -> None:
        """Raise a DataError where it was changed since it was opened."""

    def release(self) -> None:
        """Give them back; they are read again when they are needed."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Records and their targets.

    Records are float32, or int64 for tokens: tables `[N, F]`, pictures `[N, C, H, W]`, sequences `[N, T]` or any
    other shape `[N, ...]`; or several such tensors by name, which the model gets as keyword arguments. Targets are as
    the task needs them: classes int64 `[N]`, numbers float32 `[N]` or `[N, D]`, labels float32 `[N, L]`, tokens int64
    `[N, T]`.

    Attributes:
        name: What messages and reports call it.
        train_x: Training rows.
        train_y: Their targets.
        test_x: Test rows, which are public or cost nothing that is claimed.
        test_y: Their targets.
        classes: The name of each class, label or token; none for numbers.
        owners: The owner of each training row, numbered from 0; None where nobody knows.
        owner_names: What the user calls each owner.
        notes: Facts that a reader of results should know, such as a vocabulary that was read from the data.
        rows: The digest of the training rows that public features were computed from, where they were.
        test_owners: The owner of each test row, where that is known.
        known_task: The task, where the data bring one or the configuration has named it.
        features: The names of a row's numbers, where it comes from a table.
        ranges: Public bounds (low, high) of columns that were scaled to [0, 1] by them.
        schema: What encoded that table, where something did.
        linked: Whether records hold facts about their client's others, so that only whole clients can be protected.
        users: The users of each training row, numbered from 0, [N, U], -1 where it has fewer; None where unknown.
        test_users: Those of each test row.
        held_out: Whether test rows were held out of the same table as the training rows.
        files: The files on disk whose rows are read when they are needed; none where all are in memory.
        read_classes: Whether the names of classes were read from the labels: nobody gave them as public.
        read_columns: Whether ranges or categories were read from the data, or proposed from them and never confirmed.
        known: Whether it was loaded by a name that Shoal or an installed package knows.
    """

    name: str
    train_x: Inputs
    train_y: torch.Tensor
    test_x: Inputs
    test_y: torch.Tensor
    classes: tuple[str, ...]
    owners: np.ndarray | None = None
    owner_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rows: bytes = b""
    test_owners: np.ndarray | None = None
    known_task: Task | None = None
    features: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    schema: Schema | None = None
    linked: bool = False
    files: tuple[Released, ...] = ()
    users: np.ndarray | None = None
    test_users: np.ndarray | None = None
    held_out: bool = False
    read_classes: bool = False
    read_columns: bool = False
    known: bool = False

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            self._check_rows(part, x, y)
        if self.input_shape != (of_test := shape_of(self.test_x)):
            raise DataError(
                f"data '{self.name}': training rows have shape {self.input_shape} but test rows {of_test}"
            )
        for owners, y in ((self.owners, self.train_y), (self.test_owners, self.test_y)):
            self._check_owners(owners, len(y))

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts())
        return f"Dataset({self.name!r}, {facts})"

    def _repr_html_(self) -> str:
        return html_table(f"data {self.name}", self._facts(), notes=self.notes)

    def _facts(self) -> list[tuple[str, str]]:
        """What it is in a few words."""
        owners = "nobody knows" if self.owners is None else f"{len(self.owner_names):,} clients"
        return [
            ("train", f"{len(self.train_y):,}"),
            ("held out", f"{len(self.test_y):,}"),
            ("shape", str(self.input_shape)),
            *([("classes", f"{self.class_count:,}")] if self.classes else []),
            ("owners", owners),
        ]

    @cached_property
    def task(self) -> Task:
        """What a model is trained for with these data."""
        return self.known_task or choose(TaskSettings(), self.train_y, self.classes)

    def _check_rows(self, part: str, x: Inputs, y: torch.Tensor) -> None:
        where = f"data '{self.name}', {part}"
        if y.dtype not in (torch.float32, torch.int64) or y.dim() < 1:
            raise DataError(f"{where}: targets must be float32 or int64 [N, ...], got {y.dtype} {tuple(y.shape)}")
        if not parts(x):
            raise DataError(f"{where}: no data, an empty mapping")
        for name, values in parts(x).items():
            self._check_features(f"{where} '{name}'" if name else where, values, len(y), 1 if name else 2)
        named = y.dtype == torch.int64 and len(self.classes) > 1
        if self.known_task is not None or named:  # of numbers the configuration must tell the task, or the range
            self.task.check_targets(y, where)

    def _check_features(self, where: str, x: torch.Tensor, rows: int, least: int) -> None:
        if x.dtype not in (torch.float32, torch.int64) or x.dim() < least:
            raise DataError(f"{where}: features must be float32 or int64 [N, ...], got {x.dtype} {tuple(x.shape)}")
        if len(x) != rows:
            raise DataError(f"{where}: {len(x)} rows but {rows} labels")
        if x.numel() == 0:
            raise DataError(f"{where}: no data, shape {tuple(x.shape)}")
        if (row := first_bad_row(x, self.release)) is not None:
            raise DataError(f"{where}: row {row} {NOT_FINITE}")

    def _check_owners(self, owners: np.ndarray | None, rows: int) -> None:
        if owners is None:
            return
        if owners.shape != (rows,) or owners.dtype.kind not in "iu":
            raise DataError(
                f"data '{self.name}': owners must be one whole number per row, "
                f"got {owners.dtype} {owners.shape} for {rows} rows"
            )
        if owners.min() < 0 or owners.max() >= len(self.owner_names):
            raise DataError(
                f"data '{self.name}': owners run from {owners.min()} to {owners.max()}, "
                f"but there are {len(self.owner_names)} owner names"
            )

    @property
    def input_shape(self) -> InputShape:
        """The shape of one row, such as `(C, H, W)` or `(F,)`; those of several tensors by name."""
        return shape_of(self.train_x)

    def digest(self) -> bytes:
        """Of the training rows as they were loaded: features' last bits may differ from machine to machine."""
        return self.rows or digest(self.train_x, self.release)

    def release(self) -> None:
        """Give the memory of rows that were read from disk back."""
        for file in self.files:
            file.release()

    @property
    def class_count(self) -> int:
        """How many classes there are."""
        return len(self.classes)
