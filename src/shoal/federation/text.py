"""Text that another machine wrote, made fit for a log."""

from __future__ import annotations


def one_line(text: str) -> str:
    """The text with `?` for what is not printable: it can neither end a line nor steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
