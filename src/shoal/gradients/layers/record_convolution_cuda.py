"""The rule of a convolution for one client on CUDA in bfloat16, whose records all have gradients of their own.

cuDNN gives the output and the gradient of the input, with the channels last: several times faster than kernels for
many clients. It has none for the weights' gradients of single records. Those are products of numbers in bfloat16,
summed in float32, over all positions, and all views of a record.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.gradients.layers.convolution_library import Kept, LibraryConvolutionRule, Saved, live_taps, outputs
from shoal.gradients.layers.rule import few_positions, in_type, squared
from shoal.kernels import tl, triton

DEPTH, STAGES, WARPS = 32, 3, 4  # positions that are summed at a time, and how
SIDE = 128  # of the largest tile of weights
ENOUGH = 4096  # programs that surely keep a GPU busy
MOST = 2**31 - DEPTH  # the most numbers that can be indexed


class RecordConvolutionRule(LibraryConvolutionRule):
    """For a plain Conv2d."""

    def fits(self, x: Tensor, params: Tensor) -> bool:
        """Is there one client, and autocast to bfloat16?"""
        if triton is None or len(params) > 1 or not x.is_cuda or x.dim() != 4 or not 0 < x.numel() < MOST:
            return False
        size, *windows = tuple(x.shape[2:]), tuple(self.weight.shape[2:]), self.stride, self.padding, self.dilation
        large = len(x) * self.weight.shape[0] * math.prod(outputs(size, *windows)) >= MOST
        short = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        return short and not large and live_taps(size, *windows).kernel == windows[0]

    def short(self, saved: Saved) -> bool:
        """Its products are summed in float32."""
        return True

    def accumulate(self, saved: Saved, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        self._add(self.of_groups(saved[0], grad, len(into)), saved[0], into, scale)
        if self.bias is not None:
            self.bias.of(into).add_(torch.unflatten(_summed(grad), 0, (len(into), -1)).sum(1), alpha=scale)

    def squares(self, saved: Saved, grad: Tensor) -> tuple[Tensor, Kept]:
        """The squared norm of every gradient, in float64."""
        if few_positions(grad.shape[2:].numel(), self.weight.shape[0], self.weight.shape[1:].numel()):
            return super().squares(in_type(saved, torch.float32), grad.float())
        weight, bias = self._gradients(saved[0], grad, len(grad)), None if self.bias is None else _summed(grad)
        return squared(weight.flatten(1)) + (0 if bias is None else squared(bias)), (weight, bias)

    def accumulate_weighted(
        self, saved: Saved, kept: Kept | None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        kept = self.squares(saved, grad)[1] if kept is None else kept
        if kept[0] is None:
            saved, grad = in_type(saved, torch.float32), grad.float()
        super().accumulate_weighted(saved, kept, grad, factors, into, scale)

    def _last(self, x: Tensor, weights: Tensor) -> bool:
        return True

    def of_groups(self, x: Tensor, grad: Tensor, rows: int) -> Tensor:
        """The gradients of the weights of this many groups of records, [rows, O, taps, C], in float32."""
        records, programs = len(grad) // rows, rows * math.prod(self._tiles()[0])
        parts = max(n for n in range(1, records + 1) if records % n == 0 and (n == 1 or n * programs <= ENOUGH))
        found = self._gradients(x, grad, rows * parts)
        return found if parts == 1 else torch.unflatten(found, 0, (rows, parts)).sum(1)

    def _gradients(self, x: Tensor, grad: Tensor, rows: int) -> Tensor:
        """The same, by one program a tile."""
        (n, channels, h, w), (outs, high, wide) = x.shape, grad.shape[1:]
        tiles, blocks = self._tiles()
        found = torch.empty(rows, outs, tiles[2], channels, dtype=torch.float32, device=x.device)
        x, grad = (pictures.contiguous(memory_format=torch.channels_last) for pictures in (x, grad))
        _weight_gradient[rows * math.prod(tiles),](
            x, grad, found, n // rows,
            channels, h, w, outs, high, wide, *self.weight.shape[2:], *self.stride, *self.dilation, *self.padding,
            *blocks, DEPTH, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        return found

    def _tiles(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """How many tiles a record's gradient has, by outputs, channels and taps, and the sides of one."""
        outs, channels, *kernel = self.weight.shape
        up, across = (min(SIDE, max(16, int(triton.next_power_of_2(size)))) for size in (outs, channels))
        return (triton.cdiv(outs, up), triton.cdiv(channels, across), math.prod(kernel)), (up, across)


def _summed(grad: Tensor) -> Tensor:
    """The gradient of each record's bias, [N, O], in float32."""
    return grad.sum((2, 3), dtype=torch.float32)


if triton is not None:
    from shoal.gradients.layers.convolution_cuda import within

    @triton.jit
    def _weight_gradient(
        x, grad, found, each,
        C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
        TOP: tl.constexpr, LEFT: tl.constexpr, UP: tl.constexpr, ACROSS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        """gradient[o, c] of one tap of a group of records = sum over places of grad[place, o] x[place moved, c].

        The programs of all taps of a tile are next to each other: they read the same numbers. What each writes lies
        together: with the taps last, as in the weights, 256 channels took 7.4 ms on an H200 instead of 0.7.
        """
        tap, tile = tl.program_id(0) % (KH * KW), tl.program_id(0) // (KH * KW)
        i, j = tap // KW * DH - TOP, tap % KW * DW - LEFT
        channel = tile % tl.cdiv(C, ACROSS) * ACROSS + tl.arange(0, ACROSS)
        tile = tile // tl.cdiv(C, ACROSS)
        out = tile % tl.cdiv(OUTS, UP) * UP + tl.arange(0, UP)
        group = (tile // tl.cdiv(OUTS, UP)).to(tl.int64)
        x, grad = x + group * each * (H * W * C), grad + group * each * (HIGH * WIDE * OUTS)
        total = tl.zeros((UP, ACROSS), tl.float32)
        for start in range(0, each * HIGH * WIDE, DEPTH):
            place = start + tl.arange(0, DEPTH)
            there = place < each * HIGH * WIDE
            given = grad + (place * OUTS)[:, None] + out[None, :]
            given = tl.load(given, mask=there[:, None] & (out < OUTS)[None, :], other=0.0)
            at = place % (HIGH * WIDE)
            row, column = at // WIDE * SH + i, at % WIDE * SW + j
            inside = there & within(row, H) & within(column, W)
            seen = x + ((place // (HIGH * WIDE) * H + row) * W + column)[:, None] * C + channel[None, :]
            seen = tl.load(seen, mask=inside[:, None] & (channel < C)[None, :], other=0.0)
            total = tl.dot(tl.trans(given), seen, total)
        made = found + ((group * OUTS + out[:, None]) * (KH * KW) + tap) * C + channel[None, :]
        tl.store(made, total, mask=(out < OUTS)[:, None] & (channel < C)[None, :])
