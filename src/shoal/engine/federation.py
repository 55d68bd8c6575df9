"""The clients of a simulation: one data set in memory, and which of its records each client holds."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data.dataset import Dataset
from shoal.data.partition import Partition
from shoal.engine.workers import Workers
from shoal.gradients import Layout
from shoal.gradients.losses import example_losses

EVALUATION_ROWS = 250


@dataclass(frozen=True, eq=False)
class Federation:
    """Records on the device; clients are views into them."""

    dataset: Dataset
    partition: Partition
    device: torch.device
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @classmethod
    def of(cls, dataset: Dataset, partition: Partition, device: torch.device) -> Federation:
        tensors = (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y)
        return cls(dataset, partition, device, *(tensor.to(device) for tensor in tensors))

    def __len__(self) -> int:
        return len(self.partition)

    @property
    def sizes(self) -> np.ndarray:
        return self.partition.sizes

    def digest(self, key: bytes) -> str:
        """A keyed digest of the training rows and of who holds them: without the key no guess can be tried on it."""
        found = hashlib.blake2b(self.dataset.digest(), key=key, digest_size=32)
        for part in (self.dataset.train_y.numpy(), self.partition.indices, self.partition.offsets):
            found.update(f"{part.dtype} {part.shape} ".encode())
            found.update(np.ascontiguousarray(part).data)
        return found.hexdigest()

    def rows(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """The records of a batch for each client: [K, B, ...] and [K, B]."""
        flat = records.flatten()
        x = self.x.index_select(0, flat).unflatten(0, records.shape)
        return x, self.y.index_select(0, flat).view(records.shape)

    def evaluate(self, module: nn.Module, layout: Layout, model: Tensor, workers: Workers) -> tuple[float, float]:
        """Accuracy and mean loss of a model on the held-out rows."""
        layout.load(module, model)
        module.eval()

        def part(start: int) -> tuple[float, float]:
            x, y = self._held_out(start)
            with torch.inference_mode():
                logits = _logits(module, x)
                hits = (logits.argmax(1) == y).sum()
                return float(hits), float(example_losses(logits, y).sum())

        parts = workers.map(part, range(0, len(self.test_y), EVALUATION_ROWS))
        hits, losses = map(sum, zip(*parts, strict=True))
        return hits / len(self.test_y), losses / len(self.test_y)

    def confusion(self, module: nn.Module, layout: Layout, model: Tensor) -> np.ndarray:
        """How often held-out rows of each class (row) are taken for each class (column)."""
        layout.load(module, model)
        module.eval()
        classes = self.dataset.class_count
        counts = torch.zeros(classes * classes, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            for start in range(0, len(self.test_y), EVALUATION_ROWS):
                x, y = self._held_out(start)
                counts += torch.bincount(y * classes + _logits(module, x).argmax(1), minlength=classes * classes)
        return counts.view(classes, classes).cpu().numpy()

    def _held_out(self, start: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, start + EVALUATION_ROWS)
        return self.test_x[rows], self.test_y[rows]


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    """Pictures go in channels-last order, in which convolutions and pooling are fastest, where the model takes it.

    One channel alone has both orders, and PyTorch takes it for the other one unless its stride says otherwise.
    """
    if x.dim() == 4:
        _, c, h, w = x.shape
        last = x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (c * h * w, 1, c * w, c))
        with suppress(RuntimeError):  # x.view(...) in the model's own code wants the usual order
            return module(last)  # type: ignore[no-any-return]
    return module(x)  # type: ignore[no-any-return]
