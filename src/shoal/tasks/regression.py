"""Regression: numbers, scaled by their public range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.tasks.settings import TaskSettings
from shoal.tasks.task import Columns, Figures, Task, needs, numbered


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """Numbers in [low, high]; targets are float32 [N], or [N, D] for several numbers a record.

    The model learns them scaled to [0, 1]; a target outside the range is trained as the nearest one inside.
    """

    low: float
    high: float
    width: int = 1

    kind = "regression"
    headline = "rmse"
    figure_names = ("rmse", "mae", "r2")
    higher_is_better = False
    trivial_answer = "always the mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -math.inf < self.low < self.high < math.inf:
            raise ConfigError(
                f"the range of a regression must be two numbers, low < high, got {[self.low, self.high]}"
            )

    @classmethod
    def of(cls, settings: TaskSettings, targets: Tensor, classes: tuple[str, ...], **own: Any) -> Self:
        """The range must be given: the lowest and the highest target of the data are private."""
        if settings.range is None:
            raise ConfigError(
                "task.range is missing: give the lowest and the highest possible target, which are public, such as "
                "task.range=[0, 100]"
            )
        if settings.class_weights:
            raise ConfigError("task.class_weights is for classification; leave it out for regression")
        low, high = settings.range
        return cls(low=low, high=high, width=targets.shape[1] if targets.dim() == 2 else 1, **own)

    @property
    def outputs(self) -> int:
        """One number a target."""
        return self.width

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error of the scaled targets, the mean over them."""
        records = len(targets)
        scaled = ((targets.to(outputs.dtype) - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return (outputs.reshape(records, -1) - scaled.reshape(records, -1)).square().mean(1)

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        """[N, D]."""
        return (len(targets), self.width)

    def check_outputs(self, name: str, outputs: Tensor, targets: Tensor) -> None:
        """One number a record may come without its axis."""
        if not (self.width == 1 and outputs.shape == (len(targets),)):
            super().check_outputs(name, outputs, targets)

    def example_targets(self, records: int, targets: Tensor) -> Tensor:
        """Inside the range."""
        return self.low + (self.high - self.low) * super().example_targets(records, targets)

    def check_targets(self, targets: Tensor, where: str) -> None:
        """Finite numbers."""
        fits = targets.dtype == torch.float32 and targets.dim() in (1, 2) and bool(targets.isfinite().all())
        needs(targets, where, "targets of a regression must be finite float32 [N] or [N, D]", fits)

    def predictions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """In the units of the targets, and of their shape."""
        return (outputs.reshape(targets.shape) * (self.high - self.low) + self.low).clamp(self.low, self.high)

    def answers(self, outputs: Tensor, names: Sequence[str]) -> Columns:
        """The number, or several."""
        return numbered("prediction", self.predictions(outputs, outputs.new_empty(len(outputs), self.width)))

    def figures(self, predictions: np.ndarray, targets: np.ndarray) -> Figures:
        """MAE, RMSE and R2 in the units of the targets."""
        wrong, targets = (predictions - targets).astype(np.float64), targets.astype(np.float64)
        around = np.square(targets - targets.mean(0)).sum()
        found = {"rmse": float(np.sqrt(np.square(wrong).mean())), "mae": float(np.abs(wrong).mean())}
        return found | ({"r2": float(1 - np.square(wrong).sum() / around)} if around > 0 else {})

    def trivial(self, targets: np.ndarray) -> np.ndarray:
        """The mean, for every record."""
        return np.broadcast_to(targets.mean(0, keepdims=True), targets.shape)
