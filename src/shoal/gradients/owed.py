"""Linear layers whose steps are owed for a while: for SGD with small batches, on a CPU.

A step of B records changes a layer's weights by a product of B rows, W <- W + G^T X, and to read and write all of W
for it costs more than the arithmetic. So the rows are kept, and until they are settled a layer's output is
x W^T + (x X^T) G. All clients begin with the same W, so that until something is settled one product for all of them
reads it once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.gradients.rule import Rule
from shoal.gradients.rules import LinearRule, outputs


class OwedLinearRule(Rule):
    """The layer while clients train, all of them from `start` [P]; `settle` pays what is owed."""

    def __init__(self, rule: LinearRule, start: Tensor, clients: int, room: int) -> None:
        self.entries, self.rule, self.room, self.owed = rule.entries, rule, room, 0
        self._shared: Tensor | None = rule.weight.of(start)
        outs, ins = rule.weight.shape
        self._rows = start.new_empty(clients, room, ins)
        self._grads = start.new_empty(clients, room, outs)

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(len(params), -1, x.shape[-1])
        if self._shared is None:
            y = outputs(rows, self.rule.weight.of(params))
        else:  # in this order, since libraries are slow at a few rows times a great transposed matrix
            y = (self._shared @ rows.flatten(0, 1).t()).t().reshape(*rows.shape[:2], -1)
        if self.owed:
            y.baddbmm_(torch.bmm(rows, self._rows[:, : self.owed].transpose(1, 2)), self._grads[:, : self.owed])
        if self.rule.bias is not None:
            y += self.rule.bias.of(params).unsqueeze(1)
        return y.view(*x.shape[:-1], y.shape[-1]), rows

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        grads = grad.reshape(len(params), -1, grad.shape[-1])
        if self._shared is None:
            x = torch.bmm(grads, self.rule.weight.of(params))
        else:
            x = (grads.flatten(0, 1) @ self._shared).view(*grads.shape[:2], -1)
        if self.owed:
            x.baddbmm_(torch.bmm(grads, self._grads[:, : self.owed].transpose(1, 2)), self._rows[:, : self.owed])
        return x.view(*grad.shape[:-1], x.shape[-1])

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        grads = grad.reshape(len(into), -1, grad.shape[-1])
        after = self.owed + grads.shape[1]
        if after > self.room:
            self.settle(into)
            self.rule.accumulate(saved, grad, into, scale)
            return
        self._rows[:, self.owed : after] = saved
        torch.mul(grads, scale, out=self._grads[:, self.owed : after])
        self.owed = after
        if self.rule.bias is not None:
            self.rule.bias.of(into).add_(grads.sum(1), alpha=scale)

    def squares(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        return self.rule.squares(saved, grad)

    def settle(self, params: Tensor) -> None:
        if self.owed:
            rows, grads = self._rows[:, : self.owed], self._grads[:, : self.owed]
            self.rule.weight.of(params).baddbmm_(grads.transpose(1, 2), rows)
        self.owed, self._shared = 0, None


def room_for(rule: LinearRule, batch: int) -> int:
    """How many rows a layer may owe before they cost half of what its weights do; 0 if that is too few to pay."""
    outs, ins = rule.weight.shape
    room = outs * ins // (2 * (outs + ins))
    return room if room >= 8 * batch else 0
