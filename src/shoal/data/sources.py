"""Where the files of data sets come from: SHOAL_DATA, the user's cache, or a public mirror; always checked.

A file is known by the size and SHA-256 of its *content*: a `.gz` is unpacked first, so that `adult.data` and
anybody's `adult.data.gz` are the same file. Content is hashed each time it is read, as it is read.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import os
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.cache import cache_folder
from shoal.errors import DataError
from shoal.files import atomic

CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds without a byte before a mirror is given up
STALE = 24 * 3600.0  # seconds after which a temporary file must be from a download that was killed
ARCHIVE_LIMIT = 256 << 20


@dataclass(frozen=True)
class File:
    """One file of a data set: its path below the data folder, what it must hold, where it is published.

    Without a `sha256` there is more than one published form, and `size` is the most that it may hold.
    """

    path: str
    size: int
    sha256: str | None
    mirrors: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # other paths below the data folder where people keep it

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths below a data folder at which the file may be, packed or not."""
        names = [name.removesuffix(".gz") for name in (self.path, *self.also)]
        return tuple(form for name in names for form in (name, name + ".gz"))


def folders() -> tuple[Path, ...]:
    """The folders in which files are looked for: SHOAL_DATA where it is set, then the user's cache."""
    own = os.environ.get("SHOAL_DATA")
    return (Path(own).expanduser(), cache_folder()) if own else (cache_folder(),)


def writable_folder() -> Path:
    """The first data folder that can be written to (SHOAL_DATA may be read-only)."""
    for folder in folders():
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return folder
    names = " nor ".join(map(str, folders()))
    raise DataError(f"cannot write to {names}; set SHOAL_DATA to a folder of yours")


def find(paths: Sequence[str]) -> Path | None:
    """The first of these paths below the data folders that is a file."""
    places = (folder / path for folder in folders() for path in paths)
    return next((place for place in places if place.is_file()), None)


def locate(file: File) -> Path | None:
    """Where the file is, or None; nothing is read."""
    return find(file.paths)


def unpacked(path: Path, limit: int) -> bytearray:
    """The content of a file, unpacked if it is a .gz; DataError if that is more than `limit` bytes."""
    try:
        with path.open("rb") as stream:
            return _read(stream, path.suffix == ".gz", limit)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def content(file: File, path: Path) -> bytearray:
    """The content of `file` found at `path`; DataError unless size and SHA-256 are right."""
    data = unpacked(path, file.size)
    if wrong := _wrong(file, data):
        raise DataError(f"{path} is not the published {file.path}: {wrong}; remove it, or put the right file there")
    return data


def obtain(files: Sequence[File], *, archive: Sequence[str] = (), mirror: str | None = None) -> list[Path]:
    """Where each file is; those that are missing are downloaded first.

    `archive` are addresses of one .tar.gz that holds all the files. `mirror` (or SHOAL_MIRROR) is a base
    address that replaces the public ones: below it files lie as in the data folder, an archive by its name.
    """
    mirror = mirror or os.environ.get("SHOAL_MIRROR")
    missing = [file for file in files if locate(file) is None]
    if missing and archive:
        urls = [_below(mirror, archive[0].rsplit("/", 1)[1])] if mirror else archive
        _fetch_archive(missing, urls)
        missing = []
    for file in missing:
        urls = [_below(mirror, file.path)] if mirror else file.mirrors
        _fetch(file, urls)
    return [place for file in files if (place := locate(file)) is not None]


def _fetch(file: File, urls: Sequence[str]) -> None:
    """Download one file from the first mirror that has it whole."""
    target = writable_folder() / file.path
    tried: dict[str, str] = {}
    for url in urls:
        with _noting(tried, url), _answer(url) as answer:
            _remove_stale(target)
            with atomic(target) as stream:
                # Packing what cannot be packed adds a little to the size.
                _copy(answer, stream, limit=file.size + file.size // 100 + CHUNK)
                if wrong := _wrong(file, _read(stream, target.suffix == ".gz", file.size)):
                    raise DataError(wrong)
            return
    raise _not_obtained([file], tried)


def _fetch_archive(files: Sequence[File], urls: Sequence[str]) -> None:
    """Download one .tar.gz from the first mirror that has it whole, and take just these files out of it."""
    folder = writable_folder()
    tried: dict[str, str] = {}
    for url in urls:
        with _noting(tried, url), _answer(url) as answer:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as packed:
                _copy(answer, packed, limit=ARCHIVE_LIMIT)
                _extract(packed, {file.path: file for file in files}, folder)
            return
    raise _not_obtained(files, tried)


def _extract(packed: IO[bytes], wanted: dict[str, File], folder: Path) -> None:
    """Write the wanted members, each checked first; names and sizes in the archive are not trusted."""
    with tarfile.open(fileobj=packed, mode="r|gz") as archive:
        for member in archive:
            if member.size > ARCHIVE_LIMIT:
                raise DataError(f"member {member.name!r} claims {member.size:,} bytes")
            file = wanted.pop(member.name, None)
            if file is None:
                continue
            stream = archive.extractfile(member) if member.isreg() else None
            data = _read(stream, False, file.size) if stream else bytearray()
            if wrong := _wrong(file, data):
                raise DataError(f"{file.path} in the archive: {wrong}")
            with atomic(folder / file.path) as out:
                out.write(data)
            if not wanted:
                return
    raise DataError(f"the archive lacks {', '.join(wanted)}")


@contextlib.contextmanager
def _answer(url: str) -> Iterator[http.client.HTTPResponse]:
    """A mirror's answer, headers read."""
    if not url.startswith(("http://", "https://")):
        raise DataError("not an http:// or https:// address")
    request = urllib.request.Request(url, headers={"User-Agent": "shoal"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        print(f"downloading {url}", file=sys.stderr)
        yield answer


def _copy(answer: http.client.HTTPResponse, stream: IO[bytes], limit: int) -> None:
    """Stream an answer to a file, and go back to the file's beginning."""
    got = 0
    while chunk := answer.read(CHUNK):
        got += len(chunk)
        if got > limit:
            raise DataError(f"sends more than {limit:,} bytes")
        stream.write(chunk)
    promised = answer.headers.get("Content-Length")
    if promised is not None and got != int(promised):
        raise DataError(f"broke off after {got:,} of {int(promised):,} bytes")
    stream.seek(0)


def _remove_stale(target: Path) -> None:
    """Remove temporary files that downloads killed long ago have left."""
    for part in target.parent.glob(f".{target.name}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()


def _read(stream: IO[bytes], packed: bool, limit: int) -> bytearray:
    """All of a stream in pieces, so that what it claims to hold takes no memory that it does not fill."""
    data = bytearray()
    try:
        source = gzip.GzipFile(fileobj=stream) if packed else stream
        while chunk := source.read(CHUNK):
            data += chunk
            if len(data) > limit:
                raise DataError(f"holds more than {limit:,} bytes")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"damaged .gz file: {error}") from error
    return data


def _wrong(file: File, data: bytearray) -> str | None:
    """What is wrong with the content of a file, if anything."""
    digest = hashlib.sha256(data).hexdigest()
    if file.sha256 in (None, digest):
        return None
    return f"wrong checksum (content of {len(data):,} bytes, SHA-256 {digest}; expected {file.size:,}, {file.sha256})"


@contextlib.contextmanager
def _noting(tried: dict[str, str], url: str) -> Iterator[None]:
    """Note why this mirror failed, and go on."""
    try:
        yield
    except urllib.error.HTTPError as error:
        tried[url] = f"HTTP {error.code} {error.reason}"
        error.close()
    except urllib.error.URLError as error:
        tried[url] = str(error.reason)
    except (OSError, http.client.HTTPException, tarfile.TarError, ValueError, DataError) as error:
        tried[url] = str(error) or type(error).__name__
    except (EOFError, zlib.error) as error:
        tried[url] = f"damaged archive: {error}"


def _not_obtained(files: Sequence[File], tried: Mapping[str, str]) -> DataError:
    names = files[0].path + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    lines = [f"{names}: not found in {' or '.join(map(str, folders()))}, and not downloaded"]
    lines += [f"  tried {url}: {reason}" for url, reason in tried.items()]
    if not tried:
        lines.append("  no public mirror has it")
    lines.append(f"  fix: put it below {folders()[0]}, or set SHOAL_DATA to the folder that holds it")
    return DataError("\n".join(lines))


def _below(base: str, path: str) -> str:
    return f"{base.rstrip('/')}/{path}"
