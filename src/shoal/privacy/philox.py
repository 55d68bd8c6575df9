"""Normal numbers on CUDA: Philox 4x32 with a key for each client, made where they are added (Salmon et al. 2011).

The counter is (place in the vector, step), so that no number is ever drawn twice under a key. One pass over the
vectors: read, add, write. Where Triton is missing, torch's own generator draws for one client after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import libdevice
except ImportError:
    triton = None

BLOCK = 256  # counters a program takes, each of which gives four numbers


class Philox:
    """The noise of clients with these keys [K] over the steps of a round."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys
        self._step = torch.zeros((), dtype=torch.int64, device=keys.device)

    def begin(self, other: Any) -> None:
        self._keys.copy_(other._keys)
        self._step.zero_()

    def add(self, into: Tensor, scales: Tensor) -> None:
        if triton is None:
            self._add_plainly(into, scales)
        else:
            grid = (triton.cdiv(into.shape[1], 4 * BLOCK), len(into))
            _add[grid](into, self._keys, scales, self._step, into.shape[1], into.stride(0), BLOCK, num_warps=8)
        self._step += 1

    def _add_plainly(self, into: Tensor, scales: Tensor) -> None:
        step = int(self._step)
        for key, row, scale in zip(self._keys.tolist(), into, scales, strict=True):
            generator = torch.Generator(into.device).manual_seed((key + step) % 2**63)
            row.add_(torch.randn(row.shape, generator=generator, device=row.device) * scale)


if triton is not None:

    @triton.jit
    def _normal_pair(a, b):
        """Box and Muller's formula, as in `normals`; the quick logarithm may be above 0 by its last digit."""
        logarithm = libdevice.fast_logf(((a >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10)
        radius = tl.sqrt(tl.maximum(-2.0 * logarithm, 0.0))
        angle = b.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-9
        return radius * libdevice.fast_cosf(angle), radius * libdevice.fast_sinf(angle)

    @triton.jit
    def _add(into, keys, scales, step, size, stride, BLOCK: tl.constexpr):
        row = tl.program_id(1).to(tl.int64)
        scale = tl.load(scales + row)
        if scale != 0.0:
            counter = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            zero = counter * 0
            now = tl.load(step).to(tl.int32) + zero
            a, b, c, d = tl.philox(tl.load(keys + row), counter, now, zero, zero)
            first, second = _normal_pair(a, b)
            third, fourth = _normal_pair(c, d)
            noise = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (4 * BLOCK,))
            place = tl.program_id(0) * 4 * BLOCK + tl.arange(0, 4 * BLOCK)
            inside = place < size
            start = into + row * stride
            tl.store(start + place, tl.load(start + place, mask=inside) + noise * scale, mask=inside)
