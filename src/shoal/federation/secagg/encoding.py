"""How secure aggregation's lists are written in a message: JSON of numbers and hexadecimal bytes, read strictly."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.federation.messages import InvalidMessage, Payload
from shoal.federation.secagg.round_keys import KeyBundle
from shoal.federation.secagg.shamir import PRIME

KEYS, SHARES, CHECK, UNMASK = "query.keys", "query.shares", "query.check", "query.unmask"
"""The messages of a round besides ROUND, which comes after SHARES."""


def write_bytes(given: Mapping[int, bytes]) -> str:
    return json.dumps({str(number): content.hex() for number, content in sorted(given.items())})


def read_bytes(message: Payload, key: str) -> dict[int, bytes]:
    """Bytes for sites, by number."""
    return {_number(number): _bytes(content) for number, content in _table(message, key).items()}


def write_shares(given: Mapping[int, int]) -> str:
    return json.dumps({str(number): f"{share:x}" for number, share in sorted(given.items())})


def read_shares(message: Payload, key: str) -> dict[int, int]:
    found = {}
    for number, text in _table(message, key).items():
        try:
            found[_number(number)] = int(text[:80], 16)
        except (ValueError, TypeError):
            raise InvalidMessage(f"its '{key}' cannot be understood") from None
    if not all(0 <= share < PRIME for share in found.values()):
        raise InvalidMessage(f"its '{key}' holds a number that is no share")
    return found


def write_numbers(given: Iterable[int]) -> str:
    return json.dumps(sorted(given))


def read_numbers(message: Payload, key: str) -> set[int]:
    found = _json(message, key)
    if not isinstance(found, list) or not all(type(each) is int for each in found) or len(set(found)) != len(found):
        raise InvalidMessage(f"its '{key}' is no list of different sites")
    return set(found)


def bundle_values(bundle: KeyBundle) -> dict[str, bytes]:
    return {name: getattr(bundle, name) for name in BUNDLE}


def read_bundle(message: Payload, number: int) -> KeyBundle:
    return KeyBundle(number, *(message.raw(name) for name in BUNDLE))


def write_bundles(bundles: Mapping[int, KeyBundle]) -> str:
    return json.dumps(
        {str(n): [getattr(bundle, name).hex() for name in BUNDLE] for n, bundle in sorted(bundles.items())}
    )


def read_bundles(message: Payload, key: str) -> dict[int, KeyBundle]:
    found = {}
    for number, parts in _table(message, key).items():
        if not isinstance(parts, list) or len(parts) != len(BUNDLE):
            raise InvalidMessage(f"its '{key}' cannot be understood")
        found[_number(number)] = KeyBundle(_number(number), *map(_bytes, parts))
    return found


BUNDLE = ("identity", "sealing", "masking", "signature")


def _json(message: Payload, key: str) -> Any:
    try:
        return json.loads(message.text(key))
    except (ValueError, RecursionError):
        raise InvalidMessage(f"its '{key}' cannot be understood") from None


def _table(message: Payload, key: str) -> dict[str, Any]:
    found = _json(message, key)
    if not isinstance(found, dict):
        raise InvalidMessage(f"its '{key}' cannot be understood")
    return found


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and str(int(text)) == text):
        raise InvalidMessage(f"there is no site {text[:20]!r}")
    return int(text)


def _bytes(text: Any) -> bytes:
    try:
        return bytes.fromhex(text)
    except (ValueError, TypeError):
        raise InvalidMessage("a list in it cannot be understood") from None
