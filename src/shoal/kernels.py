"""What kernels of our own are made with, where the machine has it: Triton for CUDA, a C compiler for a CPU.

Triton comes with PyTorch's builds for CUDA, and needs a C compiler to start what it has compiled. Where something is
missing there is None, and the work is done by PyTorch's own operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.cache import cache_folder

__all__ = ["compiled", "libdevice", "processor", "tl", "triton"]

COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

triton: Any = None
tl: Any = None
libdevice: Any = None

if COMPILER:
    try:
        triton, tl = import_module("triton"), import_module("triton.language")
        libdevice = import_module("triton.language.extra.cuda.libdevice")
    except ImportError:
        triton = None

_compiling = threading.Lock()


def compiled(source: Path) -> ctypes.CDLL | None:
    """Compile a file in C, once: the library is kept in the user's cache, by this source and this processor.

    Args:
        source: The file.

    Returns:
        The library, or None where it cannot be made or loaded.
    """
    with _compiling:
        return _compiled(source)


@cache
def _compiled(source: Path) -> ctypes.CDLL | None:
    if not COMPILER:
        return None
    key = "\n".join([source.read_text(encoding="utf-8"), COMPILER, *FLAGS, processor()])
    name = f"{source.stem}-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.so"
    try:
        folder = cache_folder() / "kernels"
        library = folder / name
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as making:
                made = Path(making) / name
                command = [*shlex.split(COMPILER), *FLAGS, "-o", str(made), str(source)]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                made.replace(library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def cpu_lines() -> list[str]:
    """What the system says of its processors; nothing where it is not Linux."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def processor() -> str:
    """What tells processors with different instructions apart."""
    instructions = {line for line in cpu_lines() if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(instructions)])
