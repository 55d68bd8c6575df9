"""One file a method. A file here with `ALGORITHMS` in it is all that it takes to add one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from shoal.algorithms.base import Algorithm
from shoal.errors import ConfigError, nearest


@cache
def algorithms() -> dict[str, Algorithm]:
    """Every method, by name."""
    modules = (import_module(f"{__name__}.{info.name}") for info in iter_modules(__path__))
    found = [record for module in modules for record in getattr(module, "ALGORITHMS", ())]
    return {record.name: record for record in sorted(found, key=lambda record: record.name)}


def algorithm(name: str) -> Algorithm:
    """The method of this name."""
    if name not in algorithms():
        raise ConfigError(f"there is no algorithm '{name}'{nearest(name, algorithms())}")
    return algorithms()[name]


__all__ = ["Algorithm", "algorithm", "algorithms"]
