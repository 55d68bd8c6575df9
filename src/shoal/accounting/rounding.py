"""Figures for people, rounded to the side on which what is said stays true."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def up(value: float, digits: int = 4) -> str:
    """An upper bound, such as an epsilon, or a noise multiplier that is needed: never less than it is."""
    return _rounded(value, digits, ROUND_CEILING)


def down(value: float, digits: int = 4) -> str:
    """A lower bound: never more than it is."""
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, to: str) -> str:
    # By the shortest decimal of the float: 0.1 is 0.1, and not a little more.
    return f"{float(Context(prec=digits, rounding=to).create_decimal(repr(float(value)))):.{digits}g}"
