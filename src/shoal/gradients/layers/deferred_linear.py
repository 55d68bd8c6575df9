"""Linear layers with deferred low-rank updates: for SGD with small batches, on a CPU.

A step of B records changes a layer's weights by a product of B rows, W <- W + G^T X, and reading and writing all of W
costs more than the arithmetic. So the rows X and G of several steps are kept, and the layer's output is
x W^T + (x X^T) G until `flush` adds their product to W. All clients start with the same W, so that until the first
flush one product for all of them reads it once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.gradients.layers.linear import LinearRule, outputs
from shoal.gradients.layers.rule import Rule


class DeferredLinearRule(Rule):
    """A linear layer while clients train, all of them from `start` [P].

    Args:
        rule: The layer's own rule.
        start: The parameters that all clients begin with, [P].
        clients: How many clients train.
        capacity: Rows of updates that are kept before they are added to the weights.
    """

    def __init__(self, rule: LinearRule, start: Tensor, clients: int, capacity: int) -> None:
        self.entries, self.rule, self.capacity = rule.entries, rule, capacity
        self._count = 0
        self._shared: Tensor | None = rule.weight.of(start)
        outs, ins = rule.weight.shape
        self._rows = start.new_empty(clients, capacity, ins)
        self._grads = start.new_empty(clients, capacity, outs)

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of the input."""
        rows = x.reshape(len(params), -1, x.shape[-1])
        if self._shared is None:
            y = outputs(rows, self.rule.weight.of(params))
        else:  # in this order, since libraries are slow at a few rows times a large transposed matrix
            y = (self._shared @ rows.flatten(0, 1).t()).t().reshape(*rows.shape[:2], -1)
        if self._count:
            past_rows, past_grads = self._deferred()
            y.baddbmm_(torch.bmm(rows, past_rows.transpose(1, 2)), past_grads)
        if self.rule.bias is not None:
            y += self.rule.bias.of(params).unsqueeze(1)
        return y.view(*x.shape[:-1], y.shape[-1]), rows

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        grads = grad.reshape(len(params), -1, grad.shape[-1])
        if self._shared is None:
            x = torch.bmm(grads, self.rule.weight.of(params))
        else:
            x = (grads.flatten(0, 1) @ self._shared).view(*grads.shape[:2], -1)
        if self._count:
            past_rows, past_grads = self._deferred()
            x.baddbmm_(torch.bmm(grads, past_grads.transpose(1, 2)), past_rows)
        return x.view(*grad.shape[:-1], x.shape[-1])

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        grads = grad.reshape(len(into), -1, grad.shape[-1])
        after = self._count + grads.shape[1]
        if after > self.capacity:
            self.flush(into)
            self.rule.accumulate(saved, grad, into, scale)
            return
        self._rows[:, self._count : after] = saved
        torch.mul(grads, scale, out=self._grads[:, self._count : after])
        self._count = after
        if self.rule.bias is not None:
            self.rule.bias.of(into).add_(grads.sum(1), alpha=scale)

    def squares(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor] | None]:
        """The squared norm of every gradient, in float64."""
        return self.rule.squares(saved, grad)

    def flush(self, params: Tensor) -> None:
        """Add the deferred updates to the weights in `params` [K, P]."""
        if self._count:
            rows, grads = self._deferred()
            self.rule.weight.of(params).baddbmm_(grads.transpose(1, 2), rows)
        self._count, self._shared = 0, None

    def _deferred(self) -> tuple[Tensor, Tensor]:
        """The rows X [K, n, in] and G [K, n, out] of updates that are not in the weights yet."""
        return self._rows[:, : self._count], self._grads[:, : self._count]


def capacity_for(rule: LinearRule, batch: int) -> int:
    """How many rows to defer before they cost half of what the weights do; 0 where that is too few to gain."""
    outs, ins = rule.weight.shape
    capacity = outs * ins // (2 * (outs + ins))
    return capacity if capacity >= 8 * batch else 0
