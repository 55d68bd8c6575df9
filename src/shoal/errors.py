"""What goes wrong in Shoal, in words for the person who can fix it: the thing, the value, the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ShoalError(Exception):
    """The root of every error that Shoal raises on purpose; the command line prints it and exits with 2."""


class ConfigError(ShoalError):
    """A key or a value of the configuration that cannot be used."""


class PluginError(ShoalError):
    """Something of another package that cannot be imported, or is not what it should be."""


class DataError(ShoalError):
    """Data that are missing, damaged, or not what they claim to be."""


class ModelError(ShoalError):
    """A model that cannot be built, or that does not fit the data or the privacy asked for."""


class LedgerError(ShoalError):
    """A ledger that was edited, torn, or that cannot be written."""


class RunError(ShoalError):
    """A run folder that is in use, incomplete, or cannot be resumed."""


def listed(names: Sequence[str], most: int = 20) -> str:
    """The first names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the choice nearest to the word, or a list of the choices."""
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; choose from {', '.join(choices)}" if choices else ""
