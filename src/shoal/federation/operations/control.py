"""Commands to a running coordinator, over a Unix socket in the run's folder that only its owner can open.

A request is one JSON object on one line, and so is the answer: `{"command": "list"}`, `{"command": "drop", "site":
...}`, `{"command": "invite", "name": ..., "key": ...}`. An answer with `error` says why nothing was done.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, RunError, ShoalError
from shoal.federation.operations.monitor import PATIENCE, Monitor

FILE = "control.sock"
LONGEST = 2**16  # bytes of a request
REQUEST_PATIENCE = 5.0  # seconds for a request to arrive
LONGEST_PATH = 100  # bytes that a Unix socket's path may have everywhere


class ControlSocket:
    """Listens in a thread of its own, and answers one request at a time."""

    def __init__(self, run: Path, monitor: Monitor) -> None:
        """Create the socket; one that a killed coordinator left is replaced, as the folder's lock is ours.

        Raises:
            RunError: It cannot be created.
        """
        self._path, self._monitor = run / FILE, monitor
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)
            os.fchmod(self._socket.fileno(), 0o600)  # before it has a name
            with _short(self._path) as name:
                self._socket.bind(name)
            self._path.chmod(0o600)
            self._socket.listen(4)
        except OSError as error:
            self._socket.close()
            raise RunError(f"{self._path} cannot be created: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and remove the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(REQUEST_PATIENCE)
                answer = self._answer(connection)
                connection.settimeout(REQUEST_PATIENCE)
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        try:
            line = _line(connection)  # first, so that who sent it can read the answer
            if (user := peer(connection)) not in (None, os.geteuid()):
                self._monitor.on_event("control-refused", {"user": user})
                return {"error": f"only the user who started the coordinator may do this (uid {os.geteuid()})"}
            request = json.loads(line)
            command = str(request.pop("command"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {"error": "malformed request"}
        try:
            return self._listed() if command == "list" else self._monitor.ask(command, request)
        except ShoalError as error:
            return {"error": str(error)}

    def _listed(self) -> dict[str, Any]:
        status = self._monitor.status
        if status is None:
            raise RunError("the run has not begun yet")
        about = {"run": status.run, "rounds_done": status.done, "rounds": status.rounds, "doing": status.doing}
        return about | {"sites": [asdict(site) for site in status.sites]}


def ask(run: Path, **request: Any) -> dict[str, Any]:
    """Send a command to the coordinator of a run, and return the answer.

    Raises:
        ConfigError: No coordinator listens, or it refuses the command.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE + 2 * REQUEST_PATIENCE)
        try:
            with _short(run / FILE) as name:
                connection.connect(name)
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = dict(json.loads(_line(connection, None)))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error or type(error).__name__
            hint = "is `shoal serve` running, and is it yours?"
            raise ConfigError(f"no coordinator answers for {run}: {why}; {hint}") from None
    if "error" in answer:
        raise ConfigError(str(answer["error"]))
    return answer


def running(runs: Path) -> list[Path]:
    """The runs in a folder whose coordinators listen."""
    found = (path for path in runs.glob(f"*/{FILE}") if not path.parent.is_symlink())
    return sorted(path.parent for path in found if _listens(path))


def peer(connection: socket.socket) -> int | None:
    """The user at the other end, where the system says."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return int(user)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(REQUEST_PATIENCE)
            with _short(path) as name:
                connection.connect(name)
        except OSError:
            return False
        return True


def _line(connection: socket.socket, longest: int | None = LONGEST) -> bytes:
    """The first line that arrives."""
    parts = b""
    while b"\n" not in parts:
        found = connection.recv(LONGEST)
        parts += found
        if not found or (longest is not None and len(parts) > longest):
            raise ValueError("the line does not end")
    return parts


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the socket that the system takes: about a hundred bytes are the most."""
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
