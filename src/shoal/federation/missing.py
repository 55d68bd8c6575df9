"""The check that Flower, which only a real federation needs, is installed."""

from __future__ import annotations

from importlib.util import find_spec

from shoal.errors import ConfigError


def require_flower() -> None:
    """Raise a ConfigError that says what to install where Flower is missing."""
    if find_spec("flwr") is None:
        raise ConfigError("a federation over the network needs Flower: pip install 'shoal[deploy]'")
