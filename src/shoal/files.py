"""Files that appear whole or not at all and survive a crash, and folders that one process holds at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from shoal.errors import RunError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a crash leaves the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise unwritable(path, error) from None


@contextmanager
def atomic(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A binary file that appears at `path` whole and on disk, or, if the block fails, not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, which need not fit into memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fix_of(error: OSError) -> str:
    """What a person can do about a file that cannot be written."""
    return "free some space" if error.errno in FULL else "make it writable"


def unwritable(path: Path, error: OSError) -> RunError:
    """The error of a run's file that cannot be written."""
    return RunError(f"{path} cannot be written: {error.strerror or error}; {fix_of(error)}, then resume the run")


def locked(folder: Path, fix: str) -> IO[str]:
    """The open lock of a folder; closing it lets others in.

    Raises:
        RunError: Another process holds it (with the `fix`), or it cannot be made.
    """
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}; make it writable") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise RunError(f"{folder} is in use by another process; {fix}") from None
        raise RunError(f"{folder} cannot be locked: {error.strerror or error}") from None
    return file
