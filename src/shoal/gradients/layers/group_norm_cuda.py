"""GroupNorm of one client on CUDA in bfloat16, its scale and shift included: two passes over the numbers each way.

PyTorch's own is in float32 under autocast and with channels first, so that four copies surround it. Here the numbers
stay in bfloat16 with the channels last, as convolutions have them; means and sums are in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.gradients.layers.affine import AffineRule, kept_squares
from shoal.gradients.layout import Entry
from shoal.kernels import tl, triton

WIDEST = 1024  # channels
TILE = 4096  # numbers that a program reads at a time
WARPS = 8
MOST = 2**31 - TILE  # the most numbers that can be indexed


class GroupNormRule(AffineRule):
    """y = (x - mean) / deviation x w + b for pictures [N, C, H, W], of which it saves what it read."""

    def __init__(self, module: nn.GroupNorm, weight: Entry, bias: Entry | None) -> None:
        super().__init__(1, weight, bias)
        self._groups, self._eps = module.num_groups, module.eps

    def fits(self, x: Tensor, params: Tensor) -> bool:
        """Is there one client, with pictures in bfloat16 and a power of two of channels?"""
        if triton is None or x.dim() != 4 or x.dtype != torch.bfloat16 or not x.is_cuda or len(params) > 1:
            return False
        channels = x.shape[1]
        return channels & (channels - 1) == 0 and channels <= WIDEST and 0 < x.numel() < MOST

    def short(self, saved: Any) -> bool:
        """Its sums are in float32, of numbers in bfloat16."""
        return True

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Any]:
        """The output, and what the backward pass needs of the input."""
        x = x.contiguous(memory_format=torch.channels_last)
        y, (n, channels, h, w) = torch.empty_like(x), x.shape
        statistics = torch.empty(2, n, self._groups, dtype=torch.float32, device=x.device)
        _normalise[(n,)](
            x, params, y, statistics, self.weight.start, -1 if self.bias is None else self.bias.start, n, self._eps,
            h * w, channels, self._groups, max(1, TILE // channels), num_warps=WARPS,
        )  # fmt: skip
        return y, [x, statistics, None]

    def input_gradient(self, saved: Any, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input; on the way, that of each record's parameters."""
        x, statistics, _ = saved
        before = torch.empty_like(x)
        saved[2] = self._backward(x, statistics, grad, params, before)
        return before

    def accumulate(self, saved: Any, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        for entry, gradients in zip(self.entries, self._kept(saved, grad), strict=True):
            entry.of(into).add_(gradients.view(len(into), -1, gradients.shape[1]).sum(1), alpha=scale)

    def squares(self, saved: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The squared norm of every gradient, in float64."""
        kept = self._kept(saved, grad)
        return kept_squares(kept), kept

    def _kept(self, saved: Any, grad: Tensor) -> list[Tensor]:
        """The gradients of every record's scale and, where there is one, shift, [N, C]."""
        x, statistics, sums = saved
        if sums is None:  # nobody asked for the gradient of the input
            sums = self._backward(x, statistics, grad, statistics, None)
        return [sums[0], sums[1]][: len(self.entries)]

    def _backward(self, x: Tensor, statistics: Tensor, grad: Tensor, params: Tensor, before: Tensor | None) -> Tensor:
        n, channels, h, w = x.shape
        sums = torch.empty(2, n, channels, dtype=torch.float32, device=x.device)
        grad = grad.contiguous(memory_format=torch.channels_last)
        _denormalise[(n,)](
            x, params, grad, x if before is None else before, statistics, sums, self.weight.start, n, before is None,
            h * w, channels, self._groups, max(1, TILE // channels), num_warps=WARPS,
        )  # fmt: skip
        return sums


if triton is not None:

    @triton.jit
    def _of_groups(x, C: tl.constexpr, G: tl.constexpr):
        """The sum over each channel's group, [C]."""
        sums = tl.sum(tl.reshape(x, (G, C // G)), 1)
        return tl.reshape(tl.broadcast_to(sums[:, None], (G, C // G)), (C,))

    @triton.jit
    def _normalise(
        x, vectors, y, statistics, scale, shift, records, eps,
        T: tl.constexpr, C: tl.constexpr, G: tl.constexpr, PLACES: tl.constexpr,
    ):  # fmt: skip
        """One record: sums of what is left of the first position (of mean nearly 0), then the output."""
        record, channel = tl.program_id(0).to(tl.int64), tl.arange(0, C)
        x, y = x + record * (T * C), y + record * (T * C)
        near = tl.load(x + channel).to(tl.float32)
        once, squared = tl.zeros((PLACES, C), tl.float32), tl.zeros((PLACES, C), tl.float32)
        for start in range(0, T, PLACES):
            place = start + tl.arange(0, PLACES)
            there = (place < T)[:, None]
            seen = tl.load(x + place[:, None] * C + channel[None, :], mask=there, other=0.0).to(tl.float32)
            seen = tl.where(there, seen - near[None, :], 0.0)
            once += seen
            squared += seen * seen
        once, squared, many = tl.sum(once, 0), tl.sum(squared, 0), T * (C // G)
        mean = _of_groups(once + T * near, C, G) / many
        off = near - mean
        variance = _of_groups(squared + 2 * off * once + T * off * off, C, G) / many
        inverse = 1 / tl.sqrt_rn(tl.maximum(variance, 0.0) + eps)
        mine = statistics + record * G + channel // (C // G)
        tl.store(mine, mean)
        tl.store(mine + records * G, inverse)
        by = inverse * tl.load(vectors + scale + channel)
        more = -mean * by
        if shift >= 0:
            more += tl.load(vectors + shift + channel)
        for start in range(0, T, PLACES):
            place = start + tl.arange(0, PLACES)
            there = (place < T)[:, None]
            places = place[:, None] * C + channel[None, :]
            seen = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
            tl.store(y + places, (seen * by[None, :] + more[None, :]).to(y.dtype.element_ty), mask=there)

    @triton.jit
    def _denormalise(
        x, vectors, grad, before, statistics, sums, scale, records, ALONE: tl.constexpr,
        T: tl.constexpr, C: tl.constexpr, G: tl.constexpr, PLACES: tl.constexpr,
    ):  # fmt: skip
        """One record: the gradient of its scale and shift and, unless they are all, that of the input."""
        record, channel = tl.program_id(0).to(tl.int64), tl.arange(0, C)
        x, grad, before = x + record * (T * C), grad + record * (T * C), before + record * (T * C)
        mine = statistics + record * G + channel // (C // G)
        mean, inverse = tl.load(mine), tl.load(mine + records * G)
        scales, shifts = tl.zeros((PLACES, C), tl.float32), tl.zeros((PLACES, C), tl.float32)
        for start in range(0, T, PLACES):
            place = start + tl.arange(0, PLACES)
            there = (place < T)[:, None]
            places = place[:, None] * C + channel[None, :]
            seen = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
            given = tl.load(grad + places, mask=there, other=0.0).to(tl.float32)
            scales += given * ((seen - mean[None, :]) * inverse[None, :])
            shifts += given
        scales, shifts = tl.sum(scales, 0), tl.sum(shifts, 0)
        tl.store(sums + record * C + channel, scales)
        tl.store(sums + (records + record) * C + channel, shifts)
        if not ALONE:
            weight, many = tl.load(vectors + scale + channel), T * (C // G)
            flat = _of_groups(shifts * weight, C, G) / many * inverse
            along = _of_groups(scales * weight, C, G) / many * inverse
            weight *= inverse
            for start in range(0, T, PLACES):
                place = start + tl.arange(0, PLACES)
                there = (place < T)[:, None]
                places = place[:, None] * C + channel[None, :]
                seen = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
                given = tl.load(grad + places, mask=there, other=0.0).to(tl.float32)
                normal = (seen - mean[None, :]) * inverse[None, :]
                made = given * weight[None, :] - flat[None, :] - normal * along[None, :]
                tl.store(before + places, made.to(before.dtype.element_ty), mask=there)
