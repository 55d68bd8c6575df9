"""The rule of a convolution with standardised weights: that of the plain one, with each gradient mapped back."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.gradients.layers.record_convolution_cuda import RecordConvolutionRule
from shoal.gradients.layers.rule import Rule, add_kept, squared, trained
from shoal.gradients.layers.standardised_cuda import add_mapped, can_map
from shoal.gradients.layout import Entry
from shoal.precision import widened
from shoal.standardised_convolution import StandardisedConv2d, before_standardising, standardised


class StandardisedRule(Rule):
    """A record's gradient is kept: its norm is that after the mapping, which differs from output to output.

    The plain rule has a vector of its own, in which there is nothing but this layer.
    """

    products = True

    def __init__(self, plain: Rule, weight: Entry, bias: Entry | None) -> None:
        self.entries, self.weight, self.bias = trained(weight, bias), weight, bias
        self.plain, self._size = plain, weight.shape.numel()

    def fits(self, x: Tensor, params: Tensor) -> bool:
        """Does the plain rule fit, where it is a special one?"""
        found: bool = self.plain.fits(x, params)  # type: ignore[attr-defined]
        return found

    def short(self, saved: Any) -> bool:
        """As the plain rule does."""
        return self.plain.short(saved[0])

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Any]:
        """The output, and what the backward pass needs of the input and the weights."""
        weights, norms = standardised(widened(self.weight.of(params).flatten(2)))
        parts = [weights.flatten(1).to(params.dtype)]
        if self.bias is not None:
            parts.append(self.bias.of(params))
        vector = torch.cat(parts, 1)
        y, saved = self.plain.forward(x, vector)
        return y, [saved, weights, norms, vector]

    def input_gradient(self, saved: Any, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        return self.plain.input_gradient(saved[0], grad, saved[3])

    def accumulate(self, saved: Any, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        weights, norms = saved[1:3]
        if isinstance(self.plain, RecordConvolutionRule) and self.bias is None:
            found = self.plain.of_groups(saved[0][0], grad, len(into))
        else:
            found = self._plain(saved, grad, into, len(into))
        if can_map(found, weights, into):
            add_mapped(found, weights, norms, into, self.weight.start, scale)
        else:
            found = found.transpose(2, 3).flatten(1) if found.dim() == 4 else found
            self.weight.of(into).flatten(1).add_(self._mapped(found, weights, norms), alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(found[:, self._size :], alpha=scale)

    def squares(self, saved: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The squared norm of every gradient, in float64."""
        found = self._plain(saved, grad, saved[2], len(grad))
        kept = [self._mapped(found, *saved[1:3]), found[:, self._size :]][: len(self.entries)]
        return squared(torch.cat(kept, 1)), kept

    def accumulate_weighted(
        self, saved: Any, kept: list[Tensor] | None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        kept = self.squares(saved, grad)[1] if kept is None else kept
        add_kept(kept, self.entries, factors, into, scale)

    def _plain(self, saved: Any, grad: Tensor, like: Tensor, rows: int) -> Tensor:
        """The plain rule's gradients of this many groups of records, [rows, size]: weights, then bias."""
        found = like.new_zeros(rows, saved[3].shape[1])
        self.plain.accumulate(saved[0], grad, found, 1.0)
        return found

    def _mapped(self, found: Tensor, weights: Tensor, norms: Tensor) -> Tensor:
        """The gradients of the weights as they were, [rows, size of the weights]."""
        shape = (len(weights), len(found) // len(weights), *weights.shape[1:])
        plain = found[:, : self._size].reshape(shape)
        return before_standardising(plain, weights.unsqueeze(1), norms.unsqueeze(1)).reshape(len(found), -1)


def without_standardising(module: StandardisedConv2d) -> nn.Conv2d:
    """The layer with the same settings that uses its weights as they are."""
    plain: nn.Conv2d = copy.copy(module)
    plain.__class__ = nn.Conv2d
    return plain


def alone(weight: Entry, bias: Entry | None) -> tuple[Entry, Entry | None]:
    """The places of a layer's parameters in a vector of theirs alone."""
    size = weight.shape.numel()
    moved = replace(weight, start=0, stop=size)
    return moved, None if bias is None else replace(bias, start=size, stop=size + bias.shape.numel())
