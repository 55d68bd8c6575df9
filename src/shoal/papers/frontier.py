"""The figure of docs/results: accuracy on MNIST against proven epsilon; published results are hollow.

A headline needs five seeds: cells that were measured with fewer are in their tables alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from shoal.extras import optional
from shoal.papers import table as find
from shoal.papers.comparing import measured
from shoal.papers.running import SEEDS
from shoal.papers.table import Cell, Line, Table

BEYOND = 2e4
"""Where results are drawn without a proven epsilon, or with one that means nothing."""
MOST = 5e3
ASIDE = 1.18
TICKS = (0.1, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


@dataclass(frozen=True)
class Series:
    """Cells of some tables under one label; `claimed` is the epsilon that their paper states for this unit."""

    label: str
    tables: tuple[str, ...]
    rows: str
    colour: str
    mark: str = "o"
    claimed: float | None = None
    joined: bool = False


THESIS = ("thesis-table4.4", "thesis-table4.5", "thesis-table4.6")
CLIENT = (
    Series(
        "geyer-private, 100 clients, no bias",
        ("beyond-client",),
        r"^geyer-private 100, without",
        "#c2410c",
        joined=True,
    ),
    Series("geyer-private, 1,000", ("beyond-client",), r"^geyer-private 1000/", "#0f766e", joined=True),
    Series("geyer-private, 10,000", ("beyond-client",), r"^geyer-private 10000/", "#4338ca", joined=True),
    Series("100, settings from Fashion-MNIST", ("beyond-client",), r"^geyer-private 100, settings", "#c2410c", "*"),
    Series("1,000, the same", ("beyond-client",), r"^geyer-private 1000, settings", "#0f766e", "*"),
    Series("10,000, the same", ("beyond-client",), r"^geyer-private 10000, settings", "#4338ca", "*"),
    Series("dp-ftrl, 1,000, cyclic", ("beyond-client",), r"^dp-ftrl .* cyclic", "#0f766e", "D", joined=True),
    Series("Geyer et al. (2017)", ("geyer-table1",), r"^private/\d+$", "#be185d", "v", 8),
    Series("trusted curator (Thesis)", THESIS, r"^trusted curator/[^/]+$", "#a16207", "s", 8),
    Series("end to end (Thesis)", THESIS, r"^end to end/[^/]+$", "#64748b", "P", 8),
    Series("naive (Thesis)", THESIS, r"^naive/[^/]+$", "#64748b", "X", 8),
    Series("Fed-SDP (Wei et al. 2023)", ("alphacdp-table6",), r"^Fed-SDP/MNIST", "#0369a1", "^", 0.854),
)
RECORD = (
    Series("disjoint data, 10 sites", ("beyond-example",), r"^MNIST 10 ", "#0f766e", joined=True),
    Series("disjoint data, 100 sites", ("beyond-example",), r"^MNIST 100 ", "#4338ca", joined=True),
    Series("central DP-SGD (Thesis)", ("thesis-table4.2",), r"^sigma \d/MNIST$", "#a16207", "s", joined=True),
    Series("PFL, E = 1 (Bhaskar et al. 2025)", ("pfl-table2",), r"^\(1, 20\)/PFL 2.93", "#c2410c", "D", 2.93),
    Series("end to end (Thesis)", THESIS, r"^end to end/[^/]+$", "#64748b", "P", 1.31),
    Series("Fed-CDP (Wei et al. 2023)", ("alphacdp-table6",), r"^Fed-CDP/MNIST", "#0369a1", "^", 0.823),
    Series("Fed-alphaCDP (Wei et al. 2023)", ("alphacdp-table6",), r"^Fed-alphaCDP/MNIST", "#be185d", "v", 0.823),
)
PANELS = (
    ("Client level; observer: released models", ("client", "release"), CLIENT),
    ("Record level; observer: server", ("record", "server"), RECORD),
)


def frontier(lines: list[Line]) -> bytes:
    """Draw the figure from measured lines, as a PNG."""
    figures = optional("matplotlib.figure", "a paper's figure")
    sheet = figures.Figure(figsize=(13, 6.2), layout="constrained")
    for axes, (title, pair, series) in zip(sheet.subplots(1, 2, sharey=True), PANELS, strict=True):
        for each in series:
            _draw(axes, each, pair, lines, _aside(each, series))
        axes.axvspan(1e4, 4e4, color="#fee2e2", zorder=0)
        axes.text(BEYOND, 0.3, "none, or\nabove 5,000", ha="center", fontsize=8, color="#b91c1c")
        axes.set(xscale="log", xlim=(0.08, 4e4), title=title)
        axes.set_yscale("function", functions=(lambda y: -np.log(1.01 - y), lambda z: 1.01 - np.exp(-z)))
        axes.set_ylim(0, 0.995)
        axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.set_xlabel("epsilon (filled: proven; hollow: published, side by side where equal)")
        axes.set_xticks([0.1, 1, 8, 100, 1000], ["0.1", "1", "8", "100", "1,000"])
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    sheet.axes[0].set_ylabel("accuracy on MNIST's test set")
    file = io.BytesIO()
    sheet.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _draw(axes: Any, series: Series, pair: tuple[str, str], lines: list[Line], aside: float) -> None:
    points = sorted(_points(series, pair, lines))
    if not points:
        return
    xs, ys = [x for x, *_ in points], [y for _, y, _ in points]
    line = "-" if series.joined else ""
    axes.plot(xs, ys, marker=series.mark, linestyle=line, color=series.colour, markersize=5.5, label=series.label)
    hollow = [(x, y) for _, _, published in points if published for x, y in [published]]
    style = {"linestyle": "", "markerfacecolor": "none", "markersize": 8, "color": series.colour}
    axes.plot([x * aside for x, _ in hollow], [y for _, y in hollow], marker=series.mark, **style)


def _aside(series: Series, others: tuple[Series, ...]) -> float:
    """Published marks of several methods at one epsilon stand side by side."""
    there = [each for each in others if series.claimed and each.claimed == series.claimed]
    return float(ASIDE ** (there.index(series) - (len(there) - 1) / 2)) if there else 1.0


def _points(
    series: Series, pair: tuple[str, str], lines: list[Line]
) -> Iterable[tuple[float, float, tuple[float, float] | None]]:
    """Proven epsilon, accuracy, and where the published point is."""
    for name in series.tables:
        table = find(name)
        for cell, found in measured(table, lines):
            good = [line for line in found if "failed" not in line and "accuracy" in line]
            if len(good) >= SEEDS and not cell.work.instant and re.search(series.rows, cell.name):
                yield _point(series, table, cell, pair, good)


def _point(
    series: Series, table: Table, cell: Cell, pair: tuple[str, str], lines: list[Line]
) -> tuple[float, float, tuple[float, float] | None]:
    epsilon = max(_epsilon(line, pair) for line in lines)
    accuracy = fmean(line["accuracy"] for line in lines)
    return epsilon, accuracy, None if cell.change else _printed(series, table, cell)


def _printed(series: Series, table: Table, cell: Cell) -> tuple[float, float] | None:
    """What the paper says: epsilon and accuracy."""
    claimed = series.claimed or (cell.claim.epsilon if cell.claim else None)
    accuracy = table.published.get("accuracy", {}).get(cell.row, {}).get(cell.column)
    return None if claimed is None or accuracy is None else (claimed, accuracy)


def _epsilon(line: Line, pair: tuple[str, str]) -> float:
    found = next((epsilon for unit, observer, epsilon, _ in line["proven"] if (unit, observer) == pair), None)
    return BEYOND if found is None or found > MOST else found
