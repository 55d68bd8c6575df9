"""Classification: one of several classes a record, by one score a class, or by one logit for two classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import ConfigError, DataError
from shoal.tasks.ranking import f1, rankings
from shoal.tasks.settings import TaskSettings
from shoal.tasks.task import Columns, Figures, Task, needs, probabilities

BINS = 15
"""Of the calibration error."""


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """One of `classes` a record; targets are int64 [N]."""

    classes: tuple[str, ...]
    class_weights: tuple[float, ...] = ()
    _weights: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict, repr=False, compare=False)

    kind = "classification"
    headline = "accuracy"
    figure_names = ("accuracy", "balanced_accuracy", "auroc", "average_precision", "f1", "calibration_error")
    trivial_answer = "always the most frequent class"

    @classmethod
    def of(cls, settings: TaskSettings, targets: Tensor, classes: tuple[str, ...], **own: Any) -> Self:
        """Classes come from the data set."""
        weights = settings.class_weights
        if weights and len(weights) != len(classes):
            raise ConfigError(f"task.class_weights has {len(weights)} weights, but there are {len(classes)} classes")
        return cls(classes=classes, class_weights=weights, **own)

    @property
    def outputs(self) -> int:
        """One score a class."""
        return len(self.classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        weights = self._weights_like(outputs) if self.class_weights else None
        if not self._one_logit(outputs):
            return F.cross_entropy(outputs, targets, weight=weights, reduction="none")
        losses = F.binary_cross_entropy_with_logits(
            outputs.reshape(-1), targets.reshape(-1).to(outputs.dtype), reduction="none"
        )
        return losses if weights is None else losses * weights[targets]

    def _weights_like(self, outputs: Tensor) -> Tensor:
        """The class weights on the device of the outputs, where they stay: a CUDA graph cannot copy them there."""
        place = outputs.device, outputs.dtype
        if place not in self._weights:
            with torch.inference_mode(False):  # what evaluation makes here, training must be able to use
                self._weights[place] = torch.tensor(self.class_weights, dtype=outputs.dtype, device=outputs.device)
        return self._weights[place]

    def _one_logit(self, outputs: Tensor) -> bool:
        return outputs.dim() == 1 or outputs.shape[1:] == (1,)

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        """[N, classes]."""
        return (len(targets), self.outputs)

    def check_outputs(self, name: str, outputs: Tensor, targets: Tensor) -> None:
        """Two classes may also have one logit."""
        if not (self.outputs == 2 and self._one_logit(outputs) and len(outputs) == len(targets)):
            super().check_outputs(name, outputs, targets)

    def check_targets(self, targets: Tensor, where: str) -> None:
        """Whole numbers from 0."""
        if len(self.classes) < 2:
            raise DataError(f"{where}: needs at least two classes, got {list(self.classes)}")
        needs(targets, where, "labels must be int64 [N]", targets.dtype == torch.int64 and targets.dim() == 1)
        low, high = (int(targets.min()), int(targets.max())) if len(targets) else (0, 0)
        if low < 0 or high >= len(self.classes):
            raise DataError(f"{where}: labels run from {low} to {high}, but there are {len(self.classes)} classes")

    def predictions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The probability of each class, [N, classes], in float64: in float32 large logits would tie. 0 for NaN."""
        if not self._one_logit(outputs):
            return outputs.double().softmax(1).nan_to_num()
        positive = outputs.double().reshape(-1).sigmoid().nan_to_num()
        return torch.stack([1 - positive, positive], 1)

    def answers(self, outputs: Tensor, names: Sequence[str]) -> Columns:
        """The likeliest class, and the probability of each."""
        found = self.predictions(outputs, outputs).numpy()
        return {"class": np.array(self.classes)[found.argmax(1)]} | probabilities(self.classes, found)

    def cheap_figures(self, predictions: np.ndarray, targets: np.ndarray) -> Figures:
        """The accuracy."""
        return {"accuracy": float((predictions.argmax(1) == targets).mean())}

    def figures(self, predictions: np.ndarray, targets: np.ndarray) -> Figures:
        """Accuracy, and what it hides where classes are rare; means over the classes that the targets have."""
        answers, present = predictions.argmax(1), np.unique(targets)
        found = self.cheap_figures(predictions, targets)
        recalls = [float((answers[targets == k] == k).mean()) for k in present]
        found["balanced_accuracy"] = float(np.mean(recalls))
        scored = np.array([1]) if self.outputs == 2 else present
        hits = targets[:, None] == scored
        if len(present) > 1:
            found |= rankings(hits, predictions[:, scored])
        found["f1"] = float(f1(hits, answers[:, None] == scored).mean())
        return found | {"calibration_error": calibration_error(predictions, targets)}

    def trivial(self, targets: np.ndarray) -> np.ndarray:
        """The frequencies of the classes, for every record."""
        shares = np.bincount(targets, minlength=self.outputs) / len(targets)
        return np.broadcast_to(shares.astype(np.float32), (len(targets), self.outputs))


def calibration_error(probabilities: np.ndarray, targets: np.ndarray) -> float:
    """The expected calibration error (Guo et al. 2017): confidence against accuracy in bins of equal width."""
    confidence, hit = probabilities.max(1).astype(float), probabilities.argmax(1) == targets
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.abs(np.bincount(bins, hit - confidence, BINS))
    return float(gaps.sum() / len(targets))
