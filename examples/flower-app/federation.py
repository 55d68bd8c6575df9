"""What Flower loads: Shoal's own apps."""

from shoal.deploy.apps import client, server

__all__ = ["client", "server"]
