"""A port for a test's coordinator."""

import os
import socket
from contextlib import suppress


def free_port():
    """Below the ports that Linux gives to connections: sites that knock on one of those while nobody listens there
    now and then get it as their own, and are connected to themselves."""
    first = 15_000 + os.getpid() % 10_000
    for port in range(first, 32_768):
        with socket.socket() as made, suppress(OSError):
            made.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
