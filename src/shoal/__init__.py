"""Shoal: differentially private federated learning that says truthfully what it reveals."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.algorithms import algorithms
    from shoal.api import Result, run
    from shoal.data import Dataset, from_arrays, from_clients, load
    from shoal.errors import ShoalError

__version__ = "0.1.0"

_HOME = {
    "run": "shoal.api",
    "Result": "shoal.api",
    "algorithms": "shoal.algorithms",
    "Dataset": "shoal.data",
    "load": "shoal.data",
    "from_arrays": "shoal.data",
    "from_clients": "shoal.data",
    "ShoalError": "shoal.errors",
}

__all__ = [
    "Dataset",
    "Result",
    "ShoalError",
    "__version__",
    "algorithms",
    "from_arrays",
    "from_clients",
    "load",
    "run",
]


def __getattr__(name: str) -> Any:
    """Names are fetched when they are used, so that `import shoal` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
