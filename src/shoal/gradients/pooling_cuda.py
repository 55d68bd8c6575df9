"""Max pooling on CUDA over windows that do not overlap, as most are: each picture is read once and written once.

PyTorch's own gradient also works for windows that overlap, and takes longer than a convolution for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shoal.kernels import tl, triton

BLOCK = 512  # outputs that a program makes
LARGEST = 16  # window, in numbers


def can_pool(module: nn.Module) -> bool:
    """Is it a plain max pooling over small windows that do not overlap?"""
    if triton is None or type(module) is not nn.MaxPool2d or module._forward_hooks or module._forward_pre_hooks:
        return False
    window = _pair(module.kernel_size)
    return (
        window == _pair(module.stride)
        and math.prod(window) <= LARGEST
        and (_pair(module.padding), _pair(module.dilation)) == ((0, 0), (1, 1))
        and not (module.ceil_mode or module.return_indices)
    )


class MaxPool(nn.Module):
    """Takes pictures in float32 on CUDA; the others go to PyTorch's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._plain, self._window = module, _pair(module.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        fits = x.dim() == 4 and x.shape[2] >= self._window[0] and x.shape[3] >= self._window[1]
        if fits and x.is_cuda and x.dtype == torch.float32:
            return Pooled.apply(x, self._window)  # type: ignore[no-any-return,no-untyped-call]
        return self._plain(x)  # type: ignore[no-any-return]


class Pooled(torch.autograd.Function):
    """The greatest number of each window, and which it was: the first, or the last NaN, as PyTorch has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: tuple[int, int]) -> Tensor:
        (n, channels, h, w), (high, wide) = x.shape, (x.shape[2] // window[0], x.shape[3] // window[1])
        y = x.new_empty(n, channels, high, wide)
        which = torch.empty_like(y, dtype=torch.int8)
        ctx.shape, ctx.window = x.shape, window
        ctx.save_for_backward(which)
        if y.numel():
            _pool[_grid(y)](x.contiguous(), y, which, y.numel(), h, w, high, wide, *window, BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (which,), (h, w), (high, wide) = ctx.saved_tensors, ctx.shape[2:], grad.shape[2:]
        covered = (high * ctx.window[0], wide * ctx.window[1]) == (h, w)
        before = (grad.new_empty if covered else grad.new_zeros)(ctx.shape)
        if grad.numel():
            _unpool[_grid(grad)](grad.contiguous(), which, before, grad.numel(), h, w, high, wide, *ctx.window, BLOCK)
        return before, None


def _grid(y: Tensor) -> tuple[int]:
    return (triton.cdiv(y.numel(), BLOCK),)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


if triton is not None:

    @triton.jit
    def _corner(
        place,
        H: tl.constexpr, W: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    ):  # fmt: skip
        """Where an output's window begins."""
        return place // (HIGH * WIDE) * (H * W) + place // WIDE % HIGH * (KH * W) + place % WIDE * KW

    @triton.jit
    def _pool(
        x, y, which, outputs,
        H: tl.constexpr, W: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = place < outputs
        corner = x + _corner(place, H, W, HIGH, WIDE, KH, KW)
        most, found = tl.load(corner, mask=there), tl.zeros((BLOCK,), tl.int8)
        for n in tl.static_range(1, KH * KW):
            value = tl.load(corner + (n // KW * W + n % KW), mask=there)
            more = (value > most) | (value != value)
            most, found = tl.where(more, value, most), tl.where(more, n, found).to(tl.int8)
        tl.store(y + place, most, mask=there)
        tl.store(which + place, found, mask=there)

    @triton.jit
    def _unpool(
        grad, which, before, outputs,
        H: tl.constexpr, W: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = place < outputs
        corner = before + _corner(place, H, W, HIGH, WIDE, KH, KW)
        given, found = tl.load(grad + place, mask=there), tl.load(which + place, mask=there)
        for n in tl.static_range(KH * KW):
            tl.store(corner + (n // KW * W + n % KW), tl.where(found == n, given, 0.0), mask=there)
