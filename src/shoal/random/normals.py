"""Noise of many streams at once, for every step of every client, no slower than the training itself.

On a CPU: bits from each stream's own cipher, transformed by the Box-Muller formula with vector arithmetic, in a C
loop where there is a compiler. On CUDA: a counter-based generator (Philox) with a key for each stream, so that the
numbers never touch memory before they are added. Both give a client the same numbers whichever others are computed
beside it; a CPU and a GPU differ. A radius has 32 bits, and 128 more where it is one of the longest, so that float32
is the limit in the tails too; values beyond 14.9 standard deviations (probability TAIL) never occur. In secure mode
it is a discrete Gaussian (`discrete_gaussian`), from the same cipher.

A sum of gradients and its noise are added to each other before they are added to the target: otherwise a gradient
could be rounded into a large number and the noise after it be lost there.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.kernels import compiled
from shoal.random.noise_source import Normals, Product, between
from shoal.random.secure_streams import SecureGenerator, rounded_sum
from shoal.random.streams import SLACK, Keystream, Streams

RARE = 2**20
"""32-bit integers below this are extended by 128 more bits; the others have enough digits."""

TAIL = 2.0**-160
"""The probability of a radius longer than any that can be drawn."""

PIECE = 2**19
"""Numbers per stream: longer vectors use several streams, so that threads can share the work."""

BLOCK = 2**20
"""Numbers of a product that are computed in one pass, with their noise."""

FEW = 128
"""The most rows of a product that is summed in float32: with more, rounding would move the sum."""

WORTH_IT = 2**15
"""The least size of a product that is computed together with its noise."""

Each = Callable[[Callable[[Callable[[], None]], None], Sequence[Callable[[], None]]], Iterable[None]]
Loop = Callable[[Tensor, Tensor, Tensor, Tensor | None], bool]
"""into[k, :] += sums[k, :] + |scales[k]| N(0, 1) from bits [K, 2 ceil(P/2) + spare]; False if too few to spare."""


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
    """Streams for clients with vectors like these, [K, P]; `each` runs tasks, possibly in threads.

    `fused`: on CUDA products may be added with the noise, as on a CPU. `kernels`: use the C loop on a CPU.
    """
    if like.is_cuda and streams.mode == "secure":
        raise ConfigError("random=secure draws the noise of local steps by a cipher on a CPU: use --device cpu")
    if like.is_cuda:
        from shoal.random.philox import Philox

        keys = [streams.key(purpose, *numbers, client) for client in clients]
        return Philox(torch.tensor(keys, device=like.device), fused)
    adding = add_discrete if streams.mode == "secure" else partial(add_normals, loop=loop_in_c() if kernels else None)
    return OnCpu(lambda row, start: streams.keystream(purpose, *numbers, clients[row], start), each or map, adding)


Adding = Callable[[Tensor, Tensor, Sequence[Keystream], Tensor | None], None]
_Task = Callable[[], None]


class OnCpu:
    """Each client has a stream for every piece of its vector, named by where that begins."""

    fuses = True

    def __init__(self, opened: Callable[[int, int], Keystream], each: Each, adding: Adding) -> None:
        self._opened, self._each, self._adding = opened, each, adding
        self._streams: dict[tuple[int, int], Keystream] = {}

    def begin(self, other: Normals) -> None:
        """Draw from another one's streams from now on."""
        assert isinstance(other, OnCpu)
        self._opened = other._opened
        self._streams.clear()

    def takes(self, product: Product) -> bool:
        """Worthwhile where the product would not stay in the cache until the noise is added."""
        _, few, width = product.rows.shape
        return few <= FEW and width * product.grads.shape[2] >= WORTH_IT and product.rows.dtype == torch.float32

    def add(self, into: Tensor, scales: Tensor, sums: Tensor | None = None, products: Sequence[Product] = ()) -> None:
        """Add sums, products and noise, as one number for each coordinate."""
        rows = scales.nonzero().flatten().tolist()
        tasks = [task for product in products for task in self._of_product(into, scales, product, rows)]
        for start, stop in between(products, into.shape[1]):
            tasks += self._of_sums(into, scales, sums, range(start, stop), rows)
        for _ in self._each(_run, tasks):
            pass
        if len(rows) < len(into):
            self._add_without_noise(into, (scales == 0).nonzero().flatten(), sums, products)

    def _of_sums(
        self, into: Tensor, scales: Tensor, sums: Tensor | None, places: range, rows: Sequence[int]
    ) -> Iterator[_Task]:
        """Pieces of long vectors, or several short ones together."""
        for group in _runs(rows, max(1, PIECE // max(len(places), 1))):
            for start in range(places.start, places.stop, PIECE):
                part = group, slice(start, min(start + PIECE, places.stop))
                keystreams = [self._stream(row, start) for row in range(group.start, group.stop)]
                yield partial(self._move, into[part], scales[group], keystreams, None if sums is None else sums[part])

    def _move(self, into: Tensor, scales: Tensor, keystreams: list[Keystream], sums: Tensor | None) -> None:
        self._adding(into, scales, keystreams, sums)
        if sums is not None:
            sums.zero_()

    def _of_product(self, into: Tensor, scales: Tensor, product: Product, rows: Sequence[int]) -> Iterator[_Task]:
        """Some rows of a client's matrix at a time."""
        width, outs = product.rows.shape[2], product.grads.shape[2]
        high = max(1, BLOCK // width)
        for row in rows:
            for out in range(0, outs, high):
                last = min(out + high, outs)
                start = product.start + out * width
                part = into[row : row + 1, start : start + (last - out) * width]
                factors = product.grads[row, :, out:last].t().detach(), product.rows[row].detach()
                keystream = self._stream(row, start)
                yield partial(self._add_product, part, scales[row : row + 1], keystream, *factors, product.scale)

    def _add_product(
        self, into: Tensor, scales: Tensor, keystream: Keystream, grads: Tensor, rows: Tensor, scale: float
    ) -> None:
        made = _memory("product", into.numel(), torch.float32).view(len(grads), -1)
        torch.addmm(made, grads, rows, beta=0, alpha=scale, out=made)
        self._adding(into, scales, [keystream], made.view(1, -1))

    def _add_without_noise(
        self, into: Tensor, still: Tensor, sums: Tensor | None, products: Sequence[Product]
    ) -> None:
        if sums is not None:
            into[still] += sums[still]
            sums[still] = 0.0
        for product in products:
            places = slice(product.start, product.start + product.rows.shape[2] * product.grads.shape[2])
            made = torch.bmm(product.grads[still].transpose(1, 2), product.rows[still])
            into[still, places] += product.scale * made.flatten(1)

    def _stream(self, row: int, start: int) -> Keystream:
        if (row, start) not in self._streams:
            self._streams[row, start] = self._opened(row, start)
        return self._streams[row, start]


def _run(task: _Task) -> None:
    task()


def add_normals(
    into: Tensor,
    scales: Tensor,
    keystreams: Sequence[Keystream],
    sums: Tensor | None = None,
    loop: Loop | None = None,
) -> None:
    """into[k, :] += sums[k, :] + |scales[k]| N(0, 1), the numbers of row k from its own stream."""
    rows, size = into.shape
    half = (size + 1) // 2
    width = 2 * half + _spare(half)
    words = _memory("words", rows * width + SLACK, torch.int32)
    buffer = words.numpy().data.cast("B")
    for row, keystream in enumerate(keystreams):
        keystream.fill(buffer[4 * width * row : 4 * width * (row + 1) + SLACK])
    bits = words[: rows * width].view(rows, width)
    fits = all(t is None or (t.dtype == torch.float32 and t.stride(1) == 1) for t in (into, sums))
    if not (loop if loop is not None and fits else by_operations)(into, scales, bits, sums):
        raise RuntimeError("too few random words for the longest radii; try again")


def add_discrete(into: Tensor, scales: Tensor, keystreams: Sequence[Keystream], sums: Tensor | None = None) -> None:
    """The same in secure mode: the sum on a grid, plus a discrete Gaussian on it (secure_streams.rounded_sum)."""
    for place, (row, keystream) in enumerate(zip(into, keystreams, strict=True)):
        values = torch.zeros_like(row) if sums is None else sums[place]
        noisy = rounded_sum(values, abs(float(scales[place])), SecureGenerator(keystream))
        row.copy_(row.double() + noisy)


def _spare(half: int) -> int:
    """Words that extend rare numbers, four each: more are needed with probability below 1e-46, less than TAIL's."""
    return 4 * (24 + half // 256)


def by_operations(into: Tensor, scales: Tensor, bits: Tensor, sums: Tensor | None = None) -> bool:
    """r cos and r sin are two independent normal numbers.

    r = sqrt(-2 ln u), u = (i + 1/2)/2^32 of a 32-bit whole number i, as a signed one: where it is below 0, u is above
    1/2 and 1 - u has the digits. Where i is RARE 128 more bits follow it. The angle has 32 bits.
    """
    size = into.shape[1]
    half = (size + 1) // 2
    numbers, angles, spare = bits[:, :half], bits[:, half : 2 * half], bits[:, 2 * half :]
    nearer = (numbers ^ (numbers >> 31)).float().add_(0.5).mul_(2.0**-32)
    radius = torch.where(numbers < 0, torch.log1p(-nearer), nearer.log()).mul_(-2).sqrt_()
    for row in ((numbers >= 0) & (numbers < RARE)).any(1).nonzero().flatten().tolist():
        places = ((numbers[row] >= 0) & (numbers[row] < RARE)).nonzero().flatten()
        if 4 * len(places) > spare.shape[1]:
            return False
        low = torch.full(places.shape, 0.5, dtype=torch.float64)
        for more in (spare[row, : 4 * len(places)].view(-1, 4).long() & 0xFFFFFFFF).double().t().flip(0):
            low = (more + low) * 2.0**-32
        radius[row, places] = ((numbers[row, places].double() + low) * 2.0**-32).log().mul(-2).sqrt().float()
    radius *= scales.float().abs().unsqueeze(1)  # the square of the scale could underflow
    angle = angles.float().mul_(math.pi * 2.0**-31)
    noise = torch.cat([radius * angle.cos(), (radius * angle.sin())[:, : size - half]], 1).to(into.dtype)
    into += noise if sums is None else noise.add_(sums)
    return True


@cache
def loop_in_c() -> Loop | None:
    """`by_operations` as a C loop, where there is a compiler and the compiled loop gives the same numbers."""
    library = compiled(Path(__file__).with_suffix(".c"))
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.add_normals.argtypes = [pointer, number, pointer, number, number, number, pointer, number, pointer]
    library.add_normals.restype = ctypes.c_int32

    def loop(into: Tensor, scales: Tensor, bits: Tensor, sums: Tensor | None = None) -> bool:
        scales = scales.float().contiguous()
        size = into.shape[1]
        beside = (None, 0) if sums is None else (sums.data_ptr(), sums.stride(0))
        place = into.data_ptr(), into.stride(0), *beside, *into.shape
        spare = bits.shape[1] - 2 * ((size + 1) // 2)
        return not library.add_normals(*place, bits.data_ptr(), spare, scales.data_ptr())

    edges = torch.tensor([0, 1, RARE - 1, RARE, -1, -2, 2**29, 2**30, 2**31 - 1, -(2**29), -(2**31)]).int()
    pairs = torch.cat(
        [torch.cartesian_prod(edges, edges).t(), torch.arange(-(2**31), 2**31, 2**20).int().view(-1, 2).t()], 1
    )
    spare = torch.arange(-(2**31), 2**31, 2**23).int()
    bits = torch.cat([pairs.flatten(), spare]).view(1, -1)
    sums, scales = torch.linspace(-1, 1, pairs.numel() - 1).view(1, -1), torch.full((1,), 3.0)
    made, wanted = torch.zeros(2, 1, pairs.numel() - 1)
    fitted = [way(into, scales, bits, sums) for way, into in ((loop, made), (by_operations, wanted))]
    return loop if all(fitted) and torch.allclose(made, wanted, rtol=1e-5, atol=1e-5) else None


_kept = threading.local()


def _memory(name: str, count: int, dtype: torch.dtype) -> Tensor:
    """Memory that each thread keeps: allocating it costs more than filling it."""
    kept: Tensor | None = getattr(_kept, name, None)
    if kept is None or kept.numel() < count:
        kept = torch.empty(count, dtype=dtype)
        setattr(_kept, name, kept)
    return kept[:count]


def _runs(rows: Sequence[int], longest: int) -> Iterator[slice]:
    """Neighbouring rows as slices of at most this many."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1 or end - start == longest:
            yield slice(rows[start], rows[end - 1] + 1)
            start = end
