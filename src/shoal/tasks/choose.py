"""Which task a configuration and a data set ask for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.registry import Registry, Source, imported
from shoal.tasks.classification import Classification
from shoal.tasks.multi_label import MultiLabel
from shoal.tasks.next_token import NextToken
from shoal.tasks.own import Own
from shoal.tasks.regression import Regression
from shoal.tasks.settings import TaskSettings, figure_name
from shoal.tasks.task import Task

OWN: tuple[type[Task], ...] = (Classification, MultiLabel, Regression, NextToken, Own)
TASKS: Registry[type[Task]] = Registry(
    "task.kind", type, lambda: {task.kind: task for task in OWN}, group="shoal.tasks"
)


def choose(
    settings: TaskSettings,
    targets: Tensor,
    classes: tuple[str, ...],
    known: Task | None = None,
    allowed: Collection[str] | None = None,
) -> Task:
    """The task of a run.

    Args:
        settings: What the configuration says.
        targets: The targets; with `auto` their type and shape decide, never their values.
        classes: The names of classes, labels or tokens, where the data have them.
        known: The task that the data set brings with it.
        allowed: The packages from which a loss or a metric may be imported; None: from any.

    Raises:
        ShoalError: The settings contradict each other or the targets.
    """
    own: dict[str, Any] = {}
    if settings.loss is not None:
        own["own_loss"] = _function("task.loss", settings.loss, allowed)
    if settings.metrics:
        own["own_metrics"] = {
            figure_name(name): _function("task.metrics", name, allowed) for name in settings.metrics
        }
    unchanged = settings.kind in ("auto", known.kind if known else "") and not settings.class_weights
    if known is not None and unchanged and settings.range is None:
        return replace(known, **own) if own else known
    kind = settings.kind
    if kind == "auto":
        kind = known.kind if known is not None else by_targets(targets, classes)
    task = TASKS.find(kind, allowed)
    if not issubclass(task, Task):
        raise ConfigError(f"task.kind '{kind}' is not a task: it must be a class derived from shoal.tasks.Task")
    if settings.range is not None and task in OWN and task is not Regression:
        raise ConfigError(f"task.range is for regression; leave it out for {kind}")
    return task.of(settings, targets, classes, **own)


def by_targets(targets: Tensor, classes: tuple[str, ...]) -> str:
    """Whole numbers are classes or, several a record, tokens; others are regressions or, with names, labels."""
    several = targets.dim() > 1
    if targets.dtype == torch.int64:
        return NextToken.kind if several else Classification.kind
    return MultiLabel.kind if several and classes else Regression.kind


def _function(key: str, reference: str, allowed: Collection[str] | None) -> Any:
    if allowed is not None and not Source(reference).allowed_by(allowed):
        raise ConfigError(
            f"{key} '{reference}' is not Shoal's, and the owner of this site allows no package that has it: "
            f"--allow-plugin PACKAGE"
        )
    found = imported(reference, key, noun="function")
    if not callable(found):
        raise ConfigError(f"{key} '{reference}' is a {type(found).__name__}, not a function")
    return found
