"""Keys and values as TOML writes them."""

from __future__ import annotations

import json
import re
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
