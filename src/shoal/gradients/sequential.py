"""Sequential: one client, or one record, after another; for any model, by autograd and torch.func."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, func, nn

from shoal.calling import arguments, in_training, output_of
from shoal.gradients.layout import Layout
from shoal.gradients.losses import Losses, cross_entropy
from shoal.inputs import Inputs, each
from shoal.mechanisms.update_clipping import row_norms, weighed_sum
from shoal.precision import all_digits
from shoal.random.noise_source import Product


class SequentialNetwork:
    """One client after another, by autograd: for any model, also with BatchNorm and Dropout."""

    batched = False

    def __init__(self, module: nn.Module, losses: Losses = cross_entropy, layout: Layout | None = None) -> None:
        self.layout, self._losses = layout or Layout.of(module), losses
        self._module = in_training(copy.deepcopy(module))

    def backward(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor) -> SumTape:
        """The tape of the gradients of a batch for every client."""
        total = torch.zeros_like(params)
        for k in range(len(params)):
            mask = weights[k] > 0
            if mask.any():
                self._one(params[k], _of(x, k, mask), y[k][mask], weights[k][mask], total[k])
        return SumTape(total)

    def deferred_updates(self, start: Tensor, params: Tensor, batch: int) -> AbstractContextManager[None]:
        """Nothing is deferred here."""
        return nullcontext()

    def records(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor) -> Tensor:
        """The gradient of every record's weighted loss, [K, B, P]."""
        gradients = params.new_zeros(*weights.shape, params.shape[1])
        for k, b in weights.nonzero().tolist():
            one = slice(b, b + 1)
            self._one(params[k], _of(x, k, one), y[k, one], weights[k, one], gradients[k, b])
        return gradients

    def _one(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, total: Tensor) -> None:
        views = self.layout.views(params)
        trainable = [entry for entry in self.layout.entries if entry.trainable]
        for entry in trainable:
            # a copy, since a forward pass may write to it: an nn.Embedding with max_norm, the words that it looks up
            views[entry.name] = views[entry.name].detach().clone().requires_grad_()
        loss = (self._losses(self._outputs(views, x), y) * weights).sum()
        grads = torch.autograd.grad(loss, [views[e.name] for e in trainable], allow_unused=True)
        for entry, grad in zip(trainable, grads, strict=True):
            if grad is not None:
                total[entry.start : entry.stop] = grad.reshape(-1)

    def _outputs(self, views: dict[str, Tensor], x: Inputs) -> Tensor:
        """The model's output with these parameters."""
        return output_of(func.functional_call(self._module, views, *arguments(x)))


def _of(x: Inputs, client: int, records: Tensor | slice) -> Inputs:
    return each(x, lambda part: part[client][records])


class SumTape:
    """A tape of summed gradients, [K, P]."""

    def __init__(self, vectors: Tensor) -> None:
        self._vectors = vectors

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        into.add_(self._vectors, alpha=scale)


class RecordNetwork(SequentialNetwork):
    """Every record's gradient by torch.func: slow, but correct for any model that does not mix records.

    Where vmap does not support an operation, one record after another.
    """

    def __init__(self, module: nn.Module, losses: Losses = cross_entropy, layout: Layout | None = None) -> None:
        super().__init__(module, losses, layout)
        self._vmapped = True

    def backward(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor) -> GradientTape:  # type: ignore[override]
        """The tape of the gradients of a batch for every client."""
        return GradientTape(self.layout, self.records(params, x, y, weights))

    def records(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor) -> Tensor:
        """The gradients of single records, [K, B, P]."""
        if weights.numel() == 0:
            return params.new_zeros(*weights.shape, params.shape[1])
        if self._vmapped:
            before = torch.get_rng_state()
            try:
                found = [self._of_client(own, _of(x, k, slice(None)), y[k]) for k, own in enumerate(params)]
                return torch.stack(found) * weights.unsqueeze(2)
            except Exception:  # a fault of the model itself comes up again below
                self._vmapped = False
                torch.set_rng_state(before)  # Dropout draws as in every later pass
        return super().records(params, x, y, weights)

    def _of_client(self, params: Tensor, x: Inputs, y: Tensor) -> Tensor:
        def loss(vector: Tensor, record: Inputs, target: Tensor) -> Tensor:
            outputs = self._outputs(self.layout.views(vector), each(record, lambda part: part.unsqueeze(0)))
            return self._losses(outputs, target.unsqueeze(0)).squeeze(0)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)  # of layers such as LSTM
            gradients: Tensor = func.vmap(func.grad(loss), in_dims=(None, 0, 0), randomness="different")(params, x, y)
        return gradients


class GradientTape:
    """A tape of every record's gradient, [K, B, P]."""

    def __init__(self, layout: Layout, gradients: Tensor) -> None:
        self._layers, self._gradients, self.layers = layout.layers, gradients, layout.layer_names

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient."""
        if factors is None:
            into.add_(self._gradients.sum(1), alpha=scale)
            return
        for place, layer in enumerate(self._layers):
            weights = factors[place if len(factors) > 1 else 0].to(into.dtype)
            with all_digits(weights):
                total = weighed_sum(self._gradients[..., layer], weights)
            into[:, layer].add_(total, alpha=scale)

    def accumulate_except(self, left: object, into: Tensor, scale: float, factors: Tensor) -> list[Product]:
        """Leaves no products out."""
        self.accumulate(into, scale, factors)
        return []

    def squares(self) -> Tensor:
        """The squared norm of every gradient, in float64."""
        rows = self._gradients.flatten(0, 1)
        squares = torch.stack([row_norms(rows[:, layer]).square() for layer in self._layers])
        return squares.view(len(self._layers), *self._gradients.shape[:2])

    def records(self, views: int = 1) -> Tensor:
        """The gradients of single records, [K, B, P], of so many rows each."""
        clients, rows, size = self._gradients.shape
        return self._gradients if views == 1 else self._gradients.view(clients, rows // views, views, size).sum(2)

    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0."""
        self._gradients = torch.nan_to_num(self._gradients, nan=0.0, posinf=0.0, neginf=0.0)
