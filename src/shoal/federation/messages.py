"""What goes over the wire: a few named values and named float32 vectors, and nothing that could run.

Vectors are raw little-endian float32 in Flower's ArrayRecord; values are Flower's ConfigRecord. A payload from
elsewhere is taken apart key by key: whatever has another name, type or length makes it `Spoilt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from flwr.app import RecordDict

Value = str | int | float | bytes
T = TypeVar("T", str, int, float, bytes)
VALUES, VECTORS, RAW = "values", "vectors", "raw-little-endian"
MOST_TEXT = 2**20  # characters in one value


class InvalidMessage(ShoalError):
    """A payload that is not what it should be; the message says what is wrong with it."""


@dataclass(frozen=True)
class Payload:
    """Named values and named vectors."""

    values: Mapping[str, Value]
    vectors: Mapping[str, Tensor] = field(default_factory=dict)

    def text(self, key: str) -> str:
        return self._value(key, str)

    def raw(self, key: str) -> bytes:
        return self._value(key, bytes)

    def number(self, key: str) -> int:
        return self._value(key, int)

    def real(self, key: str) -> float:
        return self._value(key, float)

    def _value(self, key: str, kind: type[T]) -> T:
        value = self.values.get(key)
        if type(value) is not kind:  # a bool is no int here
            raise InvalidMessage(f"its value '{key}' is {'missing' if value is None else f'no {kind.__name__}'}")
        return value

    def require(self, values: set[str], vectors: Mapping[str, int]) -> None:
        """Spoilt unless it holds exactly these values, and these vectors of these lengths."""
        if set(self.values) != values:
            odd = sorted(set(self.values) ^ values)
            raise InvalidMessage(f"its values {_some(odd)} are missing or not asked for")
        if set(self.vectors) != set(vectors):
            odd = sorted(set(self.vectors) ^ set(vectors))
            raise InvalidMessage(f"its vectors {_some(odd)} are missing or not asked for")
        for key, length in vectors.items():
            if self.vectors[key].shape != (length,):
                raise InvalidMessage(
                    f"its vector '{key}' has shape {tuple(self.vectors[key].shape)}, not ({length},)"
                )


def pack(payload: Payload, packed: dict[int, object] | None = None) -> RecordDict:
    """The payload as the content of a Flower message; a vector that is in `packed` already is not packed again."""
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
    """The payload in a message's content; Spoilt where it is anything else."""
    from flwr.app import ArrayRecord, ConfigRecord

    if not set(records) <= {VALUES, VECTORS}:
        raise InvalidMessage(f"it holds records {_some(sorted(map(str, records)))}")
    values, arrays = records.get(VALUES), records.get(VECTORS, ArrayRecord())
    if not isinstance(values, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise InvalidMessage("its records are of the wrong kind")
    for key, value in values.items():
        if type(value) not in (str, int, float, bytes):
            raise InvalidMessage(f"its value '{key[:40]}' is a {type(value).__name__}")
        if isinstance(value, str | bytes) and len(value) > MOST_TEXT:
            raise InvalidMessage(f"its value '{key[:40]}' has {len(value):,} characters")
    if (size := sum(len(array.data) for array in arrays.values())) > most_bytes:
        raise InvalidMessage(f"its vectors have {size:,} bytes, at most {most_bytes:,} are taken")
    plain: dict[str, Value] = {key: value for key, value in values.items() if isinstance(value, Value)}
    return Payload(plain, {key: _vector(key, array) for key, array in arrays.items()})


def _array(kind: type, vector: Tensor) -> object:
    data = vector.detach().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes()
    return kind(dtype="float32", shape=(vector.numel(),), stype=RAW, data=data)


def _vector(key: str, array: object) -> Tensor:
    dtype, shape, stype, data = (getattr(array, name, None) for name in ("dtype", "shape", "stype", "data"))
    if dtype != "float32" or stype != RAW or not isinstance(data, bytes):
        raise InvalidMessage(f"its vector '{key[:40]}' is {str(dtype)[:20]} as {str(stype)[:20]}, not raw float32")
    if shape is None or len(shape) != 1 or 4 * shape[0] != len(data):
        raise InvalidMessage(f"its vector '{key[:40]}' has shape {str(shape)[:40]} in {len(data):,} bytes")
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


def _some(names: list[str]) -> str:
    return ", ".join(f"'{name[:40]}'" for name in names[:5]) or "none"
