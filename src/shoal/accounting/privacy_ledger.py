"""The ledger of a run, `ledger.jsonl`: what was charged, before any noise was drawn, and what was released.

Order of a round: `intent` appended and fsync'ed, then noise, then the new model written, then `commit`. So a crash at
any point leaves no released model that the ledger does not know, and an intent without a commit is still charged: the
round is run again with fresh noise and charged again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, cast, get_args

from shoal import release
from shoal.accounting import hash_chain
from shoal.accounting.claims import Observer, Unit, check_observer, check_unit
from shoal.accounting.events import NOTHING, Compose, Event, Unbounded, from_json
from shoal.accounting.hash_chain import START, Line, Verification, verify
from shoal.accounting.theorems import Adjacency, refused
from shoal.errors import ConfigError, LedgerError
from shoal.files import FULL, fix_of, sync_folder
from shoal.renamed import current

__all__ = ["Charge", "Commit", "Intent", "Ledger", "Record", "Verification", "verify"]

FILE = "ledger.jsonl"
_MOST_ROUNDS = 10**6  # in one intent


@dataclass(frozen=True)
class Charge:
    """What a round costs one unit, as one observer sees it; `adjacency` as in claims, None in old ledgers."""

    unit: Unit
    observer: Observer
    event: Event
    adjacency: str | None = None

    def __post_init__(self) -> None:
        check_unit(self.unit)
        check_observer(self.observer)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        written = {"unit": self.unit, "observer": self.observer, "event": self.event.to_json()}
        return written if self.adjacency is None else written | {"adjacency": self.adjacency}

    @cached_property
    def covered(self) -> Event:
        """The event, or that no theorem covers it: an earlier version may have charged it all the same."""
        if self.adjacency not in get_args(Adjacency):
            return self.event
        because = refused(self.event, self.unit, cast(Adjacency, self.adjacency), self.observer)
        return self.event if because is None else Unbounded(because)


@dataclass(frozen=True)
class Intent:
    """Rounds `first` to `round` are about to draw noise: charged from now on, whether committed or not.

    `hash` is that of the line in the ledger, which a checkpoint of these rounds keeps. `at` is when they were charged
    (ISO 8601, UTC), `run` the run that they belong to, where a ledger covers several.
    """

    round: int
    attempt: int
    charges: tuple[Charge, ...]
    first: int
    hash: str
    at: str = ""
    run: str = ""

    @property
    def rounds(self) -> int:
        """How many they are."""
        return self.round - self.first + 1


@dataclass(frozen=True)
class Commit:
    """A round whose model was released; `model` is the SHA-256 of the file."""

    round: int
    attempt: int
    model: str


class Record:
    """The contents of a ledger, read line by line; `progress` is what lines say of how far their writer was."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.opened: dict[str, Any] | None = None
        self.closed: dict[str, Any] | None = None
        self.selected: list[dict[str, Any]] | None = None
        self.charged: list[Intent] = []
        self.commits: list[Commit] = []
        self.progress: list[dict[str, Any]] = []
        self._attempts: Counter[int] = Counter()
        self._events: dict[str, Event] = {}
        self._last = Line(-1, "", "", START, {})

    @classmethod
    def read(cls, path: Path | str, head: str | None = None) -> tuple[Verification, Record]:
        """Verify and read a ledger, also while it is being written; `head` as for `verify`."""
        record = Record(path)
        return verify(path, head, record._take), record

    @property
    def head(self) -> str:
        """The hash of the last line: what a checkpoint keeps to notice a ledger that was cut off."""
        return self._last.hash

    @property
    def lines(self) -> int:
        """How many lines it has."""
        return self._last.number + 1

    @property
    def last_committed(self) -> Commit | None:
        """The last round that was released."""
        return self.commits[-1] if self.commits else None

    @property
    def pending(self) -> Intent | None:
        """The last round that was charged, where it has not been committed."""
        last = self.charged[-1] if self.charged else None
        done = self.last_committed
        if last is None or (done is not None and (done.round, done.attempt) == (last.round, last.attempt)):
            return None
        return last

    def charged_event(self, unit: Unit, observer: Observer) -> Event:
        """Everything charged to a unit as an observer sees it; a round that does not say proves nothing."""
        events: list[Event] = []
        for intent in self.charged:
            found = [c.covered for c in intent.charges if c.unit == unit and c.observer == observer]
            if not found:
                return Unbounded(f"the ledger does not say what round {intent.round} did to this {unit}")
            events += found
        return Compose(tuple(events)) if events else NOTHING

    def _take(self, line: Line) -> None:
        """Read one valid line."""
        try:
            if "progress" in line.body:
                self.progress.append(dict(line.body["progress"]))
            match line.kind:
                case "open":
                    self.opened = current(line.body)
                case "selected":
                    self.selected = [dict(claim) for claim in current(line.body)["proven"]]
                case "close":
                    self.closed = current(line.body)
                case "intent":
                    charges = tuple(self._charge(charge) for charge in current(line.body["charges"]))
                    last, attempt = line.body["round"], line.body["attempt"]
                    first = line.body.get("first", last)
                    _require_rounds(first, last, attempt)
                    at, run = (str(line.body.get(key, "")) for key in ("at", "run"))
                    self.charged.append(Intent(last, attempt, charges, first, line.hash, at, run))
                    for each in range(first, last + 1):
                        self._attempts[each] = max(self._attempts[each], attempt)
                    self.closed = None
                    self.selected = None if self.selected is None else []  # the selection no longer covers all rounds
                case "commit":
                    commit = Commit(line.body["round"], line.body["attempt"], line.body["model"])
                    self.commits.append(commit)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise LedgerError(f"line {line.number + 1} of {self.path} is malformed: {error}") from error
        self._last = line

    def _charge(self, written: dict[str, Any]) -> Charge:
        text = json.dumps(written["event"], sort_keys=True)
        if text not in self._events:
            self._events[text] = from_json(written["event"])
        return Charge(written["unit"], written["observer"], self._events[text], written.get("adjacency"))


class Ledger(Record):
    """The ledger of one run, open for appending; nobody else can open it at the same time."""

    def __init__(self, path: Path | str) -> None:
        """Open or create the ledger, check its chain, and drop a last line that a crash left half written."""
        super().__init__(path)
        self._size = 0
        self._failed = self._full = False
        self._file: int | None = _open_locked(self.path)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def recover(self) -> None:
        """After a write that failed on a full disk, cut off what it left, so that lines can be appended again.

        After any other failure the ledger stays in doubt until it is opened again.
        """
        if self._full and self._file is not None:
            try:
                os.ftruncate(self._file, self._size)
                os.fsync(self._file)
            except OSError as error:
                raise self._unwritable(error) from error
            self._failed = self._full = False

    def begin(
        self,
        run: str,
        algorithm: str,
        config: str,
        budget: dict[str, Any] | None = None,
        note: str = release.LEDGER,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write which run this ledger belongs to (`note`: may it be released?); check that where it exists already.

        `facts` are checked where the ledger states them: earlier versions did not.
        """
        body = {"run": run, "algorithm": algorithm, "config": config, "budget": budget}
        if self.opened is None:
            self._append("open", {release.KEY: note, **body, **facts})
            return
        if different := [key for key, value in body.items() if self.opened.get(key) != value]:
            key = different[0]
            raise LedgerError(
                f"the ledger {self.path} belongs to a run with {key} {self.opened.get(key)!r}, "
                f"not {body[key]!r}; resume that run as it was, or start a new one"
            )
        if different := [key for key, value in facts.items() if self.opened.get(key, value) != value]:
            raise LedgerError(
                f"the ledger {self.path} belongs to a run on other data: its {different[0]} differs, so what was "
                f"charged is not what these data cost; resume with the data of that run, or start a new one"
            )

    def intend(
        self,
        round: int,
        charges: Sequence[Charge],
        first: int | None = None,
        run: str = "",
        progress: Mapping[str, Any] = MappingProxyType({}),
    ) -> Intent:
        """Charge a round, or those from `first` to it, on disk, before any noise; repeated rounds are charged again.

        The attempt number is new for each of these rounds, however they were grouped before. `run` names the run, in
        a ledger that covers several. `progress` is kept in the same line: it is on disk if the charge is.
        """
        first = round if first is None else first
        attempt = 1 + max(self._attempts[each] for each in range(first, round + 1))
        body: dict[str, Any] = {"round": round, "first": first, "attempt": attempt} | ({"run": run} if run else {})
        body |= {"progress": dict(progress)} if progress else {}
        self._append("intent", {**body, "charges": [charge.to_json() for charge in charges]})
        return self.charged[-1]

    def note(self, progress: Mapping[str, Any]) -> None:
        """Write how far the writer is, and charge nothing."""
        self._append("progress", {"progress": dict(progress)})

    def commit(self, round: int, model: str) -> Commit:
        """Record that the model of the last charged round has been released."""
        last = self.pending
        if last is None or last.round != round:
            raise LedgerError(f"round {round} cannot be committed: the ledger {self.path} has no open intent for it")
        self._append("commit", {"round": round, "attempt": last.attempt, "model": model})
        return self.commits[-1]

    def end(
        self,
        stopped: str,
        proven: Sequence[dict[str, Any]] = (),
        by_client: Sequence[Any] = (),
        model: str = "",
        heads: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Record that the run ended, so that a changed claim, model or site's ledger is detected.

        Args:
            stopped: Why it ended.
            proven: What is proven of it.
            by_client: What is proven for a record of each client, as (records, epsilon), where that differs.
            model: The SHA-256 of the model's file, which is written next.
            heads: The names of a federation's sites and the heads of their ledgers. Only their digest is recorded:
                who takes part is no part of a ledger.
        """
        said: dict[str, Any] = {"by_client": [list(row) for row in by_client]} if by_client else {}
        said |= {"model": model} if model else {}
        said |= {"sites": digest_of_heads(heads)} if heads else {}
        self._append("close", {"stopped": stopped, "proven": list(proven), **said})

    def select(self, proven: Sequence[dict[str, Any]]) -> None:
        """Record that a private selection chose this run, and what is proven of it from now on.

        The line bears the time of the run's end: its own would show for how long other trials ran after this one,
        and so how many there were, which must stay secret.
        """
        if self.selected != list(proven):
            ended = {key: value for key, value in (self.closed or {}).items() if key == "at"}
            self._append("selected", {"proven": list(proven), **ended})

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self) -> None:
        assert self._file is not None
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            found, self._size = hash_chain.read(file, self._take)
            if not found.whole:
                raise LedgerError(f"the ledger {self.path} is broken: {found.because}; nothing can be proven from it")
            if found.torn:
                file.seek(self._size)
                torn = file.read(hash_chain.LONGEST)
        try:
            if found.torn:
                os.ftruncate(self._file, self._size)
            # Of what is read and built upon, a killed process may have left some in memory alone.
            os.fsync(self._file)
        except OSError as error:
            raise self._unwritable(error) from error
        if found.torn:
            self._append("recovered", {"dropped": len(torn), "sha256": hashlib.sha256(torn).hexdigest()})

    def _append(self, kind: str, body: dict[str, Any]) -> None:
        if self._file is None or self._failed:
            state = "closed" if self._file is None else "in doubt after a failed write; resume the run"
            raise LedgerError(f"the ledger {self.path} cannot be written: it is {state}")
        stamped = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **body}
        line, raw = hash_chain.seal(self._last.number + 1, kind, self._last.hash, stamped)
        if len(raw) > hash_chain.LONGEST:
            raise LedgerError(f"a line of kind '{kind}' has {len(raw):,} bytes; {hash_chain.LONGEST:,} are the most")
        try:
            _write_all(self._file, raw)
            os.fsync(self._file)
        except OSError as error:
            self._failed, self._full = True, error.errno in FULL
            self._forget_half_a_line()
            raise self._unwritable(error, released=kind in ("commit", "close")) from error
        self._size += len(raw)
        self._take(line)

    def _forget_half_a_line(self) -> None:
        """After a failed write: leave the file as it was, if that is still possible."""
        with suppress(OSError):  # else the next reader sees a torn line and drops it
            os.ftruncate(self._file or -1, self._size)

    def _unwritable(self, error: OSError, released: bool = False) -> LedgerError:
        done = "The round's model is written, and its charge" if released else "Nothing was released by this round"
        return LedgerError(
            f"the ledger {self.path} cannot be written: {error.strerror or error}. {done}; {fix_of(error)}, "
            f"then resume the run"
        )


def digest_of_heads(heads: Sequence[tuple[str, str]]) -> str:
    """The digest by which a closing line names sites and the heads of their ledgers."""
    return hash_chain.digest(sorted(map(list, heads)))


def _require_rounds(first: object, last: object, attempt: object) -> None:
    """Refuse a range of rounds that would take forever to count."""
    if not (type(first) is int and type(last) is int and type(attempt) is int):
        raise TypeError("rounds and attempts are whole numbers")
    if not 0 <= last - first < _MOST_ROUNDS:
        raise TypeError(f"rounds {first} to {last} are not a range of rounds")


def _open_locked(path: Path) -> int:
    new = not path.exists()
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be opened for writing: {error.strerror or error}; "
            f"make its folder writable, or choose another"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise LedgerError(f"the ledger {path} is not a regular file; choose another place for the run")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if new:
            sync_folder(path.parent)
    except BaseException as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise LedgerError(
                f"the ledger {path} is in use by another process; wait until that run has ended, or stop it"
            ) from error
        if isinstance(error, OSError):
            raise LedgerError(f"the ledger {path} cannot be locked: {error.strerror or error}") from error
        raise
    return file


def _write_all(file: int, raw: bytes) -> None:
    left = memoryview(raw)
    while left:
        left = left[os.write(file, left) :]
