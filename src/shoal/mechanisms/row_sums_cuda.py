"""Norms and weighted sums of many float32 rows on CUDA, in float64: each number is read once, and none is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernels import tl, triton

BLOCK = 1024  # numbers that a program takes of a row at a time
ROWS = 8  # rows of which it sums as many at a time
PARTS = 64  # programs for a row, at most
MOST = 2**31 - PARTS * BLOCK  # the most numbers of a row that can be indexed


def can_sum(rows: Tensor) -> bool:
    """Are these rows [..., size] that the kernels can read?"""
    return (
        triton is not None
        and rows.is_cuda
        and rows.dtype == torch.float32
        and rows.numel() > 0
        and rows.stride(-1) == 1
        and rows.shape[-1] < MOST
    )


def norms(rows: Tensor) -> Tensor:
    """The norm of each row [N, size], in float64."""
    count, size = rows.shape
    parts = min(PARTS, int(triton.cdiv(size, BLOCK)))
    found = rows.new_empty(count, parts, dtype=torch.float64)
    _squares[(count, parts)](rows, found, rows.stride(0), size, parts, BLOCK)
    return found.sum(1).sqrt()


def weighted_sum(rows: Tensor, factors: Tensor) -> Tensor:
    """sum_b factors[k, b] rows[k, b], [K, size] in float64, for rows [K, B, size]."""
    clients, records, size = rows.shape
    found = rows.new_empty(clients, size, dtype=torch.float64)
    blocks = triton.cdiv(size, BLOCK // 2)
    _weighted[(blocks * clients,)](  # only the first dimension may be longer than 65,535
        rows, factors.double().contiguous(), found, rows.stride(0), rows.stride(1), records, size, blocks,
        BLOCK // 2, ROWS,
    )  # fmt: skip
    return found


if triton is not None:

    @triton.jit
    def _squares(rows, found, stride, size, parts, BLOCK: tl.constexpr):
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(part * BLOCK, size, parts * BLOCK):
            place = start + tl.arange(0, BLOCK)
            seen = tl.load(rows + row * stride + place, mask=place < size, other=0.0).to(tl.float64)
            total += seen * seen
        tl.store(found + row * parts + part, tl.sum(total, 0))

    @triton.jit
    def _weighted(
        rows, factors, found, apart, stride, records, size, blocks, BLOCK: tl.constexpr, ROWS: tl.constexpr
    ):  # fmt: skip
        client = (tl.program_id(0) // blocks).to(tl.int64)
        place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        rows, factors = rows + client * apart + place[None, :], factors + client * records
        total = tl.zeros((ROWS, BLOCK), tl.float64)
        for start in range(0, records, ROWS):
            row = (start + tl.arange(0, ROWS)).to(tl.int64)
            by = tl.load(factors + row, mask=row < records, other=0.0)
            there = (row < records)[:, None] & (place < size)[None, :]
            total += by[:, None] * tl.load(rows + row[:, None] * stride, mask=there, other=0.0).to(tl.float64)
        tl.store(found + client * size + place, tl.sum(total, 0), mask=place < size)
