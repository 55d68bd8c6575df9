"""The rule of a convolution of any kind, by the library's own kernels: of 1 to 3 dimensions, grouped or transposed.

Several clients, or records, with weights of their own are one convolution, with their channels side by side and as
many times the groups. A CPU is fastest on data in its caches, so there it is one client after another.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.gradients.layers.rule import (
    Rule,
    few_positions,
    gram,
    gram_squares,
    kept_sum,
    outer_squares,
    squared,
    trained,
    weighed,
)
from shoal.gradients.layout import Entry
from shoal.mechanisms.update_clipping import PIECE

MOST = 2**28  # numbers of unfolded images at a time
CACHED = 2**19  # the same on a CPU, so that they stay in its caches

Sizes = tuple[int, ...]
Saved = tuple[Tensor, Tensor | None]  # the input, and the clients' weights [K, ...] for the gradient of the input
Kept = tuple[Tensor | None, Tensor | None]  # gradients of each record: of the weights, where they are small, and bias


class Taps(NamedTuple):
    """The part of a kernel that can see a map, its size, and the padding that it needs."""

    places: Any  # an index
    kernel: Sizes
    padding: Sizes


class LibraryConvolutionRule(Rule):
    """Zero padding is the same on both sides; layers with another one are padded before.

    A transposed convolution's weights have the gradient of a plain one's whose input and gradient are exchanged.
    """

    products = True

    def __init__(self, module: Any, weight: Entry, bias: Entry | None) -> None:
        self.entries, self.weight, self.bias = trained(weight, bias), weight, bias
        self.stride, self.padding, self.dilation = module.stride, module.padding, module.dilation
        self.groups, self.transposed, self.output_padding = module.groups, module.transposed, module.output_padding

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Saved]:
        """The output, and what the backward pass needs of the input."""
        clients, taps = len(params), self._taps(x)
        weights = self.weight.of(params)[taps.places]
        order = torch.channels_last if self._last(x, weights) else torch.contiguous_format
        x = x.contiguous(memory_format=order)
        weights = weights.flatten(0, 1).contiguous(memory_format=order)
        many = clients if x.is_cuda else 1
        y = [
            torch.convolution(
                _beside(images, many), own, None, self.stride, taps.padding, self.dilation,
                self.transposed, self.output_padding, many * self.groups,
            )
            for images, own in zip(x.chunk(clients // many), weights.chunk(clients // many), strict=True)
        ]  # fmt: skip
        joined = torch.cat([_apart(part, many) for part in y]) if len(y) > 1 else _apart(y[0], many)
        if self.bias is not None:
            bias = self.bias.of(params).view(clients, 1, -1, *[1] * (x.dim() - 2))
            torch.unflatten(joined, 0, (clients, -1)).add_(bias)
        return joined, (x, torch.unflatten(weights, 0, (clients, -1)))

    def input_gradient(self, saved: Saved, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        (x, weights), many = saved, len(params) if grad.is_cuda else 1
        assert weights is not None
        found = [_apart(part, many) for part in self._backward(x, weights, grad, many, of_input=True)]
        return torch.cat(found) if len(found) > 1 else found[0]

    def accumulate(self, saved: Saved, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        x, records = saved[0], len(into) == len(grad) and not grad.is_cuda
        self._add(self._of_records(x, grad) if records else self._gradients(x, grad, len(into)), x, into, scale)
        if self.bias is not None:
            self.bias.of(into).add_(torch.unflatten(_summed(grad), 0, (len(into), -1)).sum(1), alpha=scale)

    def squares(self, saved: Saved, grad: Tensor) -> tuple[Tensor, Kept]:
        """The squared norm of every gradient, in float64."""
        seen, given = self._exchanged(saved[0], grad)
        bias = None if self.bias is None else _summed(grad)
        outs, patch = given.shape[1] // self.groups, seen.shape[1] // self.groups * math.prod(self._taps(seen).kernel)
        if few_positions(given.shape[2:].numel(), outs, patch):
            weight, found = None, self._gram_squares(seen, given)
        else:
            weight = self._of_records(saved[0], grad)
            found = squared(weight.flatten(1))
        return found if bias is None else found + squared(bias), (weight, bias)

    def accumulate_weighted(
        self, saved: Saved, kept: Kept | None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        weight, bias = self.squares(saved, grad)[1] if kept is None else kept
        x = saved[0]
        if weight is None:
            total = self._product(x, weighed(grad, factors), len(into))
        else:
            total = kept_sum(weight, factors).view(-1, *weight.shape[1:])
        self._add(total, x, into, scale)
        if self.bias is not None and bias is not None:
            self.bias.of(into).add_(kept_sum(bias, factors), alpha=scale)

    def _gram_squares(self, seen: Tensor, given: Tensor) -> Tensor:
        """The squared norms, from products of positions; those of groups are added.

        The factors of the clip will be in the gradients, so it is the inputs that must be short (rule.LONGEST).
        """
        rows, grads = (images.transpose(1, 2) for images in self._exchanged(*self._unfolded(seen, given)))
        if rows.shape[1] == 1:
            found = outer_squares(rows.squeeze(1), grads.squeeze(1), False)
        else:
            found = gram_squares(gram(rows), grads, rows.shape[2])
        return found.view(len(seen), -1).sum(1)

    def _of_records(self, x: Tensor, grad: Tensor) -> Tensor:
        """Each record's gradient of the weights, [N, size] or [N, O, taps, C]."""
        seen, given = self._exchanged(x, grad)
        if min(seen.shape[1], given.shape[1]) == self.groups:  # one channel each
            return self._gradients(x, grad, len(grad))
        return self._products(seen, given) if grad.is_cuda else self._products_last(seen, given)

    def _products(self, seen: Tensor, given: Tensor) -> Tensor:
        """Each record's gradient of the weights, [N, size], by products."""
        many = max(1, MOST // (given[0, 0].numel() * seen.shape[1] * math.prod(self.weight.shape[2:])))
        pieces = (
            self._unfolded(*some) for some in zip(torch.split(seen, many), torch.split(given, many), strict=True)
        )
        return torch.cat([torch.bmm(grads, rows.transpose(1, 2)) for rows, grads in pieces]).view(len(seen), -1)

    def _products_last(self, seen: Tensor, given: Tensor) -> Tensor:
        """The same on a CPU, as [N, O, taps, C]: with the channels last, they are copied together."""
        dims, patches = seen.dim() - 2, self._patches(seen, given.shape[2:])
        patches = patches.permute(0, 1, *range(3 + dims, 3 + 2 * dims), *range(3, 3 + dims), 2)
        positions, taps = (math.prod(sizes) for sizes in (given.shape[2:], patches.shape[2 + dims : -1]))
        grads = torch.unflatten(given.flatten(2), 1, (self.groups, -1))
        found = seen.new_empty(len(seen), given.shape[1], taps, patches.shape[-1])
        many = max(1, CACHED // math.prod(patches.shape[1:]))
        for some, own, out in zip(*(torch.split(x, many) for x in (patches, grads, found)), strict=True):
            rows = some.reshape(-1, positions, taps * patches.shape[-1])
            torch.bmm(own.flatten(0, 1), rows, out=out.view(len(rows), -1, rows.shape[2]))
        return found

    def _unfolded(self, seen: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Patches [N x groups, patch, T], and what their products are weighed with, [N x groups, outs, T]."""
        rows = self._patches(seen.contiguous(), given.shape[2:]).flatten(2, seen.dim()).flatten(3).flatten(0, 1)
        return rows, given.reshape(len(rows), -1, rows.shape[2])

    def _product(self, x: Tensor, grad: Tensor, clients: int) -> Tensor:
        """The sum of each client's clipped gradients, by products (update_clipping.summed_products says how)."""
        seen, given = (torch.unflatten(images, 0, (clients, -1)) for images in self._exchanged(x, grad))
        few = given.shape[1] <= PIECE and given.shape[3:].numel() == 1 and x.dtype == grad.dtype
        total: Any = 0.0
        for some, grads in zip(*(torch.split(images, PIECE, 1) for images in (seen, given)), strict=True):
            some = some.flatten(0, 1).contiguous().to(x.dtype if few else torch.float64)
            patches = self._patches(some, grads.shape[3:])
            rows = torch.unflatten(patches, 0, (clients, -1)).movedim(1, x.dim() + 1)  # next to the positions
            rows = rows.reshape(clients * self.groups, -1, grads[0, :, 0].numel())
            wide = torch.unflatten(grads, 2, (self.groups, -1)).movedim(1, 3).reshape(len(rows), -1, rows.shape[2])
            total = total + torch.bmm(wide.to(rows.dtype), rows.transpose(1, 2))
        product: Tensor = total
        return product

    def _gradients(self, x: Tensor, grad: Tensor, rows: int) -> Tensor:
        """The gradients of the weights of this many groups of records, [rows, size]."""
        many = rows if grad.is_cuda or rows == len(grad) else 1  # records are fastest all at once
        shapes = x.new_empty(rows, *self.weight.shape[:2], *self._taps(x).kernel)
        found = self._backward(x, shapes, grad, many, of_input=False)
        return torch.cat(found).reshape(rows, -1)

    def _backward(self, x: Tensor, weights: Tensor, grad: Tensor, many: int, of_input: bool) -> list[Tensor]:
        """The gradients of the input, or of the weights, of `many` clients at a time."""
        chunks, padding = len(weights) // many, self._taps(x).padding
        last = x.dim() == 4 and not x.is_contiguous()
        grad = grad.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        return [
            torch.ops.aten.convolution_backward(
                _beside(own_grad, many), _beside(images, many), own, None, self.stride, padding,
                self.dilation, self.transposed, self.output_padding, many * self.groups,
                [of_input, not of_input, False],
            )[not of_input]
            for images, own_grad, own in zip(
                x.chunk(chunks), grad.chunk(chunks), weights.flatten(0, 1).chunk(chunks), strict=True
            )
        ]  # fmt: skip

    def _exchanged(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """What the kernel sees, and what its products are weighed with."""
        return (grad, x) if self.transposed else (x, grad)

    def _patches(self, seen: Tensor, output: Sizes) -> Tensor:
        """All that the kernel sees, [N, groups, C / groups, *kernel, *output], as a view of padded images."""
        taps = self._taps(seen)
        sides = [side for padding in reversed(taps.padding) for side in (padding, padding)]
        x = F.pad(seen, sides) if any(sides) else seen
        width, (n, channels, *steps) = x.shape[1] // self.groups, x.stride()
        moves = [step * by for along in (self.dilation, self.stride) for step, by in zip(steps, along, strict=True)]
        shape = (len(x), self.groups, width, *taps.kernel, *output)
        return x.as_strided(shape, (n, channels * width, channels, *moves))

    def _last(self, x: Tensor, weights: Tensor) -> bool:
        """Are channels fastest in the last place? So on a CPU, unless reordering the weights costs more."""
        return x.dim() == 4 and not x.is_cuda and 2 * x.numel() > weights.numel()

    def _taps(self, seen: Tensor) -> Taps:
        kernel = tuple(self.weight.shape[2:])
        if self.transposed:
            return Taps(..., kernel, self.padding)
        return live_taps(tuple(seen.shape[2:]), kernel, self.stride, self.padding, self.dilation)

    def _add(self, gradients: Tensor, x: Tensor, into: Tensor, scale: float) -> None:
        mine = self.weight.of(into)[self._taps(x).places]
        if gradients.dim() == 4:  # the taps come before the channels
            mine.add_(torch.unflatten(gradients.transpose(2, 3), 3, mine.shape[3:]), alpha=scale)
        else:
            mine.add_(gradients.reshape(mine.shape), alpha=scale)


@lru_cache
def live_taps(size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Taps:
    """Without the outer taps that see nothing but padding, as 8 of 9 do on a map of one pixel."""
    made = outputs(size, kernel, stride, padding, dilation)
    places, kernels, paddings = [], [], []
    for s, k, by, pad, d, out in zip(size, kernel, stride, padding, dilation, made, strict=True):
        live = [i for i in range(k) if any(0 <= o * by - pad + i * d < s for o in range(out))] or [0, k - 1]
        first, many, less = live[0], live[-1] + 1 - live[0], pad - live[0] * d
        if less < 0 or outputs((s,), (many,), (by,), (less,), (d,)) != (out,):
            first, many, less = 0, k, pad
        places.append(slice(first, first + many))
        kernels.append(many)
        paddings.append(less)
    return Taps((..., *places), tuple(kernels), tuple(paddings))


def outputs(size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Sizes:
    """The size of the output, for maps of this size."""
    along = zip(size, kernel, stride, padding, dilation, strict=True)
    return tuple((s + 2 * pad - d * (k - 1) - 1) // by + 1 for s, k, by, pad, d in along)


def _summed(grad: Tensor) -> Tensor:
    """The gradient of each record's bias, [N, O]."""
    return grad.flatten(2).sum(2)


def _beside(images: Tensor, many: int) -> Tensor:
    """Images [many x B, C, ...] with the channels of all clients side by side, [B, many x C, ...]."""
    return images if many == 1 else torch.unflatten(images, 0, (many, -1)).transpose(0, 1).flatten(1, 2)


def _apart(images: Tensor, many: int) -> Tensor:
    """The other way around."""
    return images if many == 1 else torch.unflatten(images, 1, (many, -1)).transpose(0, 1).flatten(0, 1)
