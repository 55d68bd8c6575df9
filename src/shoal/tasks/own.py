"""A task of which Shoal knows the loss alone: any targets, any outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from shoal.errors import ConfigError
from shoal.tasks.settings import TaskSettings
from shoal.tasks.task import Figures, Task


@dataclass(frozen=True, kw_only=True)
class Own(Task):
    """Trained with `task.loss`, which is also its headline figure."""

    kind = "own"
    headline = "mean_loss"
    higher_is_better = False
    trivial_answer = "none is known"

    @classmethod
    def of(cls, settings: TaskSettings, targets: Tensor, classes: tuple[str, ...], **own: Any) -> Self:
        """The loss must be given."""
        if settings.loss is None:
            raise ConfigError("task.kind is own, so task.loss must name the loss: task.loss=package.module:function")
        return cls(**own)

    @property
    def outputs(self) -> int:
        """The user's model knows it."""
        return 1

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Never called: `own_loss` is."""
        raise AssertionError

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        """Any."""
        return (len(targets),)

    def check_outputs(self, name: str, outputs: Tensor, targets: Tensor) -> None:
        """Any are fine that the loss takes."""

    def check_targets(self, targets: Tensor, where: str) -> None:
        """Any are fine."""

    def predictions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The losses themselves."""
        return self.losses(outputs, targets)

    def figures(self, predictions: np.ndarray, targets: np.ndarray) -> Figures:
        """The mean loss."""
        return {"mean_loss": float(predictions.mean())}

    def trivial(self, targets: np.ndarray) -> np.ndarray:
        """Nothing is known that is trivial."""
        return np.full(len(targets), np.inf)
