"""Evaluation of a model on the held-out rows."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data.dataset import Dataset
from shoal.gradients import Layout
from shoal.tasks import Figures
from shoal.training.workers import Workers

ROWS = 250  # evaluated at once
IN_FULL = (
    100  # clients at most, each with all figures; of more the headline alone, or scikit-learn would take minutes
)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A network, and the held-out rows on which it is evaluated."""

    module: nn.Module
    layout: Layout
    dataset: Dataset
    x: Tensor
    y: Tensor
    workers: Workers

    @classmethod
    def of(cls, module: nn.Module, layout: Layout, dataset: Dataset, workers: Workers) -> Evaluation:
        """On the device where the module is."""
        device = next(module.parameters()).device
        return cls(module, layout, dataset, dataset.test_x.to(device), dataset.test_y.to(device), workers)

    def metrics(self, params: Tensor) -> dict[str, float | None]:
        """The task's headline figure and the mean loss; None where one is not finite."""
        predictions, loss = self._predicted(params)
        return _finite(self.dataset.task.cheap_figures(predictions, self._targets) | {"loss": loss})

    def figures(self, params: Tensor) -> dict[str, Any]:
        """All figures, over all held-out rows and by client, beside those of the trivial prediction."""
        task, (predictions, _) = self.dataset.task, self._predicted(params)
        return {
            "task": task.kind,
            "headline": task.headline,
            "higher_is_better": task.higher_is_better,
            "trivial_answer": task.trivial_answer,
            "figures": _finite(task.all_figures(predictions, self._targets)),
            "trivial": _finite(task.trivial_figures(self._targets)),
            "figures_by_client": self._by_client(predictions),
        }

    def _by_client(self, predictions: np.ndarray) -> list[dict[str, Any]]:
        """The figures of each client's held-out rows, where their owner is known; of many clients the headline alone."""
        task, owners, found = self.dataset.task, self.dataset.test_owners, []
        if owners is None:
            return []
        order = np.argsort(owners, kind="stable")
        cuts = np.flatnonzero(np.diff(owners[order])) + 1
        figures_of = task.all_figures if len(cuts) < IN_FULL else task.cheap_figures
        for rows in np.split(order, cuts):
            figures = _finite(figures_of(predictions[rows], self._targets[rows]))
            name = self.dataset.owner_names[owners[rows[0]]]
            found.append({"client": name, "records": len(rows), "figures": figures})
        return found

    def confusion(self, params: Tensor) -> np.ndarray | None:
        """The confusion matrix of a classification: true classes by row, predicted classes by column."""
        if self.dataset.task.kind != "classification":
            return None
        predictions, _ = self._predicted(params)
        classes = self.dataset.class_count
        counts = np.bincount(self._targets * classes + predictions.argmax(1), minlength=classes * classes)
        return counts.reshape(classes, classes)

    @property
    def _targets(self) -> np.ndarray:
        return self.dataset.test_y.numpy()

    def _predicted(self, params: Tensor) -> tuple[np.ndarray, float]:
        """The predictions for all held-out rows, and the mean loss."""
        self.layout.load(self.module, params)
        self.module.eval()
        task = self.dataset.task

        def part(start: int) -> tuple[Tensor, float]:
            rows = slice(start, start + ROWS)
            x, y = self.x[rows], self.y[rows]
            with torch.inference_mode():
                outputs = _outputs(self.module, x)
                predictions = task.predictions(outputs, y)
                return torch.nan_to_num(predictions).cpu(), float(task.losses(outputs, y).sum())

        parts = list(self.workers.map(part, range(0, len(self.y), ROWS)))
        return torch.cat([found for found, _ in parts]).numpy(), sum(loss for _, loss in parts) / len(self.y)


def _finite(figures: Figures) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    """Images are passed in channels-last order, the fastest for convolutions and pooling, where the model takes it.

    A single channel has both orders, and PyTorch assumes the other one unless its strides say otherwise.
    """
    if x.dim() == 4:
        _, c, h, w = x.shape
        last = x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (c * h * w, 1, c * w, c))
        with suppress(RuntimeError):  # x.view(...) in the model's own code needs the usual order
            return module(last)  # type: ignore[no-any-return]
    return module(x)  # type: ignore[no-any-return]
