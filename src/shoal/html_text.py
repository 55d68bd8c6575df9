"""Small tables in HTML, as notebooks show them: `_repr_html_` of results, data sets, claims and certificates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(
    caption: str, rows: Iterable[Sequence[str]], head: Sequence[str] = (), notes: Iterable[str] = ()
) -> str:
    """A table with a caption, and notes below it; all words are escaped."""
    left = ' style="text-align:left"'
    heads = "".join(f"<th{left}>{escape(word)}</th>" for word in head)
    lines = ["".join(f"<td{left}>{escape(word)}</td>" for word in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in ([heads] if heads else []) + lines)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><caption{left}><strong>{escape(caption)}</strong></caption>{body}</table>{below}"
