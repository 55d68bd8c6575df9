"""The rule of a layer: how it acts on many clients at once, each with its own parameters.

Activations keep the shape that the model's own code expects, [N, ...] with N = clients x batch, the
records of one client next to each other; only layers with parameters know about clients. A rule gives a
layer's output, the gradient of its input, and adds the gradient of its parameters, summed over each
client's records, into one vector per client. For privacy it also gives the norm of each record's gradient, from
the layer's inputs and output gradients, and weights the records in the sum; gradients of single records are
computed only where they are smaller than the alternative.
In names: K clients, N records, O outputs, C channels, T positions (pixels, words) of a record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from shoal.gradients.layout import Entry, layer_of
from shoal.mechanisms.update_clipping import row_norms, weighed_sum
from shoal.precision import widened
from shoal.random.noise_source import Product

ROUNDING = 64  # the error of a few products in last digits, relative to their sizes; sums add one per term
SUMMED = 1024  # products that are summed in float32; more are summed in pieces, and those in float64
TINY = torch.finfo(torch.float32).tiny  # a number or a product below this may be treated as 0, or lose its digits
LONGEST = 2.0**64  # times the digits that float32 may lack, it is still little beside the least step of a clip


def trained(*entries: Entry | None) -> tuple[Entry, ...]:
    """The entries that exist: a layer may lack a bias."""
    return tuple(entry for entry in entries if entry is not None)


class Rule(Protocol):
    """The interface of a layer for the tape; `entries` are all the parameters that it trains."""

    entries: tuple[Entry, ...]
    positions: bool = False
    """Whether a record may have several rows, [N, T, ...], that are treated alike."""
    products: ClassVar[bool] = False
    """Is it mostly matrix products, which autocast computes in fewer digits? Its input and parameters are then given
    in that type; its norms and sums always in float32."""

    def short(self, saved: Any) -> bool:
        """Does it take what it saved in fewer digits as it is, and sum in float32?"""
        return False

    @property
    def layer(self) -> str:
        """The name of the layer whose parameters these are; a recurrent one has several rules."""
        return layer_of(self.entries[0].name)

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Any]:
        """The output, and what the backward pass needs of the input.

        They share no memory: the model may change the output in place.
        """

    def input_gradient(self, saved: Any, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""

    def accumulate(self, saved: Any, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x the gradient of this layer's parameters.

        `into` may have any number of rows that divides the records: with N rows, each record gets its own gradient.
        """

    def squares(self, saved: Any, grad: Tensor) -> tuple[Tensor, Any]:
        """The squared norm of each record's gradient, [N], and what `accumulate_weighted` can reuse.

        It is in float64, since float32 squares vanish below 1e-23, which times an input of 1e20 is not small. It is
        the norm of exactly the gradient that is added, or above it by all that rounding may do. Where this cannot be
        guaranteed it is not finite: such a record is left out.
        """

    def accumulate_weighted(
        self, saved: Any, kept: Any, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b].

        Where `factors` and `into` are in float64, and the rest is not, the sum must be in float64.
        """
        grads = weighed(grad, factors)
        self.accumulate(in_type(saved, grads.dtype), grads, into, scale)

    def product(self, saved: Any, kept: Any, grad: Tensor, factors: Tensor, scale: float) -> Product | None:
        """What `accumulate_weighted` adds to this layer, or to its first tensor, where that is a product."""
        return None

    def accumulate_rest(self, product: Product, into: Tensor) -> None:
        """What `accumulate_weighted` does beside the product; nothing by default."""
        return None


Item = tuple[Rule, Any, Tensor]
"""Of a tape: a rule, what it saved of the input, and the gradient of its output."""


def in_type(held: Any, dtype: torch.dtype) -> Any:
    """What a tape holds, its fractions in this type."""
    if isinstance(held, Tensor):
        return held.to(dtype) if held.is_floating_point() else held
    return type(held)(in_type(each, dtype) for each in held) if type(held) in (tuple, list) else held


def wide(item: Item) -> Item:
    """An item of a tape in float32, which holds every number in bfloat16: norms and sums are of the same numbers.

    Rules that compute both in float32 from numbers in bfloat16 get those.
    """
    rule, saved, grad = item
    whole = grad if rule.short(saved) else widened(grad)
    return item if whole is grad else (rule, in_type(saved, whole.dtype), whole)


def squared(rows: Tensor) -> Tensor:
    """The squared norm of each row in float64; numbers that this thread's arithmetic may treat as 0 are counted."""
    return (row_norms(rows) + TINY * math.sqrt(rows.shape[1])).square()


def outer_squares(x: Tensor, grad: Tensor, bias: bool) -> Tensor:
    """|g x^T|^2 of every record, for rows [N, in] and [N, out], and |g|^2 more for a bias."""
    inputs = squared(x)
    return (squared(grad) * (inputs + bias)).where(inputs < LONGEST**2 / grad.shape[1], math.inf)


def few_positions(positions: int, outs: int, ins: int) -> bool:
    """Are the T x T products of all positions cheaper than a record's gradient [outs, ins]?

    They take 2 T^2 (outs + ins) operations, and it 2 T outs ins. Where it is cheaper, it is also no larger than what
    it is computed from, so that those of all records can be kept.
    """
    return positions * (outs + ins) < outs * ins


def keeps(positions: int, outs: int, ins: int, like: Tensor) -> bool:
    """Is it cheapest to keep the gradient [outs, ins] of every record, from several positions?

    Its norm is then that of exactly what is added, and the sum over records needs no float64, which takes twice as
    long on a CPU (`update_clipping.summed_products`). It is at most twice as large as what it is computed from.
    """
    return positions > 1 and not like.is_cuda and outs * ins <= 2 * positions * (outs + ins)


def product_squares(x: Tensor, grad: Tensor, bias: bool) -> Tensor:
    """|sum_t g_t x_t^T|^2 of every record, for [N, T, in] and [N, T, out], and |sum_t g_t|^2 more for a bias.

    Without the product where T is small.
    """
    positions = x.shape[1]
    if positions == 1:
        return outer_squares(x.squeeze(1), grad.squeeze(1), bias)
    if few_positions(positions, grad.shape[2], x.shape[2]):
        return gram_squares(gram(x), grad, x.shape[2], bias)
    found = squared(torch.bmm(grad.transpose(1, 2), x).flatten(1))
    if bias:
        found = found + squared(grad.sum(1))
    inputs, grads = (squared(rows.flatten(0, 1)).view(rows.shape[:2]) for rows in (x, grad))
    found = found + _rounded_away(inputs + bias, grads, grad.dtype, 2 * positions)
    return found.where(_held(inputs, grad.shape[2]), math.inf)


def gram_squares(alike: Tensor, grad: Tensor, width: int, bias: bool = False) -> Tensor:
    """The same from the `gram` [N, T, T] of the inputs, each a sum of `width`; a bias is one more input, of 1."""
    return pair_squares(alike, gram(grad), (width, grad.shape[2]), grad.dtype, bias)


def gram(rows: Tensor) -> Tensor:
    """The products of all pairs of rows, [N, T, T], for [N, T, width]; in float64 where they are wide.

    A sum of n <= SUMMED products in float32 has an error of at most n eps/2 of their sizes, also where the products
    are rounded (Higham 2002, "Accuracy and stability of numerical algorithms", 3.1). The sizes of all pieces add up
    to at most |g_s| |g_t|, so their errors to at most SUMMED eps/2 of that, however wide the rows: of a vocabulary of
    50,000 words a fiftieth of the error of one sum. The sum of m pieces in float64 adds m 2^-53 (`summed`).
    """
    if rows.shape[2] <= SUMMED:
        return torch.bmm(rows, rows.transpose(1, 2))
    total = rows.new_zeros(len(rows), *[rows.shape[1]] * 2, dtype=torch.float64)
    for piece in torch.split(rows, SUMMED, 2):
        total += torch.bmm(piece, piece.transpose(1, 2))
    return total


def summed(width: int) -> int:
    """The terms of the longest sums of `gram`, for rows of this width: those of a piece, and the pieces."""
    return min(width, SUMMED) + width // SUMMED


def pair_squares(
    alike: Tensor, grads: Tensor, widths: tuple[int, int], dtype: torch.dtype, bias: bool = False
) -> Tensor:
    """The same from the `gram` [N, T, T] of the inputs and that of the gradients, each a sum of this many numbers.

    `dtype` is that of the numbers; the products may have more digits.

    The sum is over products that may cancel (a constant picture before a normalisation), and what is left then is
    rounding, even below 0: a clip by it would let anything through. So all that rounding may have taken is added, and
    all that underflowing products may have contributed.
    """
    pairs = ((alike + bias) * grads).sum((1, 2), dtype=torch.float64)
    lost = [TINY * 2 * width for width in widths]
    inputs, outputs = (
        products.diagonal(dim1=1, dim2=2).double().clamp(min=0) + below
        for products, below in zip((alike, grads), lost, strict=True)
    )
    inputs = inputs + bias
    terms = sum(map(summed, widths)) + grads.shape[1]
    found = pairs.clamp(min=0) + _rounded_away(inputs, outputs, dtype, terms)
    found = found + lost[0] * outputs.sqrt().sum(1).square() + lost[1] * inputs.sqrt().sum(1).square()
    return found.where(pairs.isfinite() & _held(inputs, widths[1]), math.inf)


def _rounded_away(inputs: Tensor, grads: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
    """What rounding may take from |sum_t g_t x_t^T|^2, or add to what is summed later, from the squared norms [N, T].

    A sum of n products has an error of at most n eps/2 of their sizes, in whatever order; `terms` is the number of
    terms of all the sums on the way.
    """
    return (ROUNDING + terms) * torch.finfo(dtype).eps * (inputs * grads).sqrt().sum(1).square()


def _held(inputs: Tensor, outputs: int) -> Tensor:
    """Are inputs of these squared norms [N, T] short enough for factor x gradient to be too small for float32?

    It then has lost at most 2^-149 per number, times the inputs 2^-85: less than 2^-20 of LEAST_STEP.
    """
    return inputs.sqrt().sum(1) * math.sqrt(outputs) < LONGEST


def kept_sum(kept: Tensor, factors: Tensor) -> Tensor:
    """sum_b factors[k, b] kept[k, b], [K, P], of gradients kept for every record, [N, ...]."""
    return weighed_sum(kept.view(*factors.shape, -1), factors)


def add_kept(kept: Sequence[Tensor], entries: Sequence[Entry], factors: Tensor, into: Tensor, scale: float) -> None:
    """into[K, P] += scale x sum_b factors[k, b] kept[k, b], of the gradients [N, ...] of these parameters."""
    for entry, gradients in zip(entries, kept, strict=True):
        entry.of(into).flatten(1).add_(kept_sum(gradients, factors), alpha=scale)


def weighed(grad: Tensor, factors: Tensor) -> Tensor:
    """The output's gradient [N, ...] of every record times its factor [K, B]."""
    return grad * factors.reshape(-1, *[1] * (grad.dim() - 1))
