"""Where a coordinator's events and status come together for its operators, and where their commands wait for it.

The coordinator's thread publishes the status and carries out commands; the threads of the link, the metrics address
and the control socket report events, read the status and ask.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.errors import RunError, ShoalError
from shoal.federation.operations.audit_log import AuditLog
from shoal.federation.operations.status import Status
from shoal.federation.text import one_line

Report = Callable[[int, str, Mapping[str, Any]], None]
"""Called with a level of `logging`, a message and its facts."""
Command = tuple[str, Mapping[str, Any], "Future[dict[str, Any]]"]

LOG_ONLY = {"log", "waiting", "answered"}
"""Events that are only logged; who answered must not show in a count either."""
UNAUDITED = LOG_ONLY | {"late", "gone"}
"""Events that are not in the audit log; all others are, those of the link too."""
MOST_OF_STRANGERS = 20  # events a minute, of each kind, that are written down although no site is behind them
LONGEST, LONGEST_MESSAGE = 200, 1000  # characters of a fact, and of a message
RECENT = 30  # events on the page
EARLY = 1000  # events kept until there is a run's folder
PATIENCE = 60.0  # seconds for the coordinator to carry out a command


class Monitor:
    """Collects what happens.

    Attributes:
        keys: The folder of the coordinator's keys, if it has one.
        status: The federation as last published.
        seen: When that was (`time.time`).
        proven: What is proven so far.
        answered: How many sites answered in the last round; None where sampling hides it.
        counts: How many events of each kind there were.
        recent: The last events: time, kind, message.
    """

    def __init__(self, report: Report, keys: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Start with nothing.

        Args:
            report: Writes a line to the log.
            keys: The folder of the coordinator's keys, to which the keys of invited sites are added.
            clock: As `time.time`.
        """
        self.keys = keys
        self._report, self._clock, self._lock = report, clock, threading.Lock()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._audit: AuditLog | None = None
        self._early: deque[dict[str, Any]] = deque(maxlen=EARLY)
        self._strangers: Counter[tuple[str, int]] = Counter()
        self._left_out: Counter[str] = Counter()
        self._warned = False
        self.status: Status | None = None
        self.seen = clock()
        self.proven: list[dict[str, Any]] = []
        self.answered: int | None = None
        self.counts: Counter[str] = Counter()
        self.recent: deque[tuple[str, str, str]] = deque(maxlen=RECENT)

    def begin(self, run: Path) -> None:
        """Write the audit log into this run's folder, the events so far first; a resumed run has claims already."""
        self.proven = _proven(run / "metrics.jsonl")
        with self._lock:
            self._audit = AuditLog(run)
            while self._early:
                self._write(self._early.popleft())

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Report an event, from any thread.

        Args:
            kind: What happened, in a word.
            facts: `message` in words and `level` (of `logging`), where they are known; `site`, where a known site is
                behind it; `times`, where it stands for more than one; anything else.
        """
        shown = {key: _shown(value) for key, value in facts.items() if key not in ("level", "message")}
        said = ", ".join(f"{key} {value}" for key, value in shown.items())
        message = one_line(str(facts.get("message") or f"{kind}: {said}")[:LONGEST_MESSAGE])
        level, now = int(facts.get("level", logging.WARNING)), self._clock()
        with self._lock:
            if kind not in LOG_ONLY:
                self.counts[kind] += int(facts.get("times", 1))
            if kind not in UNAUDITED:
                if "site" not in shown and not self._room(kind, now):
                    return
                if left_out := self._left_out.pop(kind, 0):
                    shown["left_out"] = left_out
                at = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
                self.recent.appendleft((at, kind, message))
                self._write({"time": at, "kind": kind, "message": message, **shown})
        self._report(level, message, {"kind": kind, **shown})

    def events(self) -> tuple[dict[str, int], list[tuple[str, str, str]]]:
        """How many events of each kind there were, and the last ones: time, kind, message."""
        with self._lock:
            return dict(self.counts), list(self.recent)

    def publish(self, status: Status) -> None:
        """Replace the status."""
        self.status, self.seen = status, self._clock()

    def round(self, line: Mapping[str, Any]) -> None:
        """Take a round's claims from its metrics, and nothing that shows who took part."""
        self.proven = list(line.get("proven", ()))
        if self.status is not None and not self.status.hidden:
            self.answered = line.get("clients")

    def ask(self, command: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Have the coordinator carry out a command, and return its answer.

        Raises:
            ShoalError: The command cannot be carried out.
        """
        answer: Future[dict[str, Any]] = Future()
        self._commands.put((command, values, answer))
        try:
            return answer.result(PATIENCE)
        except Late:
            if answer.cancel():
                raise RunError(f"the coordinator has been busy for {PATIENCE:g} s; try again later") from None
            return answer.result()

    def carry_out(self, act: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> None:
        """Carry out the commands that wait; called by the coordinator's thread."""
        while not self._commands.empty():
            command, values, answer = self._commands.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(act(command, values))
                except ShoalError as error:
                    answer.set_exception(error)
                except OSError as error:  # an operator's command may not end the run
                    answer.set_exception(RunError(f"'{command}' failed: {error}"))

    def _room(self, kind: str, now: float) -> bool:
        """Whether one more event of a stranger may be written down: nobody may fill the disk from outside."""
        minute = kind, int(now // 60)
        self._strangers = Counter({key: count for key, count in self._strangers.items() if key[1] == minute[1]})
        self._strangers[minute] += 1
        if self._strangers[minute] <= MOST_OF_STRANGERS:
            return True
        self._left_out[kind] += 1
        return False

    def _write(self, line: dict[str, Any]) -> None:
        if self._audit is None:
            self._early.append(line)
            return
        try:
            self._audit.append(line)
            self._warned = False
        except OSError as error:
            if not self._warned:
                self._warned = True
                words = f"the audit log cannot be written: {error.strerror or error}; the run goes on"
                self._report(logging.ERROR, words, {"kind": "log"})


def _proven(metrics: Path) -> list[dict[str, Any]]:
    """The claims of the last round in a run's metrics."""
    try:
        return list(json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])["proven"])
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _shown(value: Any) -> Any:
    """A fact that is fit for a log: another machine may have written it."""
    return value if isinstance(value, bool | int | float | None) else one_line(str(value)[:LONGEST])
