"""The wire format of secure aggregation's lists: JSON of numbers and hexadecimal bytes, parsed strictly."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from shoal.federation.messages import InvalidMessage, Payload, Value
from shoal.federation.secagg.commitments import HASH, Dealt
from shoal.federation.secagg.round_keys import KeyBundle
from shoal.federation.secagg.shamir import PRIME

KEYS, SHARES, CHECK, UNMASK = "query.keys", "query.shares", "query.check", "query.unmask"
"""The message types of a round besides ROUND, which follows SHARES."""


def write_bytes(given: Mapping[int, bytes]) -> str:
    """Write bytes by site number."""
    return json.dumps({str(number): content.hex() for number, content in sorted(given.items())})


def read_bytes(message: Payload, key: str) -> dict[int, bytes]:
    """Read bytes by site number."""
    return {_number(number): _bytes(content) for number, content in _table(message, key).items()}


def write_shares(given: Mapping[int, int]) -> str:
    """Write shares by site number."""
    return json.dumps({str(number): f"{share:x}" for number, share in sorted(given.items())})


def read_shares(message: Payload, key: str) -> dict[int, int]:
    """Read shares by site number."""
    found = {}
    for number, text in _table(message, key).items():
        try:
            found[_number(number)] = int(text[:80], 16)
        except (ValueError, TypeError):
            raise InvalidMessage(f"malformed field '{key}'") from None
    if not all(0 <= share < PRIME for share in found.values()):
        raise InvalidMessage(f"malformed field '{key}': a share is out of range")
    return found


def write_numbers(given: Iterable[int]) -> str:
    """Write a set of site numbers."""
    return json.dumps(sorted(given))


def read_numbers(message: Payload, key: str) -> set[int]:
    """Read a set of site numbers."""
    found = _json(message, key)
    if not isinstance(found, list) or not all(type(each) is int for each in found) or len(set(found)) != len(found):
        raise InvalidMessage(f"malformed field '{key}': not a list of distinct sites")
    return set(found)


def bundle_values(bundle: KeyBundle) -> dict[str, bytes]:
    """Return a key bundle as the values of a message."""
    return {name: getattr(bundle, name) for name in BUNDLE}


def read_bundle(message: Payload, number: int) -> KeyBundle:
    """Read the key bundle of one site from a message's values."""
    return KeyBundle(number, *(message.raw(name) for name in BUNDLE))


def dealt_values(dealt: Dealt) -> dict[str, Value]:
    """Return what a dealer sends as the values of a message."""
    return {"sealed": write_bytes(dealt.sealed), "commitments": write_bytes(dealt.commitments), "seed": dealt.seed}


def read_dealt(message: Payload) -> Dealt:
    """Read what a dealer sends."""
    dealt = Dealt(read_bytes(message, "sealed"), read_bytes(message, "commitments"), message.raw("seed"))
    if len(dealt.seed) != HASH or any(len(each) != 2 * HASH for each in dealt.commitments.values()):
        raise InvalidMessage("its commitments are not SHA-256 hashes")
    return dealt


def write_bundles(bundles: Mapping[int, KeyBundle]) -> str:
    """Write key bundles by site number."""
    return json.dumps(
        {str(n): [getattr(bundle, name).hex() for name in BUNDLE] for n, bundle in sorted(bundles.items())}
    )


def read_bundles(message: Payload, key: str) -> dict[int, KeyBundle]:
    """Read key bundles by site number."""
    found = {}
    for number, parts in _table(message, key).items():
        if not isinstance(parts, list) or len(parts) != len(BUNDLE):
            raise InvalidMessage(f"malformed field '{key}'")
        found[_number(number)] = KeyBundle(_number(number), *map(_bytes, parts))
    return found


BUNDLE = ("identity", "sealing", "masking", "signature")


def _json(message: Payload, key: str) -> Any:
    try:
        return json.loads(message.text(key))
    except (ValueError, RecursionError):
        raise InvalidMessage(f"malformed field '{key}'") from None


def _table(message: Payload, key: str) -> dict[str, Any]:
    found = _json(message, key)
    if not isinstance(found, dict):
        raise InvalidMessage(f"malformed field '{key}'")
    return found


@lru_cache(4096)
def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and (text[0] != "0" or text == "0")):
        raise InvalidMessage(f"malformed site number {text[:20]!r}")
    return int(text)


def _bytes(text: Any) -> bytes:
    try:
        return bytes.fromhex(text)
    except (ValueError, TypeError):
        raise InvalidMessage("malformed hexadecimal bytes") from None
