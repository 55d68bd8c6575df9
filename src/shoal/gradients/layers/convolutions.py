"""Which convolution has which rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.gradients.layers.convolution import Conv2dRule, sides
from shoal.gradients.layers.convolution_cpu import ThinConv2dRule
from shoal.gradients.layers.convolution_cuda import cuda_rule
from shoal.gradients.layers.convolution_library import LibraryConvolutionRule
from shoal.gradients.layers.rule import Rule
from shoal.gradients.layout import Entry

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


def convolution_rule(
    module: Any, weight: Entry, bias: Entry | None, kernels: bool
) -> tuple[Rule, Callable[[Tensor], Tensor]]:
    """The rule of a convolution, and the padding that comes before it."""
    plain = type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
    if plain and not kernels:
        return Conv2dRule(module, weight, bias), _same
    if plain and module.weight.is_cuda:
        return cuda_rule(module, weight, bias), _same
    if plain and module.in_channels * module.kernel_size[1] < 16:
        return ThinConv2dRule(module, weight, bias), _same
    module, padded = _padded_before(module)
    return LibraryConvolutionRule(module, weight, bias), padded


def _padded_before(module: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """The layer without any padding but the same zeros on both sides, and what pads before."""
    if type(module) in TRANSPOSED:
        return module, _same
    along, mode = sides(module), module.padding_mode
    before = mode != "zeros" or along[::2] != along[1::2]
    module = copy.copy(module)
    module.padding = (0,) * (len(along) // 2) if before else tuple(along[::-2])
    return module, partial(F.pad, pad=along, mode="constant" if mode == "zeros" else mode) if before else _same


def _same(x: Tensor) -> Tensor:
    return x
