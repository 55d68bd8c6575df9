"""Sequences of different lengths: padded to one public length, with a mask of what is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.errors import ConfigError, DataError
from shoal.tasks.next_token import PADDING

Array = Any


@dataclass(frozen=True)
class Padding:
    """How the lists of sequences in a data set are padded, at their ends; longer ones are cut.

    Attributes:
        where: What messages call the data set.
        length: The length that all get, which is public; None where nothing is padded.
        mask: The name of the mask among features that have names; None for none.
    """

    where: str
    length: int | None
    mask: str | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ConfigError(f"{self.where}: length must be at least 1, got {self.length}")

    def features(self, x: Array | Mapping[str, Array]) -> Array | Mapping[str, Array]:
        """Features with their sequences padded by 0; those with names get the mask of the first one."""
        lists = [name for name, value in by_name(x).items() if are_sequences(value)]
        if self.length is None:
            for value in by_name(x).values():
                self._refuse_ragged(value)
            return x
        if not lists:
            raise ConfigError(
                f"{self.where}: length={self.length} has no effect: no features are a list of sequences"
            )
        found = {name: self._padded(by_name(x)[name], 0, f"{self.where}, x {name}".strip()) for name in lists}
        if not isinstance(x, Mapping):
            return found[""][0]
        masks = {} if self.mask is None or self.mask in x else {self.mask: found[lists[0]][1]}
        return {**x, **{name: array for name, (array, _) in found.items()}, **masks}

    def targets(self, y: Array, x: Array | Mapping[str, Array]) -> Array:
        """Targets padded by what counts for nothing, where they are as long as the sequences of their features."""
        own = _lengths(y)
        if self.length is None or not own or all(own != _lengths(value) for value in by_name(x).values()):
            return y
        found = self._padded(y, PADDING, f"{self.where}, y")[0]
        if found.dtype.kind not in "iu" or found.ndim > 2:
            raise DataError(f"{self.where}: targets that are sequences must be tokens, whole numbers [T]")
        return found

    def _refuse_ragged(self, value: Array) -> None:
        lengths = _lengths(value)
        if len(set(lengths)) > 1:
            raise DataError(
                f"{self.where}: rows have {min(lengths)} to {max(lengths)} values; if they are sequences, give the "
                f"public length to which they are padded or cut, length=..., not one that these data show"
            )

    def _padded(self, value: Array, fill: int, where: str) -> tuple[np.ndarray, np.ndarray]:
        """One array [N, length, ...], and 1 for what is a sequence's own."""
        rows = [_row(row) for row in value]
        kinds = {row.shape[1:] for row in rows if row.size}
        if len(kinds) != 1 or any(not row.ndim or row.dtype.kind not in "biuf" for row in rows):
            raise DataError(f"{where}: sequences must be arrays of numbers [T] or [T, ...] that differ in T alone")
        shape, kind = (len(rows), self.length or 0), np.result_type(*(row.dtype for row in rows if row.size))
        array, mask = np.full((*shape, *kinds.pop()), fill, kind), np.zeros(shape, np.int64)
        for place, row in enumerate(rows):
            if row.size:
                own = row[: self.length]
                array[place, : len(own)], mask[place, : len(own)] = own, 1
        return array, mask


def are_sequences(value: Array) -> bool:
    """Is it a list of arrays, of any lengths?"""
    listed = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object)
    return listed and len(value) > 0 and not isinstance(value[0], str) and hasattr(value[0], "__len__")


def by_name(array: Array | Mapping[str, Array]) -> Mapping[str, Array]:
    """Arrays by name; a single one has none."""
    return array if isinstance(array, Mapping) else {"": array}


def _lengths(value: Array) -> list[int]:
    """The lengths of the sequences in a list; none of anything else."""
    return [len(row) if hasattr(row, "__len__") else 0 for row in value] if are_sequences(value) else []


def _row(row: Any) -> np.ndarray:
    if isinstance(row, torch.Tensor):
        return row.detach().cpu().numpy()
    try:
        return np.asarray(row)
    except ValueError:  # ragged in more than its length
        return np.empty(0, object)
