"""Multi-label classification: any of several labels a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import ConfigError, DataError
from shoal.tasks.ranking import f1, rankings
from shoal.tasks.settings import TaskSettings
from shoal.tasks.task import Columns, Figures, Task, needs, probabilities


@dataclass(frozen=True, kw_only=True)
class MultiLabel(Task):
    """Some of `labels` a record; targets are float32 [N, labels], 0 or 1."""

    labels: tuple[str, ...]

    kind = "multi-label"
    headline = "f1"
    figure_names = ("f1", "exact_match", "label_accuracy", "auroc", "average_precision")
    trivial_answer = "each label by its frequency alone"

    @classmethod
    def of(cls, settings: TaskSettings, targets: Tensor, classes: tuple[str, ...], **own: Any) -> Self:
        """Labels without names are numbered."""
        if settings.class_weights:
            raise ConfigError("task.class_weights is for classification; for multi-label write a task.loss")
        count = targets.shape[1] if targets.dim() == 2 else 0
        return cls(labels=classes or tuple(map(str, range(count))), **own)

    @property
    def outputs(self) -> int:
        """One logit a label."""
        return len(self.labels)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy, the mean over labels."""
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none").mean(1)

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        """[N, labels]."""
        return (len(targets), self.outputs)

    def check_targets(self, targets: Tensor, where: str) -> None:
        """0 or 1 for each label."""
        fits = targets.dtype == torch.float32 and targets.dim() == 2 and targets.shape[1] == self.outputs
        needs(targets, where, f"multi-label targets must be float32 [N, {self.outputs}]", fits)
        if not ((targets == 0) | (targets == 1)).all():
            raise DataError(f"{where}: multi-label targets must be 0 or 1")

    def predictions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The probability of each label, [N, labels]. 0 for NaN."""
        return outputs.sigmoid().nan_to_num()

    def answers(self, outputs: Tensor, names: Sequence[str]) -> Columns:
        """0 or 1 for each label, and its probability."""
        found = self.predictions(outputs, outputs).numpy()
        given = {name: (found[:, place] > 0.5).astype(np.int64) for place, name in enumerate(self.labels)}
        return given | probabilities(self.labels, found)

    def figures(self, predictions: np.ndarray, targets: np.ndarray) -> Figures:
        """Means over labels; those that all records or none have cannot be ranked, and are left out there."""
        answers, hits = predictions > 0.5, targets > 0.5
        found = {
            "f1": float(f1(hits.reshape(-1, 1), answers.reshape(-1, 1))[0]),
            "exact_match": float((answers == hits).all(1).mean()),
            "label_accuracy": float((answers == hits).mean()),
        }
        ranked = [k for k in range(self.outputs) if 0 < hits[:, k].sum() < len(hits)]
        if ranked:
            found |= rankings(hits[:, ranked], predictions[:, ranked])
        return found

    def trivial(self, targets: np.ndarray) -> np.ndarray:
        """The frequencies of the labels, for every record."""
        return np.broadcast_to(targets.mean(0, keepdims=True), targets.shape)
