"""The rule of a convolution on CUDA: one kernel for the output, one for the gradient of the input, and one for that
of the weights, each for all clients at once.

Each is a matrix product with one factor read directly from the images (`implicit GEMM`), so that nothing is unfolded,
padded or permuted in memory: only the images and the weights move, and little else. Products are in TF32 where
PyTorch's own convolutions would be. A norm is that of exactly the gradient which is added later.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.gradients.layers.convolution import Conv2dRule
from shoal.gradients.layers.convolution_library import LibraryConvolutionRule, live_taps
from shoal.gradients.layers.rule import Rule, few_positions, kept_sum
from shoal.gradients.layout import Entry
from shoal.kernels import tl, triton
from shoal.mechanisms.update_clipping import PIECE
from shoal.random.noise_source import Product


class Tile(NamedTuple):
    """The tile that one program computes: the length of its sides, and the `depth` that it sums at a time."""

    side: int
    depth: int
    warps: int
    stages: int


OUTPUT = Tile(64, 32, 8, 3)
INPUT = Tile(64, 32, 4, 3)
WEIGHTS = Tile(64, 32, 4, 3)
FEW_POSITIONS = 20  # below this, products of unfolded rows are faster
ENOUGH = 4096  # programs that surely keep a GPU busy
MOST = 2**31  # the most numbers of one client that can be indexed


def cuda_rule(module: nn.Conv2d, weight: Entry, bias: Entry | None) -> Rule:
    """These kernels where there is Triton and they can write weights and bias in one pass."""
    separate = bias is not None and bias.start != weight.stop
    return (Conv2dRule if triton is None or separate else TritonConv2dRule)(module, weight, bias)


@dataclass(frozen=True)
class SomeTaps(Entry):
    """A part of a layer's weights, of `shape`; the rest of them never sees its input."""

    whole: torch.Size = field(default_factory=torch.Size)
    places: Any = ...

    def of(self, vectors: Tensor) -> Tensor:
        """A view of this part."""
        return torch.unflatten(vectors[..., self.start : self.stop], -1, self.whole)[self.places]


class TritonConv2dRule(Conv2dRule):
    """For float32 or bfloat16 images with many positions; others use `Conv2dRule`, with the taps that see them.

    The library's kernels are faster in float32's full precision, and at the input's gradient where the stride skips
    positions; they do not know of zeros on one side only.
    """

    def __init__(self, module: nn.Conv2d, weight: Entry, bias: Entry | None) -> None:
        super().__init__(module, weight, bias)
        left, right, top, bottom = self.padding
        plain = copy.copy(module)
        plain.padding = (top, left)
        self.even = (left, top) == (right, bottom)
        self._library = LibraryConvolutionRule(plain, weight, bias)
        self.plain, self._rows = plain, Conv2dRule(module, weight, bias)
        self._windows = (*self.kernel, *self.stride, *self.dilation, top, left)
        self._one = module.weight.new_ones(1)
        self._size = weight.stop - weight.start + (0 if bias is None else bias.stop - bias.start)

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Any]:
        """The output, and what the backward pass needs of the input."""
        left, right, top, bottom = self.padding
        n, channels, h, w = x.shape
        high, wide = self._output(torch.Size((n, channels, h + top + bottom, w + left + right)))
        outs, each = self.weight.shape[0], n // len(params)
        large = each * max(x[0].numel(), outs * high * wide) >= MOST
        if x.dtype not in (torch.float32, torch.bfloat16) or high * wide < FEW_POSITIONS or large:
            y, rows = self._of_rows((h, w)).forward(x, params)
            return y, ((h, w), *rows)
        x = x.contiguous()
        if self.even and _precision() == "ieee" and self.stride != (1, 1):
            return self._library.forward(x, params)[0], x
        y = x.new_empty(n, outs, high, wide)
        grid, shares, block = _grid(outs, each * high * wide, len(params), OUTPUT)
        _output[grid](
            x, params, y, self.weight.start, params.stride(0), shares, each, channels, h, w, outs, high, wide,
            *self._windows, self.bias is not None, _precision(), block, *OUTPUT[:2],
            num_warps=OUTPUT.warps, num_stages=OUTPUT.stages,
        )  # fmt: skip
        return y, x

    def input_gradient(self, saved: Any, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        if not isinstance(saved, Tensor):
            size, *rows = saved
            return self._of_rows(size).input_gradient(tuple(rows), grad, params)
        if self.even and (_precision() == "ieee" or self.stride != (1, 1)):
            return self._library.input_gradient((saved, self.weight.of(params)), grad, params)
        (n, channels, h, w), (outs, high, wide) = saved.shape, grad.shape[1:]
        grad, each, before = grad.contiguous(), n // len(params), torch.empty_like(saved)
        grid, shares, block = _grid(channels, each * h * w, len(params), INPUT)
        _input_gradient[grid](
            grad, params, before, self.weight.start, params.stride(0), shares, each, channels, h, w, outs, high, wide,
            *self._windows, _precision(), block, *INPUT[:2],
            num_warps=INPUT.warps, num_stages=INPUT.stages,
        )  # fmt: skip
        return before

    def _accumulate(self, saved: Any, grad: Tensor, into: Tensor, scale: float) -> None:
        if not isinstance(saved, Tensor):
            size, *rows = saved
            self._of_rows(size)._accumulate(tuple(rows), grad, into, scale)
            return
        if self.even and _precision() == "ieee" and len(into) < len(grad):
            self._library.accumulate((saved, None), grad, into, scale)
            return
        records, programs = len(grad) // len(into), len(into) * math.prod(self._tiles()[0])
        parts = max(n for n in range(1, records + 1) if records % n == 0 and (n == 1 or n * programs <= ENOUGH))
        gradients, _ = self._gradients(saved, grad, len(into) * parts)
        self._of(into).add_(gradients.view(len(into), parts, -1).sum(1), alpha=scale)

    def squares(self, saved: Any, grad: Tensor) -> tuple[Tensor, Any]:
        """The squared norm of every gradient, in float64."""
        if not isinstance(saved, Tensor):
            size, *rows = saved
            return self._of_rows(size).squares(tuple(rows), grad)
        if self.even and few_positions(grad.shape[2:].numel(), *self._sizes):
            return self._library.squares((saved, None), grad)
        kept, parts = self._gradients(saved, grad, len(grad))
        return parts.sum(1, dtype=torch.float64), kept

    def accumulate_weighted(
        self, saved: Any, kept: Any, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        if not isinstance(saved, Tensor):
            size, *rows = saved
            self._of_rows(size).accumulate_weighted(tuple(rows), kept, grad, factors, into, scale)
            return
        kept = self.squares(saved, grad)[1] if kept is None else kept
        if not isinstance(kept, Tensor):
            self._library.accumulate_weighted((saved, None), kept, grad, factors, into, scale)
            return
        if factors.shape[1] > PIECE or factors.dtype != kept.dtype:
            self._of(into).add_(kept_sum(kept, factors), alpha=scale)
            return
        rows = kept.view(*factors.shape, -1)
        self._of(into).unsqueeze(1).baddbmm_(factors.unsqueeze(1), rows, alpha=scale)

    def product(self, saved: Any, kept: Any, grad: Tensor, factors: Tensor, scale: float) -> Product | None:
        """What `accumulate_weighted` adds, as a product that is added together with the noise."""
        if not isinstance(kept, Tensor) or not isinstance(saved, Tensor):
            return None
        return Product(self.weight.start, kept.view(*factors.shape, -1), factors.unsqueeze(2), scale)

    def _of_rows(self, size: tuple[int, ...]) -> Conv2dRule:
        """The rule of products for maps of this size."""
        if not self.even:
            return self._rows
        taps = live_taps(size, self.kernel, self.stride, self._library.padding, self.dilation)
        if taps.kernel == self.kernel:
            return self._rows
        module = copy.copy(self.plain)
        module.kernel_size, module.padding = taps.kernel, taps.padding
        shape = torch.Size((*self.weight.shape[:2], *taps.kernel))
        weight = self.weight
        seen = SomeTaps(weight.name, weight.start, weight.stop, shape, True, False, weight.shape, taps.places)
        return Conv2dRule(module, seen, self.bias)

    def _of(self, vectors: Tensor) -> Tensor:
        """Weights and bias, which are adjacent."""
        return vectors[:, self.weight.start : self.weight.start + self._size]

    def _gradients(self, x: Tensor, grad: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """The gradients [groups, size] of this many groups of records, and the squares of their parts."""
        (n, channels, h, w), (outs, high, wide) = x.shape, grad.shape[1:]
        (wide_tiles, high_tiles), (across, up) = self._tiles()
        gradients, parts = x.new_empty(groups, self._size), x.new_empty(groups, wide_tiles * high_tiles)
        _weight_gradient[groups * wide_tiles, high_tiles](
            x, self._one, grad.contiguous(), gradients, parts, self._size, wide_tiles, n // groups,
            channels, h, w, outs, high, wide, *self._windows, self.bias is not None, _precision(),
            up, across, WEIGHTS.depth, num_warps=WEIGHTS.warps, num_stages=WEIGHTS.stages,
        )  # fmt: skip
        return gradients, parts

    def _tiles(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """How many tiles the weights have, across and up, and how large they are."""
        outs, depth = self.weight.shape[0], self.weight.shape[1:].numel() + (self.bias is not None)
        across, up = _block(depth, WEIGHTS.side), _block(outs)
        return (triton.cdiv(depth, across), triton.cdiv(outs, up)), (across, up)


def _grid(channels: int, positions: int, clients: int, tile: Tile) -> tuple[tuple[int, int], int, int]:
    """How many programs, how many of them share a client's positions, and how many channels each takes."""
    block, shares = _block(channels), triton.cdiv(positions, tile.side)
    return (clients * shares, triton.cdiv(channels, block)), shares, block


def _block(size: int, most: int = 64) -> int:
    return min(most, max(16, int(triton.next_power_of_2(size))))


def _precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


if triton is not None:

    @triton.jit
    def within(place, size):
        """0 <= place < size, in one comparison: as unsigned numbers the negative ones are the largest."""
        return place.to(tl.uint32, bitcast=True) < size

    @triton.jit
    def _output(
        x, vectors, y, first, stride, shares, each,
        C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
        TOP: tl.constexpr, LEFT: tl.constexpr,
        BIAS: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        """y[o, place] = sum over (c, i, j) of weight[o, c, i, j] x[c, place moved by i, j]."""
        client = (tl.program_id(0) // shares).to(tl.int64)
        place = tl.program_id(0) % shares * PLACES + tl.arange(0, PLACES)
        out = tl.program_id(1) * TILE + tl.arange(0, TILE)
        there = place < each * HIGH * WIDE
        example, at = place // (HIGH * WIDE), place % (HIGH * WIDE)
        row, column = at // WIDE * SH - TOP, at % WIDE * SW - LEFT
        corner = example * (C * H * W) + row * W + column
        x, y = x + client * each * (C * H * W), y + client * each * (OUTS * HIGH * WIDE)
        weights = vectors + client * stride + first
        total = tl.zeros((TILE, PLACES), tl.float32)
        for start in range(0, C * KH * KW, DEPTH):
            r = start + tl.arange(0, DEPTH)
            i, j = r // KW % KH * DH, r % KW * DW
            inside = within(row[None, :] + i[:, None], H) & within(column[None, :] + j[:, None], W)
            inside &= there[None, :] & (r < C * KH * KW)[:, None]
            seen = x + (corner[None, :] + (r // (KH * KW) * (H * W) + i * W + j)[:, None])
            kernel = weights + (out * (C * KH * KW))[:, None] + r[None, :]
            kernel = tl.load(kernel, mask=(out < OUTS)[:, None] & (r < C * KH * KW)[None, :], other=0.0)
            total = tl.dot(kernel, tl.load(seen, mask=inside, other=0.0), total, input_precision=PRECISION)
        if BIAS:
            total += tl.load(weights + OUTS * C * KH * KW + out, mask=out < OUTS, other=0.0)[:, None]
        made = y + ((example * (OUTS * HIGH * WIDE) + at)[:, None] + (out * (HIGH * WIDE))[None, :])
        tl.store(made, tl.trans(total), mask=there[:, None] & (out < OUTS)[None, :])

    @triton.jit
    def _input_gradient(
        grad, vectors, before, first, stride, shares, each,
        C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
        TOP: tl.constexpr, LEFT: tl.constexpr,
        PRECISION: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        """before[c, place] = sum over (o, i, j) of weight[o, c, i, j] grad[o, the place that saw it at i, j]."""
        client = (tl.program_id(0) // shares).to(tl.int64)
        place = tl.program_id(0) % shares * PLACES + tl.arange(0, PLACES)
        channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
        there = place < each * H * W
        example, at = place // (H * W), place % (H * W)
        row, column = at // W + TOP, at % W + LEFT
        corner = example * (OUTS * HIGH * WIDE) + row * WIDE + column
        grad, before = grad + client * each * (OUTS * HIGH * WIDE), before + client * each * (C * H * W)
        weights = vectors + client * stride + first
        total = tl.zeros((PLACES, TILE), tl.float32)
        for start in range(0, OUTS * KH * KW, DEPTH):
            r = start + tl.arange(0, DEPTH)
            o, i, j = r // (KH * KW), r // KW % KH * DH, r % KW * DW
            h, w = row[None, :] - i[:, None], column[None, :] - j[:, None]
            inside = there[None, :] & (r < OUTS * KH * KW)[:, None]
            if SH > 1:
                inside &= h % SH == 0
                h = tl.where(h < 0, h, h // SH)
            if SW > 1:
                inside &= w % SW == 0
                w = tl.where(w < 0, w, w // SW)
            inside &= within(h, HIGH) & within(w, WIDE)
            if SH == 1 and SW == 1:
                seen = grad + (corner[None, :] + (o * (HIGH * WIDE) - i * WIDE - j)[:, None])
            else:
                seen = grad + (
                    (example * (OUTS * HIGH * WIDE))[None, :] + (o * (HIGH * WIDE))[:, None] + h * WIDE + w
                )
            kernel = weights + ((o * (C * KH * KW) + r % (KH * KW))[:, None] + (channel * (KH * KW))[None, :])
            kernel = tl.load(kernel, mask=(r < OUTS * KH * KW)[:, None] & (channel < C)[None, :], other=0.0)
            seen = tl.load(seen, mask=inside, other=0.0)
            total = tl.dot(tl.trans(seen), kernel, total, input_precision=PRECISION)
        made = before + ((example * (C * H * W) + at)[:, None] + (channel * (H * W))[None, :])
        tl.store(made, total, mask=there[:, None] & (channel < C)[None, :])

    @triton.jit
    def _weight_gradient(
        x, one, grad, gradients, parts, size, shares, each,
        C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
        TOP: tl.constexpr, LEFT: tl.constexpr,
        BIAS: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, ACROSS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        """gradient[o, (c, i, j)] = sum over places of grad[o, place] x[c, place moved by i, j]; and its squares.

        A bias is the weight of one more input, which is 1 everywhere.
        """
        group = (tl.program_id(0) // shares).to(tl.int64)
        r = tl.program_id(0) % shares * ACROSS + tl.arange(0, ACROSS)
        out = tl.program_id(1) * TILE + tl.arange(0, TILE)
        i, j = r // KW % KH * DH, r % KW * DW
        x, grad = x + group * each * (C * H * W), grad + group * each * (OUTS * HIGH * WIDE)
        total = tl.zeros((TILE, ACROSS), tl.float32)
        for start in range(0, each * HIGH * WIDE, DEPTH):
            place = start + tl.arange(0, DEPTH)
            there = place < each * HIGH * WIDE
            example, at = place // (HIGH * WIDE), place % (HIGH * WIDE)
            given = grad + ((out * (HIGH * WIDE))[:, None] + (example * (OUTS * HIGH * WIDE) + at)[None, :])
            given = tl.load(given, mask=(out < OUTS)[:, None] & there[None, :], other=0.0)
            row, column = at // WIDE * SH - TOP, at % WIDE * SW - LEFT
            inside = within(row[:, None] + i[None, :], H) & within(column[:, None] + j[None, :], W)
            inside &= (r < C * KH * KW)[None, :]
            corner = example * (C * H * W) + row * W + column
            seen = x + (corner[:, None] + (r // (KH * KW) * (H * W) + i * W + j)[None, :])
            if BIAS:
                seen = tl.where((r == C * KH * KW)[None, :], one, seen)
                inside |= (r == C * KH * KW)[None, :]
            seen = tl.load(seen, mask=there[:, None] & inside, other=0.0)
            total = tl.dot(given, seen, total, input_precision=PRECISION)
        mine = gradients + group * size
        weight = mine + (out * (C * KH * KW))[:, None] + r[None, :]
        tl.store(weight, total, mask=(out < OUTS)[:, None] & (r < C * KH * KW)[None, :])
        if BIAS:
            bias = tl.sum(tl.where((r == C * KH * KW)[None, :], total, 0.0), 1)
            last = tl.program_id(0) % shares == shares - 1
            tl.store(mine + OUTS * C * KH * KW + out, bias, mask=(out < OUTS) & last)
        tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(parts + tile, tl.sum(tl.sum(total * total, 1), 0))
