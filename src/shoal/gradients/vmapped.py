"""By torch.func.vmap: all clients, or all records of all clients, at once; for any model that vmap can transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.overrides import TorchFunctionMode

from shoal.gradients.layout import Layout
from shoal.gradients.losses import Losses, cross_entropy
from shoal.gradients.sequential import FunctionalNetwork, RecordNetwork
from shoal.gradients.tapes import Gradients, SumTape
from shoal.inputs import Inputs, each

_warn_of_slow_operations: Any = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
"""Called with False: ways are measured, so that slow operations need no warning; a filter is not for threads."""
Views = dict[str, Tensor]
Found = Callable[..., Views]
"""From trained parameters, others, inputs, targets, weights and seeds to the gradients, by name."""


class VmappedNetwork(FunctionalNetwork):
    """All clients at once, each with the sum over its records."""

    way = "vmap"
    batched = True

    def __init__(
        self,
        module: nn.Module,
        losses: Losses = cross_entropy,
        layout: Layout | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(module, losses, layout)
        self.draws, self.masks = False, True
        self._found = _maybe_compiled(func.vmap(func.grad(self._of_client)), compiled)
        self.way = "compiled" if compiled else "vmap"

    def backward(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor | None = None) -> SumTape:
        """The tape of the gradients of a batch for every client."""
        if not weights.numel():
            return SumTape([])
        return SumTape([(slice(None), _by_entry(self, self._found, params, x, y, weights, seeds))])

    def _of_client(
        self, trained: Views, others: Views, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor
    ) -> Tensor:
        return self._loss(trained | others, x, y, weights, seeds)


class VmappedRecordNetwork(RecordNetwork):
    """All records of all clients at once; of one client after the other where the model draws random numbers."""

    way = "vmap"

    def __init__(
        self,
        module: nn.Module,
        losses: Losses = cross_entropy,
        layout: Layout | None = None,
        *,
        compiled: bool = False,
        draws: bool = True,
    ) -> None:
        super().__init__(module, losses, layout)
        self.draws, self.masks, self.batched = draws, not draws, not draws
        randomness = "different" if draws else "error"
        records = func.vmap(func.grad(self._of_record), in_dims=(None, None, 0, 0, 0, 0), randomness=randomness)
        self._found = _maybe_compiled(func.vmap(records, randomness=randomness), compiled)
        self.way = "compiled" if compiled else "vmap"

    def _of_records(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor | None) -> Gradients:
        found = _by_entry(self, self._found, params, x, y, weights, seeds)
        return [(entry, gradient.view(*weights.shape, -1)) for entry, gradient in found]

    def _of_record(self, trained: Views, others: Views, x: Inputs, y: Tensor, weight: Tensor, seed: Tensor) -> Tensor:
        one = each(x, lambda part: part.unsqueeze(0))
        return self._loss(trained | others, one, y.unsqueeze(0), weight, seed.unsqueeze(0))


def _by_entry(
    network: FunctionalNetwork,
    found: Found,
    params: Tensor,
    x: Inputs,
    y: Tensor,
    weights: Tensor,
    seeds: Tensor | None,
) -> Gradients:
    """The gradients, with a flat row for each client."""
    assert seeds is not None or not network.drops, "a model with dropout needs a seed for each record"
    seeds = torch.zeros_like(weights, dtype=torch.int64) if seeds is None else seeds
    entries, clients = network.layout.entries, len(params)
    views = {entry: entry.of(params).reshape(clients, *entry.shape) for entry in entries}
    trained, others = ({e.name: view for e, view in views.items() if e.trainable is kind} for kind in (True, False))
    _warn_of_slow_operations(False)
    with _PlainAttention():
        gradients = found(trained, others, x, y, weights, seeds)
    return [(entry, gradients[entry.name].reshape(clients, -1)) for entry in entries if entry.trainable]


def _maybe_compiled(function: Callable[..., Any], compiled: bool) -> Found:
    return torch.compile(function) if compiled else function


class _PlainAttention(TorchFunctionMode):
    """Attention by products and a softmax: vmap would run the fused kernels one by one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Exchange that one function."""
        if function is F.scaled_dot_product_attention:
            return torch._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
        return function(*args, **(kwargs or {}))
