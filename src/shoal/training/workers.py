"""Parallel work on chunks of a cohort: one thread per core on a CPU, one after the other on a GPU.

On a CPU, one thread per chunk beats one chunk with many threads inside each operation: no thread waits for
another, and a busy machine hurts less. Results come back in the order of the items, so that sums, and with them
the model, do not depend on which thread was first.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

from shoal.precision import Precision, computing

_LEAST, _ONE = 5e-324, 1.0  # whose product the compiler would know, were they written out
Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """A small pool of threads; `count` is 1 on a GPU, and where chunks must not be trained in parallel."""

    def __init__(
        self,
        device: torch.device,
        threads: int | None = None,
        *,
        side_by_side: bool = True,
        precision: Precision = "auto",
    ) -> None:
        self.threads = threads or torch.get_num_threads()
        self.count = self.threads if device.type == "cpu" and side_by_side else 1
        self._pool: ThreadPoolExecutor | None = None
        self._precision = precision
        if device.type == "cpu" and side_by_side:
            _keep_memory()

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], steady: bool = False
    ) -> Iterator[Result]:
        """function(item) for each item, in order, at most `count` + 1 results ahead of the reader.

        `steady`: an item gives the same result, to the last digit, however many others there are.
        """
        items = list(items)
        alone = self.count == 1 or (len(items) < 2 and not steady)
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads if alone and not steady else 1)  # threads divide the rows of a product
        try:
            with _flushing(), computing(self._precision):
                yield from map(function, items) if alone else self._side_by_side(function, items)
        finally:
            torch.set_num_threads(before)

    def _side_by_side(self, function: Callable[[Item], Result], items: list[Item]) -> Iterator[Result]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, initializer=_begin_thread)
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(self._pool.submit(function, item))
                if len(waiting) > self.count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def spread(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterable[Result]:
        """Small tasks inside the work on one chunk: in parallel unless chunks already are."""
        if self.count == 1 or len(items) < 2 or torch.get_num_threads() == 1:
            return map(function, items)
        return self._side_by_side(function, list(items))

    def close(self) -> None:
        """Shut the threads down."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _begin_thread() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


@contextmanager
def _flushing() -> Iterator[None]:
    """Treat numbers below 1e-38 as 0 in this thread.

    Processors are very slow with them, and an overconfident, noisy model can have so many in its gradients that a
    round takes almost three times as long.
    """
    before = _LEAST * _ONE == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _keep_memory() -> None:
    """Let the C library keep freed memory for the next step.

    Returning it to the system and asking for it again, page by page, takes about a tenth of a round. (Where there is
    no such call, only that time is lost.)
    """
    trim_threshold, mmap_threshold = -1, -3
    with suppress(OSError, AttributeError):
        if sys.platform == "linux":
            library = ctypes.CDLL(None)
            library.mallopt(mmap_threshold, 32 * 2**20)
            library.mallopt(trim_threshold, 256 * 2**20)
