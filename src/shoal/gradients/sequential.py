"""Sequential: one client, or one record, after another, by autograd; right for any model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, func, nn

from shoal.calling import arguments, call, evaluating, in_training, output_of
from shoal.copying import copied
from shoal.gradients.dropout import dropping
from shoal.gradients.layout import Entry, Layout
from shoal.gradients.losses import Losses, cross_entropy
from shoal.gradients.tapes import Gradients, GradientTape, SumTape
from shoal.inputs import Inputs, each


class FunctionalNetwork:
    """A model that is called with parameters from outside; the base of all networks without rules.

    `draws`: it may draw random numbers; but for dropout where `places` are known (`dropout.places_of`). `masks`:
    padding may have weight 0, else it is taken out of the batch first, which a recorded step cannot do; a model that
    mixes records must not see it.
    """

    way = ""
    batched = False
    because = ""

    def __init__(self, module: nn.Module, losses: Losses = cross_entropy, layout: Layout | None = None) -> None:
        self.layout, self._losses = layout or Layout.of(module), losses
        self.draws, self.masks = True, False
        self.places: Sequence[int] = ()
        self._whole, self._copies = in_training(copied(module)), threading.local()

    @property
    def drops(self) -> bool:
        """Whether a pass needs a seed for each record."""
        return bool(self.places)

    @property
    def recordable(self) -> bool:
        """Whether a step can be recorded as a CUDA graph."""
        return self.masks

    @property
    def _module(self) -> nn.Module:
        """This thread's: parameters are put into a module while it is called. Tensors are shared."""
        if not hasattr(self._copies, "module"):
            self._copies.module = with_same_tensors(self._whole)
        module: nn.Module = self._copies.module
        return module

    def deferred_updates(self, start: Tensor, params: Tensor, batch: int) -> AbstractContextManager[None]:
        """Nothing is deferred here."""
        return nullcontext()

    @torch.no_grad()
    def losses(self, params: Tensor, x: Inputs, y: Tensor) -> Tensor:
        """The loss of every record, [K, B]."""
        made = params.new_zeros(y.shape[:2])
        with evaluating(self._module) as module:
            for k in range(len(params) if y.shape[1] else 0):
                given = arguments(of(x, k, slice(None)))
                made[k] = self._losses(
                    output_of(func.functional_call(module, self.layout.views(params[k]), *given)), y[k]
                )
        return made

    def _trained(self) -> list[Entry]:
        return [entry for entry in self.layout.entries if entry.trainable]

    def _loss(self, views: dict[str, Tensor], x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor) -> Tensor:
        """The weighted loss of records [N, ...] with these parameters."""
        with dropping(seeds, self.places):
            outputs = output_of(func.functional_call(self._module, views, *arguments(x)))
        return (self._losses(outputs, y) * weights).sum()

    def _gradients(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor | None) -> Gradients:
        """The gradient of one client, [n] for each tensor."""
        views, trained = self.layout.views(params), self._trained()
        for entry in trained:
            # a copy, since a forward pass may write to it: an nn.Embedding with max_norm, the words that it looks up
            views[entry.name] = views[entry.name].detach().clone().requires_grad_()
        # with its parameters in place until the end: a checkpointed module runs again in the backward pass
        whole = _Backward(self._module)
        inside = {f"module.{name}": view for name, view in views.items()}
        loss, drops = lambda outputs: (self._losses(outputs, y) * weights).sum(), dropping(seeds, self.places)
        func.functional_call(whole, inside, (loss, x, drops))
        found = ((entry, views[entry.name].grad) for entry in trained)
        return [(entry, gradient.reshape(-1)) for entry, gradient in found if gradient is not None]


class _Backward(nn.Module):
    """A module whose call is a forward and a backward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, loss: Callable[[Tensor], Tensor], x: Inputs, drops: AbstractContextManager[object]) -> None:
        """Write the gradients to the parameters."""
        with drops:
            outputs = call(self.module, x)
        torch.autograd.backward(loss(outputs))


class SequentialNetwork(FunctionalNetwork):
    """One client after another: for any model, also with BatchNorm."""

    way = "sequential"

    def backward(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor | None = None) -> SumTape:
        """The tape of the gradients of a batch for every client."""
        found = []
        for k, own in enumerate(weights):
            mask = slice(None) if self.masks else own > 0
            if own.numel() and (self.masks or bool(own.any())):
                drawn = None if seeds is None else seeds[k][mask]
                gradients = self._gradients(params[k], of(x, k, mask), y[k][mask], own[mask], drawn)
                found.append((slice(k, k + 1), gradients))
        return SumTape(found)


class RecordNetwork(FunctionalNetwork):
    """Every record's gradient, one record after another."""

    way = "sequential"

    def backward(
        self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor | None = None
    ) -> GradientTape:
        """The tape of the gradients of a batch for every client."""
        found = self._of_records(params, x, y, weights, seeds) if weights.numel() else []
        return GradientTape(self.layout, found, torch.zeros_like(weights))

    def _of_records(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor | None) -> Gradients:
        """The gradient of every record's weighted loss, [K, B, n] for each tensor."""
        made = {entry: params.new_zeros(*weights.shape, entry.stop - entry.start) for entry in self._trained()}
        places = [(k, b) for k in range(len(weights)) for b in range(weights.shape[1])]
        for k, b in places if self.masks else weights.nonzero().tolist():
            one = slice(b, b + 1)
            drawn = None if seeds is None else seeds[k, one]
            for entry, gradient in self._gradients(params[k], of(x, k, one), y[k, one], weights[k, one], drawn):
                made[entry][k, b] = gradient
        return list(made.items())


def with_same_tensors(module: nn.Module) -> nn.Module:
    """A copy of the module, whose parameters and buffers are the same tensors."""
    return copied(module, [*module.parameters(), *module.buffers()])


def of(x: Inputs, client: int, records: Tensor | slice) -> Inputs:
    """These records of a client."""
    return each(x, lambda part: part[client][records])
