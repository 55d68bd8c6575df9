"""The audit log of a run, `audit.jsonl`: one line for each join, refusal, strike and authentication failure.

It is a record for people. Nothing is computed from it, and a run goes on where it cannot be written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal import release

FILE = "audit.jsonl"


class AuditLog:
    """Appends lines to the file."""

    def __init__(self, folder: Path) -> None:
        self._path, self._torn = folder / FILE, False

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line in one call, so that no other line is mixed with it.

        Raises:
            OSError: The file cannot be written.
        """
        raw = json.dumps({release.KEY: release.SITES, **line}).encode() + b"\n"
        raw, self._torn = (b"\n" if self._torn else b"") + raw, True
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._torn = os.write(file, raw) != len(raw)
        finally:
            os.close(file)
