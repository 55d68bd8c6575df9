"""Matrix products of many clients on CUDA: float32 by tensor cores, where that is measured to be faster.

Tensor cores multiply numbers of 11 digits (TF32), and float32 has 24. So each number is split into x + x', with x its
first 11 digits, and a b is computed as a' b + a b' + a b (Ootomo and Yokota 2022, "Recovering single precision
accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance").

The error is of float32's order. x is rounded, so x' is at most 2^-11 of the number and has 12 digits, of which tensor
cores drop the last, 2^-23. A product lacks a' b', at most 2^-22 of it, and two such digits: less than 9 x 2^-24.
Tensor cores add at least 4 products at a time to a sum, and drop digits rather than round: at most 2^-23 of all sizes
for each of these 5 numbers and for the result (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores"). In a
sum of DEPTH products this is less than 3.1 DEPTH x 2^-24 of their sizes; a' b and a b' are too small to matter. Those
sums are added in float32. So the error of D products, where none underflows, is at most

    (9 + 3.1 min(D, DEPTH) + D / DEPTH) 2^-24

of the sum of their sizes (`error_bound`). Float32's own bound is D 2^-24 (Higham 2002, "Accuracy and stability of
numerical algorithms", 3.1). What is not finite stays so, and what is above 2^128 - 2^116 is taken as infinite.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.kernels import tl, triton


class Tile(NamedTuple):
    """The part of a product that one program computes."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = (Tile(64, 64, 4, 3), Tile(64, 128, 4, 3), Tile(128, 128, 8, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 3))
DEPTH = 32  # products that tensor cores sum
LEAST, SHORTEST = 2**29, 64  # operations and sides of matrices; with less, launching and memory take the time
MOST = 2**31  # numbers of one client that can be indexed
FASTER = 0.9  # of PyTorch's time: a closer choice would fall differently from run to run
NEAR = 1e-5  # of the largest number: how far the kernel and PyTorch may be apart
REPEATS, TIMES = 5, 3

_tiles: dict[tuple[object, ...], Tile | None] = {}
"""The fastest tile by device, shapes and strides, and None where PyTorch is faster: a process measures each once."""


def error_bound(depth: int) -> float:
    """How far a sum of so many products may be from the true one, relative to the sum of their sizes."""
    return float((9 + 3.1 * min(depth, DEPTH) + depth / DEPTH) * 2.0**-24)


def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None, kernels: bool = True) -> Tensor:
    """left right + bias, [K, M, N], for [K, M, D], [K, D, N] and [K, N]."""
    return _run(_tile(left, right, bias, None) if kernels else None, left, right, bias, None)


def add_product(into: Tensor, left: Tensor, right: Tensor, scale: float, kernels: bool = True) -> None:
    """into += scale left right, for [K, M, N], [K, M, D] and [K, D, N]."""
    _run(_tile(left, right, None, into) if kernels else None, left, right, None, into, scale)


def _run(
    tile: Tile | None, left: Tensor, right: Tensor, bias: Tensor | None, into: Tensor | None, scale: float = 1.0
) -> Tensor:
    """left right + bias; or into, to which scale left right is added. By PyTorch where there is no tile."""
    if tile is None and into is not None:
        return into.baddbmm_(left, right, alpha=scale)
    if tile is None:
        return torch.bmm(left, right) if bias is None else torch.baddbmm(bias.unsqueeze(1), left, right)
    made = left.new_empty(*left.shape[:2], right.shape[2]) if into is None else into
    launch(tile, made, left, right, into if bias is None else bias.unsqueeze(1).expand_as(made), scale)
    return made


def launch(tile: Tile, into: Tensor, left: Tensor, right: Tensor, added: Tensor | None, scale: float) -> None:
    """into = added + scale left right, all of them [K, ., .], with any strides; `added` may be `into`.

    The second factor is the one that tensor cores read from shared memory, along the sum. So that this is how it lies
    in memory, factors may change their places: (left right)^T = right^T left^T.
    """
    added, adds = (into, False) if added is None else (added, True)
    if left.stride(2) == 1 and right.stride(2) == 1:
        into, added, left, right = (x.transpose(1, 2) for x in (into, added, right, left))
    clients, rows, columns = into.shape
    _product[clients * triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),](
        into, left, right, added, scale, rows, columns, left.shape[2],
        *into.stride(), *left.stride(), *right.stride(), *added.stride(),
        adds, *tile[:2], DEPTH, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _tile(left: Tensor, right: Tensor, bias: Tensor | None, into: Tensor | None) -> Tile | None:
    """The tile for such a product; None where PyTorch is to compute it.

    What is not known yet is measured, but not while a CUDA graph is recorded: such a step has been run before.
    """
    shortest, operations = min(*left.shape[1:], right.shape[2]), 2 * left.numel() * right.shape[2]
    if not left.is_cuda or shortest < SHORTEST or operations < LEAST:
        return None
    if torch.backends.cuda.matmul.allow_tf32 or not _has_tf32(left.device):
        return None
    given = [x for x in (left, right, bias, into) if x is not None]
    if not all(map(_readable, given)):
        return None
    key = (left.device, bias is None, into is None, *((x.shape, x.stride()[1:]) for x in given))
    if key not in _tiles:
        if torch.cuda.is_current_stream_capturing():
            return None
        _tiles[key] = _fastest(left, right, bias, into)
    return _tiles[key]


def _has_tf32(device: torch.device) -> bool:
    return triton is not None and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _readable(x: Tensor) -> bool:
    """Are these float32, few enough to count, and so aligned that the kernel can read several at once?"""
    aligned = x.data_ptr() % 16 == 0 and all(step == 1 or step % 16 == 0 for step in x.stride())
    reach = sum(count * step for count, step in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x.dtype == torch.float32 and aligned and reach < MOST


def _fastest(left: Tensor, right: Tensor, bias: Tensor | None, into: Tensor | None) -> Tile | None:
    """The fastest tile, if it is faster than PyTorch and gives the same; of other numbers, in the same shapes.

    How long a product takes must say nothing of the records.
    """
    try:
        left, right = _stand_in(left), _stand_in(right)
        bias, into = (x if x is None else _stand_in(x) for x in (bias, into))
        plain = _run(None, left, right, bias, into).clone()
        best, least = None, FASTER * _milliseconds(None, left, right, bias, into)
    except torch.OutOfMemoryError:
        return None
    for tile in TILES:
        try:
            if into is not None:
                into.copy_(_stand_in(into))
            error = (_run(tile, left, right, bias, into) - plain).abs().max()
            taken = _milliseconds(tile, left, right, bias, into)
        except Exception:  # of Triton, for tiles that this GPU has no room for
            continue
        if taken < least and bool(error <= NEAR * plain.abs().max()):
            best, least = tile, taken
    return best


def _stand_in(x: Tensor) -> Tensor:
    """Other numbers in the same shape and order."""
    return torch.empty_like(x).copy_(torch.arange(x.numel(), device=x.device, dtype=x.dtype).sin_().view(x.shape))


def _milliseconds(tile: Tile | None, *operands: Any) -> float:
    """What a product takes, at best."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMES + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(REPEATS):
            _run(tile, *operands)
        mark.record()
    marks[-1].synchronize()
    return float(min(start.elapsed_time(end) for start, end in pairwise(marks))) / REPEATS


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
