"""Evaluation of a model on the held-out rows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data.dataset import Dataset
from shoal.gradients import Layout
from shoal.gradients.losses import record_losses
from shoal.training.workers import Workers

ROWS = 250  # evaluated at once


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

    def metrics(self, params: Tensor) -> tuple[float, float]:
        """Accuracy and mean loss."""
        self._load(params)

        def part(start: int) -> tuple[float, float]:
            x, y = self._rows(start)
            with torch.inference_mode():
                logits = _logits(self.module, x)
                hits = (logits.argmax(1) == y).sum()
                return float(hits), float(record_losses(logits, y).sum())

        parts = self.workers.map(part, range(0, len(self.y), ROWS))
        hits, losses = map(sum, zip(*parts, strict=True))
        return hits / len(self.y), losses / len(self.y)

    def confusion(self, params: Tensor) -> np.ndarray:
        """The confusion matrix: true classes by row, predicted classes by column."""
        self._load(params)
        classes = self.dataset.class_count
        counts = torch.zeros(classes * classes, dtype=torch.int64, device=self.y.device)
        with torch.inference_mode():
            for start in range(0, len(self.y), ROWS):
                x, y = self._rows(start)
                counts += torch.bincount(y * classes + _logits(self.module, x).argmax(1), minlength=classes * classes)
        return counts.view(classes, classes).cpu().numpy()

    def _load(self, params: Tensor) -> None:
        self.layout.load(self.module, params)
        self.module.eval()

    def _rows(self, start: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, start + ROWS)
        return self.x[rows], self.y[rows]


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    """Images are passed in channels-last order, the fastest for convolutions and pooling, where the model takes it.

    A single channel has both orders, and PyTorch assumes the other one unless its strides say otherwise.
    """
    if x.dim() == 4:
        _, c, h, w = x.shape
        last = x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (c * h * w, 1, c * w, c))
        with suppress(RuntimeError):  # x.view(...) in the model's own code needs the usual order
            return module(last)  # type: ignore[no-any-return]
    return module(x)  # type: ignore[no-any-return]
