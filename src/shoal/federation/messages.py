"""The wire format: named values and named float32 vectors, and no executable content.

Vectors are raw little-endian float32 in Flower's ArrayRecord; values are Flower's ConfigRecord. A received
payload is checked key by key: an unexpected name, type or length raises `InvalidMessage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.federation.text import one_line

if TYPE_CHECKING:
    from flwr.app import RecordDict

Value = str | int | float | bytes
T = TypeVar("T", str, int, float, bytes)
VALUES, VECTORS, RAW = "values", "vectors", "raw-little-endian"
MOST_TEXT = 2**20  # characters in one value


class InvalidMessage(ShoalError):
    """A malformed or unexpected payload; the text says what is wrong with it."""


@dataclass(frozen=True)
class Payload:
    """Named values and named vectors."""

    values: Mapping[str, Value]
    vectors: Mapping[str, Tensor] = field(default_factory=dict)

    def text(self, key: str) -> str:
        """The value of a text field."""
        return self._value(key, str)

    def raw(self, key: str) -> bytes:
        """The value of a bytes field."""
        return self._value(key, bytes)

    def number(self, key: str) -> int:
        """The value of an integer field."""
        return self._value(key, int)

    def real(self, key: str) -> float:
        """The value of a float field."""
        return self._value(key, float)

    def _value(self, key: str, kind: type[T]) -> T:
        value = self.values.get(key)
        if type(value) is not kind:  # a bool is not an int here
            raise InvalidMessage(f"field '{key}' is {'missing' if value is None else f'not of type {kind.__name__}'}")
        return value

    def require(self, values: set[str], vectors: Mapping[str, int]) -> None:
        """Raise InvalidMessage unless it holds exactly these values, and these vectors of these lengths."""
        if set(self.values) != values:
            odd = sorted(set(self.values) ^ values)
            raise InvalidMessage(f"fields {_some(odd)} are missing or unexpected")
        if set(self.vectors) != set(vectors):
            odd = sorted(set(self.vectors) ^ set(vectors))
            raise InvalidMessage(f"vectors {_some(odd)} are missing or unexpected")
        for key, length in vectors.items():
            if self.vectors[key].shape != (length,):
                raise InvalidMessage(f"vector '{key}' has shape {tuple(self.vectors[key].shape)}, not ({length},)")


def printable(log: Callable[[str], None]) -> Callable[[str], None]:
    """A log whose lines are printable: what another machine wrote can neither end a line nor steer the terminal."""

    def write(words: str) -> None:
        log(one_line(words))

    return write


def pack(payload: Payload, packed: dict[int, object] | None = None) -> RecordDict:
    """Return the payload as the content of a Flower message; vectors already in `packed` are reused."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    records = RecordDict({VALUES: ConfigRecord(dict(payload.values))})
    if payload.vectors:
        packed = {} if packed is None else packed
        for vector in payload.vectors.values():
            if id(vector) not in packed:
                packed[id(vector)] = _array(Array, vector)
        arrays = {key: packed[id(vector)] for key, vector in payload.vectors.items()}
        records[VECTORS] = ArrayRecord(arrays)
    return records


def unpack(records: RecordDict, most_bytes: int) -> Payload:
    """Return the payload of a Flower message's content; raise InvalidMessage where it is malformed."""
    from flwr.app import ArrayRecord, ConfigRecord

    if not set(records) <= {VALUES, VECTORS}:
        raise InvalidMessage(f"unexpected records {_some(sorted(map(str, records)))}")
    values, arrays = records.get(VALUES), records.get(VECTORS, ArrayRecord())
    if not isinstance(values, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise InvalidMessage("its records have the wrong type")
    for key, value in values.items():
        if type(value) not in (str, int, float, bytes):
            raise InvalidMessage(f"field '{key[:40]}' has the unsupported type {type(value).__name__}")
        if isinstance(value, str | bytes) and len(value) > MOST_TEXT:
            raise InvalidMessage(f"field '{key[:40]}' has {len(value):,} characters, more than {MOST_TEXT:,}")
    if (size := sum(len(array.data) for array in arrays.values())) > most_bytes:
        raise InvalidMessage(f"its vectors have {size:,} bytes, at most {most_bytes:,} are allowed")
    plain: dict[str, Value] = {key: value for key, value in values.items() if isinstance(value, Value)}
    return Payload(plain, {key: _vector(key, array) for key, array in arrays.items()})


def _array(kind: type, vector: Tensor) -> object:
    data = vector.detach().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes()
    return kind(dtype="float32", shape=(vector.numel(),), stype=RAW, data=data)


def _vector(key: str, array: object) -> Tensor:
    dtype, shape, stype, data = (getattr(array, name, None) for name in ("dtype", "shape", "stype", "data"))
    if dtype != "float32" or stype != RAW or not isinstance(data, bytes):
        raise InvalidMessage(f"vector '{key[:40]}' is {str(dtype)[:20]} as {str(stype)[:20]}, not raw float32")
    if shape is None or len(shape) != 1 or 4 * shape[0] != len(data):
        raise InvalidMessage(f"vector '{key[:40]}' has shape {str(shape)[:40]} in {len(data):,} bytes")
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


def _some(names: list[str]) -> str:
    return ", ".join(f"'{name[:40]}'" for name in names[:5]) or "none"
