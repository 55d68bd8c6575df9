"""The list of key bundles of a sparse round, packed: a site reads the entries of its neighbours alone."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise

from shoal.federation.messages import InvalidMessage
from shoal.federation.secagg.round_keys import KeyBundle

_HEAD = struct.Struct(">IHH")  # number, and the lengths of identity and signature
_KEYS = 64  # bytes of the two X25519 keys


class BundleList(Mapping[int, KeyBundle]):
    """Key bundles by site number, as bytes: of each its head, identity, sealing key, masking key and signature."""

    def __init__(self, packed: bytes) -> None:
        """Raise InvalidMessage unless the bytes are a list in the order of the numbers."""
        self.packed = packed
        self._places: dict[int, tuple[int, int, int]] = {}  # where identity, keys and signature begin
        self._read: dict[int, KeyBundle] = {}
        place, last = 0, -1
        try:
            while place < len(packed):
                number, identity, signature = _HEAD.unpack_from(packed, place)
                if number <= last:
                    raise InvalidMessage("malformed field 'cards': not in order")
                keys = place + _HEAD.size + identity
                self._places[number] = place + _HEAD.size, keys, keys + _KEYS
                place, last = keys + _KEYS + signature, number
        except struct.error:
            place = -1
        if place != len(packed):
            raise InvalidMessage("malformed field 'cards': cut off")

    @classmethod
    def of(cls, bundles: Mapping[int, KeyBundle]) -> BundleList:
        """Pack bundles, whose keys are known to be X25519 keys."""
        parts = []
        for number, each in sorted(bundles.items()):
            head = _HEAD.pack(number, len(each.identity), len(each.signature))
            parts += [head, each.identity, each.sealing, each.masking, each.signature]
        return cls(b"".join(parts))

    def __getitem__(self, number: int) -> KeyBundle:
        if number not in self._read:
            self._read[number] = self._unpacked(number)
        return self._read[number]

    def _unpacked(self, number: int) -> KeyBundle:
        start, keys, signature = self._places[number]
        _, _, size = _HEAD.unpack_from(self.packed, start - _HEAD.size)
        cuts = (start, keys, keys + _KEYS // 2, signature, signature + size)
        return KeyBundle(number, *(self.packed[a:b] for a, b in pairwise(cuts)))

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def identity(self, number: int) -> bytes:
        """The public key that identifies a site."""
        start, keys, _ = self._places[number]
        return self.packed[start:keys]

    def identities(self) -> set[bytes]:
        """The public keys that identify the sites."""
        return {self.packed[start:keys] for start, keys, _ in self._places.values()}

    def digest(self, context: bytes) -> bytes:
        """Return a hash that identifies a round with these sites and keys."""
        return hashlib.sha256(context + self.packed).digest()
