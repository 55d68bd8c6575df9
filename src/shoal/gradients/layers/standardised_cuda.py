"""Gradients of standardised weights, mapped back and added on CUDA: each number is read once."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels import tl, triton
from shoal.standardised_convolution import LEAST

MOST = 2**14  # numbers that lead to one output, at most: a program holds all of them


def can_map(gradients: Tensor, weights: Tensor, into: Tensor) -> bool:
    """Can the kernel read these gradients, of `add_mapped`, and add to these rows?"""
    return (
        triton is not None
        and into.is_cuda
        and {gradients.dtype, weights.dtype, into.dtype} == {torch.float32}
        and gradients.stride(-1) == into.stride(-1) == 1
        and 0 < weights.shape[-1] <= MOST
        and len(gradients) * weights.shape[1] < 2**31
    )


def add_mapped(gradients: Tensor, weights: Tensor, norms: Tensor, into: Tensor, first: int, scale: float) -> None:
    """Add scale x `before_standardising` of each row's gradients to its row, from its place `first` on.

    `weights` are [clients, outputs, inputs], of as many clients as divide the rows; gradients [rows, size] in their
    order, or [rows, outputs, taps, channels], whose taps come last in the weights.
    """
    clients, outputs, inputs = weights.shape
    taps = gradients.shape[2] if gradients.dim() == 4 else 1
    _mapped[len(gradients) * outputs,](
        gradients, weights.contiguous(), norms.contiguous(), into, gradients.stride(0), into.stride(0), first, scale,
        len(gradients) // clients, outputs, inputs, taps, LEAST, triton.next_power_of_2(inputs),
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _mapped(
        gradients, weights, norms, into, stride, stride_into, first, scale, each, outputs, inputs,
        TAPS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row, out, place = (tl.program_id(0) // outputs).to(tl.int64), tl.program_id(0) % outputs, tl.arange(0, BLOCK)
        of, there = row // each * outputs + out, place < inputs
        at = place % TAPS * (inputs // TAPS) + place // TAPS
        given = tl.load(gradients + row * stride + out * inputs + at, mask=there, other=0.0)
        weight, norm = tl.load(weights + of * inputs + place, mask=there, other=0.0), tl.load(norms + of)
        centred = tl.where(there, given - tl.sum(given, 0) / inputs, 0.0)
        along = tl.where(norm > LEAST, tl.sum(centred * weight, 0), 0.0)
        made = into + row * stride_into + first + out * inputs + place
        mapped = (centred - along * weight) / norm
        tl.store(made, tl.load(made, mask=there) + scale * mapped, mask=there)
