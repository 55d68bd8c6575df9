"""Keys and values as TOML writes them, and sections as dotted keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_key(name: str) -> str:
    """A key as TOML writes it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_word(name)


def toml_word(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML requires it escaped
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_word, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_key(key)} = {toml_word(each)}' for key, each in value.items())}}}"
    return repr(value)


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Sections as dotted keys; what is flat already stays so, and `schema.columns` is one value."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and value and "." not in key:
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat
