"""The rule of a convolution of few channels on a CPU, where one product is faster than PyTorch's own kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.gradients.layers.convolution import Conv2dRule, Saved


class ThinConv2dRule(Conv2dRule):
    """A convolution as on the input images: one product per record.

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
