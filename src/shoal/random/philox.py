"""Normal numbers on CUDA: Philox 4x32 with a key for each client, computed where they are added (Salmon et al. 2011).

The counter is (coordinate, step), so that no number is ever drawn twice under a key. One pass over the
vectors: read, add, write; the gradients of matrices are added in the same pass where they are products of a few rows.
A radius of few digits, one of 2^18, is extended by 128 bits of another counter. Without Triton, torch's own
generator draws for one client after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.kernels import libdevice, tl, triton
from shoal.random.noise_source import Product, between

BLOCK = 256  # counters per program, each of which gives four numbers
TILE = (4, 128)  # of a matrix: rows, and counters along a row
LONG = (1, 256)  # of a matrix that is one row
MOST_ROWS = 16  # of a product; with more a library's own kernel is faster
LENT = 63  # the last 6 bits of an angle extend its radius: 26 bits are as fine as float32
RARE = 2**14  # radii of integers below this are extended: rarely, since a whole block is extended with one


class Philox:
    """The noise of clients with these keys [K] over the steps of a round."""

    def __init__(self, keys: Tensor, fused: bool = True) -> None:
        self._keys, self.fuses = keys, fused and triton is not None
        self._step = torch.zeros((), dtype=torch.int64, device=keys.device)

    def begin(self, other: Any) -> None:
        """Take over another one's keys, from their first step on."""
        self._keys.copy_(other._keys)
        self._step.zero_()

    def takes(self, product: Product) -> bool:
        """A counter's four numbers must lie in one row of the matrix."""
        few = product.rows.shape[1] <= MOST_ROWS and product.rows.dtype == torch.float32
        return self.fuses and few and product.start % 4 == product.rows.shape[2] % 4 == 0

    def add(self, into: Tensor, scales: Tensor, sums: Tensor | None = None, products: Sequence[Product] = ()) -> None:
        """Add sums, products and noise, as one number for each coordinate."""
        if triton is None:
            self._add_plainly(into, scales, sums)
        else:
            for product in products:
                self._add_product(into, scales, product)
            noise, given = (self._keys, scales, self._step), sums is not None
            rows = (into.stride(0), sums.stride(0) if sums is not None else 0)
            for start, stop in between(products, into.shape[1]):
                grid = (triton.cdiv(stop - start, 4 * BLOCK), len(into))
                _add[grid](into, sums if given else into, *noise, start, stop, *rows, given, BLOCK, num_warps=8)
        self._step += 1

    def _add_product(self, into: Tensor, scales: Tensor, product: Product) -> None:
        rows, grads = product.rows.contiguous(), product.grads.contiguous()
        (clients, few, width), outs = rows.shape, grads.shape[2]
        high, wide = LONG if outs == 1 else TILE
        grid = (triton.cdiv(width, 4 * wide), triton.cdiv(outs, high), clients)
        noise, place = (self._keys, scales, self._step), (product.start, outs, into.stride(0), width)
        _add_product[grid](into, *noise, rows, grads, product.scale, *place, few, high, wide, num_warps=4)

    def _add_plainly(self, into: Tensor, scales: Tensor, sums: Tensor | None) -> None:
        step = int(self._step)
        for place, (key, row) in enumerate(zip(self._keys.tolist(), into, strict=True)):
            generator = torch.Generator(into.device).manual_seed((key + step) % 2**63)
            noise = _normal_numbers(len(row), generator) * scales[place]
            row.add_((noise if sums is None else noise + sums[place]).to(row.dtype))
        if sums is not None:
            sums.zero_()


def _normal_numbers(count: int, generator: torch.Generator) -> Tensor:
    """By the Box-Muller formula in float64, with 212 bits for the radius."""
    *bits, turn = torch.rand(5, (count + 1) // 2, dtype=torch.float64, device=generator.device, generator=generator)
    u = sum(part * 2.0 ** (-53 * place) for place, part in enumerate(bits))
    radius = torch.as_tensor(u).clamp_(2.0**-212, 1.0).log().mul_(-2).sqrt_()
    angle = 2 * torch.pi * turn
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


if triton is not None:
    _RARE = tl.constexpr(RARE)
    _LENT = tl.constexpr(LENT)

    @triton.jit
    def _radius(a, b):
        """sqrt(-2 ln u), u = (a + lent)/2^32, last bits lent by the angle; near 1 it is 1 - u that has the digits."""
        upper = a >= 2147483648
        lent = (b & _LENT).to(tl.float32) * 0.015625 + 0.0078125
        nearer = (tl.where(upper, 4294967295 - a, a).to(tl.float32) + lent) * 2.3283064365386963e-10
        quick = libdevice.fast_logf(tl.where(upper, 1.0 - nearer, nearer))
        near_one = -nearer * (1.0 + nearer * (0.5 + nearer * (0.33333333 + nearer * 0.25)))
        return tl.sqrt(-2.0 * tl.where(upper & (nearer < 0.03125), near_one, quick))

    @triton.jit
    def _extended(radius, a, e, f, g, h):
        """The radius, or that of a number with 128 more bits where it has too few digits."""
        more = (h.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        more = (g.to(tl.float64) + more) * 2.3283064365386963e-10
        more = (f.to(tl.float64) + more) * 2.3283064365386963e-10
        more = (e.to(tl.float64) + more) * 2.3283064365386963e-10
        u = (tl.minimum(a, _RARE).to(tl.float64) + more) * 2.3283064365386963e-10
        return tl.where(a < _RARE, tl.sqrt(-2.0 * libdevice.log(u)).to(tl.float32), radius)

    @triton.jit
    def _turned(radius, b):
        """The Box-Muller formula, as in `normals`."""
        angle = (b.to(tl.int32, bitcast=True) & (-1 - _LENT)).to(tl.float32) * 1.4629180792671596e-9
        return radius * libdevice.fast_cosf(angle), radius * libdevice.fast_sinf(angle)

    @triton.jit
    def _normals(key, counter, step):
        """Four normal numbers for every counter, [..., 2, 2]."""
        zero = counter * 0
        now = tl.load(step).to(tl.int32) + zero
        a, b, c, d = tl.philox(key, counter, now, zero, zero)
        one, other = _radius(a, b), _radius(c, d)
        if tl.max((tl.minimum(a, c) < _RARE).to(tl.int32)) > 0:
            e, f, g, h = tl.philox(key, counter, now, zero + 1, zero)
            one = _extended(one, a, e, f, g, h)
            e, f, g, h = tl.philox(key, counter, now, zero + 2, zero)
            other = _extended(other, c, e, f, g, h)
        first, second = _turned(one, b)
        third, fourth = _turned(other, d)
        return tl.join(tl.join(first, third), tl.join(second, fourth))

    @triton.jit
    def _add(
        into, sums, keys, scales, step, first, last, stride, sums_stride,
        SUMS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """into[first:last] += sums + scale x noise, in every row, and sums = 0; `first` is a multiple of 4."""
        row = tl.program_id(1).to(tl.int64)
        scale = tl.load(scales + row)
        place = first + tl.program_id(0) * 4 * BLOCK + tl.arange(0, 4 * BLOCK)
        inside = place < last
        at = into + row * stride + place
        beside = sums + row * sums_stride + place
        if scale != 0.0:
            counter = first // 4 + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            total = tl.reshape(_normals(tl.load(keys + row), counter, step), (4 * BLOCK,)) * scale
            if SUMS:
                total += tl.load(beside, mask=inside)
            tl.store(at, tl.load(at, mask=inside) + total, mask=inside)
        elif SUMS:
            tl.store(at, tl.load(at, mask=inside) + tl.load(beside, mask=inside), mask=inside)
        if SUMS:
            tl.debug_barrier()  # one thread may clear what another has still to read
            tl.store(beside, tl.zeros((4 * BLOCK,), tl.float32), mask=inside)

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
