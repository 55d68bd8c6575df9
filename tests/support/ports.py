"""A port for a test's coordinator."""

import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

FIRST, LAST = 15_000, 32_767
RESERVED = []


def free_port():
    """A port that nobody listens on, and that no other test is given as long as this process lives.

    Below the ports that Linux gives to connections: sites that knock on one of those while nobody listens there
    now and then get it as their own, and are connected to themselves.
    """
    folder = Path(tempfile.gettempdir()) / "shoal-tests-ports"
    folder.mkdir(exist_ok=True)
    count = LAST - FIRST + 1
    for number in range(count):
        port = FIRST + (os.getpid() + number) % count
        with suppress(OSError), (folder / str(port)).open("w") as lock, socket.socket() as made:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made.bind(("127.0.0.1", port))
            RESERVED.append(os.dup(lock.fileno()))  # which keeps the lock
            return port
    raise AssertionError("no port is free")
