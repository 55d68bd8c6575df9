"""The picture of an audit: false negatives against false positives, and the curve that the claim allows."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal import release
from shoal.accounting.rounding import up
from shoal.audit import bounds
from shoal.audit.auditing import Outcome
from shoal.extras import optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes

figures = optional("matplotlib.figure", "the picture of an audit")

COLOURS = {"VIOLATED": "#a63314", "consistent": "#0f6b5c", "too weak to tell": "#8a6d00", "no claim": "#5b6470"}
MOST_COLUMNS = 3


def picture(outcomes: Sequence[Outcome]) -> bytes:
    """A PNG with a panel a claim: what the adversary reached, with its confidence, against what may be reached."""
    columns = min(MOST_COLUMNS, len(outcomes))
    rows = math.ceil(len(outcomes) / columns)
    figure = figures.Figure(figsize=(3.4 * columns + 0.4, 3.5 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for place, outcome in zip(axes, outcomes, strict=False):
        _panel(place, outcome)
    for place in axes[len(outcomes) :]:
        place.set_visible(False)
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
