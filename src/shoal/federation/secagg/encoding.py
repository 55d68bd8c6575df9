"""How secure aggregation's lists are written in a letter: JSON of numbers and hexadecimal bytes, read strictly."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.federation.messages import Parcel, Spoilt
from shoal.federation.secagg.round_keys import Card
from shoal.federation.secagg.shamir import PRIME

KEYS, SHARES, CHECK, UNMASK = "query.keys", "query.shares", "query.check", "query.unmask"
"""The letters of a round besides ROUND, which comes after SHARES."""


def write_bytes(given: Mapping[int, bytes]) -> str:
    return json.dumps({str(number): content.hex() for number, content in sorted(given.items())})


def read_bytes(letter: Parcel, key: str) -> dict[int, bytes]:
    """Bytes for sites, by number."""
    return {_number(number): _bytes(content) for number, content in _table(letter, key).items()}


def write_shares(given: Mapping[int, int]) -> str:
    return json.dumps({str(number): f"{share:x}" for number, share in sorted(given.items())})


def read_shares(letter: Parcel, key: str) -> dict[int, int]:
    found = {}
    for number, text in _table(letter, key).items():
        try:
            found[_number(number)] = int(text[:80], 16)
        except (ValueError, TypeError):
            raise Spoilt(f"its '{key}' cannot be understood") from None
    if not all(0 <= share < PRIME for share in found.values()):
        raise Spoilt(f"its '{key}' holds a number that is no share")
    return found


def write_numbers(given: Iterable[int]) -> str:
    return json.dumps(sorted(given))


def read_numbers(letter: Parcel, key: str) -> set[int]:
    found = _json(letter, key)
    if not isinstance(found, list) or not all(type(each) is int for each in found) or len(set(found)) != len(found):
        raise Spoilt(f"its '{key}' is no list of different sites")
    return set(found)


def card_values(card: Card) -> dict[str, bytes]:
    return {name: getattr(card, name) for name in CARD}


def read_card(letter: Parcel, number: int) -> Card:
    return Card(number, *(letter.raw(name) for name in CARD))


def write_cards(cards: Mapping[int, Card]) -> str:
    return json.dumps({str(n): [getattr(card, name).hex() for name in CARD] for n, card in sorted(cards.items())})


def read_cards(letter: Parcel, key: str) -> dict[int, Card]:
    found = {}
    for number, parts in _table(letter, key).items():
        if not isinstance(parts, list) or len(parts) != len(CARD):
            raise Spoilt(f"its '{key}' cannot be understood")
        found[_number(number)] = Card(_number(number), *map(_bytes, parts))
    return found


CARD = ("identity", "sealing", "masking", "signature")


def _json(letter: Parcel, key: str) -> Any:
    try:
        return json.loads(letter.text(key))
    except (ValueError, RecursionError):
        raise Spoilt(f"its '{key}' cannot be understood") from None


def _table(letter: Parcel, key: str) -> dict[str, Any]:
    found = _json(letter, key)
    if not isinstance(found, dict):
        raise Spoilt(f"its '{key}' cannot be understood")
    return found


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and str(int(text)) == text):
        raise Spoilt(f"there is no site {text[:20]!r}")
    return int(text)


def _bytes(text: Any) -> bytes:
    try:
        return bytes.fromhex(text)
    except (ValueError, TypeError):
        raise Spoilt("a list in it cannot be understood") from None
