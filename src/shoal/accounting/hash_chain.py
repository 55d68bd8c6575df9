"""A file of hash-chained JSON lines: how lines are sealed, read and verified.

Each line holds its number, the hash of the line before and its own hash. So an edited, dropped or reordered line
is detected, and so is a torn last line. The file alone cannot show that whole lines were cut off its end: for that
the reader names a hash that must still be there (`head`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shoal.errors import LedgerError

START = "0" * 64
LONGEST = 1 << 20  # bytes in a line: far more than any round needs; the reader holds no more


@dataclass(frozen=True)
class Line:
    """One line whose own hash is right."""

    number: int
    kind: str
    before: str
    hash: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Verification:
    """What a check of the chain found; `broken` counts lines from 1, as an editor does."""

    whole: bool
    lines: int
    head: str
    broken: int | None = None
    because: str | None = None
    torn: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def seal(number: int, kind: str, before: str, body: dict[str, Any]) -> tuple[Line, bytes]:
    """The line, and the bytes that stand for it in the file."""
    content = {**body, "n": number, "kind": kind, "before": before}
    own = digest(content)
    return Line(number, kind, before, own, body), _canonical({**content, "hash": own}) + b"\n"


def verify(
    path: Path | str, head: str | None = None, each: Callable[[Line], None] = lambda _line: None
) -> Verification:
    """Check the whole chain; `head` is a hash that must be in it, for example the one a checkpoint holds.

    Every good line is handed to `each`.
    """
    seen_head = head is None or head == START

    def look(line: Line) -> None:
        nonlocal seen_head
        seen_head = seen_head or line.hash == head
        each(line)

    try:
        with open(path, "rb") as file:
            found, _ = read(file, look)
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error.strerror or error}") from error
    if found.whole and not seen_head:
        because = f"the line with hash {str(head)[:12]}... is gone: the ledger was cut off after line {found.lines}"
        return Verification(False, found.lines, found.head, found.lines + 1, because, found.torn)
    return found


def read(file: BinaryIO, each: Callable[[Line], None]) -> tuple[Verification, int]:
    """Pass every valid line to `each`, up to the first invalid one; also the number of bytes of valid lines."""
    previous = Line(-1, "", "", START, {})
    size = 0
    segments = _segments(file)
    for raw, torn in segments:
        if torn:
            return Verification(True, previous.number + 1, previous.hash, torn=True), size
        line = _parse(raw)
        if isinstance(line, str):
            return _broken(previous, previous.number + 2, f"line {previous.number + 2} {line}"), size
        if line.number != previous.number + 1 or line.before != previous.hash:
            return _misplaced(previous, line, segments), size
        each(line)
        previous, size = line, size + len(raw) + 1
    return Verification(True, previous.number + 1, previous.hash), size


def _segments(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """The lines without their ends; an incomplete last line is marked as torn."""
    line = file.readline(LONGEST)
    while line:
        following = file.readline(LONGEST)
        whole = line.endswith(b"\n")
        # A crash may leave part of a line at the end, or a stretch of zeros where it should be.
        torn = not following and (b"\0" in line or (not whole and len(line) < LONGEST))
        yield (line, True) if torn else (line.removesuffix(b"\n"), False)
        line = following


def _parse(raw: bytes) -> Line | str:
    """The line, or what is wrong with it, to follow the words `line 7`."""
    try:
        content = json.loads(raw.decode("ascii"), parse_constant=_refuse)
        if not isinstance(content, dict) or _canonical(content) != raw:
            return "was edited: it is not written as Shoal writes"
        own = content.pop("hash")
        number, kind, before = content["n"], content["kind"], content["before"]
    except (ValueError, KeyError, RecursionError):
        return "was edited: it is not a line of a ledger"
    if not (type(number) is int and isinstance(kind, str) and isinstance(before, str) and isinstance(own, str)):
        return "was edited: it is not a line of a ledger"
    if own != digest(content):
        return "was edited: its hash does not match what it says"
    body = {key: value for key, value in content.items() if key not in ("n", "kind", "before")}
    return Line(number, kind, before, own, body)


def _misplaced(previous: Line, line: Line, rest: Iterator[tuple[bytes, bool]]) -> Verification:
    """A valid line that does not follow the one before it."""
    here, written = previous.number + 2, line.number + 1
    if written == here == 1:
        return _broken(previous, here, "line 1 was edited: it does not begin a ledger")
    if written == here:
        said = f"line {here - 1} was edited: it is not the line that line {here} was written after"
        return _broken(previous, here - 1, said)
    if written < here:
        return _broken(previous, here, f"line {here} holds again what was written as line {written}")
    for raw, torn in rest:
        later = None if torn else _parse(raw)
        if isinstance(later, Line) and later.number == here - 1:
            said = f"line {here} was reordered: in its place stands what was written as line {written}"
            return _broken(previous, here, said)
    gone = f"line {here} was" if written == here + 1 else f"lines {here} to {written - 1} were"
    return _broken(previous, here, f"{gone} dropped: line {written} as written comes next")


def _broken(previous: Line, number: int, because: str) -> Verification:
    return Verification(False, previous.number + 1, previous.hash, number, because)


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(content: Any) -> str:
    """The SHA-256 of JSON content, written in the one way that is hashed."""
    return hashlib.sha256(_canonical(content)).hexdigest()


def _refuse(constant: str) -> None:
    raise ValueError(constant)
