"""The user's own model: `package.module:Class`, imported from the current folder or the environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from torch import nn

from shoal.errors import ModelError
from shoal.inputs import InputShape
from shoal.registry import imported

Factory = Callable[..., nn.Module]
Make = Callable[[InputShape, int], nn.Module]


def factory(model: str | Factory) -> Make:
    """What makes the model, given the shape and the classes: by path, or a class or function itself."""
    if isinstance(model, str):
        return partial(call, load(model), model)
    return partial(call, model, getattr(model, "__name__", repr(model)))


def load(path: str) -> nn.Module | Factory:
    """What `package.module:name` names; ModelError with the nearest name where it is not there."""
    found = imported(path, "model", ModelError, "Class")
    if not callable(found):
        raise ModelError(f"model '{path}' is a {type(found).__name__}; name an nn.Module class or a function")
    return found  # type: ignore[no-any-return]


def call(found: nn.Module | Factory, path: str, shape: InputShape, classes: int) -> nn.Module:
    """The model that a class or factory makes, given the shape and the classes if it asks for them."""
    if isinstance(found, nn.Module):
        return found
    arguments, keywords = _arguments(found, path, shape, classes)
    try:
        model = found(*arguments, **keywords)
    except Exception as error:
        raise ModelError(f"model '{path}' could not be built: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model '{path}' gives a {type(model).__name__}, it must give a torch.nn.Module")
    return model


def _arguments(
    found: Factory, path: str, shape: InputShape, classes: int
) -> tuple[tuple[object, ...], dict[str, object]]:
    """By name where it has parameters `input_shape` or `classes`, by place where two are required."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return (), {}
    offered: dict[str, object] = {"input_shape": shape, "classes": classes, "outputs": classes}
    named = {p.name: offered[p.name] for p in parameters if p.name in offered and p.kind not in _UNNAMED}
    required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    unmet = [p.name for p in required if p.name not in named]
    if not unmet:
        return (), named
    if not named and len(required) == 2 and all(p.kind in _PLACED for p in required):
        return (shape, classes), {}
    raise ModelError(
        f"model '{path}' wants {', '.join(unmet)}; its parameters may be input_shape and classes (or outputs), "
        "all others need defaults"
    )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, *_VARIADIC)
_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
