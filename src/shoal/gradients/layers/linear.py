"""The rule of a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.gradients.layers.products_cuda import add_product, multiply
from shoal.gradients.layers.rule import Rule, add_kept, keeps, product_squares, squared, trained, weighed
from shoal.gradients.layout import Entry
from shoal.mechanisms.update_clipping import PIECE, row_sums, summed_products
from shoal.random.noise_source import Product


def outputs(rows: Tensor, weights: Tensor, bias: Tensor | None = None, kernels: bool = False) -> Tensor:
    """Each client's rows [K, B, in] times its weights [K, out, in], transposed, plus its bias [K, out].

    For batches of about ten and large matrices, CPU libraries take up to twice as long in this order as in the other.
    """
    count, size = rows.shape[1], weights[0].numel()
    if 8 <= count <= 32 and size >= 250_000 and not rows.is_cuda:
        y = torch.bmm(weights, rows.transpose(1, 2)).transpose(1, 2).contiguous()
        return y if bias is None else y.add_(bias.unsqueeze(1))
    return multiply(rows, weights.transpose(1, 2), bias, kernels)


class LinearRule(Rule):
    """y = x W^T + b, for inputs [N, ..., in]."""

    products, positions = True, True

    def __init__(self, weight: Entry, bias: Entry | None, kernels: bool = True) -> None:
        self.entries, self.weight, self.bias, self.kernels = trained(weight, bias), weight, bias, kernels

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of the input."""
        rows = x.reshape(len(params), -1, x.shape[-1])
        bias = None if self.bias is None else self.bias.of(params)
        y = outputs(rows, self.weight.of(params), bias, self.kernels)
        return y.view(*x.shape[:-1], y.shape[-1]), rows

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        weight = self.weight.of(params)
        rows = multiply(grad.reshape(len(params), -1, grad.shape[-1]), weight, kernels=self.kernels)
        return rows.view(*grad.shape[:-1], weight.shape[-1])

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        self._accumulate(saved, grad, into, scale, self.kernels)

    def _accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float, kernels: bool) -> None:
        grad = grad.reshape(len(into), -1, grad.shape[-1])
        left, right = self._factors(grad, saved.view(len(into), -1, saved.shape[-1]))
        add_product(self.weight.of(into), left.transpose(1, 2), right, scale, kernels)
        if self.bias is not None:
            self.bias.of(into).add_(grad.sum(1), alpha=scale)

    def _factors(self, grads: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the weights is the product of these, the first of them transposed."""
        return grads, rows

    def product(self, saved: Tensor, kept: Any, grad: Tensor, factors: Tensor, scale: float) -> Product | None:
        """What `accumulate_weighted` adds, as a product that is added together with the noise."""
        if saved.shape[:2].numel() > factors.numel():  # several positions per record, which float32 must not sum
            return None
        grads = weighed(grad, factors).reshape(*factors.shape, -1)
        return Product(self.weight.start, saved.view(*factors.shape, -1), grads, scale)

    def accumulate_rest(self, product: Product, into: Tensor) -> None:
        """Add the gradient of the bias."""
        if self.bias is not None:
            self.bias.of(into).add_(row_sums(product.grads), alpha=product.scale)

    def accumulate_weighted(
        self, saved: Tensor, kept: list[Tensor] | None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        if kept is not None:
            add_kept(kept, self.entries, factors, into, scale)
            return
        rows = saved.view(len(factors), -1, saved.shape[-1])
        grads = weighed(grad, factors).reshape(*rows.shape[:2], -1)
        positions = rows.shape[1] // max(factors.shape[1], 1)
        if rows.shape[1] <= PIECE and positions == 1 and grads.dtype == rows.dtype:
            self._accumulate(saved, grads, into, scale, kernels=False)  # clipped records are summed by PyTorch alone
            return
        self.weight.of(into).add_(summed_products(*self._factors(grads, rows), positions), alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(row_sums(grads, positions), alpha=scale)

    def squares(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor] | None]:
        """The squared norm of every gradient, in float64."""
        grad = grad.reshape(len(grad), -1, grad.shape[-1])
        rows = saved.view(len(grad), -1, saved.shape[-1])
        if not keeps(rows.shape[1], grad.shape[2], rows.shape[2], grad):
            return product_squares(rows, grad, self.bias is not None), None
        left, right = self._factors(grad, rows)
        kept = [torch.bmm(left.transpose(1, 2), right).flatten(1)]
        if self.bias is not None:
            kept.append(grad.sum(1))
        return sum((squared(gradients) for gradients in kept[1:]), squared(kept[0])), kept


class TransposedLinearRule(LinearRule):
    """y = x W + b, as in GPT-2."""

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of the input."""
        rows = x.reshape(len(params), -1, x.shape[-1])
        bias = None if self.bias is None else self.bias.of(params)
        y = multiply(rows, self.weight.of(params), bias, self.kernels)
        return y.view(*x.shape[:-1], y.shape[-1]), rows

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        weight = self.weight.of(params).transpose(1, 2)
        rows = multiply(grad.reshape(len(params), -1, grad.shape[-1]), weight, kernels=self.kernels)
        return rows.view(*grad.shape[:-1], rows.shape[-1])

    def product(self, saved: Tensor, kept: Any, grad: Tensor, factors: Tensor, scale: float) -> Product | None:
        """None: such a product would be added in the other order."""
        return None

    def _factors(self, grads: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows, grads
