"""How a model is called: with records in one tensor or in several, for the one tensor that the task needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.inputs import Inputs

SCORES = "logits"
"""The name of the output that counts, in a model that names its outputs."""


def call(module: nn.Module, x: Inputs) -> Tensor:
    """The model's output for these records."""
    args, named = arguments(x)
    return output_of(module(*args, **named))


def arguments(x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """What is passed by place, and what by name."""
    return ((x,), {}) if isinstance(x, Tensor) else ((), x)


def output_of(found: Any) -> Tensor:
    """The tensor that counts: `logits` where outputs have names (as in transformers), else the first."""
    if isinstance(found, Tensor):
        return found
    first: Any = getattr(found, SCORES, None)
    if isinstance(found, Mapping):
        only = next(iter(found.values())) if len(found) == 1 else None
        first = found.get(SCORES, only)
    elif isinstance(found, tuple | list) and first is None and found:
        first = found[0]
    if isinstance(first, Tensor):
        return first
    names = f" of {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
    raise ModelError(
        f"the model gives a {type(found).__name__}{names}; it must give a tensor, a tuple that begins with one, or a "
        f"mapping with '{SCORES}'"
    )


def in_training(module: nn.Module) -> nn.Module:
    """The module in training mode, but for layers that were put into eval(): they stay there, with their statistics.

    Its own `train` is called, since many models keep layers in eval() there.
    """
    frozen = [layer for layer in module.modules() if not layer.training]
    module.train()
    for layer in frozen:
        layer.training = False
    return module


@contextmanager
def evaluating(module: nn.Module) -> Iterator[nn.Module]:
    """The module in eval mode inside the block; afterwards each layer is in its own mode again."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield module
    finally:
        for layer, mode in modes:
            layer.training = mode
