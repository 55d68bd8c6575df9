"""The rule of an embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.gradients.layers.rule import Rule, gram_squares, weighed
from shoal.gradients.layout import Entry


class EmbeddingRule(Rule):
    """y = W[x], for whole numbers [N, ...]."""

    positions = True

    def __init__(self, weight: Entry, padding: int | None = None) -> None:
        self.entries, self.weight, self.padding = (weight,), weight, padding

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of the input."""
        return self.weight.of(params).reshape(-1, self.weight.shape[1])[self._places(x, len(params))], x

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        """Never asked for: the inputs are whole numbers."""
        raise AssertionError("whole numbers have no gradient")

    def accumulate_weighted(
        self, saved: Tensor, kept: None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        self.accumulate(saved, weighed(grad, factors).double(), into, scale)

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        clients, (words, width) = len(into), self.weight.shape
        total = grad.new_zeros(clients * words, width)
        total.index_add_(0, self._places(saved, clients).reshape(-1), grad.reshape(-1, width))
        total = total.view(clients, words, width)
        if self.padding is not None:
            total[:, self.padding] = 0
        self.weight.of(into).add_(total, alpha=scale)

    def squares(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        """Gradients of repeated words are summed before the norm is taken."""
        words = saved.reshape(len(saved), -1)
        grad = self.unpadded(saved, grad).reshape(*words.shape, grad.shape[-1])
        same = words.unsqueeze(1) == words.unsqueeze(2)
        return gram_squares(same.to(grad.dtype), grad, 1), None

    def unpadded(self, words: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the output, but 0 for padding."""
        return grad if self.padding is None else grad * (words != self.padding).unsqueeze(-1)

    def _places(self, x: Tensor, clients: int) -> Tensor:
        """The row of every word in all clients' tables, one below the other: a word beyond its own is another's."""
        torch._assert_async(((x >= 0) & (x < self.weight.shape[0])).all(), "index out of range of an nn.Embedding")
        client = torch.arange(clients, device=x.device).repeat_interleave(len(x) // clients)
        return x + self.weight.shape[0] * client.view(-1, *[1] * (x.dim() - 1))
