"""The user's own model: `package.module:Class`, imported from the current folder or the environment."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

from torch import nn

from shoal.errors import ModelError, nearest
from shoal.models.network import Make, Shape

Factory = Callable[..., nn.Module]


def factory(model: str | Factory) -> Make:
    """What makes the model, given the shape and the classes: by path, or a class or function itself."""
    if isinstance(model, str):
        return partial(call, load(model), model)
    return partial(call, model, getattr(model, "__name__", repr(model)))


def load(path: str) -> nn.Module | Factory:
    """What `package.module:name` names; ModelError with the nearest name where it is not there."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ModelError(f"model '{path}' is not of the form package.module:Class")
    with _current_folder_first():
        module = _import(module_name, path)
    if not hasattr(module, attribute):
        raise ModelError(f"model '{path}': {module_name} has no '{attribute}'{_nearest(attribute, module)}")
    found = getattr(module, attribute)
    if not callable(found):
        raise ModelError(f"model '{path}' is a {type(found).__name__}; name an nn.Module class or a function")
    return found  # type: ignore[no-any-return]


def call(found: nn.Module | Factory, path: str, shape: Shape, classes: int) -> nn.Module:
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


def _arguments(found: Factory, path: str, shape: Shape, classes: int) -> tuple[tuple[object, ...], dict[str, object]]:
    """By name where it has parameters `input_shape` or `classes`, by place where two are required."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return (), {}
    offered: dict[str, object] = {"input_shape": shape, "classes": classes}
    named = {p.name: offered[p.name] for p in parameters if p.name in offered and p.kind not in _UNNAMED}
    required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    unmet = [p.name for p in required if p.name not in named]
    if not unmet:
        return (), named
    if not named and len(required) == 2 and all(p.kind in _PLACED for p in required):
        return (shape, classes), {}
    raise ModelError(
        f"model '{path}' wants {', '.join(unmet)}; its parameters may be input_shape and classes, "
        "all others need defaults"
    )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, *_VARIADIC)
_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """The console script does not have the current folder on the path, where users keep their code."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _import(name: str, path: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            parent, _, last = missing.rpartition(".")
            prefix = f"{parent}." if parent else ""
            choices = [prefix + m for m in _siblings(parent)]
            raise ModelError(
                f"model '{path}': no module '{prefix}{last}' in {Path.cwd()} or among the installed packages"
                f"{nearest(missing, choices)}"
            ) from error
        raise ModelError(f"model '{path}': {name} needs the module '{missing}', which is not installed") from error
    except Exception as error:
        raise ModelError(f"model '{path}': importing {name} failed: {type(error).__name__}: {error}") from error


def _siblings(parent: str) -> list[str]:
    """The modules that could have been meant: those of the parent package, or of the current folder."""
    search = list(sys.modules[parent].__path__) if parent in sys.modules else [str(Path.cwd())]
    return [m.name for m in pkgutil.iter_modules(search)]


def _nearest(attribute: str, module: ModuleType) -> str:
    """The nearest thing that the module itself defines."""
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    return nearest(attribute, own)
