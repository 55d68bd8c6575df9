"""Published beside ours: three numbers a figure, what is proven, and a light that says how the claim stands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from shoal.papers.base import Cell, Line, Table
from shoal.papers.work import Account
from shoal.report.plots import UNITS

REPRODUCED = "reproduced"
EXCEEDED = "exceeded"
WITH = "reproduced with"
NOT = "not reproduced"
CONTRADICTED = "contradicted"
FAILED = "failed"
NOT_RUN = "not run"
LIGHTS = (REPRODUCED, EXCEEDED, WITH, NOT, CONTRADICTED, FAILED, NOT_RUN)
PROVEN = "epsilon, proven"


@dataclass(frozen=True)
class Measure:
    """How near is near: an absolute distance, or a share of the published figure. `better`: more is better."""

    absolute: float = 0.0
    relative: float = 0.0
    better: bool = False

    def near(self, published: float, ours: float) -> bool:
        return abs(ours - published) <= max(self.absolute, self.relative * abs(published)) + 1e-12


MEASURES = {
    "accuracy": Measure(absolute=0.02, better=True),
    "epsilon": Measure(relative=0.01),
    "rounds": Measure(absolute=1, relative=0.01),
    "communication": Measure(relative=0.01),
    "example_delta": Measure(relative=0.25),
    "client_delta": Measure(relative=0.25),
    "success": Measure(absolute=0.02, better=True),
    "rmse": Measure(absolute=0.05),
    "iterations": Measure(relative=0.5),
    "resilient": Measure(),
}
"""Deltas are printed with one digit. Seconds of a local step belong to a machine: they get no light."""


@dataclass(frozen=True)
class Compared:
    """One figure of a table beside what was measured for it."""

    cell: Cell
    measure: str
    published: float | None
    values: tuple[float, ...]
    proven: str
    light: str
    note: str = ""
    quick: bool = False
    device: str = ""

    @property
    def ours(self) -> float | None:
        """The mean of the seeds; of what is proven the greatest, since a mean of bounds is no bound."""
        if not self.values:
            return None
        return max(self.values) if self.measure == PROVEN else fmean(self.values)

    @property
    def spread(self) -> tuple[float, float] | None:
        """The least and the greatest of the seeds: a range of so many, no confidence interval."""
        return (min(self.values), max(self.values)) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        if self.published is None or self.ours is None or math.isinf(self.ours):
            return None
        return self.ours - self.published


def compare(table: Table, lines: Iterable[Line], quick: bool = False) -> list[Compared]:
    """Every figure of the table; lines of other tables count where they measured the same thing."""
    rows = [row for cell, found in measured(table, lines, quick) for row in _of_cell(table, cell, found, quick)]
    return [_with_change(row, rows) for row in rows]


def measured(table: Table, lines: Iterable[Line], quick: bool = False) -> list[tuple[Cell, list[Line]]]:
    """Each cell of the table with the lines that were measured for it, one a seed."""
    by_key, by_name = _sorted(lines, quick)
    return [(cell, _found(cell, by_key, by_name, quick)) for cell in table.cells]


def _found(cell: Cell, by_key: dict[str, list[Line]], by_name: dict[str, list[Line]], quick: bool) -> list[Line]:
    if isinstance(cell.work, Account):
        return [cell.work.measure()]
    return by_key.get(cell.work.key(quick)) or by_name.get(cell.attacked, [])


def lights(rows: Iterable[Compared]) -> Counter[str]:
    """How many claims stand how; a changed cell speaks through the one that is as printed."""
    return Counter(row.light for row in rows if row.light and not row.cell.change)


def _sorted(lines: Iterable[Line], quick: bool) -> tuple[dict[str, list[Line]], dict[str, list[Line]]]:
    """The newest line of each seed, by key; and those of attacks, by name."""
    by_key: dict[str, dict[int, Line]] = {}
    by_name: dict[str, dict[int, Line]] = {}
    for line in lines:
        if bool(line.get("quick")) != quick or not ("key" in line or "cell" in line):
            continue  # audits are kept in the same folder
        place = by_key.setdefault(line["key"], {}) if "key" in line else by_name.setdefault(line["cell"], {})
        seed = line.get("seed", 0)
        if "failed" not in line or seed not in place:
            place[seed] = line
    kept = ({key: list(seeds.values()) for key, seeds in found.items()} for found in (by_key, by_name))
    return next(kept), next(kept)


def _of_cell(table: Table, cell: Cell, lines: list[Line], quick: bool) -> list[Compared]:
    good = [line for line in lines if "failed" not in line]
    failed = next((line["failed"] for line in lines if "failed" in line), "") if not good else ""
    figures = [cell.work.figures(line) for line in good]
    words = _proven_words(cell, good)
    rows = []
    for measure in cell.measures:
        published = table.published.get(measure, {}).get(cell.row, {}).get(cell.column)
        values = tuple(float(each[measure]) for each in figures if each.get(measure) is not None)
        small = quick and not cell.work.instant
        light, note = (FAILED, failed) if failed else ("" if small else _light(measure, published, values), "")
        rows.append(Compared(cell, measure, published, values, words, light, note, quick, _devices(good)))
    if cell.claim is not None and good and not quick:
        rows.append(_privacy(cell, good))
    return rows


def _devices(lines: list[Line]) -> str:
    """What made the lines, since CPU and GPU draw different noise; how many each, where it was both."""
    counted = Counter(line["device"] for line in lines if line.get("device"))
    if len(counted) < 2:
        return "".join(counted)
    return ", ".join(f"{count} {device}" for device, count in sorted(counted.items()))


def _light(measure: str, published: float | None, values: tuple[float, ...]) -> str:
    if published is None or measure not in MEASURES:
        return ""
    if not values:
        return NOT_RUN
    known, ours = MEASURES[measure], fmean(values)
    if known.near(published, ours):
        return REPRODUCED
    return EXCEEDED if known.better and ours > published else NOT


def _privacy(cell: Cell, lines: list[Line]) -> Compared:
    """The claimed epsilon beside the proven one."""
    claim = cell.claim
    assert claim is not None
    found = [_proven(cell, line) for line in lines]
    values = _bounds(cell, lines)
    whom = f"for {UNITS[claim.unit]}, against the {claim.observer}"
    if values and max(values) <= claim.epsilon * 1.001:
        return Compared(cell, PROVEN, claim.epsilon, values, whom, REPRODUCED)
    if claim.comes is not None and (epsilon := claim.comes()) <= claim.epsilon * 1.001:
        note = f"for a record that comes or goes {epsilon:.3g} is proven"
        return Compared(cell, PROVEN, claim.epsilon, values, whom, REPRODUCED, note)
    if claim.mended is not None and (epsilon := claim.mended[1]()) <= claim.epsilon * 1.001:
        note = f"{claim.mended[0]}: {epsilon:.3g} is proven then"
        return Compared(cell, PROVEN, claim.epsilon, values, whom, WITH, note)
    because = next((because for epsilon, because in found if epsilon is None and because), "")
    note = claim.contradicted or because
    return Compared(cell, PROVEN, claim.epsilon, values, whom, CONTRADICTED if claim.contradicted else NOT, note)


def _proven(cell: Cell, line: Line) -> tuple[float | None, str]:
    """Epsilon for the cell's unit and observer, or why there is none."""
    for unit, observer, epsilon, because in line.get("proven", ()):
        if (unit, observer) == cell.protects:
            return epsilon, because or ""
    return None, ""


def _bounds(cell: Cell, lines: list[Line]) -> tuple[float, ...]:
    """What is proven of each seed; nothing, if one of them has no proof."""
    found = [_proven(cell, line)[0] for line in lines]
    return () if None in found else tuple(epsilon for epsilon in found if epsilon is not None)


def _proven_words(cell: Cell, lines: list[Line]) -> str:
    if cell.protects is None or not lines:
        return ""
    bounds = _bounds(cell, lines)
    return f"{UNITS[cell.protects[0]]}: {max(bounds):.3g}" if bounds else "none"


def _with_change(row: Compared, rows: list[Compared]) -> Compared:
    """A figure that only a named change reaches says which: the first that does."""
    if row.cell.change or row.light != NOT or row.measure not in MEASURES:
        return row
    place = (row.cell.row, row.cell.column, row.measure)
    for other in rows:
        same = (other.cell.row, other.cell.column, other.measure) == place and other.cell.change
        if same and other.light in (REPRODUCED, EXCEEDED):
            return replace(row, light=WITH, note=other.cell.change)
    return row
