"""Column names and values that people commonly use, and what is publicly known of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

LABELS = (
    "label",
    "target",
    "outcome",
    "died",
    "death",
    "mortality",
    "class",
    "y",
    "readmitted",
    "diagnosis",
    "event",
)
CLIENTS = (
    "hospital", "site", "client", "center", "centre", "clinic", "institution", "user", "customer", "student",
    "device", "speaker", "patient", "subject", "participant",
)  # fmt: skip
IDENTIFIER = re.compile(r"(^|_)(id|uuid|guid|mrn|ssn|key|name|email|phone|address|index|no|nr|unnamed_0)$|^$")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{1,2}:\d{2}(:\d{2})?( ?[ap]m)?$", re.IGNORECASE)
"""Dates, and times of day."""
RANGES: tuple[tuple[str, float, float, float], ...] = (
    ("age", 0, 120, 50),
    ("bmi", 10, 70, 25),
    ("systolic|sbp", 50, 250, 130),
    ("diastolic|dbp", 20, 150, 80),
    ("heart_rate|hr|pulse", 20, 250, 80),
    ("respiratory_rate|resp_rate", 0, 60, 16),
    ("spo2|sao2|oxygen_saturation", 50, 100, 97),
    ("temperature|temp", 30, 45, 37),
    ("weight", 0, 300, 75),
    ("height", 50, 250, 170),
    ("month", 1, 12, 6),
    ("hour", 0, 24, 12),
    ("weekday|day_of_week", 0, 7, 3),
    ("percent|pct", 0, 100, 50),
)
"""Public ranges by the words of a column's name, and the constant for missing values."""
VOCABULARIES = (
    ("F", "M"), ("f", "m"), ("female", "male"), ("Female", "Male"), ("no", "yes"), ("No", "Yes"), ("N", "Y"),
    ("n", "y"), ("false", "true"),
)  # fmt: skip
"""Values that are public knowledge wherever they occur."""


def find_label(names: Sequence[str]) -> str | None:
    """The column whose name says that it is predicted."""
    return _first(LABELS, names)


def find_client(names: Sequence[str]) -> str | None:
    """The column whose name says that it holds owners."""
    return _first(CLIENTS, names)


def find_person(names: Sequence[str]) -> str | None:
    """The column whose name says that it holds persons."""
    return _first(CLIENTS[CLIENTS.index("user") :], names)


def _first(listed: Sequence[str], names: Sequence[str]) -> str | None:
    """The name that is one of the listed words, or ends with one; closer matches and earlier words first."""
    for match in (r"^{}$", r"^{}_(id|name|code|number)$", r"(^|_){}$", r"^{}_(in|at|within|after)_"):
        for word in listed:
            if found := [name for name in names if re.search(match.format(word), words(name))]:
                return found[0]
    return None


@lru_cache(4096)
def words(name: str) -> str:
    """A name in lower case, its words joined by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()).strip("_")
