"""The rules of a convolution on a CPU: PyTorch's own kernels where they are fast, one product where they are not.

A CPU is fastest on data in its caches, so nothing is lost by taking one client, or one record, after another. Images
pass from layer to layer in channels-last order, which matters most for pooling.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.gradients.layers.convolution import Conv2dRule, Saved
from shoal.gradients.layers.rule import Rule
from shoal.gradients.layout import Entry


def cpu_rule(module: nn.Conv2d, weight: Entry, bias: Entry | None) -> Rule:
    """The fastest rule for the layer's shape."""
    rows = Conv2dRule(module, weight, bias)
    left, right, top, bottom = rows.padding
    if left != right or top != bottom:
        return rows
    thin = module.in_channels * module.kernel_size[1] < 16
    return ThinConv2dRule(module, weight, bias) if thin else LibraryConv2dRule(module, weight, bias)


class LibraryConv2dRule(Conv2dRule):
    """Each client's convolution by PyTorch's own kernels; the norms of records are still products over rows."""

    def __init__(self, module: nn.Conv2d, weight: Entry, bias: Entry | None) -> None:
        super().__init__(module, weight, bias)
        left, _, top, _ = self.padding
        self._sides = (top, left)

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Saved]:
        """The output, and what the backward pass needs of the input."""
        x = x.contiguous(memory_format=torch.channels_last)
        weights = self.weight.of(params).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        biases = [None] * len(params) if self.bias is None else self.bias.of(params)
        each = zip(x.chunk(len(params)), weights, biases, strict=True)
        y = [torch.conv2d(*own, self.stride, self._sides, self.dilation) for own in each]
        return torch.cat(y), (x, weights)

    def input_gradient(self, saved: Saved, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        x, weights = saved
        return torch.cat([found for found, _, _ in self._backward(x, grad, weights, (True, False, False))])

    def _accumulate(self, saved: Saved, grad: Tensor, into: Tensor, scale: float) -> None:
        x, weights = saved
        shapes = weights[:1].expand(len(into), *[-1] * 4)
        found = self._backward(x, grad, shapes, (False, True, self.bias is not None))
        for own, (_, weight, bias) in zip(into, found, strict=True):
            self.weight.of(own).add_(weight, alpha=scale)
            if self.bias is not None:
                self.bias.of(own).add_(bias, alpha=scale)

    def squares(self, saved: Saved, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The squared norm of every gradient, in float64."""
        x = F.pad(saved[0], self.padding)
        return super().squares((self._unfold(x, *self._output(x.shape)), x.shape), grad)

    def _backward(
        self, x: Tensor, grad: Tensor, weights: Tensor, wanted: tuple[bool, bool, bool]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The gradients of input, weights and bias that are wanted, for each of the weights."""
        grad = grad.contiguous(memory_format=torch.channels_last)
        for own_grad, own_x, weight in zip(*(t.chunk(len(weights)) for t in (grad, x)), weights, strict=True):
            yield torch.ops.aten.convolution_backward(
                own_grad, own_x, weight, [grad.shape[1]],
                self.stride, self._sides, self.dilation, False, [0, 0], 1, wanted,
            )  # fmt: skip


class ThinConv2dRule(Conv2dRule):
    """A convolution of few channels, as on the input images: one product per record.

    Its patches lie side by side, [N, patch, T], so that whole picture rows are copied at a time.
    """

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Saved]:
        """The output, and what the backward pass needs of the input."""
        padded = F.pad(x, self.padding) if any(self.padding) else x
        patches = self._patches(padded)
        kernel = self._kernels(params, len(x)).transpose(1, 2)
        if self.bias is None:
            y = torch.bmm(patches.transpose(1, 2), kernel)
        else:
            bias = self.bias.of(params).repeat_interleave(len(x) // len(params), 0)
            y = torch.baddbmm(bias.unsqueeze(1), patches.transpose(1, 2), kernel)
        return y.view(len(x), *self._output(padded.shape), -1).permute(0, 3, 1, 2), (patches, padded.shape)

    def input_gradient(self, saved: Saved, grad: Tensor, params: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""
        _, shape = saved
        patches = torch.bmm(self._kernels(params, len(grad)).transpose(1, 2), grad.flatten(2))
        x = F.fold(patches, shape[2:], self.kernel, self.dilation, stride=self.stride)
        left, right, top, bottom = self.padding
        return x[:, :, top : shape[2] - bottom, left : shape[3] - right]

    def _accumulate(self, saved: Saved, grad: Tensor, into: Tensor, scale: float) -> None:
        ones = grad.new_ones(len(into), len(grad) // len(into))
        self.accumulate_weighted(saved, self._gradients(saved, grad), grad, ones, into, scale)

    def squares(self, saved: Saved, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The squared norm of every gradient, in float64."""
        kept = self._gradients(saved, grad)
        return self._squares_of(kept, grad), kept

    def _gradients(self, saved: Saved, grad: Tensor) -> Tensor:
        """Each record's gradient of the weights, [N, patch, O]."""
        return torch.bmm(saved[0], grad.permute(0, 2, 3, 1).flatten(1, 2))

    def _patches(self, x: Tensor) -> Tensor:
        n, c, _, _ = x.shape
        (sn, sc, sh, sw), (stride_h, stride_w), (dilation_h, dilation_w) = x.stride(), self.stride, self.dilation
        strides = (sn, sc, sh * dilation_h, sw * dilation_w, sh * stride_h, sw * stride_w)
        view = x.as_strided((n, c, *self.kernel, *self._output(x.shape)), strides)
        return view.reshape(n, c * self.kernel[0] * self.kernel[1], -1)

    def _kernels(self, params: Tensor, records: int) -> Tensor:
        """Each record's weights, [N, O, patch]."""
        return self.weight.of(params).flatten(2).repeat_interleave(records // len(params), 0)

    def _add_kernel(self, kernel: Tensor, into: Tensor, scale: float) -> None:
        """Add [K, patch, O] to the weights."""
        self.weight.of(into).flatten(2).add_(kernel.transpose(1, 2), alpha=scale)
