"""Follows the folder of `shoal keys` while a coordinator runs: no restart for a new, rotated or revoked key.

A site whose key is revoked, removed or replaced is disconnected at once, in the middle of a round too. A site with a
new key in NAME.pub keeps its place in the run. A renewed certificate is used for new connections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from shoal.errors import ConfigError, RunError
from shoal.federation.key_files import SERVER, SERVER_KEY, read_sites, warn_of_end

INTERVAL = 1.0  # seconds between looks
Stamp = dict[Path, tuple[int, int, int]]


class AccessControl(Protocol):
    """What a watch tells of changes: the SuperLink of `shoal serve`."""

    def allow(self, keys: list[bytes]) -> None:
        """Let only the nodes with these keys (PEM) join."""

    def reload_certificate(self) -> None:
        """Use the certificate's files as they are now."""


class KeyWatch:
    """Compares a folder of keys with what it was; `names` (by key) is kept up to date for the coordinator."""

    def __init__(
        self,
        folder: Path,
        access: AccessControl,
        names: dict[str, str],
        identity: Callable[[bytes], str],
        log: Callable[[str], None],
    ) -> None:
        self._folder, self._access, self._names, self._identity, self._log = folder, access, names, identity, log
        self._failure = ""
        self._stamps: tuple[Stamp | None, Stamp] = None, self._certificate()  # the sites may have changed already

    def look_again(self) -> None:
        """Apply what has changed since the last look; a failure is logged, once, and tried again at the next look."""
        before, self._failure = self._failure, ""
        try:
            self.look()
        except Exception as error:  # or revoked keys could join from then on
            self._failure = f"{type(error).__name__}: {error}"
            if self._failure != before:
                self._log(f"changes in {self._folder} could not be applied, and will be tried again: {self._failure}")

    def look(self) -> None:
        """Apply what has changed since the last look."""
        sites, certificate = self._sites(), self._certificate()
        before = self._stamps
        if sites != before[0]:
            self._apply()
        self._stamps = sites, certificate  # what could not be applied is tried again
        if certificate != before[1]:
            try:
                self._access.reload_certificate()
                self._log(f"certificate {self._folder / SERVER} re-read")
                warn_of_end(self._folder / SERVER, self._log)
            except (ConfigError, RunError) as error:
                self._log(f"the certificate stays as it was: {error}")

    def _apply(self) -> None:
        keys = read_sites(self._folder, lambda error: self._log(f"key left out: {error}"))
        self._access.allow(list(keys.values()))
        new = {self._identity(key): name for name, key in keys.items()}
        gone, come = self._names.keys() - new.keys(), new.items() - self._names.items()
        self._names |= new
        for identity in gone:
            name = self._names.pop(identity)
            self._log(f"site {name}: its key {identity} may not join any more; it is disconnected")
        for identity, name in come:
            self._log(f"site {name}: its key {identity} may join")

    def _sites(self) -> Stamp:
        return _stamps([path for name in ("sites", "revoked") for path in (self._folder / name).glob("*.pub")])

    def _certificate(self) -> Stamp:
        return _stamps([self._folder / SERVER, self._folder / SERVER_KEY])


@contextmanager
def watching(watch: KeyWatch) -> Iterator[None]:
    """Look every second, in a thread."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(INTERVAL):
            watch.look_again()

    thread = threading.Thread(target=run, daemon=True, name="keys")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _stamps(paths: list[Path]) -> Stamp:
    found = {}
    for path in paths:
        try:
            facts = path.stat()
        except OSError:  # removed meanwhile
            continue
        found[path] = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
    return found
