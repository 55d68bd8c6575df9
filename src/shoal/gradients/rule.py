"""What every layer's rule gives: how it acts on many clients at once, each with its own parameters.

Activations keep the shape that the model's own code expects, [N, ...] with N = clients x batch, the
examples of one client next to each other; only layers with parameters know of clients. A rule gives a
layer's output, the gradient of its input, and adds the gradient of its parameters, summed over each
client's examples, into one vector a client. For privacy it also gives the norm of each example's gradient, from
the layer's inputs and output gradients, and weighs the examples in the sum; gradients of single examples are
made only where they are smaller than the way around them.
In names: K clients, N examples, O outputs, C channels, T positions (pixels, words) of an example.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.gradients.layout import Entry
from shoal.privacy.clip import row_norms
from shoal.privacy.normals import Product

FEW_POSITIONS = 20  # below so many, T x T products beat making an example's gradient
ROUNDING = 64  # last digits that a sum of products may be wrong by, relative to the sum of their sizes


class Rule(Protocol):
    """What the tape asks of a layer; the first of its `entries` tells it from others."""

    entries: tuple[Entry, ...]

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Any]:
        """The output, and what the backward pass needs of the input."""

    def input_gradient(self, saved: Any, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""

    def accumulate(self, saved: Any, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x the gradient of this layer's parameters.

        Any number of rows that divides the examples may be asked for: with N of them, each gets its own gradient.
        """

    def squares(self, saved: Any, grad: Tensor) -> tuple[Tensor, Any]:
        """The squared norm of each example's gradient, [N], and what `accumulate_weighted` can use of it."""

    def accumulate_weighted(
        self, saved: Any, kept: Any, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        self.accumulate(saved, weighed(grad, factors), into, scale)

    def product(self, saved: Any, kept: Any, grad: Tensor, factors: Tensor, scale: float) -> Product | None:
        """What `accumulate_weighted` adds to this layer's tensors, or to the first of them, where it is a product."""
        return None

    def accumulate_rest(self, product: Product, into: Tensor) -> None:
        """What `accumulate_weighted` does beside the product."""


def squared(rows: Tensor) -> Tensor:
    """The squared norm of each row."""
    return row_norms(rows).square()


def gram_squares(alike: Tensor, grads: Tensor) -> Tensor:
    """|sum_t g_t x_t^T|^2 of every example, at least, from the products [N, T, T] of its inputs and of its gradients.

    The sum is over products that may cancel (a constant picture before a normalisation), and what then is left is
    rounding, even below 0: a clip by it would let anything through. So all that rounding may have taken is added.
    """
    pairs = (alike * grads).sum((1, 2))
    lengths = [products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt() for products in (alike, grads)]
    return pairs.clamp(min=0) + ROUNDING * torch.finfo(pairs.dtype).eps * (lengths[0] * lengths[1]).sum(1).square()


def weighed(grad: Tensor, factors: Tensor) -> Tensor:
    """The output's gradient [N, ...] of every example times its factor [K, B]."""
    return grad * factors.reshape(-1, *[1] * (grad.dim() - 1))
