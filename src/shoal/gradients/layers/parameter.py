"""Parameters that a model's own code uses: a class token, positions, the scale of a branch, a temperature.

The code gets one value for each record, that of its client, so that the gradient of this value is the record's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn

from shoal.gradients.layers.client_layer import ClientLayer, Taped
from shoal.gradients.layers.rule import Rule, kept_sum, squared
from shoal.gradients.layout import Entry

Kind = tuple[str, torch.Size]
"""The attribute's name and shape: parameters of one kind are used in one way."""
Shape = tuple[int, ...]
"""The shape that the code gets, with -1 for the records."""

MOST_DIMENSIONS = 5  # of pictures' series, [N, C, T, H, W]
LARGEST = 2**20  # numbers of a parameter of which each record may have its own


class ParameterRule(Rule):
    """Every client's value for each of its records, [N, ...]."""

    def __init__(self, entry: Entry) -> None:
        self.entries, self.entry = (entry,), entry

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, None]:
        """The values; of `x` only the number of records counts."""
        values = self.entry.of(params).repeat_interleave(len(x) // len(params), 0)
        return values.view(len(x), *self.entry.shape), None

    def input_gradient(self, saved: None, grad: Tensor, params: Tensor) -> Tensor:
        """Never asked for: there is no input."""
        raise AssertionError("a parameter has no input")

    def accumulate(self, saved: None, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        self._of(into).add_(grad.reshape(len(into), -1, self._of(into).shape[1]).sum(1), alpha=scale)

    def squares(self, saved: None, grad: Tensor) -> tuple[Tensor, None]:
        """The squared norm of every gradient, in float64."""
        return squared(grad.reshape(len(grad), -1)), None

    def accumulate_weighted(
        self, saved: None, kept: None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        self._of(into).add_(kept_sum(grad.reshape(len(grad), -1), factors), alpha=scale)

    def _of(self, vectors: Tensor) -> Tensor:
        return vectors[:, self.entry.start : self.entry.stop]


class HoldsParameters:
    """Mixed into a module whose own code uses parameters."""

    client_parameters: dict[str, Entry]


def own_parameters(module: nn.Module, entries: dict[int, Entry]) -> dict[str, Entry]:
    """The trained parameters that a module's own code may use, by name; none in PyTorch's layers."""
    if isinstance(module, ClientLayer) or type(module).__module__.partition(".")[0] == "torch":
        return {}
    own = {name: (p, entries.get(id(p))) for name, p in module.named_parameters(recurse=False)}
    return {name: entry for name, (p, entry) in own.items() if entry and p.numel() <= LARGEST}


def hold_parameters(
    module: nn.Module, own: dict[str, Entry], taped: Taped, shapes: Mapping[Kind, Shape] | None
) -> None:
    """Let the module's code find each client's values under the same names, in these shapes or the likeliest.

    A class that cannot be derived from is left alone: its parameters have no rule.
    """
    members: dict[str, Any] = {"client_parameters": own}
    for name, entry in own.items():
        shape = (shapes or {}).get((name, entry.shape)) or next(likely_shapes(entry.shape))
        members[name] = property(_reader(ParameterRule(entry), shape, taped))
    kind = type(module)
    with suppress(Exception):
        module.__class__ = new_class(kind.__name__, (HoldsParameters, kind), {}, lambda body: body.update(members))


class _Values(Tensor):
    """Values with `added` dimensions before the parameter's own: an index of the code's is one of the others.

    An index of records would do as well where there are no more of them than it takes, as in a trial: [:T].
    """

    added: int

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The same function of a plain tensor."""
        if function is Tensor.__getitem__ and isinstance(args[0], _Values):
            values, places = args
            args = values, (*[slice(None)] * values.added, *(places if isinstance(places, tuple) else (places,)))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def _reader(rule: ParameterRule, shape: Shape, taped: Taped) -> Callable[[nn.Module], Tensor]:
    records = shape.index(-1)
    others = shape[:records] + shape[records + 1 :]
    added = len(shape) - len(rule.entry.shape)

    def read(module: nn.Module) -> Tensor:
        values = taped(rule, taped.params.new_empty(taped.records, 0))
        found = values.view(-1, *others).movedim(0, records)
        if not added:
            return found
        found = found.as_subclass(_Values)
        found.added = added
        return found

    return read


def only(module: nn.Module, kind: Kind) -> nn.Module:
    """A copy that trains parameters of this kind alone."""
    module = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        trained = (name.rpartition(".")[2], parameter.shape) == kind
        parameter.requires_grad_(parameter.requires_grad and trained)
    return module


def likely_shapes(shape: torch.Size) -> Iterator[Shape]:
    """Records in the place of a 1, as in [1, T, D]; else before the rest, as broadcasting needs it."""
    for place, size in enumerate(shape):
        if size == 1:
            yield (*shape[:place], -1, *shape[place + 1 :])
    for dimensions in range(len(shape) + 1, MOST_DIMENSIONS + 1):
        yield (-1, *[1] * (dimensions - 1 - len(shape)), *shape)
