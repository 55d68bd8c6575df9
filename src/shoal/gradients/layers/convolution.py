"""The rule of a convolution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.gradients.layers.rule import (
    SUMMED,
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
from shoal.precision import tf32

Saved = Any  # unfolded rows and the padded input's shape; rules for one device keep what they need


@contextmanager
def _products_of(x: Tensor) -> Iterator[None]:
    """On CUDA, products inside a convolution may use TF32 where PyTorch's own convolutions would.

    Not where a norm and its gradient are computed by two different products: they must agree.
    """
    with tf32(x, torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
        yield


class Conv2dRule(Rule):
    """Convolution as a few matrix products over channels-last rows.

    Unfolding an image for one product copies it kh x kw times, and that copy costs more than the product.
    So it is unfolded along its width only; the kernel's rows are then `shifts` products on the same rows,
    each read one image row further down. (Rows that straddle two images are computed and discarded.)
    Where the stride skips rows, or too little would be left to multiply, it is unfolded both ways.
    """

    products = True

    def __init__(self, module: nn.Conv2d, weight: Entry, bias: Entry | None) -> None:
        self.entries, self.weight, self.bias = trained(weight, bias), weight, bias
        self.kernel, self.stride, self.dilation = module.kernel_size, module.stride, module.dilation
        self.padding = sides(module)  # left, right, top, bottom
        thin = module.in_channels * module.kernel_size[1] < 16
        self.both_ways = thin or module.stride[0] != 1 or module.kernel_size[0] == 1
        self.shifts = 1 if self.both_ways else module.kernel_size[0]
        self._sizes = weight.shape[0], weight.shape[1:].numel()

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Saved]:
        """The output, and what the backward pass needs of the input."""
        clients = len(params)
        if any(self.padding):
            x = F.pad(x, self.padding)
        high, wide = self._output(x.shape)
        unfolded = self._unfold(x, high, wide)
        rows = unfolded.view(clients, -1, unfolded.shape[-1])
        kernel = self._kernel(params)
        n, step = self._window(rows, wide)
        y = rows.new_empty(clients, rows.shape[1], kernel.shape[-1])
        with _products_of(x):
            torch.bmm(rows[:, :n], kernel[:, 0], out=y[:, :n])
            for d in range(1, self.shifts):
                y[:, :n].baddbmm_(rows[:, d * step : d * step + n], kernel[:, d])
        pictures = y.view(clients, -1, unfolded.shape[1], wide, y.shape[-1])[:, :, :high]
        if self.bias is not None:
            pictures = pictures + self.bias.of(params)[:, None, None, None]
        pictures = pictures.reshape(len(x), high, wide, -1)
        return pictures.permute(0, 3, 1, 2), (rows, x.shape)

    def input_gradient(self, saved: Saved, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        rows, shape = saved
        high, wide = self._output(shape)
        kernel = self._kernel(params).transpose(2, 3)
        grad_rows = self._rows_of(grad, rows, shape)
        n, step = self._window(rows, wide)
        unfolded = torch.empty_like(rows)
        unfolded[:, n:] = 0
        with _products_of(grad):
            torch.bmm(grad_rows[:, :n], kernel[:, 0], out=unfolded[:, :n])
            for d in range(1, self.shifts):
                unfolded[:, d * step : d * step + n].baddbmm_(grad_rows[:, :n], kernel[:, d])
        x = self._fold(unfolded, shape, high, wide).permute(0, 3, 1, 2)
        left, right, top, bottom = self.padding
        return x[:, :, top : shape[2] - bottom, left : shape[3] - right]

    def accumulate(self, saved: Saved, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        with _products_of(grad):
            self._accumulate(saved, grad, into, scale)

    def _accumulate(self, saved: Saved, grad: Tensor, into: Tensor, scale: float) -> None:
        rows, shape = saved
        rows = rows.view(len(into), -1, rows.shape[-1])
        _, wide = self._output(shape)
        grad_rows = self._rows_of(grad, rows, shape)
        n, step = self._window(rows, wide)
        products = [
            torch.bmm(rows[:, d * step : d * step + n].transpose(1, 2), grad_rows[:, :n]) for d in range(self.shifts)
        ]
        self._add_kernel(torch.stack(products, 1), into, scale)
        if self.bias is not None:
            self.bias.of(into).add_(grad_rows.sum(1), alpha=scale)

    def squares(self, saved: Saved, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The squared norm of every gradient, in float64."""
        rows, shape = saved
        _, wide = self._output(shape)
        pictures = rows.view(len(grad), -1, rows.shape[-1])
        grads = grad.permute(0, 2, 3, 1).reshape(len(grad), -1, grad.shape[1])
        _, step = self._window(pictures, wide)
        windows = [pictures[:, d * step : d * step + grads.shape[1]] for d in range(self.shifts)]
        if grads.shape[1] == len(windows) == 1:
            return outer_squares(windows[0].squeeze(1), grads.squeeze(1), self.bias is not None), None
        if few_positions(grads.shape[1], *self._sizes):
            digits = torch.float64 if self._sizes[1] > SUMMED else None
            alike = torch.stack([gram(window) for window in windows]).sum(0, dtype=digits)
            return gram_squares(alike, grads, self._sizes[1], self.bias is not None), None
        kept = grads.new_empty(len(grad), self.shifts, rows.shape[-1], grad.shape[1])
        with _products_of(grad):
            for d, window in enumerate(windows):
                torch.bmm(window.transpose(1, 2), grads, out=kept[:, d])
        return self._squares_of(kept, grad), kept

    def _squares_of(self, kept: Tensor, grad: Tensor) -> Tensor:
        squares = squared(kept.flatten(1))
        return squares if self.bias is None else squares + squared(grad.sum((2, 3)))

    def accumulate_weighted(
        self,
        saved: Saved,
        kept: Tensor | None,
        grad: Tensor,
        factors: Tensor,
        into: Tensor,
        scale: float,
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        if kept is None:  # its norm came from another product
            self._accumulate_records(saved, weighed(grad, factors), into, scale)
            return
        self._add_kernel(kept_sum(kept, factors).view(len(into), *kept.shape[1:]), into, scale)
        if self.bias is not None:
            bias = grad.sum((2, 3)).where(factors.reshape(-1, 1) != 0, 0.0)  # else 0 x inf
            self.bias.of(into).add_(kept_sum(bias, factors), alpha=scale)

    def _accumulate_records(self, saved: Saved, grad: Tensor, into: Tensor, scale: float) -> None:
        """In float64, but for few records of one position (update_clipping.summed_products says why)."""
        rows, shape = saved
        if len(grad) <= PIECE * len(into) and grad[0, 0].numel() == 1 and grad.dtype == rows.dtype:
            self._accumulate(saved, grad, into, scale)
            return
        images = rows.view(len(grad), -1, rows.shape[2])
        total = torch.zeros_like(into, dtype=torch.float64)
        for some in zip(*(x.unflatten(0, (len(into), -1)).split(PIECE, 1) for x in (images, grad)), strict=True):
            x, grads = (part.flatten(0, 1).double() for part in some)
            self._accumulate((x, shape), grads, total, 1.0)
        for entry in self.entries:
            entry.of(into).add_(entry.of(total), alpha=scale)

    def _add_kernel(self, kernel: Tensor, into: Tensor, scale: float) -> None:
        """Add [K, shifts, patch, O] to the weights."""
        kernel = kernel.view(len(into), *self.kernel, -1, kernel.shape[-1])
        self.weight.of(into).add_(kernel.permute(0, 4, 3, 1, 2), alpha=scale)

    def _output(self, padded: torch.Size) -> tuple[int, int]:
        high, wide = (
            (size - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, dilation in zip(
                padded[2:], self.kernel, self.stride, self.dilation, strict=True
            )
        )
        return high, wide

    def _window(self, rows: Tensor, wide: int) -> tuple[int, int]:
        """How many rows each product takes, and by how many rows the next one is shifted."""
        step = self.dilation[0] * wide
        return rows.shape[1] - (self.shifts - 1) * step, step

    def _unfold(self, x: Tensor, high: int, wide: int) -> Tensor:
        """Padded images [N, C, H, W] as [N, rows, wide, patch]."""
        n, c, h, _ = x.shape
        sn, sc, sh, sw = x.stride()
        (kh, kw), (_, stride_w), (dilation_h, dilation_w) = self.kernel, self.stride, self.dilation
        if not self.both_ways:
            view = x.as_strided((n, h, wide, kw, c), (sn, sh, sw * stride_w, sw * dilation_w, sc))
            return view.reshape(n, h, wide, kw * c).contiguous()
        strides = (sn, sh * self.stride[0], sw * stride_w, sh * dilation_h, sw * dilation_w, sc)
        view = x.as_strided((n, high, wide, kh, kw, c), strides)
        return view.reshape(n, high, wide, kh * kw * c).contiguous()

    def _fold(self, unfolded: Tensor, shape: torch.Size, high: int, wide: int) -> Tensor:
        """The transpose of `_unfold`: add every patch to where it came from, [N, H, W, C]."""
        n, c, h, w = shape
        (kh, kw), (stride_h, stride_w), (dilation_h, dilation_w) = self.kernel, self.stride, self.dilation
        x = unfolded.new_zeros(n, h, w, c)
        rows_high = high if self.both_ways else h
        patches = unfolded.view(n, rows_high, wide, kh if self.both_ways else 1, kw, c)
        for i in range(patches.shape[3]):
            down = slice(i * dilation_h, i * dilation_h + stride_h * (rows_high - 1) + 1, stride_h)
            for j in range(kw):
                across = slice(j * dilation_w, j * dilation_w + stride_w * (wide - 1) + 1, stride_w)
                x[:, down, across] += patches[:, :, :, i, j]
        return x

    def _kernel(self, params: Tensor) -> Tensor:
        """The weights as [K, shifts, patch, O]."""
        kernel = self.weight.of(params).permute(0, 3, 4, 2, 1)
        return kernel.reshape(len(params), self.shifts, -1, kernel.shape[-1])

    def _rows_of(self, grad: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
        """The output's gradient as rows that match the unfolded ones; 0 where a row straddles pictures."""
        clients = len(rows)
        pictures = grad.permute(0, 2, 3, 1)
        if self.shifts == 1:
            return pictures.reshape(clients, -1, grad.shape[1])
        n, high, wide, channels = pictures.shape
        padded = grad.new_empty(n, shape[2], wide, channels)
        padded[:, :high] = pictures
        padded[:, high:] = 0
        return padded.view(clients, -1, channels)


def sides(module: Any) -> list[int]:
    """The zeros before and after each dimension, from the last one on, in the order of F.pad."""
    if not isinstance(module.padding, str):
        return [side for side in reversed(module.padding) for _ in range(2)]
    same = module.padding == "same"
    totals = [d * (k - 1) if same else 0 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
