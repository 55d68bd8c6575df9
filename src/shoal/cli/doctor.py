"""`shoal doctor`: what Shoal finds on this machine, on one screen."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from shoal import __version__
from shoal.cache import cache_folder
from shoal.cli.exit_codes import NOT_HELD
from shoal.cli.options import Json, print_json
from shoal.extras import EXTRAS, installed

PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "dp-accounting", "flwr")
LITTLE = 2**30
"""Bytes of free disk below which it is named as a problem."""


def command(as_json: Json = False) -> None:
    """Show versions, devices, caches, data sets, free disk, and whether secure mode can be used here.

    Files of data sets are hashed, as by `shoal data check`; nothing is downloaded. The exit code is 1 where
    something is wrong.
    """
    facts, problems = examine()
    if as_json:
        print_json(facts | {"problems": problems})
    else:
        for name, value in facts.items():
            typer.echo(f"{name:<9}{value}")
        for problem in problems or ["none"]:
            typer.echo(f"{'problems':<9}{problem}")
    if problems:
        raise typer.Exit(NOT_HELD)


def examine() -> tuple[dict[str, str], list[str]]:
    """Facts by name, and what is wrong, each problem with its fix."""
    from shoal.data.catalogue import entries
    from shoal.random.platform_checks import platform_problems

    broken, data, cache = platform_problems(), entries(), cache_folder()
    disks = {"this folder": _existing(Path.cwd()), "the cache": _existing(cache)}
    free = {name: shutil.disk_usage(path).free for name, path in disks.items()}
    facts = {
        "shoal": f"{__version__}, {Path(__file__).parent.parent}",
        "python": f"{platform.python_version()}, {sys.executable}",
        "system": platform.platform(),
        "packages": ", ".join(f"{name} {installed(name)}" for name in PACKAGES),
        "extras": _extras(),
        "devices": _devices(),
        "kernels": _kernels(),
        "cache": f"{cache}, {_gib(_size(cache))}",
        "data": _data(data),
        "disk": ", ".join(f"{_gib(size)} free for {name}" for name, size in free.items()),
        "secure": "random=secure can be used" if not broken else "random=secure cannot be used",
    }
    full = [f"{_gib(size)} of disk are free for {name}; make room" for name, size in free.items() if size < LITTLE]
    closed = [] if os.access(disks["the cache"], os.W_OK) else [f"{cache} cannot be written to; set SHOAL_CACHE"]
    return facts, [*broken, *full, *closed, *(problem for entry in data for problem in entry.problems)]


def _extras() -> str:
    missing = {extra for module, extra in EXTRAS.items() if find_spec(module) is None}
    here = _listed(extra for extra in EXTRAS.values() if extra not in missing)
    return f"{here}; not installed: {_listed(missing)}"


def _devices() -> str:
    import torch

    gpus = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    named = [f"{gpu.name} ({_gib(gpu.total_memory)})" for gpu in gpus]
    return ", ".join([f"cpu ({os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads)", *named])


def _kernels() -> str:
    from shoal.kernels import COMPILER, triton

    by = [*([f"C by {COMPILER}"] if COMPILER else []), *(["Triton"] if triton else [])]
    return ", ".join(by) or "none: no C compiler, so PyTorch's own operations are used"


def _data(data: Iterable[Any]) -> str:
    states: dict[str, list[str]] = {}
    for entry in data:
        states.setdefault(entry.state, []).append(entry.name)
    found = "; ".join(f"{state}: {', '.join(names)}" for state, names in states.items())
    return f"{found} (SHOAL_DATA is {os.environ.get('SHOAL_DATA') or 'not set'})"


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"
