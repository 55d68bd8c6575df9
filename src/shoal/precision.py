"""In how many digits CUDA multiplies: all of float32's 24, or the 11 of TF32, which is faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


@contextmanager
def tf32(x: Tensor, wanted: bool) -> Iterator[None]:
    """Products of matrices where `x` lies are in TF32 or not, whatever PyTorch is set to."""
    matmul = torch.backends.cuda.matmul
    if not x.is_cuda or matmul.allow_tf32 == wanted:
        yield
        return
    matmul.allow_tf32 = wanted
    try:
        yield
    finally:
        matmul.allow_tf32 = not wanted


def all_digits(x: Tensor) -> AbstractContextManager[None]:
    """For what is clipped: a product in TF32 can be longer than its norm says, by a thousandth."""
    return tf32(x, False)
