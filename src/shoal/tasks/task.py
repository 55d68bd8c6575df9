"""The interface of a task."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from shoal.tasks.settings import TaskSettings

Figures = dict[str, float]
Columns = dict[str, np.ndarray]
Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """What a model is trained for.

    Attributes:
        own_loss: The user's loss instead of the task's.
        own_metrics: The user's figures beside the task's, by name.
    """

    own_loss: Loss | None = field(default=None, repr=False)
    own_metrics: Mapping[str, Metric] = field(default_factory=dict, repr=False)

    kind: ClassVar[str]
    headline: ClassVar[str]
    """The figure that curves, comparisons and sweeps show."""
    figure_names: ClassVar[tuple[str, ...]] = ()
    """All that `figures` may give, the headline included, so that no figure of the user's takes their place."""
    higher_is_better: ClassVar[bool] = True
    trivial_answer: ClassVar[str]
    """In words, the constant prediction that needs no model."""

    def __post_init__(self) -> None:
        if taken := next((name for name in (self.headline, *self.figure_names) if name in self.own_metrics), None):
            raise ConfigError(
                f"task.metrics names a figure '{taken}', which {self.kind} has itself: rename the function"
            )

    @classmethod
    @abstractmethod
    def of(cls, settings: TaskSettings, targets: Tensor, classes: tuple[str, ...], **own: Any) -> Self:
        """The task for these targets.

        Args:
            settings: What the configuration says.
            targets: The targets, of which only type and shape may decide.
            classes: The names of classes, labels or tokens, where the data have them.
            **own: `own_loss` and `own_metrics`.
        """

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many numbers the model gives, for a record or for a token of it."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The task's own loss of each record, [N]."""

    @abstractmethod
    def output_shape(self, targets: Tensor) -> tuple[int, ...]:
        """The shape that the model's output has for these targets."""

    @abstractmethod
    def check_targets(self, targets: Tensor, where: str) -> None:
        """Raise a DataError for targets that are not of this task."""

    @abstractmethod
    def predictions(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What figures are computed from, a row for each record: small, so that those of all records fit."""

    @abstractmethod
    def figures(self, predictions: np.ndarray, targets: np.ndarray) -> Figures:
        """How good predictions are, by the names of the figures."""

    @abstractmethod
    def trivial(self, targets: np.ndarray) -> np.ndarray:
        """The best constant prediction for these targets: a model that is no better has learnt nothing."""

    def answers(self, outputs: Tensor, names: Sequence[str]) -> Columns:
        """What a user of the model reads, one value a record in each column; here the outputs as they are.

        Args:
            outputs: The model's outputs.
            names: The names of classes, labels or tokens, where the data have them.
        """
        return numbered("output", outputs)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each record, [N]."""
        if self.own_loss is None:
            return self.loss(outputs, targets)
        losses = self.own_loss(outputs, targets)
        if losses.shape != outputs.shape[:1]:
            raise ModelError(
                f"task.loss gives a value of shape {tuple(losses.shape)} for {len(outputs)} records; it must give "
                f"one loss a record"
            )
        return losses

    def cheap_figures(self, predictions: np.ndarray, targets: np.ndarray) -> Figures:
        """The headline figure alone, as it is computed after every round."""
        return {self.headline: self.figures(predictions, targets)[self.headline]}

    def all_figures(self, predictions: np.ndarray, targets: np.ndarray) -> Figures:
        """The task's figures and the user's."""
        own = {name: _figure(name, metric, predictions, targets) for name, metric in self.own_metrics.items()}
        return self.figures(predictions, targets) | own

    def trivial_figures(self, targets: np.ndarray) -> Figures:
        """Those of the best constant prediction."""
        return self.figures(self.trivial(targets), targets)

    def better(self, score: float, other: float) -> bool:
        """Is a headline figure better than another?"""
        return score > other if self.higher_is_better else score < other

    def check_outputs(self, name: str, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ModelError where the model's output is not of the shape that the task needs."""
        wanted = self.output_shape(targets)
        if tuple(outputs.shape) != wanted:
            raise ModelError(
                f"model {name} gives outputs of shape {tuple(outputs.shape)} for {len(targets)} records; "
                f"{self.kind} needs {wanted}"
            )

    def example_targets(self, records: int, targets: Tensor) -> Tensor:
        """Targets of the shape and type of these for a few synthetic records, with alternating values."""
        turns = torch.arange(records, device=targets.device) % 2
        values = 0.25 + 0.5 * turns if targets.is_floating_point() else turns
        return values.to(targets.dtype).view(-1, *[1] * (targets.dim() - 1)).expand(records, *targets.shape[1:])


def _figure(name: str, metric: Metric, predictions: np.ndarray, targets: np.ndarray) -> float:
    """A figure of the user's, NaN where it cannot be computed: the training that came before it is not lost."""
    try:
        return float(metric(predictions, targets))
    except Exception as error:
        warnings.warn(f"task.metrics '{name}' failed: {type(error).__name__}: {error}", stacklevel=2)
        return math.nan


def needs(found: Tensor, where: str, wanted: str, fits: bool) -> None:
    """Raise a DataError that says what targets are needed, unless they fit."""
    if not fits:
        raise DataError(f"{where}: {wanted}, got {found.dtype} {tuple(found.shape)}")


def numbered(name: str, values: Tensor) -> Columns:
    """One column, or `name_1`, `name_2`, ... for several numbers a record."""
    flat = values.reshape(len(values), -1).numpy()
    if flat.shape[1] == 1:
        return {name: flat[:, 0]}
    return {f"{name}_{place}": column for place, column in enumerate(flat.T, 1)}


def probabilities(names: Sequence[str], values: np.ndarray) -> Columns:
    """One column a class or label."""
    return {f"probability_{name}": values[:, place] for place, name in enumerate(names)}
