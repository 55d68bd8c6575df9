"""How a layer acts on many clients at once, each with its own parameters.

Activations keep the shape that the model's own code expects, [N, ...] with N = clients x batch, the
examples of one client next to each other; only layers with parameters know of clients. A rule gives a
layer's output, the gradient of its input, and adds the gradient of its parameters, summed over each
client's examples, into one vector a client. In names: K clients, N examples, O outputs, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.gradients.layout import Entry


class Rule(Protocol):
    """What the tape asks of a layer."""

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Any]:
        """The output, and what the backward pass needs of the input."""

    def input_gradient(self, saved: Any, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""

    def accumulate(self, saved: Any, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x the gradient of this layer's parameters."""


class LinearRule:
    """y = x W^T + b, for inputs [N, ..., in]."""

    def __init__(self, module: nn.Linear, weight: Entry, bias: Entry | None) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(len(params), -1, x.shape[-1])
        weight = self.weight.of(params).transpose(1, 2)
        if self.bias is None:
            y = torch.bmm(rows, weight)
        else:
            y = torch.baddbmm(self.bias.of(params).unsqueeze(1), rows, weight)
        return y.view(*x.shape[:-1], y.shape[-1]), rows

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        weight = self.weight.of(params)
        rows = torch.bmm(grad.reshape(len(params), -1, grad.shape[-1]), weight)
        return rows.view(*grad.shape[:-1], weight.shape[-1])

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        grad = grad.reshape(len(into), -1, grad.shape[-1])
        self.weight.of(into).baddbmm_(grad.transpose(1, 2), saved, alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(grad.sum(1), alpha=scale)


class Conv2dRule:
    """Convolution as a few matrix products over channels-last rows.

    Unfolding a picture for one product copies it kh x kw times, and that copy costs more than the product.
    So it is unfolded along its width only; the kernel's rows are then `shifts` products on the same rows,
    each read a picture row further down. (Rows that straddle two pictures are computed and thrown away.)
    Where the stride skips rows, or too little would be left to multiply, it is unfolded both ways.
    """

    def __init__(self, module: nn.Conv2d, weight: Entry, bias: Entry | None) -> None:
        self.weight, self.bias = weight, bias
        self.kernel, self.stride, self.dilation = module.kernel_size, module.stride, module.dilation
        self.padding = _padding(module)
        thin = module.in_channels * module.kernel_size[1] < 16
        self.both_ways = thin or module.stride[0] != 1 or module.kernel_size[0] == 1
        self.shifts = 1 if self.both_ways else module.kernel_size[0]

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, tuple[Tensor, torch.Size]]:
        clients = len(params)
        if any(self.padding):
            x = F.pad(x, self.padding)
        high, wide = self._output(x.shape)
        unfolded = self._unfold(x, high, wide)
        rows = unfolded.view(clients, -1, unfolded.shape[-1])
        kernel = self._kernel(params)
        n, step = self._window(rows, wide)
        y = rows.new_empty(clients, rows.shape[1], kernel.shape[-1])
        if self.shifts == 1:
            torch.bmm(rows, kernel[:, 0], out=y)
        else:
            torch.bmm(rows[:, :n], kernel[:, 0], out=y[:, :n])
        for d in range(1, self.shifts):
            y[:, :n].baddbmm_(rows[:, d * step : d * step + n], kernel[:, d])
        pictures = y.view(clients, -1, unfolded.shape[1], wide, y.shape[-1])[:, :, :high]
        if self.bias is not None:
            pictures = pictures + self.bias.of(params)[:, None, None, None]
        pictures = pictures.reshape(len(x), high, wide, -1)
        return pictures.permute(0, 3, 1, 2), (rows, x.shape)

    def input_gradient(self, saved: tuple[Tensor, torch.Size], grad: Tensor, params: Tensor) -> Tensor:
        rows, shape = saved
        high, wide = self._output(shape)
        kernel = self._kernel(params).transpose(2, 3)
        grad_rows = self._rows_of(grad, rows, shape)
        n, step = self._window(rows, wide)
        unfolded = torch.empty_like(rows)
        torch.bmm(grad_rows[:, :n], kernel[:, 0], out=unfolded[:, :n])
        unfolded[:, n:] = 0
        for d in range(1, self.shifts):
            unfolded[:, d * step : d * step + n].baddbmm_(grad_rows[:, :n], kernel[:, d])
        x = self._fold(unfolded, shape, high, wide).permute(0, 3, 1, 2)
        left, right, top, bottom = self.padding
        return x[:, :, top : shape[2] - bottom, left : shape[3] - right]

    def accumulate(self, saved: tuple[Tensor, torch.Size], grad: Tensor, into: Tensor, scale: float) -> None:
        rows, shape = saved
        _, wide = self._output(shape)
        grad_rows = self._rows_of(grad, rows, shape)
        n, step = self._window(rows, wide)
        products = [
            torch.bmm(rows[:, d * step : d * step + n].transpose(1, 2), grad_rows[:, :n]) for d in range(self.shifts)
        ]
        kernel = torch.stack(products, 1).view(len(into), *self.kernel, shape[1], grad.shape[1])
        self.weight.of(into).add_(kernel.permute(0, 4, 3, 1, 2), alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(grad_rows.sum(1), alpha=scale)

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
        """Padded pictures [N, C, H, W] as [N, rows, wide, patch]."""
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


class AffineRule:
    """y = x w + b after a normalisation without parameters; `w` spans dimensions from `first` on."""

    def __init__(self, first: int, weight: Entry, bias: Entry | None) -> None:
        self.first, self.weight, self.bias = first, weight, bias

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        shaped = x.reshape(len(params), -1, *x.shape[1:])
        y = shaped * self._shaped(self.weight, params, shaped)
        if self.bias is not None:
            y = y + self._shaped(self.bias, params, shaped)
        return y.view(x.shape), shaped

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        return (grad.reshape(saved.shape) * self._shaped(self.weight, params, saved)).view(grad.shape)

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        grad = grad.reshape(saved.shape)
        self.weight.of(into).add_(self._summed(grad * saved), alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(self._summed(grad), alpha=scale)

    def _span(self, dims: int) -> tuple[int, int]:
        """The first and one past the last dimension of [K, B, ...] that the weights span."""
        first = self.first + 1 if self.first > 0 else dims + self.first
        return first, first + len(self.weight.shape)

    def _shaped(self, entry: Entry, params: Tensor, x: Tensor) -> Tensor:
        first, last = self._span(x.dim())
        shape = [1] * x.dim()
        shape[0] = len(params)
        shape[first:last] = entry.shape
        return entry.of(params).reshape(shape)

    def _summed(self, x: Tensor) -> Tensor:
        first, last = self._span(x.dim())
        return x.sum([d for d in range(1, x.dim()) if not first <= d < last])


class EmbeddingRule:
    """y = W[x], for whole numbers [N, ...]."""

    def __init__(self, module: nn.Embedding, weight: Entry) -> None:
        self.weight, self.padding = weight, module.padding_idx

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        words = self.weight.shape[0]
        client = torch.arange(len(params), device=x.device).repeat_interleave(len(x) // len(params))
        places = x + words * client.view(-1, *[1] * (x.dim() - 1))
        return self.weight.of(params).reshape(-1, self.weight.shape[1])[places], places

    def input_gradient(self, saved: Tensor, grad: Tensor, params: Tensor) -> Tensor:
        raise AssertionError("whole numbers have no gradient")

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        clients, (words, width) = len(into), self.weight.shape
        total = grad.new_zeros(clients * words, width)
        total.index_add_(0, saved.reshape(-1), grad.reshape(-1, width))
        total = total.view(clients, words, width)
        if self.padding is not None:
            total[:, self.padding] = 0
        self.weight.of(into).add_(total, alpha=scale)


def _padding(module: nn.Conv2d) -> tuple[int, int, int, int]:
    """left, right, top, bottom."""
    if module.padding == "valid":
        return 0, 0, 0, 0
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        (top, bottom), (left, right) = [(t // 2, t - t // 2) for t in totals]
        return left, right, top, bottom
    high, wide = module.padding
    return int(wide), int(wide), int(high), int(high)


def rule_for(module: nn.Module, entries: dict[int, Entry]) -> tuple[Rule, Callable[[Tensor], Tensor]] | None:
    """The rule of a layer and what comes before it, or None where there is no rule that is surely right."""
    own = {name: entries.get(id(p)) for name, p in module.named_parameters(recurse=False)}
    if None in own.values() or module._forward_hooks or module._forward_pre_hooks:
        return None
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None:
        return None
    if type(module) is nn.Linear:
        return LinearRule(module, weight, bias), _same
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros":
        return Conv2dRule(module, weight, bias), _same
    if type(module) is nn.GroupNorm:
        groups, eps = module.num_groups, module.eps
        return AffineRule(1, weight, bias), lambda x: F.group_norm(x, groups, eps=eps)
    if type(module) is nn.LayerNorm:
        shape, eps = module.normalized_shape, module.eps
        return AffineRule(-len(shape), weight, bias), lambda x: F.layer_norm(x, shape, eps=eps)
    plain = type(module) is nn.Embedding and module.max_norm is None
    if plain and not module.scale_grad_by_freq and not module.sparse:
        return EmbeddingRule(module, weight), _same
    return None


def _same(x: Tensor) -> Tensor:
    return x
