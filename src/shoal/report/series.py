"""Series over rounds, thinned so that a page with 15,000 rounds stays small and plots keep their shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.accounting.rounding import up
from shoal.report.scores import number, percent, short

MOST_POINTS = 800
"""About how many rounds a plot keeps: each stretch gives the minimum and the maximum of every series."""

Format = Literal["share", "number", "epsilon", "bytes", "seconds"]


@dataclass(frozen=True)
class Series:
    """One line of a plot; `tone` names its colour, `plain` draws it thin and dashed."""

    name: str
    values: list[float | None]
    tone: int = 1
    plain: bool = False


@dataclass(frozen=True)
class Plot:
    """A plot as the page's script draws it.

    Attributes:
        id: The element's id.
        title: Its heading.
        note: A line below the heading.
        about: The plot in words, for screen readers.
        format: How values are written.
        x: Rounds.
        series: One value a round each.
        log: Whether the y axis is logarithmic.
        lines: Horizontal lines, such as a budget.
        marks: Single points, such as a published figure.
        of: How many rounds there were before thinning.
        names: Of a plot of clients instead of rounds: their names, ...
        records: ... and how many records each has.
    """

    id: str
    title: str
    note: str
    about: str
    format: Format
    x: list[int]
    series: list[Series]
    log: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    of: int = 0
    names: list[str] = field(default_factory=list)
    records: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The plot as JSON."""
        return {**vars(self), "series": [vars(each) for each in self.series]}


def column(lines: Iterable[dict[str, Any]], name: str) -> dict[int, float]:
    """The finite values of one metric, by round."""
    found = ((line["round"], number(line.get(name))) for line in lines)
    return {round: value for round, value in found if value is not None}


def build(
    id: str,
    title: str,
    columns: Sequence[tuple[str, dict[int, float], int, bool]],
    *,
    note: str = "",
    format: Format = "number",
    may_log: bool = False,
    lines: Sequence[dict[str, Any]] = (),
    marks: Sequence[dict[str, Any]] = (),
) -> Plot | None:
    """Build a plot from columns (name, values by round, tone, plain); None where all of them are empty."""
    full = [each for each in columns if each[1]]
    if not full:
        return None
    rounds = sorted(set().union(*(values for _, values, _, _ in full)))
    kept = thinned(rounds, [values for _, values, _, _ in full])
    series = [Series(name, [values.get(round) for round in kept], tone, plain) for name, values, tone, plain in full]
    return Plot(
        id=id,
        title=title,
        note=note,
        about=_in_words(full, _WORDS[format]),
        format=format,
        x=kept,
        series=series,
        log=may_log and _spans_decades(full),
        lines=list(lines),
        marks=list(marks),
        of=len(rounds),
    )


def thinned(rounds: list[int], columns: Sequence[dict[int, float]], most: int = MOST_POINTS) -> list[int]:
    """The rounds to keep: all if they are few, else the first, the last, and the extremes of each stretch."""
    if len(rounds) <= most:
        return rounds
    stretches = max(1, most // (2 * len(columns)))
    kept = {rounds[0], rounds[-1]} | {max(values) for values in columns}
    for place in range(stretches):
        stretch = rounds[place * len(rounds) // stretches : (place + 1) * len(rounds) // stretches]
        for values in columns:
            held = [round for round in stretch if round in values]
            if held:
                kept |= {min(held, key=values.__getitem__), max(held, key=values.__getitem__)}
    return sorted(kept)


def figure(epsilon: float) -> str:
    """An epsilon with three digits, rounded up."""
    if epsilon == 0 or epsilon >= 1e5:
        return up(epsilon, 3)
    rounded = float(up(epsilon, 3))
    return f"{rounded:.{max(2 - math.floor(math.log10(rounded)), 0)}f}"


def in_bytes(value: float) -> str:
    """A number of bytes: `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def in_seconds(value: float) -> str:
    """A duration: `3 min 20 s`."""
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


_WORDS: dict[str, Callable[[float], str]] = {
    "share": percent,
    "number": short,
    "epsilon": figure,
    "bytes": in_bytes,
    "seconds": in_seconds,
}


def _in_words(columns: Sequence[tuple[str, dict[int, float], int, bool]], say: Callable[[float], str]) -> str:
    """The plot in words, for screen readers: first and last value, minimum and maximum of each series."""
    words = []
    for name, values, _, _ in columns:
        first, last = min(values), max(values)
        if first == last:
            words.append(f"{name}: {say(values[last])} in round {last}")
        else:
            words.append(
                f"{name}: from {say(values[first])} in round {first} to {say(values[last])} in round {last}, "
                f"between {say(min(values.values()))} and {say(max(values.values()))}"
            )
    return "; ".join(words) + "."


def _spans_decades(columns: Sequence[tuple[str, dict[int, float], int, bool]]) -> bool:
    values = [value for _, held, _, _ in columns for value in held.values()]
    return min(values) > 0 and max(values) / min(values) > 50
