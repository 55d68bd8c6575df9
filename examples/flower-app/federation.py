"""What Flower loads: Shoal's own apps."""

from shoal.federation.flower.apps import client, server

__all__ = ["client", "server"]
