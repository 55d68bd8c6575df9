"""Normal numbers of many streams at once, for noise in every step of every client: drawing it must not cost more
than the training does.

On a CPU: bits from each stream's own cipher, turned by Box and Muller's formula with vector arithmetic, in a loop in
C where there is a compiler (1.4 ns a number in one thread, else 2.6; numpy's ziggurat takes 12, torch's generator 6).
On CUDA: a counter-based generator (Philox) with a key for each stream, so that the numbers never touch memory before
they are added. Both give the same numbers to a client whoever else is computed beside it; a CPU and a GPU differ.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.kernels import compiled
from shoal.privacy.random import SLACK, Keystream, Streams

PIECE = 2**19
"""Numbers that are drawn in one go: one more stream for every so many, so that threads can share the work."""

Each = Callable[[Callable[["_Task"], None], Sequence["_Task"]], Iterable[None]]
Loop = Callable[[Tensor, Tensor, Tensor], None]
"""into[k, :] += |scales[k]| N(0, 1) from these bits, [K, 2 ceil(P/2)]."""


@dataclass(frozen=True)
class Product:
    """scale x grads^T rows [K, out, in], which belongs to the places of a vector from `start` on."""

    start: int
    rows: Tensor
    grads: Tensor
    scale: float


class Normals(Protocol):
    """The noise of K clients over the steps of a round: every call draws new numbers."""

    @property
    def fuses(self) -> bool:
        """May products be added with the noise? It spares a pass over the vectors."""

    def takes(self, product: Product) -> bool:
        """Can this one be added with the noise?"""

    def begin(self, other: Normals) -> None:
        """Draw from another one's streams from now on."""

    def add(self, into: Tensor, scales: Tensor, products: Sequence[Product] = ()) -> None:
        """into[k] += scales[k] N(0, 1), for every client k, and the products; nothing is drawn where a scale is 0."""


def normals(
    streams: Streams,
    purpose: str,
    numbers: Sequence[int],
    clients: Sequence[int],
    like: Tensor,
    each: Each | None = None,
    fused: bool = False,
    kernels: bool = True,
) -> Normals:
    """Streams for clients with vectors like these, [K, P]; `each` runs tasks, in threads perhaps.

    `fused`: it may add products with the noise where it can, which is on CUDA. `kernels`: on a CPU by the loop in C.
    """
    if like.is_cuda and streams.mode == "secure":
        raise ConfigError("random=secure draws the noise of local steps by a cipher on a CPU: use --device cpu")
    if like.is_cuda:
        from shoal.privacy.philox import Philox

        keys = [streams.key(purpose, *numbers, client) for client in clients]
        return Philox(torch.tensor(keys, device=like.device), fused)
    pieces = range(len(range(0, like.shape[1], PIECE)))
    keystreams = [[streams.keystream(purpose, *numbers, client, piece) for piece in pieces] for client in clients]
    return OnCpu(keystreams, each or map, loop_in_c() if kernels else None)


@dataclass(frozen=True)
class _Task:
    into: Tensor
    scales: Tensor
    keystreams: list[Keystream]
    loop: Loop | None

    def run(self) -> None:
        add_normals(self.into, self.scales, self.keystreams, self.loop)


@dataclass(frozen=True)
class OnCpu:
    """Each client has a stream for every piece of its vector."""

    keystreams: list[list[Keystream]]
    each: Each
    loop: Loop | None = None
    fuses: bool = False

    def begin(self, other: Normals) -> None:
        assert isinstance(other, OnCpu)
        self.keystreams[:] = other.keystreams

    def takes(self, product: Product) -> bool:
        return False

    def add(self, into: Tensor, scales: Tensor, products: Sequence[Product] = ()) -> None:
        assert not products
        for _ in self.each(_Task.run, list(self._tasks(into, scales))):
            pass

    def _tasks(self, into: Tensor, scales: Tensor) -> Iterator[_Task]:
        """Pieces of long vectors, or several short ones together."""
        size, rows = into.shape[1], scales.nonzero().flatten().tolist()
        for group in _runs(rows, max(1, PIECE // max(size, 1))):
            for piece, start in enumerate(range(0, size, PIECE)):
                columns = slice(start, min(start + PIECE, size))
                keystreams = [self.keystreams[row][piece] for row in range(group.start, group.stop)]
                yield _Task(into[group, columns], scales[group], keystreams, self.loop)


def add_normals(into: Tensor, scales: Tensor, keystreams: Sequence[Keystream], loop: Loop | None = None) -> None:
    """into[k, :] += |scales[k]| N(0, 1), the numbers of row k from its own stream."""
    rows, size = into.shape
    half = (size + 1) // 2
    words = _memory("words", 2 * rows * half + SLACK, torch.int32)
    buffer = words.numpy().data.cast("B")
    for row, keystream in enumerate(keystreams):
        keystream.fill(buffer[8 * half * row : 8 * half * (row + 1) + SLACK])
    bits = words[: 2 * rows * half].view(rows, 2 * half)
    fits = into.dtype == torch.float32 and into.stride(1) == 1
    (loop if loop is not None and fits else by_operations)(into, scales, bits)


def by_operations(into: Tensor, scales: Tensor, bits: Tensor) -> None:
    """r cos and r sin are two independent normal numbers.

    r = sqrt(-2 ln u), u = (i + 1/2)/2^31 of a 31-bit whole number i, so that the greatest is 6.66; the angle has 32
    bits.
    """
    rows, size = into.shape
    half = (size + 1) // 2
    radius, angle, cosine = _memory("floats", 3 * rows * half, torch.float32).view(3, rows, half)
    radius.copy_(bits[:, :half].bitwise_and_(0x7FFFFFFF)).add_(0.5).mul_(2.0**-31).log_()
    radius.mul_(-2).sqrt_().mul_(scales.float().abs().unsqueeze(1))  # a square of the scale would be 0 too early
    angle.copy_(bits[:, half:]).mul_(math.pi * 2.0**-31)
    into[:, :half].addcmul_(torch.cos(angle, out=cosine).to(into.dtype), radius.to(into.dtype))
    rest = size - half
    into[:, half:].addcmul_(angle.sin_()[:, :rest].to(into.dtype), radius[:, :rest].to(into.dtype))


@cache
def loop_in_c() -> Loop | None:
    """`by_operations` as a loop in C, where there is a compiler and what it made gives the same numbers."""
    library = compiled(Path(__file__).with_suffix(".c"))
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.add_normals.argtypes = [pointer, number, number, number, pointer, pointer]

    def loop(into: Tensor, scales: Tensor, bits: Tensor) -> None:
        scales = scales.float().contiguous()
        place = into.data_ptr(), into.stride(0), *into.shape
        library.add_normals(*place, bits.data_ptr(), scales.data_ptr())

    edges = torch.tensor([0, 1, -1, 2**29, 2**30, 2**31 - 1, -(2**29), -(2**31)], dtype=torch.int32)
    bits = torch.cat(
        [torch.cartesian_prod(edges, edges).t(), torch.arange(-(2**31), 2**31, 2**20).int().view(2, -1)], 1
    )
    made, wanted = torch.zeros(2, 1, bits.numel() - 1)
    scales = torch.full((1,), 3.0)
    loop(made, scales, bits.view(1, -1).clone())
    by_operations(wanted, scales, bits.view(1, -1).clone())
    return loop if torch.allclose(made, wanted, rtol=1e-5, atol=1e-5) else None


_kept = threading.local()


def _memory(name: str, count: int, dtype: torch.dtype) -> Tensor:
    """Memory that each thread keeps: getting it anew from the system costs more than filling it."""
    kept: Tensor | None = getattr(_kept, name, None)
    if kept is None or kept.numel() < count:
        kept = torch.empty(count, dtype=dtype)
        setattr(_kept, name, kept)
    return kept[:count]


def _runs(rows: Sequence[int], longest: int) -> Iterator[slice]:
    """Neighbouring rows as slices of at most so many."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1 or end - start == longest:
            yield slice(rows[start], rows[end - 1] + 1)
            start = end
