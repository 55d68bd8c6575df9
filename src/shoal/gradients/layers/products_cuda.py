"""Matrix products of many clients on CUDA: float32 by tensor cores, for shapes where that was measured to be faster.

Tensor cores multiply numbers of 11 digits (TF32), and float32 has 24. So each number is split into x + x', with x its
first 11 digits, and a b is computed as a' b + a b' + a b (Ootomo & Yokota 2022, "Recovering single precision
accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance").

The error is of float32's order. x is rounded, so x' is at most 2^-11 of the number and has 12 digits, of which tensor
cores drop the last, 2^-23. A product lacks a' b', at most 2^-22 of it, and two such digits: less than 9 x 2^-24.
Tensor cores add at least 4 products at a time to a sum, and drop digits rather than round: at most 2^-23 of all sizes
for each of these 5 numbers and for the result (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores"). In a
sum of DEPTH products this is less than 3.1 DEPTH x 2^-24 of their sizes; a' b and a b' are too small to matter. Those
sums are added in float32. So the error of D products is at most

    (9 + 3.1 min(D, DEPTH) + D / DEPTH) 2^-24

of the sum of their sizes (`error_bound`), where no product underflows and every number is 0 or at least 2^-113. Of
smaller numbers tensor cores drop what is below 2^-136. Float32's own bound is D 2^-24 (Higham 2002, "Accuracy and
stability of numerical algorithms", 3.1).

What is not finite stays so: an infinite number gives NaN, as does one above 2^128 - 2^116, and a product or sum
within 2^-9 of float32's largest may overflow. No clip depends on any of this: it measures what was computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels import tl, triton
from shoal.precision import in_tf32

OUTPUTS, GRADIENTS = 64, 32
"""The rows of a tile, the part of a product that one program computes: of outputs, or of a gradient to be added."""
COLUMNS, WARPS, STAGES = 64, 4, 3
DEPTH = 32  # products that tensor cores sum
# Where PyTorch takes 1.2 to 2.2 times as long: sides of matrices and operations, as measured on an H200.
SHORTEST, LONGEST, LEAST, MEASURED = 128, 1024, 50 * 2 * 128 * 128 * 1024, (9, 0)
MOST = 2**31  # numbers of one client that can be indexed


def error_bound(depth: int) -> float:
    """How far a sum of this many products may be from the true one, relative to the sum of their sizes."""
    return float((9 + 3.1 * min(depth, DEPTH) + depth / DEPTH) * 2.0**-24)


def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None, kernels: bool = True) -> Tensor:
    """left right + bias, [K, M, N], for [K, M, D], [K, D, N] and [K, N]."""
    if not (kernels and _suits(left, right, bias)):
        return torch.bmm(left, right) if bias is None else torch.baddbmm(bias.unsqueeze(1), left, right)
    made = left.new_empty(*left.shape[:2], right.shape[2])
    launch(OUTPUTS, made, left, right, None if bias is None else bias.unsqueeze(1).expand_as(made), 1.0)
    return made


def add_product(into: Tensor, left: Tensor, right: Tensor, scale: float, kernels: bool = True) -> None:
    """into += scale left right, for [K, M, N], [K, M, D] and [K, D, N]."""
    if kernels and _suits(left, right, into):
        launch(GRADIENTS, into, left, right, into, scale)
    else:
        into.baddbmm_(left, right, alpha=scale)


def launch(tile: int, into: Tensor, left: Tensor, right: Tensor, added: Tensor | None, scale: float) -> None:
    """into = added + scale left right, all of them [K, ., .], with any strides; `added` may be `into`.

    The second factor is the one that tensor cores read from shared memory, along the sum. So that this is how it lies
    in memory, factors may change their places: (left right)^T = right^T left^T.
    """
    added, adds = (into, False) if added is None else (added, True)
    if left.stride(2) == 1 and right.stride(2) == 1:
        into, added, left, right = (x.transpose(1, 2) for x in (into, added, right, left))
    clients, rows, columns = into.shape
    _product[clients * triton.cdiv(rows, tile) * triton.cdiv(columns, COLUMNS),](
        into, left, right, added, scale, rows, columns, left.shape[2],
        *into.stride(), *left.stride(), *right.stride(), *added.stride(),
        adds, tile, COLUMNS, DEPTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def _suits(left: Tensor, right: Tensor, other: Tensor | None) -> bool:
    """Is such a product faster by tensor cores?

    Shapes and the kind of GPU decide, not the clock: the choice shows in the last digits, which must be the same in a
    run with the same seed, in a resumed one, and on every rank.
    """
    sides, operations = (*left.shape[1:], right.shape[2]), 2 * left.numel() * right.shape[2]
    if not left.is_cuda or operations < LEAST or min(sides) < SHORTEST or max(sides) > LONGEST:
        return False
    if in_tf32() or not _measured(left.device):
        return False
    return all(map(_readable, (left, right) if other is None else (left, right, other)))


def _measured(device: torch.device) -> bool:
    return triton is not None and torch.version.hip is None and torch.cuda.get_device_capability(device) == MEASURED


def _readable(x: Tensor) -> bool:
    """Are these float32, few enough to count, and so aligned that the kernel can read several at once?"""
    aligned = x.data_ptr() % 16 == 0 and all(step == 1 or step % 16 == 0 for step in x.stride())
    reach = sum(count * step for count, step in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x.dtype == torch.float32 and aligned and reach < MOST


if triton is not None:

    @triton.jit
    def _short(x):
        """The first 11 digits of float32 numbers, rounded."""
        return ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)

    @triton.jit
    def _product(
        into, left, right, added, scale, rows, columns, depth,
        into_client, into_row, into_column, left_client, left_row, left_depth,
        right_client, right_depth, right_column, added_client, added_row, added_column,
        ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        across = tl.cdiv(columns, COLUMNS)
        tiles = tl.cdiv(rows, ROWS) * across
        client, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
        row, column = tile // across * ROWS + tl.arange(0, ROWS), tile % across * COLUMNS + tl.arange(0, COLUMNS)
        row_there, column_there = (row < rows)[:, None], (column < columns)[None, :]
        row, column = row[:, None], column[None, :]
        left += client * left_client + row * left_row
        right += client * right_client + column * right_column
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            d = start + tl.arange(0, DEPTH)
            a = tl.load(left + d[None, :] * left_depth, mask=row_there & (d < depth)[None, :], other=0.0)
            b = tl.load(right + d[:, None] * right_depth, mask=(d < depth)[:, None] & column_there, other=0.0)
            short_a, short_b = _short(a), _short(b)
            part = tl.dot(a - short_a, short_b, input_precision="tf32")
            part = tl.dot(short_a, b - short_b, part, input_precision="tf32")
            total += tl.dot(short_a, short_b, part, input_precision="tf32")
        total *= scale
        there = row_there & column_there
        if ADDS:
            total += tl.load(added + client * added_client + row * added_row + column * added_column, mask=there)
        tl.store(into + client * into_client + row * into_row + column * into_column, total, mask=there)
