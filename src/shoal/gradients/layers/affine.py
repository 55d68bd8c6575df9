"""The rules of a scale and a shift, as after a normalisation, and of a shift alone."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.gradients.layers.rule import Rule, add_kept, kept_sum, squared, trained
from shoal.gradients.layout import Entry


class AffineRule(Rule):
    """y = x w + b after a normalisation without parameters; `w` spans dimensions from `first` on."""

    def __init__(self, first: int, weight: Entry, bias: Entry | None) -> None:
        self.first, self.entries, self.weight, self.bias = first, trained(weight, bias), weight, bias
        self.positions = first < 0

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of the input."""
        shaped = x.reshape(len(params), -1, *x.shape[1:])
        weight = self._shaped(self.weight, params, shaped)
        if self.bias is None:
            return (shaped * weight).view(x.shape), shaped
        bias = self._shaped(self.bias, params, shaped)
        # One pass; but for pictures, with weights of channels, it takes a CPU longer than two.
        y = torch.addcmul(bias, shaped, weight) if self.first < 0 else (shaped * weight).add_(bias)
        return y.reshape(x.shape), shaped  # bias and input may lie in memory in different orders

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        return (grad.reshape(saved.shape) * self._shaped(self.weight, params, saved)).view(grad.shape)

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        shape = (len(into), -1, *saved.shape[2:])
        grad, x = grad.reshape(shape), saved.reshape(shape)
        self.weight.of(into).add_(self._summed(grad * x), alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(self._summed(grad), alpha=scale)

    def squares(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The squared norm of every gradient, in float64."""
        shape = (len(grad), 1, *saved.shape[2:])
        grad, x = grad.reshape(shape), saved.reshape(shape)
        kept = [self._summed(grad * x).flatten(1)]
        if self.bias is not None:
            kept.append(self._summed(grad).flatten(1))
        return kept_squares(kept), kept

    def accumulate_weighted(
        self, saved: Tensor, kept: list[Tensor] | None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        kept = self.squares(saved, grad)[1] if kept is None else kept
        add_kept(kept, self.entries, factors, into, scale)

    def _span(self, dims: int) -> tuple[int, int]:
        """The first and one past the last dimension of [K, B, ...] that the weights span."""
        first = self.first + 1 if self.first > 0 else dims + self.first
        return first, first + len(self.weight.shape)

    def _shaped(self, entry: Entry, params: Tensor, x: Tensor) -> Tensor:
        first, last = self._span(x.dim())
        shape = [1] * x.dim()
        shape[0] = len(params)
        shape[first:last] = entry.shape
        return entry.of(params).reshape(shape)

    def _summed(self, x: Tensor) -> Tensor:
        first, last = self._span(x.dim())
        return x.sum([d for d in range(1, x.dim()) if not first <= d < last])


def kept_squares(kept: list[Tensor]) -> Tensor:
    """The squared norm of every record's gradient, of the gradients [N, ...] of all its parameters."""
    return sum((squared(gradients) for gradients in kept[1:]), squared(kept[0]))


class BiasRule(Rule):
    """y = x + b, with `b` along one dimension of the records."""

    def __init__(self, dimension: int, bias: Entry) -> None:
        self.dimension, self.entries, self.bias = dimension, (bias,), bias

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, None]:
        """The output, and what the backward pass needs of the input."""
        shaped = x.reshape(len(params), -1, *x.shape[1:]).movedim(self._place, -1)
        bias = self.bias.of(params).view(len(params), *[1] * (shaped.dim() - 2), -1)
        return (shaped + bias).movedim(-1, self._place).reshape(x.shape), None

    def input_gradient(self, saved: None, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        return grad

    def accumulate(self, saved: None, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        shaped = grad.reshape(len(into), -1, *grad.shape[1:]).movedim(self._place, -1)
        self.bias.of(into).add_(shaped.flatten(1, -2).sum(1), alpha=scale)

    def squares(self, saved: None, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The squared norm of every gradient, in float64."""
        shaped = grad.unsqueeze(1).movedim(self._place, -1)
        kept = shaped.flatten(1, -2).sum(1)
        return squared(kept), kept

    def accumulate_weighted(
        self, saved: None, kept: Tensor | None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        kept = self.squares(saved, grad)[1] if kept is None else kept
        self.bias.of(into).add_(kept_sum(kept, factors), alpha=scale)

    @property
    def _place(self) -> int:
        """The dimension in [K, B, ...]."""
        return self.dimension + 1 if self.dimension > 0 else self.dimension
