"""In how many digits products are computed (`engine.precision`).

| | on CUDA | on a CPU |
|---|---|---|
| auto | float32; convolutions (and cuDNN's LSTM) in TF32, which is PyTorch's own default | float32 |
| float32 | float32 | float32 |
| tf32 | TF32: 11 digits of float32's 24 | float32 |
| bf16 | the model runs under autocast: products in bfloat16, of 8 digits; what is left in TF32 | the same, float32 |

Float32 products of large linear layers on some GPUs are by tensor cores, with errors of float32's order
(gradients.layers.products_cuda). PyTorch's global switches decide nothing. In each of them parameters, norms,
factors, sums of clipped gradients and noise are float32 or float64.

A clip holds in all of them. The passes through the model decide only which numbers a layer's inputs and output
gradients are. From these the gradient of a record is computed in one of two ways. Either once, in whatever digits:
it is kept, and what is measured is what is added. Or twice, by different products, for its norm and for the sum: then
both are in all digits (`all_digits`), and what float32 may still lose is part of the norm (gradients.layers.rule).
Numbers in bfloat16 are widened to float32 before the second, which is exact; sums of their products are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["auto", "float32", "tf32", "bf16"]


@contextmanager
def computing(precision: Precision) -> Iterator[None]:
    """PyTorch's switches as a precision says: all digits, but for convolutions on CUDA where it allows that.

    A caller's autocast is off inside: it would shorten what is clipped, norms and sums apart.
    The switches are of the whole process: two threads must not enter this at a time with different precisions.
    """
    restore, short = _restoring(), precision != "float32"
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = short
        for library, switch in _newer():
            if library != "cuda":  # set already
                switch.fp32_precision = "tf32" if library == "cudnn" and short else "ieee"
        if precision == "bf16" and not _onednn_has_bf16():
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        with no_autocast():
            yield
    finally:
        restore()


@cache
def _onednn_has_bf16() -> bool:
    """Can oneDNN multiply in bfloat16 on this CPU? Where it cannot, PyTorch tries each time, and warns at length."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


def _newer() -> list[tuple[str, Any]]:
    """PyTorch's newer switches (from 2.9 on), one for each kind of product in each library."""
    kinds = {"cuda": ["matmul"], "mkldnn": ["matmul", "conv", "rnn"], "cudnn": ["conv", "rnn"]}
    named = [(library, kind) for library in kinds for kind in kinds[library]]
    found = [(library, getattr(getattr(torch.backends, library), kind, None)) for library, kind in named]
    return [(library, switch) for library, switch in found if hasattr(switch, "fp32_precision")]


def _restoring() -> Callable[[], None]:
    """Sets PyTorch's switches back to what they are now: the older two, and the newer."""
    before = [(switch, switch.fp32_precision) for _, switch in _newer()]
    matmul, convolutions, onednn = None, None, torch.backends.mkldnn.enabled
    with suppress(RuntimeError):  # where the newer ones were set to what the older cannot say
        matmul = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        convolutions = torch.backends.cudnn.allow_tf32

    def restore() -> None:
        torch.backends.mkldnn.enabled = onednn
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if convolutions is not None:
            torch.backends.cudnn.allow_tf32 = convolutions
        for switch, value in before:
            if switch.fp32_precision != value:
                switch.fp32_precision = value

    return restore


def rough(precision: Precision, x: Tensor) -> AbstractContextManager[None]:
    """Products that are not clipped, where `x` lies: in TF32 if the precision allows that."""
    return tf32(x, True) if precision in ("tf32", "bf16") else nullcontext()


def autocast(precision: Precision, x: Tensor) -> AbstractContextManager[object]:
    """For a model that runs where `x` lies: its products in bfloat16, where that is the precision."""
    if precision != "bf16":
        return without_autocast(x)
    return torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False)


@contextmanager
def no_autocast() -> Iterator[None]:
    """A caller's autocast decides nothing inside."""
    with _without_autocast("cpu"), _without_autocast("cuda"):
        yield


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """For what is computed where `x` lies in the types that it has."""
    return _without_autocast(x.device.type)


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@contextmanager
def tf32(x: Tensor, wanted: bool) -> Iterator[None]:
    """Products of matrices where `x` lies are in TF32 or not, whatever PyTorch is set to."""
    matmul = torch.backends.cuda.matmul
    if not x.is_cuda or in_tf32() == wanted:
        yield
        return
    matmul.allow_tf32 = wanted
    try:
        yield
    finally:
        matmul.allow_tf32 = not wanted


def in_tf32() -> bool:
    """Are products of matrices on CUDA in TF32? The older switch cannot be read where only the newer was set."""
    matmul = torch.backends.cuda.matmul
    return bool(matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32)


def all_digits(x: Tensor) -> AbstractContextManager[None]:
    """For what is clipped: a product in TF32 can be longer than its norm says, by a thousandth."""
    return tf32(x, False)


def widened(x: Tensor) -> Tensor:
    """Numbers of fewer digits than float32's as float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
