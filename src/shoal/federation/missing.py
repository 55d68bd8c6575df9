"""Says what to install where Flower is missing: it is needed for a real federation only."""

from __future__ import annotations

from importlib.util import find_spec

from shoal.errors import ConfigError


def require_flower() -> None:
    if find_spec("flwr") is None:
        raise ConfigError("a federation over the network needs Flower: pip install 'shoal[deploy]'")
