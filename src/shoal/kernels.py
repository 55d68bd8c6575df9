"""Triton, in which the kernels for CUDA are written, where it can be used; None elsewhere.

It comes with PyTorch's builds for CUDA, and needs a C compiler to start what it has compiled.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

__all__ = ["libdevice", "tl", "triton"]

triton: Any = None
tl: Any = None
libdevice: Any = None

if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
    try:
        import triton
        import triton.language as tl
        from triton.language.extra.cuda import libdevice
    except ImportError:
        triton = None
