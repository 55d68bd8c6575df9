"""One data set in memory: training and test rows, classes and, where known, who owns each training row."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from shoal.errors import DataError

NOT_FINITE = "holds NaN or Inf, or numbers too large for float32; fill, remove or scale such values first"


def first_bad_row(x: torch.Tensor) -> int | None:
    """The first row with a number that is not finite, or so large that the row's sum is not."""
    bad = ~torch.isfinite(x.reshape(len(x), -1).sum(1))
    return int(bad.nonzero()[0]) if bad.any() else None


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pictures `[N, C, H, W]` or tables `[N, F]` in float32, labels `[N]` in int64.

    Attributes:
        name: What messages and reports call it.
        train_x: Training rows.
        train_y: Their labels, from 0.
        test_x: Test rows, which are public or cost nothing that is claimed.
        test_y: Their labels.
        classes: The name of each label.
        owners: The owner of each training row, numbered from 0; None where nobody knows.
        owner_names: What the user calls each owner.
        notes: Facts that a reader of results should know, such as a vocabulary that was read from the data.
        features: The names of a row's numbers, where it comes from a table.
        rows: The digest of the training rows that public features were computed from, where they were.
    """

    name: str
    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    classes: tuple[str, ...]
    owners: np.ndarray | None = None
    owner_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rows: bytes = b""
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise DataError(f"data '{self.name}': needs at least two classes, got {list(self.classes)}")
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            self._check_rows(part, x, y)
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise DataError(
                f"data '{self.name}': training rows have shape {tuple(self.train_x.shape[1:])} "
                f"but test rows {tuple(self.test_x.shape[1:])}"
            )
        self._check_owners()

    def _check_rows(self, part: str, x: torch.Tensor, y: torch.Tensor) -> None:
        where = f"data '{self.name}', {part}"
        if x.dtype != torch.float32 or x.dim() not in (2, 4):
            raise DataError(
                f"{where}: features must be float32 [N, F] or [N, C, H, W], got {x.dtype} {tuple(x.shape)}"
            )
        if y.dtype != torch.int64 or y.dim() != 1:
            raise DataError(f"{where}: labels must be int64 [N], got {y.dtype} {tuple(y.shape)}")
        if len(x) != len(y):
            raise DataError(f"{where}: {len(x)} rows but {len(y)} labels")
        if x.numel() == 0:
            raise DataError(f"{where}: no data, shape {tuple(x.shape)}")
        if (row := first_bad_row(x)) is not None:
            raise DataError(f"{where}: row {row} {NOT_FINITE}")
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= len(self.classes):
            raise DataError(f"{where}: labels run from {low} to {high}, but there are {len(self.classes)} classes")

    def _check_owners(self) -> None:
        if self.owners is None:
            return
        if self.owners.shape != (len(self.train_y),) or self.owners.dtype.kind not in "iu":
            raise DataError(
                f"data '{self.name}': owners must be one whole number a training row, "
                f"got {self.owners.dtype} {self.owners.shape} for {len(self.train_y)} rows"
            )
        if self.owners.min() < 0 or self.owners.max() >= len(self.owner_names):
            raise DataError(
                f"data '{self.name}': owners run from {self.owners.min()} to {self.owners.max()}, "
                f"but there are {len(self.owner_names)} owner names"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one row: `(C, H, W)` or `(F,)`."""
        return tuple(self.train_x.shape[1:])

    def digest(self) -> bytes:
        """Of the training rows as they were loaded: features' last bits may differ from machine to machine."""
        if self.rows:
            return self.rows
        found = hashlib.blake2b(f"{tuple(self.train_x.shape)} ".encode())
        found.update(self.train_x.detach().cpu().contiguous().numpy().data)
        return found.digest()

    @property
    def class_count(self) -> int:
        """How many classes there are."""
        return len(self.classes)
