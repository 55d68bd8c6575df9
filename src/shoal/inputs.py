"""What a model takes: one tensor of records, or several by name, which it gets as keyword arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Inputs = Tensor | dict[str, Tensor]
"""One row a record, in each of them."""

Shape = tuple[int, ...]
PIECE = 1 << 22
"""Numbers that are read at once."""

InputShape = Shape | dict[str, Shape]
"""The shape of one record."""


def each(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same change to every tensor."""
    return change(x) if isinstance(x, Tensor) else {name: change(part) for name, part in x.items()}


def parts(x: Inputs) -> dict[str, Tensor]:
    """The tensors by name; a single one has none."""
    return {"": x} if isinstance(x, Tensor) else x


def count(x: Inputs) -> int:
    """How many records there are."""
    return len(next(iter(parts(x).values())))


def numbers(x: Inputs) -> int:
    """How many numbers all of them have."""
    return sum(part.numel() for part in parts(x).values())


def device_of(x: Inputs) -> torch.device:
    """Where they lie."""
    return next(iter(parts(x).values())).device


def take(x: Inputs, rows: slice | Tensor | np.ndarray) -> Inputs:
    """These records."""
    index = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
    return each(x, lambda part: part[index])


def joined(first: Inputs, second: Inputs) -> Inputs:
    """The records of both."""
    if isinstance(first, Tensor):
        return torch.cat([first, parts(second)[""]])
    return {name: torch.cat([part, parts(second)[name]]) for name, part in first.items()}


def single(x: Inputs, error: Callable[[str], Exception], what: str) -> Tensor:
    """The only tensor; an error that says what needs it where there are several."""
    if isinstance(x, Tensor):
        return x
    raise error(f"{what} take records of one array, these have several: {', '.join(x)}")


def shape_of(x: Inputs) -> InputShape:
    """The shape of one record."""
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else {name: tuple(part.shape[1:]) for name, part in x.items()}


def read_shape(written: Any) -> InputShape:
    """A shape as JSON has it."""
    if isinstance(written, Mapping):
        return {str(name): tuple(int(n) for n in shape) for name, shape in written.items()}
    return tuple(int(n) for n in written)


def digest(x: Inputs, after: Callable[[], None] = lambda: None) -> bytes:
    """Of the shapes, the names and the values; `after` is called after every piece."""
    found = hashlib.blake2b()
    for name, part in parts(x).items():
        found.update(f"{name}{' ' if name else ''}{tuple(part.shape)} ".encode())
        values = part.reshape(1) if part.dim() == 0 else part
        for rows in pieces(values):
            found.update(values[rows].detach().cpu().contiguous().numpy().data)
            after()
    return found.digest()


def pieces(part: Tensor) -> Iterator[slice]:
    """The rows of a tensor, a few megabytes at a time."""
    step = max(1, PIECE * len(part) // max(part.numel(), 1))
    yield from (slice(start, start + step) for start in range(0, len(part), step))
