"""Shoal: differentially private federated learning that states exactly what it guarantees."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import algorithms
    from shoal.algorithms import algorithms as list_algorithms
    from shoal.algorithms.base import Algorithm
    from shoal.api import run
    from shoal.data import Dataset, from_arrays, from_clients, load
    from shoal.errors import ShoalError
    from shoal.estimator import FederatedClassifier, FederatedRegressor
    from shoal.result import Result
    from shoal.saved_model import load_model

__version__ = "0.2.0"

_HOME = {
    "run": "shoal.api:run",
    "Result": "shoal.result:Result",
    "Algorithm": "shoal.algorithms.base:Algorithm",
    "list_algorithms": "shoal.algorithms:algorithms",
    "Dataset": "shoal.data:Dataset",
    "load": "shoal.data:load",
    "load_model": "shoal.saved_model:load_model",
    "from_arrays": "shoal.data:from_arrays",
    "from_clients": "shoal.data:from_clients",
    "FederatedClassifier": "shoal.estimator:FederatedClassifier",
    "FederatedRegressor": "shoal.estimator:FederatedRegressor",
    "ShoalError": "shoal.errors:ShoalError",
}

__all__ = [
    "Algorithm",
    "Dataset",
    "FederatedClassifier",
    "FederatedRegressor",
    "Result",
    "ShoalError",
    "__version__",
    "algorithms",
    "from_arrays",
    "from_clients",
    "list_algorithms",
    "load",
    "load_model",
    "run",
]


def __getattr__(name: str) -> Any:
    """Names are fetched when they are used, so that `import shoal` costs nothing."""
    if name == "algorithms":  # the package, as it is once anything has imported it
        return import_module("shoal.algorithms")
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute '{name}'")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
