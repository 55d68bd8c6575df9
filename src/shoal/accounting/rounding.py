"""Figures for people: `0.5`, `1e-5`, and bounds that are rounded to the safe side."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

IN_NAME_ONLY = 100.0
"""Above this an epsilon rules out no useful test."""


def up(value: float, digits: int = 4) -> str:
    """An upper bound, such as an epsilon or a noise multiplier: rounded up."""
    return _rounded(value, digits, ROUND_CEILING)


def down(value: float, digits: int = 4) -> str:
    """A lower bound: rounded down."""
    return _rounded(value, digits, ROUND_FLOOR)


def plain(value: float, digits: int = 6) -> str:
    """The nearest figure, without the padding of `e-05`: `1e-5`."""
    return re.sub(r"e([+-])0*", lambda found: "e-" if found[1] == "-" else "e", f"{value:.{digits}g}")


def epsilon(value: float, digits: int = 4) -> str:
    """An epsilon, rounded up; `none in practice (1.9e7)` where it is too large to mean anything."""
    return f"none in practice ({up(value, 2)})" if value > IN_NAME_ONLY else up(value, digits)


def _rounded(value: float, digits: int, to: str) -> str:
    # By the shortest decimal of the float: 0.1 is 0.1, and not a little more.
    return plain(float(Context(prec=digits, rounding=to).create_decimal(repr(float(value)))), digits)
