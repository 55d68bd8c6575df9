"""Arithmetic that an attack needs: exact to float32's last digits, and not slow near zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact() -> Iterator[None]:
    """Inside, a GPU's convolutions keep all digits of float32, and a CPU takes numbers near 1e-40 for 0.

    TF32 has 10 bits, so that a gradient could never be explained better than to a thousandth. Searches that
    saturate the model meet denormal numbers, on which a CPU is several times slower.
    """
    rough = torch.backends.cudnn.allow_tf32
    flushed = float(torch.tensor(1e-40) * 1.0) == 0.0
    torch.backends.cudnn.allow_tf32 = False
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = rough
        torch.set_flush_denormal(flushed)
