"""Max pooling on CUDA over windows that do not overlap, as most are: each image is read once and written once.

PyTorch's own gradient also works for windows that overlap, and takes longer than a convolution for it.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.kernels import tl, triton

BLOCK = 512  # numbers per program
LARGEST = 16  # window, in numbers
MOST = 2**31  # the most numbers that can be indexed


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
    """For float32 images on CUDA with the channels first; others use PyTorch's own, which keeps their order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._plain, self._window = module, _pair(cast(int | tuple[int, int], module.kernel_size))

    def forward(self, x: Tensor) -> Tensor:
        """Max pooling, by a Triton kernel where it fits."""
        fits = x.dim() == 4 and x.shape[2] >= self._window[0] and x.shape[3] >= self._window[1]
        if fits and x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() and x.numel() < MOST:
            return Pooled.apply(x, self._window)  # type: ignore[no-any-return,no-untyped-call]
        return self._plain(x)  # type: ignore[no-any-return]


class Pooled(torch.autograd.Function):
    """The maximum of each window, and its position: the first, or the last NaN, as in PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: tuple[int, int]) -> Tensor:
        """The pooled image; the position of each maximum is saved."""
        (n, channels, h, w), (high, wide) = x.shape, (x.shape[2] // window[0], x.shape[3] // window[1])
        y = x.new_empty(n, channels, high, wide)
        which = torch.empty_like(y, dtype=torch.int8)
        ctx.shape, ctx.window = x.shape, window
        ctx.save_for_backward(which)
        if y.numel():
            _pool[_grid(y)](x.contiguous(), y, which, y.numel(), h, w, high, wide, *window, BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Each output's gradient, added where its maximum was."""
        (which,), (h, w), (high, wide) = ctx.saved_tensors, ctx.shape[2:], grad.shape[2:]
        before = grad.new_empty(ctx.shape)
        if before.numel():
            _unpool[_grid(before)](
                grad.contiguous(), which, before, before.numel(), h, w, high, wide, *ctx.window, BLOCK
            )
        return before, None


def _grid(made: Tensor) -> tuple[int]:
    return (triton.cdiv(made.numel(), BLOCK),)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


if triton is not None:

    @triton.jit
    def _pool(
        x, y, which, outputs,
        H: tl.constexpr, W: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """For every output: the maximum of its window, and its position."""
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        there = place < outputs
        corner = x + (place // (HIGH * WIDE) * (H * W) + place // WIDE % HIGH * (KH * W) + place % WIDE * KW)
        most, found = tl.load(corner, mask=there), tl.zeros((BLOCK,), tl.int8)
        for n in tl.static_range(1, KH * KW):
            value = tl.load(corner + (n // KW * W + n % KW), mask=there)
            more = (value > most) | (value != value)
            most, found = tl.where(more, value, most), tl.where(more, n, found).to(tl.int8)
        tl.store(y + place, most, mask=there)
        tl.store(which + place, found, mask=there)

    @triton.jit
    def _unpool(
        grad, which, before, inputs,
        H: tl.constexpr, W: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """For every input: its window's gradient where it was the maximum, and 0 elsewhere or outside of windows."""
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row, column = place // W % H, place % W
        high, wide = row // KH, column // KW
        inside = (place < inputs) & (high < HIGH) & (wide < WIDE)
        window = place // (H * W) * (HIGH * WIDE) + high * WIDE + wide
        given, found = tl.load(grad + window, mask=inside, other=0.0), tl.load(which + window, mask=inside, other=-1)
        tl.store(before + place, tl.where(found == row % KH * KW + column % KW, given, 0.0), mask=place < inputs)
