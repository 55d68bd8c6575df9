"""Names that were other ones in version 0.1: old configuration keys work for one release, old files can be read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.errors import ConfigError

SECTIONS = {"examples": "records", "per_example": "per_record"}
FIELDS = {
    "clip": "clip_norm",
    "noise": "noise_multiplier",
    "count_noise": "count_noise_multiplier",
    "initial": "initial_clip_norm",
    "rate": "clip_norm_lr",
}
"""Of mechanisms; one of another package may well have a field of the old name, and keeps it."""
KEYS = {
    "data.client": "data.client_column",
    "engine.together": "engine.way",
    "engine.batched": "engine.way",
    "federation.first": "federation.min_sites_to_start",
    "federation.least": "federation.min_sites",
    "federation.largest": "federation.max_update_norm",
    "federation.fewest_records": "federation.min_records",
    "federation.most_records": "federation.max_records",
}
WORDS = {"example": "record", "inside": "client-process", "per-example": "per-record"}
"""Units, observers and placements of noise."""
ALGORITHMS = {"quantile-example": "quantile-record"}
_WAYS = {True: "auto", False: "sequential"}
"""What the values of engine.batched mean for engine.way."""
_CHOICES = ("budget.unit", "budget.observer", "per_step.placement")
_DEEPEST = 30
_MECHANISMS = ("per_record", "per_step", "per_update", "per_round")


def current_keys(
    given: Mapping[str, Any], known: Mapping[str, frozenset[str]], written: Mapping[str, str]
) -> dict[str, Any]:
    """A configuration under today's keys, with a warning for each old one.

    Args:
        given: Flat keys, in sections of today's names, and values.
        known: The fields of each section, by its name.
        written: What each key was called by the user.
    """
    found: dict[str, Any] = {}
    for old, value in given.items():
        key, said = _current(old, known), written.get(old, old)
        if key != said:
            _warn(said, key)
        found[key] = WORDS.get(value, value) if key in _CHOICES and isinstance(value, str) else value
        if key == "engine.way" and isinstance(value, bool):
            found[key] = _WAYS[value]
    return found


def refuse_twice(keys: Iterable[str], known: Mapping[str, frozenset[str]]) -> None:
    """Raise a ConfigError where a key is given under its old name and under today's; `known` as above."""
    found: dict[str, str] = {}
    for key in keys:
        other = found.setdefault(_current(current_section(key), known), key)
        if other != key:
            raise ConfigError(f"{other} and {key} are the same key, by its old and new name: leave one of them out")


def current_algorithm(name: str) -> str:
    """The name of an algorithm today, with a warning where another was given."""
    if name in ALGORITHMS:
        _warn(name, ALGORITHMS[name])
    return ALGORITHMS.get(name, name)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now called {new}; the old name works until version 0.3", FutureWarning, 4)


def current_section(key: str) -> str:
    """A key with its section's name of today."""
    section, dot, name = key.partition(".")
    return SECTIONS.get(section, section) + dot + name


def _current(old: str, known: Mapping[str, frozenset[str]]) -> str:
    key = KEYS.get(old, old)
    section, _, name = key.partition(".")
    fields = known.get(section, frozenset())
    return f"{section}.{FIELDS[name]}" if name in FIELDS and name not in fields and FIELDS[name] in fields else key


def earlier_key(key: str) -> str:
    """What a key was called: digests of settings were made with that, and stay what they are."""
    section, _, name = key.partition(".")
    names = {new: old for old, new in FIELDS.items()}
    if section in _MECHANISMS:
        key = f"{section}.{names.get(name, name)}"
    for old, new in SECTIONS.items():
        key = old + key.removeprefix(new) if key.startswith(f"{new}.") else key
    return {new: old for old, new in KEYS.items()}.get(key, key)


def earlier_word(value: Any) -> Any:
    """What a unit, an observer, a placement of noise or an algorithm was called."""
    names = {new: old for old, new in (WORDS | ALGORITHMS).items()}
    return names.get(value, value) if isinstance(value, str) else value


def current(read: Any, depth: int = 0) -> Any:
    """What was read from a file of an earlier version, with all that is called otherwise today under its new name.

    What is nested deeper than Shoal writes is left as it is: a foreign file must not exhaust the stack.
    """
    if depth > _DEEPEST:
        return read
    if isinstance(read, list):
        return [current(each, depth + 1) for each in read]
    if isinstance(read, dict):
        names = {"example_clip": "record_clip"}
        return {names.get(key, key): _current_value(key, value, depth) for key, value in read.items()}
    return read


def _current_value(key: str, value: Any, depth: int) -> Any:
    if key in ("unit", "observer") and isinstance(value, str):
        return WORDS.get(value, value)
    if key == "algorithm" and isinstance(value, str):
        return ALGORITHMS.get(value, value)
    if key in ("proven", "published") and isinstance(value, list):  # of a table's results: [unit, observer, ...]
        return [[_word(each) for each in row] if isinstance(row, list) else current(row, depth + 1) for row in value]
    return current(value, depth + 1)


def _word(value: Any) -> Any:
    return WORDS.get(value, value) if isinstance(value, str) else value
