"""Published figures beside ours: the difference, what is proven, and a verdict on each claim."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from shoal.accounting.rounding import epsilon as epsilon_words
from shoal.accounting.rounding import up
from shoal.papers.table import Cell, Claim, Line, Table
from shoal.papers.work import Account
from shoal.report.plots import OBSERVERS, UNITS

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
    """When a figure counts as reproduced.

    Attributes:
        absolute: The difference that is allowed.
        relative: The same as a share of the published figure.
        better: Whether more is better.
    """

    absolute: float = 0.0
    relative: float = 0.0
    better: bool = False

    def near(self, published: float, ours: float) -> bool:
        """Whether our figure agrees with the published one."""
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
"""Deltas are printed with one digit. Seconds of a local step depend on the machine and get no verdict."""


@dataclass(frozen=True)
class Compared:
    """One published figure and our measurements of it; `light` is the verdict."""

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
        """The mean over seeds; of proven bounds the greatest, since a mean of bounds is no bound."""
        if not self.values:
            return None
        return max(self.values) if self.measure == PROVEN else fmean(self.values)

    @property
    def spread(self) -> tuple[float, float] | None:
        """The least and the greatest of the seeds; not a confidence interval."""
        return (min(self.values), max(self.values)) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the published figure."""
        if self.published is None or self.ours is None or math.isinf(self.ours):
            return None
        return self.ours - self.published


def compare(table: Table, lines: Iterable[Line], quick: bool = False) -> list[Compared]:
    """Compare every figure of a table.

    Args:
        table: The table.
        lines: Measurements; those of other tables count where they measured the same thing.
        quick: Whether to compare the small version.

    Returns:
        One entry a figure, and one for each claimed epsilon.
    """
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
    """Count the verdicts; a changed cell counts through the cell in the paper's own setting."""
    return Counter(row.light for row in rows if row.light and not row.cell.change)


def _sorted(lines: Iterable[Line], quick: bool) -> tuple[dict[str, list[Line]], dict[str, list[Line]]]:
    """The newest line of each seed, by key; and those of attacks, by name."""
    by_key: dict[str, dict[int, Line]] = {}
    by_name: dict[str, dict[int, Line]] = {}
    for line in lines:
        if bool(line.get("quick")) != quick or not ("key" in line or "cell" in line):
            continue  # audits are kept in the same folder
        # names were once written without a leading zero: `noise .01`
        place = by_key.setdefault(line["key"], {}) if "key" in line else by_name.setdefault(_zeros(line["cell"]), {})
        seed = line.get("seed", 0)
        if "failed" not in line or seed not in place:
            place[seed] = line
    kept = ({key: list(seeds.values()) for key, seeds in found.items()} for found in (by_key, by_name))
    return next(kept), next(kept)


def _zeros(name: str) -> str:
    return name.replace(" .", " 0.")


def _of_cell(table: Table, cell: Cell, lines: list[Line], quick: bool) -> list[Compared]:
    good = [line for line in lines if "failed" not in line]
    rows = [_row(table, cell, measure, good, quick) for measure in cell.measures]
    if lines and not good:
        rows = [replace(row, light=FAILED, note=lines[0]["failed"]) for row in rows]
    if cell.claim is not None and good and not quick:
        rows.append(_privacy(cell, cell.claim, good))
    return rows


def _row(table: Table, cell: Cell, measure: str, lines: list[Line], quick: bool) -> Compared:
    published = table.published.get(measure, {}).get(cell.row, {}).get(cell.column)
    figures = (cell.work.figures(line).get(measure) for line in lines)
    values = tuple(float(figure) for figure in figures if figure is not None)
    light = "" if quick and not cell.work.instant else _light(measure, published, values)
    note = cell.unneeded if light == NOT_RUN else ""
    return Compared(cell, measure, published, values, _proven_words(cell, lines), light, note, quick, _devices(lines))


def _devices(lines: list[Line]) -> str:
    """The devices of the lines, since CPU and GPU draw different noise; with counts where there are several."""
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


def _privacy(cell: Cell, claim: Claim, lines: list[Line]) -> Compared:
    """The claimed epsilon beside the proven one."""
    values = _bounds(cell, lines)
    light, note = _verdict(claim, values)
    if light == NOT:
        found = (_proven(cell, line) for line in lines)
        note = next((because for epsilon, because in found if epsilon is None and because), "")
    whom = f"{UNITS[claim.unit]}, {OBSERVERS[claim.observer]}"
    return Compared(cell, PROVEN, claim.epsilon, values, whom, light, note)


def _verdict(claim: Claim, bounds: tuple[float, ...]) -> tuple[str, str]:
    """The verdict on a claimed epsilon, and a note."""
    most = claim.epsilon * 1.001
    if bounds and max(bounds) <= most:
        return REPRODUCED, ""
    if claim.add_or_remove is not None and (epsilon := claim.add_or_remove()) <= most:
        return REPRODUCED, f"under add-or-remove {up(epsilon, 3)} is proven"
    if claim.amended is not None and (epsilon := claim.amended[1]()) <= most:
        return WITH, f"{claim.amended[0]} ({up(epsilon, 3)} is proven)"
    return (CONTRADICTED, claim.contradicted) if claim.contradicted else (NOT, "")


def _proven(cell: Cell, line: Line) -> tuple[float | None, str]:
    """Epsilon for the cell's unit and observer, or why there is none."""
    for unit, observer, epsilon, because in line.get("proven", ()):
        if (unit, observer) == cell.protects:
            return epsilon, because or ""
    return None, ""


def _bounds(cell: Cell, lines: list[Line]) -> tuple[float, ...]:
    """The proven epsilon of each seed; empty where one of them has none."""
    found = [_proven(cell, line)[0] for line in lines]
    return () if None in found else tuple(epsilon for epsilon in found if epsilon is not None)


def _proven_words(cell: Cell, lines: list[Line]) -> str:
    if cell.protects is None or not lines:
        return ""
    bounds = _bounds(cell, lines)
    return f"{UNITS[cell.protects[0]]}: {epsilon_words(max(bounds), 3)}" if bounds else "none"


def _with_change(row: Compared, rows: list[Compared]) -> Compared:
    """Name the first change with which a figure is reproduced that is not reproduced without."""
    place = (row.cell.row, row.cell.column, row.measure)
    same = [other for other in rows if (other.cell.row, other.cell.column, other.measure) == place]
    good = [other.cell.change for other in same if other.light in (REPRODUCED, EXCEEDED)]
    if row.cell.change and row.light == NOT_RUN and "" in good:
        return replace(row, note="reproduced without this change")
    if not row.cell.change and row.light == NOT and row.measure in MEASURES and good:
        return replace(row, light=WITH, note=good[0])
    return row
