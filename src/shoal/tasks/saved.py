"""A task as JSON holds it: its kind, its settings, and the references of a user's own loss and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from shoal.checked import checked
from shoal.errors import ConfigError, nearest
from shoal.registry import imported
from shoal.tasks.choose import TASKS
from shoal.tasks.task import Task

LOSS, METRICS = "own_loss", "own_metrics"


def to_mapping(task: Task) -> dict[str, Any]:
    """The task as JSON holds it; `of_mapping` reads it back."""
    found: dict[str, Any] = {"kind": TASKS.name_of(type(task), type(task).__qualname__)}
    found |= {name: getattr(task, name) for name in _settings(type(task))}
    if task.own_loss is not None:
        found[LOSS] = _reference(task.own_loss)
    if task.own_metrics:
        found[METRICS] = {name: _reference(metric) for name, metric in task.own_metrics.items()}
    return found


def of_mapping(mapping: Mapping[str, Any], *, own: bool = False) -> Task:
    """The task in a mapping.

    Args:
        mapping: What `to_mapping` gave, from a file that nobody vouches for.
        own: Whether to import the user's own loss and figures too.

    Raises:
        ShoalError: The mapping is no task, or what it names cannot be imported.
    """
    given = dict(mapping)
    kind = TASKS.find(checked("task.kind", given.pop("kind", None), str))
    if not issubclass(kind, Task):
        raise ConfigError(f"task.kind '{mapping['kind']}' is no task")
    loss = checked("task.own_loss", given.pop(LOSS, None), str | None)
    metrics = checked("task.own_metrics", given.pop(METRICS, {}), dict[str, str])
    known = _settings(kind)
    for name in given:
        if name not in known:
            raise ConfigError(f"there is no key 'task.{name}'{nearest(name, known)}")
    if lacks := [name for name, needed in known.items() if needed and name not in given]:
        raise ConfigError(f"task lacks {', '.join(lacks)}")
    hints = get_type_hints(kind)
    settings = {name: checked(f"task.{name}", value, hints[name]) for name, value in given.items()}
    if own and loss is not None:
        settings[LOSS] = imported(loss, "task.loss", noun="function")
    if own and metrics:
        settings[METRICS] = {name: imported(each, "task.metrics", noun="function") for name, each in metrics.items()}
    return kind(**settings)


def own_code(mapping: Mapping[str, Any]) -> str:
    """The references of the user's own loss and figures in a mapping; empty where there are none."""
    loss, metrics = mapping.get(LOSS), mapping.get(METRICS) or {}
    return ", ".join(map(str, [loss, *metrics.values()] if loss else metrics.values()))


def _settings(kind: type[Task]) -> dict[str, bool]:
    """The names of a task's settings, and whether each must be given."""
    found = {each.name: each for each in fields(kind) if each.init and not each.name.startswith(("own_", "_"))}
    return {name: each.default is MISSING and each.default_factory is MISSING for name, each in found.items()}


def _reference(function: Any) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
