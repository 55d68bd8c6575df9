"""Log lines with levels, on standard error: plain words on a terminal, with time and level elsewhere, or JSON."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from shoal.errors import ConfigError
from shoal.federation.text import one_line

LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
FORMATS = ("text", "json")
LOGGER = "shoal"


class _StandardError(logging.Handler):
    """Writes to standard error as it is at that moment: a progress bar may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class _Words(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO words`."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} {record.levelname} {one_line(record.getMessage())}"


class _BareWords(logging.Formatter):
    """For a terminal: the words alone."""

    def format(self, record: logging.LogRecord) -> str:
        words = one_line(record.getMessage())
        return f"shoal: {words}" if record.levelno >= logging.ERROR else words


class _Json(logging.Formatter):
    """One JSON object a line: time, level, message, and the facts of the event."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "message": one_line(record.getMessage())}
        return json.dumps(line | getattr(record, "facts", {}), default=str)


class Log:
    """The log of one command, which the command line closes at its end.

    Attributes:
        on_terminal: Its lines are words on a terminal.
    """

    def __init__(self, level: str, format: str) -> None:
        """Send everything that the package logs, and Python's warnings, to standard error.

        Raises:
            ConfigError: There is no such level or format.
        """
        for option, value, choices in (("--log-level", level, LEVELS), ("--log-format", format, FORMATS)):
            if value not in choices:
                raise ConfigError(f"{option} must be one of {', '.join(choices)}, got {value!r}")
        self.on_terminal = format == "text" and sys.stderr.isatty()
        handler = _StandardError()
        handler.setFormatter(_BareWords() if self.on_terminal else _Json() if format == "json" else _Words())
        self._logger = logging.getLogger(LOGGER)
        self._logger.handlers, self._logger.propagate = [handler], False
        self._logger.setLevel(LEVELS[level])
        warnings.showwarning = lambda message, *_: self.write(logging.WARNING, str(message))

    def __call__(self, words: str) -> None:
        """Log a line of level info."""
        self.write(logging.INFO, words)

    def write(self, level: int, words: str, facts: Mapping[str, Any] | None = None) -> None:
        """Log a line, with facts for the format `json`."""
        self._logger.log(level, "%s", words, extra={"facts": dict(facts or {})})


def show_error(words: str) -> None:
    """Show what ended a command: in its log, if it has one."""
    logger = logging.getLogger(LOGGER)
    if logger.handlers:
        logger.error("%s", words)
    else:
        print(f"shoal: {words}", file=sys.stderr)


def close() -> None:
    """Leave Python's logging as it was before there was a log."""
    logger = logging.getLogger(LOGGER)
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
