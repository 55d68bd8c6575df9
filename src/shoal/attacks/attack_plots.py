"""Pictures of attacks: originals and reconstructions, the grid of methods and types, ROC curves."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from shoal import release
from shoal.extras import optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shoal.attacks.allowed import Allowed
    from shoal.attacks.leakage import Outcome
    from shoal.attacks.matrix import Method

figures = optional("matplotlib.figure", "the picture of an attack")

MOST = 10  # records in a row


def picture(outcome: Outcome) -> bytes:
    """A PNG with two rows: records and their reconstructions."""
    truth, found = outcome.truth.flatten(0, 1)[:MOST], outcome.quality.x.flatten(0, 1)[:MOST]
    errors, good = outcome.quality.rmse.flatten(), outcome.quality.success.flatten()
    figure = figures.Figure(figsize=(1.05 * len(truth) + 1.0, 2.7), layout="constrained")
    axes = figure.subplots(2, len(truth), squeeze=False)
    for column, (a, b) in enumerate(zip(truth, found, strict=True)):
        _show(axes[0, column], a)
        _show(axes[1, column], b)
        axes[1, column].set_xlabel(f"{float(errors[column]):.3f}", color=_tone(bool(good[column])), fontsize=9)
    axes[0, 0].set_ylabel("original", fontsize=10)
    axes[1, 0].set_ylabel("reconstructed", fontsize=10)
    return _png(figure)


def grid(cells: list[tuple[Method, Outcome]], victim: int = 0) -> bytes:
    """A PNG like Figure 3 of Wei et al. (2023): methods in columns, types in rows, always the same victim."""
    labels = list(dict.fromkeys(method.label for method, _ in cells))
    kinds = sorted({outcome.aim.kind for _, outcome in cells}, reverse=True)
    figure = figures.Figure(figsize=(1.15 * (len(labels) + 1), 1.45 * len(kinds) + 0.5), layout="constrained")
    axes = figure.subplots(len(kinds), len(labels) + 1, squeeze=False)
    for row, kind in enumerate(kinds):
        of_kind = {method.label: outcome for method, outcome in cells if outcome.aim.kind == kind}
        first = next(iter(of_kind.values()))
        _show(axes[row, 0], first.truth[victim, 0])
        axes[row, 0].set_ylabel(f"type {kind}", fontsize=10)
        for column, label in enumerate(labels, start=1):
            outcome = of_kind[label]
            _show(axes[row, column], outcome.quality.x[victim, 0])
            success = float(outcome.quality.success.float().mean())
            axes[row, column].set_xlabel(f"{100 * success:.0f}% leaked", color=_tone(success > 0), fontsize=8)
    for column, label in enumerate(["original", *labels]):
        axes[0, column].set_title(_two_lines(label), fontsize=8)
    return _png(figure)


LEAST = 1e-4  # on both axes of a curve


def curve(rocs: dict[str, list[tuple[float, float]]], allowed: Allowed | None = None) -> bytes:
    """ROC curves of membership inference on log axes, since low false-positive rates matter most.

    Args:
        rocs: The curves by name.
        allowed: The curve that none may pass.
    """
    figure = figures.Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, points), colour in zip(rocs.items(), ("#c2560c", "#1668c7", "#2a8a57"), strict=False):
        false, true = np.array([point for point in points if point[0] > 0]).T  # log axes have no 0
        axes.plot(false, np.maximum(true, LEAST), color=colour, label=name)
    if allowed is not None:
        false, true = np.array(allowed.points[1:]).T
        axes.plot(false, true, color="#24292f", linestyle="--", label=allowed.row()["attack"])
        axes.fill_between(false, true, 1, color="#24292f", alpha=0.07, linewidth=0)
    axes.plot([LEAST, 1], [LEAST, 1], color="#8b949e", linestyle=":", label="guessing")
    axes.set(xscale="log", yscale="log", xlim=(LEAST, 1), ylim=(LEAST, 1))
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
    axes.legend(frameon=False, loc="lower right")
    return _png(figure)


def _show(axes: Axes, record: Tensor) -> None:
    values: Any = record.detach().float().cpu().numpy()
    if values.ndim == 1:
        values = values[None, :].repeat(max(1, len(values) // 3), axis=0)
    elif values.shape[0] == 3:
        values = values.transpose(1, 2, 0)
    else:
        values = values.mean(0)
    axes.imshow(values, cmap="gray", vmin=0, vmax=1, aspect="auto" if record.dim() == 1 else "equal")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _two_lines(label: str) -> str:
    return label.replace(" ", "\n", 1) if " " in label else label.replace("[", "\n[")


def _tone(leaks: bool) -> str:
    return "#a63314" if leaks else "#5b6470"


def _png(figure: Figure) -> bytes:
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=130, facecolor="white", metadata={release.KEY: release.ATTACK})
    return held.getvalue()
