"""The pictures of an audit: the curve that a claim allows and what was reached; of many claims the gaps."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import release
from shoal.accounting.rounding import up
from shoal.audit import bounds
from shoal.audit.auditing import Outcome
from shoal.extras import optional
from shoal.report.claim_rows import at_least

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

figures = optional("matplotlib.figure", "the picture of an audit")

COLOURS = {"VIOLATED": "#a63314", "consistent": "#0f6b5c", "too weak to tell": "#8a6d00", "no claim": "#5b6470"}
MOST_COLUMNS = 3


def picture(outcomes: Sequence[Outcome], narrow: bool = False) -> bytes:
    """A PNG with a panel per claim: what the adversary reached, with its confidence, against what may be reached.

    Args:
        outcomes: What was found.
        narrow: One panel below another, for a phone.
    """
    columns = 1 if narrow else min(MOST_COLUMNS, len(outcomes))
    rows = math.ceil(len(outcomes) / columns)
    figure = figures.Figure(figsize=(3.4 * columns + 0.4, 3.5 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for place, outcome in zip(axes, outcomes, strict=False):
        _panel(place, outcome)
    for place in axes[len(outcomes) :]:
        place.set_visible(False)
    return _png(figure)


def gaps(rows: Sequence[Mapping[str, Any]], narrow: bool = False) -> bytes:
    """A PNG with a line per claim, the proven ones first: what is claimed, what was measured, and the gap.

    Args:
        rows: What was found.
        narrow: Half as wide, for a phone.
    """
    kinds = ("none", "published", "proven")  # from below
    rows = sorted(rows, key=lambda row: (kinds.index(row["kind"]), (row["claimed"] or 0.0) - row["measured"]))
    figure = figures.Figure(figsize=(4.6 if narrow else 9.5, 1.8 + 0.27 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        claimed, measured, colour = row["claimed"], row["measured"], COLOURS[row["verdict"]]
        axes.barh(y, measured, height=0.62, color=colour)
        words = f"{at_least(measured)}, nothing claimed"
        if claimed is not None:
            axes.plot([min(measured, claimed), claimed], [y, y], color="#9aa3ab", linewidth=1.2, zorder=3)
            axes.plot(claimed, y, "D" if row["kind"] == "proven" else "x", color="#1a1d21", markersize=4, zorder=4)
            by = "gap" if measured <= claimed else "above by"
            words = f"{at_least(measured)} of {up(claimed, 2)}, {by} {abs(claimed - measured):.2f}"
        end = max(measured, claimed or 0.0)
        axes.annotate(words, (end, y), (7, 0), textcoords="offset points", va="center", fontsize=7, color="#5b6470")
    names = [f"{row['algorithm']}, {row['unit']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set(ylim=(-0.7, len(rows) - 0.3), xlabel="epsilon")
    axes.margins(x=0.45 if narrow else 0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _explain(axes, {row["verdict"] for row in rows}, {row["kind"] for row in rows}, columns=1 if narrow else 3)
    return _png(figure)


def _explain(axes: Axes, verdicts: set[str], kinds: set[str], columns: int) -> None:
    """A legend above the picture: the colours of the verdicts there are, and the marks of the claims."""
    for verdict, colour in COLOURS.items():
        if verdict in verdicts:
            axes.barh(0, 0, color=colour, label=f"measured, at least: {verdict}")
    for kind, mark in (("proven", "D"), ("published", "x")):
        if kind in kinds:
            axes.plot([], [], mark, color="#1a1d21", markersize=4, label=kind)
    axes.legend(frameon=False, fontsize=7.5, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1))


def _png(figure: Figure) -> bytes:
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=110, facecolor="white", metadata={release.KEY: release.AUDIT})
    return held.getvalue()


def _panel(axes: Axes, outcome: Outcome) -> None:
    x = np.linspace(0, 1, 400)
    claim, game = outcome.case.claim, outcome.game
    axes.plot(x, 1 - x, color="#b8bfc6", linestyle=":", linewidth=1)
    if claim is not None:
        allowed = claim.tradeoff(x)
        axes.fill_between(x, 0, allowed, color="#f4ded6", linewidth=0)
        axes.plot(x, allowed, color="#5b6470", linewidth=1.2, label=f"{outcome.case.kind} {up(claim.epsilon, 2)}")
    colour = COLOURS[outcome.verdict]
    levels = np.quantile(np.concatenate([game.without, game.with_unit]), np.linspace(0, 1, 300))
    false = [(game.without > level).mean() for level in levels]
    missed = [(game.with_unit <= level).mean() for level in levels]
    axes.plot([1, *false, 0], [0, *missed, 1], color=colour, linewidth=1.6, label="adversary")
    sure = [(point.most_false_positives, point.most_false_negatives) for point in game.points]
    axes.plot(*zip(*sure, strict=True), "o", color=colour, markersize=3.5, label=f"at {bounds.CONFIDENCE:.2%}")
    axes.set_title(f"{outcome.algorithm}, {outcome.case.unit}\n{outcome.verdict}", fontsize=9, color=colour)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="false positives", ylabel="false negatives")
    axes.legend(frameon=False, fontsize=7, loc="upper right")
