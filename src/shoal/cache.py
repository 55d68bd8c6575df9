"""Where Shoal keeps what it can make or fetch again: downloads, public features, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache: `SHOAL_CACHE`, else `shoal` below `XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("SHOAL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"
