"""The list of key bundles of a sparse round, packed: a site reads the entries of its neighbours alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from shoal.federation.messages import InvalidMessage
from shoal.federation.secagg.round_keys import KeyBundle

_COUNT = 4  # bytes
_HEAD = np.dtype([("number", ">u4"), ("identity", ">u2"), ("signature", ">u2")])  # the last two are lengths
_KEYS = 64  # bytes of the two X25519 keys


class BundleList(Mapping[int, KeyBundle]):
    """Key bundles by site number, as bytes: their count, their heads, and of each its identity, sealing key, masking
    key and signature."""

    def __init__(self, packed: bytes) -> None:
        """Raise InvalidMessage unless the bytes are a list in the order of the numbers."""
        count = int.from_bytes(packed[:_COUNT], "big")
        first = _COUNT + count * _HEAD.itemsize
        if len(packed) < first:
            raise InvalidMessage("malformed field 'cards': cut off")
        heads = np.frombuffer(packed, _HEAD, count, _COUNT)
        numbers, identity, signature = (heads[name].astype(np.int64) for name in ("number", "identity", "signature"))
        if (np.diff(numbers) <= 0).any():
            raise InvalidMessage("malformed field 'cards': not in order")
        places = first + np.cumsum(np.append(0, identity + _KEYS + signature))
        if len(packed) != places[-1]:
            raise InvalidMessage("malformed field 'cards': cut off")
        self.packed = packed
        self._index = dict(zip(numbers.tolist(), range(count), strict=True))
        self._places = places.tolist()  # where each begins, and the last one ends
        self._keys = (places[:-1] + identity).tolist()  # where its keys begin
        self._read: dict[int, KeyBundle] = {}

    @classmethod
    def of(cls, bundles: Mapping[int, KeyBundle]) -> BundleList:
        """Pack bundles, whose keys are known to be X25519 keys."""
        listed = sorted(bundles.items())
        heads = np.array([(number, len(each.identity), len(each.signature)) for number, each in listed], _HEAD)
        bodies = (part for _, each in listed for part in (each.identity, each.sealing, each.masking, each.signature))
        return cls(b"".join([len(listed).to_bytes(_COUNT, "big"), heads.tobytes(), *bodies]))

    def __getitem__(self, number: int) -> KeyBundle:
        if number not in self._read:
            self._read[number] = self._unpacked(number)
        return self._read[number]

    def _unpacked(self, number: int) -> KeyBundle:
        at = self._index[number]
        keys = self._keys[at]
        cuts = (self._places[at], keys, keys + _KEYS // 2, keys + _KEYS, self._places[at + 1])
        return KeyBundle(number, *(self.packed[a:b] for a, b in pairwise(cuts)))

    def __iter__(self) -> Iterator[int]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def identity(self, number: int) -> bytes:
        """The public key that identifies a site."""
        at = self._index[number]
        return self.packed[self._places[at] : self._keys[at]]

    def identities(self) -> set[bytes]:
        """The public keys that identify the sites."""
        return {self.packed[a:b] for a, b in zip(self._places, self._keys, strict=False)}

    def digest(self, context: bytes) -> bytes:
        """Return a hash that identifies a round with these sites and keys."""
        return hashlib.sha256(context + self.packed).digest()
