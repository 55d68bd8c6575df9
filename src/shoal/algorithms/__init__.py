"""One file a method. A file here with `ALGORITHMS` in it is all that it takes to add one.

Other packages add theirs by entry points of the group `shoal.algorithms` (see shoal.registry).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from shoal.algorithms.base import Algorithm
from shoal.registry import Registry


def _own() -> dict[str, Algorithm]:
    modules = (import_module(f"{__name__}.{info.name}") for info in iter_modules(__path__))
    found = [record for module in modules for record in getattr(module, "ALGORITHMS", ())]
    return {record.name: record for record in sorted(found, key=lambda record: record.name)}


REGISTRY = Registry("algorithm", Algorithm, _own, "shoal.algorithms")


def algorithms() -> dict[str, Algorithm]:
    """Every method by name, those of installed packages included.

    Returns:
        Records by the names that `shoal run -c algorithm=NAME` takes.
    """
    return {name: _called(name, record) for name, record in REGISTRY.loadable().items()}


def algorithm(given: str | Algorithm, allowed: Collection[str] | None = None) -> Algorithm:
    """A method, called by the name under which it is found again.

    Args:
        given: A name, `package.module:NAME`, or a record itself.
        allowed: The packages from which a record may be imported; None: from any.

    Raises:
        ShoalError: There is no such method, or it may not be imported.
    """
    if isinstance(given, Algorithm):
        return _called(REGISTRY.name_of(given, given.name), given)
    return _called(given, REGISTRY.find(given, allowed))


def _called(name: str, record: Algorithm) -> Algorithm:
    return record if record.name == name else replace(record, name=name)


__all__ = ["Algorithm", "algorithm", "algorithms"]
