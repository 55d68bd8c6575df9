"""Next-token prediction: a record is a sequence, and every token of it is predicted from those before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import ConfigError, DataError
from shoal.tasks.settings import TaskSettings
from shoal.tasks.task import Columns, Figures, Task, needs

PADDING = -100
"""The target of a token that does not count."""


@dataclass(frozen=True, kw_only=True)
class NextToken(Task):
    """The next of `vocabulary` tokens, at every place; targets are int64 [N, T], with -100 for padding."""

    vocabulary: int

    kind = "next-token"
    headline = "accuracy"
    figure_names = ("accuracy", "perplexity")
    trivial_answer = "always the most frequent token"

    @classmethod
    def of(cls, settings: TaskSettings, targets: Tensor, classes: tuple[str, ...], **own: Any) -> Self:
        """The vocabulary comes from the data set."""
        if not classes:
            raise ConfigError("task.kind is next-token, but the data set names no vocabulary (its classes)")
        if settings.class_weights:
            raise ConfigError("task.class_weights is for classification; leave it out for next-token")
        return cls(vocabulary=len(classes), **own)

    @property
    def outputs(self) -> int:
        """One score a token of the vocabulary."""
        return self.vocabulary

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, the mean over a record's own tokens; 0 for a record of padding alone."""
        counted = (targets != PADDING).sum(1).clamp(min=1)
        return self._of_tokens(outputs, targets).sum(1) / counted

    def _of_tokens(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="none")
        return losses.view(targets.shape)

    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        """[N, T, vocabulary]."""
        return (*targets.shape, self.vocabulary)

    def check_targets(self, targets: Tensor, where: str) -> None:
        """Tokens of the vocabulary, or padding."""
        fits = targets.dtype == torch.int64 and targets.dim() == 2
        needs(targets, where, "targets of next-token must be int64 [N, T]", fits)
        outside = (targets != PADDING) & ((targets < 0) | (targets >= self.vocabulary))
        if outside.any():
            row, place = outside.nonzero()[0].tolist()
            raise DataError(
                f"{where}: row {row} has token {int(targets[row, place])}, outside 0 to {self.vocabulary - 1} "
                f"({PADDING} is padding)"
            )

    def predictions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """For each record: its tokens' loss, how many were right, and how many there are, [N, 3]."""
        counted = targets != PADDING
        right = (outputs.argmax(2) == targets) & counted
        losses = self._of_tokens(outputs, targets).sum(1)
        return torch.stack([losses, right.sum(1).to(losses), counted.sum(1).to(losses)], 1)

    def answers(self, outputs: Tensor, names: Sequence[str]) -> Columns:
        """The likeliest token after the last place of a record, and its probability."""
        best, token = outputs[:, -1].double().softmax(1).max(1)
        tokens = np.array(names)[token.numpy()] if names else token.numpy()
        return {"token": tokens, "probability": best.numpy()}

    def figures(self, predictions: np.ndarray, targets: np.ndarray) -> Figures:
        """The share of right tokens, and the perplexity."""
        losses, right, counted = predictions.astype(np.float64).sum(0)
        counted = max(counted, 1.0)
        return {"accuracy": float(right / counted), "perplexity": float(np.exp(min(losses / counted, 700.0)))}

    def trivial(self, targets: np.ndarray) -> np.ndarray:
        """The frequencies of the tokens, at every place."""
        counted = targets != PADDING
        counts = np.bincount(targets[counted], minlength=self.vocabulary)
        losses = -np.log(np.maximum(counts, 1) / max(counts.sum(), 1))
        tokens = np.where(counted, targets, 0)
        return np.stack(
            [(losses[tokens] * counted).sum(1), ((tokens == counts.argmax()) & counted).sum(1), counted.sum(1)], 1
        )
