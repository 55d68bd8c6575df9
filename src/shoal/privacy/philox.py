"""Normal numbers on CUDA: Philox 4x32 with a key for each client, made where they are added (Salmon et al. 2011).

The counter is (place in the vector, step), so that no number is ever drawn twice under a key. One pass over the
vectors: read, add, write; the gradients of matrices are added in the same pass where they are products of a few rows.
Where Triton is missing, torch's own generator draws for one client after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.kernels import libdevice, tl, triton
from shoal.privacy.normals import Product

BLOCK = 256  # counters a program takes, each of which gives four numbers
TILE = (8, 64)  # of a matrix: rows, and counters along a row
LONG = (1, 256)  # of a matrix that is one row
MOST_ROWS = 16  # of a product; with more of them a library's own is faster


class Philox:
    """The noise of clients with these keys [K] over the steps of a round."""

    def __init__(self, keys: Tensor, fused: bool = True) -> None:
        self._keys, self.fuses = keys, fused and triton is not None
        self._step = torch.zeros((), dtype=torch.int64, device=keys.device)

    def begin(self, other: Any) -> None:
        self._keys.copy_(other._keys)
        self._step.zero_()

    def takes(self, product: Product) -> bool:
        """A counter's four numbers must lie in one row of the matrix."""
        few = product.rows.shape[1] <= MOST_ROWS and product.rows.dtype == torch.float32
        return self.fuses and few and product.start % 4 == product.rows.shape[2] % 4 == 0

    def add(self, into: Tensor, scales: Tensor, products: Sequence[Product] = ()) -> None:
        if triton is None:
            self._add_plainly(into, scales)
        else:
            products = sorted(products, key=lambda product: product.start)
            for product in products:
                self._add_product(into, scales, product)
            for start, stop in _between(products, into.shape[1]):
                grid = (triton.cdiv(stop - start, 4 * BLOCK), len(into))
                _add[grid](into, self._keys, scales, self._step, start, stop, into.stride(0), BLOCK, num_warps=8)
        self._step += 1

    def _add_product(self, into: Tensor, scales: Tensor, product: Product) -> None:
        rows, grads = product.rows.contiguous(), product.grads.contiguous()
        (clients, few, width), outs = rows.shape, grads.shape[2]
        high, wide = LONG if outs == 1 else TILE
        grid = (triton.cdiv(width, 4 * wide), triton.cdiv(outs, high), clients)
        noise, place = (self._keys, scales, self._step), (product.start, outs, into.stride(0), width)
        _add_product[grid](into, *noise, rows, grads, product.scale, *place, few, high, wide, num_warps=4)

    def _add_plainly(self, into: Tensor, scales: Tensor) -> None:
        step = int(self._step)
        for key, row, scale in zip(self._keys.tolist(), into, scales, strict=True):
            generator = torch.Generator(into.device).manual_seed((key + step) % 2**63)
            row.add_(torch.randn(row.shape, generator=generator, device=row.device) * scale)


def _between(products: Sequence[Product], size: int) -> Iterator[tuple[int, int]]:
    """The places of a vector that belong to none of the matrices."""
    start = 0
    for product in products:
        if product.start > start:
            yield start, product.start
        start = product.start + product.rows.shape[2] * product.grads.shape[2]
    if size > start:
        yield start, size


if triton is not None:

    @triton.jit
    def _normal_pair(a, b):
        """Box and Muller's formula, as in `normals`; the quick logarithm may be above 0 by its last digit."""
        logarithm = libdevice.fast_logf(((a >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10)
        radius = tl.sqrt(tl.maximum(-2.0 * logarithm, 0.0))
        angle = b.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-9
        return radius * libdevice.fast_cosf(angle), radius * libdevice.fast_sinf(angle)

    @triton.jit
    def _normals(key, counter, step):
        """Four normal numbers for every counter, [..., 2, 2]."""
        zero = counter * 0
        a, b, c, d = tl.philox(key, counter, tl.load(step).to(tl.int32) + zero, zero, zero)
        first, second = _normal_pair(a, b)
        third, fourth = _normal_pair(c, d)
        return tl.join(tl.join(first, third), tl.join(second, fourth))

    @triton.jit
    def _add(into, keys, scales, step, first, last, stride, BLOCK: tl.constexpr):
        """into[first:last] += scale x noise, in every row; `first` is a multiple of 4."""
        row = tl.program_id(1).to(tl.int64)
        scale = tl.load(scales + row)
        if scale != 0.0:
            counter = first // 4 + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            noise = tl.reshape(_normals(tl.load(keys + row), counter, step), (4 * BLOCK,))
            place = first + tl.program_id(0) * 4 * BLOCK + tl.arange(0, 4 * BLOCK)
            inside = place < last
            at = into + row * stride + place
            tl.store(at, tl.load(at, mask=inside) + noise * scale, mask=inside)

    @triton.jit
    def _add_product(
        into, keys, scales, step, rows, grads, factor, first, outs, stride,
        WIDTH: tl.constexpr, FEW: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    ):  # fmt: skip
        """The matrix at into[first] += factor x grads^T rows + scale x noise, a tile of it."""
        row = tl.program_id(2).to(tl.int64)
        scale = tl.load(scales + row)
        out = tl.program_id(1) * HIGH + tl.arange(0, HIGH)
        counter = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
        column = tl.program_id(0) * 4 * WIDE + tl.arange(0, 4 * WIDE)
        counters = (first + out * WIDTH)[:, None] // 4 + counter[None, :]
        total = tl.reshape(_normals(tl.load(keys + row), counters, step), (HIGH, 4 * WIDE)) * scale
        for each in tl.static_range(FEW):
            g = tl.load(grads + (row * FEW + each) * outs + out, mask=out < outs, other=0.0) * factor
            x = tl.load(rows + (row * FEW + each) * WIDTH + column, mask=column < WIDTH, other=0.0)
            total += g[:, None] * x[None, :]
        inside = (out < outs)[:, None] & (column < WIDTH)[None, :]
        at = into + row * stride + first + (out * WIDTH)[:, None] + column[None, :]
        tl.store(at, tl.load(at, mask=inside) + total, mask=inside)
