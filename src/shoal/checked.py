"""Values that come from outside, checked against a type: an error names the key, the value and what it should be."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shoal.errors import ConfigError, nearest


def checked(key: str, value: Any, kind: Any) -> Any:
    """The value of a key, lists as tuples.

    Raises:
        ConfigError: It is not of this kind.
    """
    held = tuple(value) if isinstance(value, list) else value  # as records hold it
    try:
        found = _adapter(kind).validate_python(held)
    except ValidationError as error:
        raise ConfigError(f"{key} cannot be {short(value)}: {_reason(error, value)}") from None
    if isinstance(found, int) and abs(found) >= 2**63:
        raise ConfigError(f"{key} cannot be {short(value)}: numbers must fit into 63 bits")
    if isinstance(found, str) and any("\ud800" <= letter <= "\udfff" for letter in found):
        raise ConfigError(f"{key} cannot be {short(value)}: it is not UTF-8")
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Made once for each type, since that takes longer than checking a value."""
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def short(value: Any) -> str:
    """A value in a message: at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no number of more than 4,300 digits
        return "so long a number"
    return text if len(text) <= 80 else text[:77] + "..."


def _reason(error: ValidationError, value: Any) -> str:
    first = error.errors()[0]
    choices = first.get("ctx", {}).get("expected", "")
    if first["type"] == "literal_error":
        words = [word.strip().strip("'") for word in choices.replace(" or ", ",").split(",")]
        return f"it is one of {', '.join(words)}{nearest(str(value), words) if str(value) else ''}"
    reasons = [item["msg"].removeprefix("Input should be ") for item in error.errors()]
    reasons = ["a list in brackets" if reason == "a valid tuple" else reason for reason in reasons]
    return f"it should be {' or '.join(dict.fromkeys(reasons))}"
