"""The section `task` of a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import ConfigError


@dataclass(frozen=True)
class TaskSettings:
    """What the model is trained for. All of it is public: nothing here is computed from records.

    Attributes:
        kind: `auto` (by the targets, or regression where there is a range), classification, multi-label, regression,
            next-token, own, or a task of another package.
        loss: Your own loss, `package.module:function`: (outputs, targets) -> one value for each record.
        metrics: Your own figures, `package.module:function`: (predictions, targets) -> a number.
        class_weights: How much each class counts in the loss.
        range: The lowest and the highest target of a regression, by which it is scaled.
    """

    kind: str = "auto"
    loss: str | None = None
    metrics: tuple[str, ...] = ()
    class_weights: tuple[float, ...] = ()
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for weight in self.class_weights:
            if not 0 < weight < math.inf:
                raise ConfigError(f"task.class_weights must be > 0 and finite, got {weight}")
        if self.range is not None and not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise ConfigError(f"task.range must be two numbers, low < high, got {list(self.range)}")
        if self.range is not None and self.kind == "auto":
            object.__setattr__(self, "kind", "regression")
        names = [figure_name(reference) for reference in self.metrics]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"task.metrics names two figures '{twice}': give one of the functions another name")
        if self.class_weights and self.loss is not None:
            raise ConfigError("task.class_weights has no effect on a task.loss; weigh the classes there")


def figure_name(reference: str) -> str:
    """The name of a user's own figure: that of its function."""
    return reference.rpartition(":")[2]
