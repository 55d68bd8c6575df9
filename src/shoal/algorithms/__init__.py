"""One file per method. A file here that defines `ALGORITHMS` is all it takes to add one.

Other packages add methods and mechanisms by entry points of the groups `shoal.algorithms` and `shoal.mechanisms` (see
shoal.registry). Shoal's own mechanisms are named by their classes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import is_dataclass, replace
from importlib import import_module
from pkgutil import iter_modules

from shoal.algorithms.base import Algorithm
from shoal.errors import ConfigError
from shoal.mechanisms import (
    coordinate_clipping,
    correlated,
    gaussian,
    noise_shares,
    record_clipping,
    selective_release,
    sparsification,
    update_clipping,
)
from shoal.mechanisms.mechanism import Mechanism
from shoal.registry import Registry
from shoal.renamed import current_algorithm


def _own() -> dict[str, Algorithm]:
    modules = (import_module(f"{__name__}.{info.name}") for info in iter_modules(__path__))
    found = [record for module in modules for record in getattr(module, "ALGORITHMS", ())]
    return {record.name: record for record in sorted(found, key=lambda record: record.name)}


def _own_mechanisms() -> dict[str, type[Mechanism]]:
    modules = (
        coordinate_clipping, update_clipping, correlated, record_clipping, gaussian, noise_shares, sparsification,
        selective_release,
    )  # fmt: skip
    kinds = (kind for module in modules for kind in vars(module).values() if _is_mechanism(kind))
    return {kind.__name__: kind for kind in kinds}


def _is_mechanism(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Mechanism) and is_dataclass(kind)


REGISTRY = Registry("algorithm", Algorithm, _own, "shoal.algorithms")
MECHANISMS = Registry("mechanism", object, _own_mechanisms, "shoal.mechanisms")


def algorithms() -> dict[str, Algorithm]:
    """Every method by name, those of installed packages included.

    Returns:
        Records by the names that `shoal run -c algorithm=NAME` takes.
    """
    return {name: _called(name, record) for name, record in REGISTRY.loadable().items()}


def algorithm(given: str | Algorithm, allowed: Collection[str] | None = None) -> Algorithm:
    """A method, under the name by which it can be found again.

    Args:
        given: A name, `package.module:NAME`, or a record itself.
        allowed: The packages from which a record may be imported; None: from any.

    Raises:
        ShoalError: There is no such method, or it may not be imported.
    """
    if isinstance(given, Algorithm):
        return _called(REGISTRY.name_of(given, given.name), given)
    name = current_algorithm(given)
    return _called(name, REGISTRY.find(name, allowed))


def mechanism(name: str, section: str, allowed: Collection[str] | None = None) -> type[Mechanism]:
    """The class of a mechanism for a boundary.

    Args:
        name: A name, or `package.module:NAME`.
        section: The boundary, such as `per_record`.
        allowed: The packages from which it may be imported; None: from any.

    Raises:
        ShoalError: There is no such mechanism, it is for another boundary, or it may not be imported.
    """
    found = MECHANISMS.find(name, allowed)
    if not _is_mechanism(found) or found.section != section:
        raise ConfigError(f"{section}.mechanism '{name}' is not a mechanism of the boundary {section}")
    return found


def _called(name: str, record: Algorithm) -> Algorithm:
    return record if record.name == name else replace(record, name=name)


__all__ = ["Algorithm", "algorithm", "algorithms", "mechanism"]
