"""`shoal ...` as a process of its own, forked from one that has imported everything: a federation starts in no time.

It may kill itself with SIGKILL at a named moment of a named round:

    charged     the round is in the ledger, nobody has been asked
    asked       messages are sent, no answer is read
    answered    all answers are there, the noise is not drawn
    written     the model is written, its commit is not in the ledger
    committed   the round is over
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = [
    "shoal.federation.serve",
    "shoal.federation.flower.superlink",
    "shoal.federation.flower.node",
    "shoal.report.run_page",
    "sklearn.datasets",
]
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Child:
    """A process that was started, and the file with what it says."""

    process: BaseProcess
    words: str
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def ended(self, until: float) -> int:
        """Its exit code; a failure, with what it said, if it is still running at that time (`time.monotonic`)."""
        self.process.join(max(0.0, until - time.monotonic()))
        code = self.process.exitcode
        assert code is not None, f"`{self.words}` has not ended; it said:\n{self.said}"
        return code

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def away(self) -> None:
        """Dead and buried, whatever it was doing."""
        self.process.kill()
        self.process.join(30)


def start(folder: Path, log: str, words: list[str], index: str = "never", round: int = 0, skew: float = 0.0) -> Child:
    """`shoal WORDS` in that folder, with what it prints in that file and a clock that is ahead by `skew` seconds."""
    os.environ["OMP_NUM_THREADS"] = "1"
    _context.set_forkserver_preload(PRELOADED)
    made = _context.Process(target=_child, args=(str(folder), log, words, index, round, skew))
    made.start()
    return Child(made, shlex.join(["shoal", *words]), folder / log)


def _child(folder: str, log: str, words: list[str], index: str, round: int, skew: float) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests were started in the background
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    with open(log, "a", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    if index != "never":
        _die(index, round)
    if skew:
        true_time = time.time
        time.time = lambda: true_time() + skew
    from shoal.cli.main import main

    sys.argv = ["shoal", *words]
    main()


def _die(index: str, at: int) -> None:
    """The end before or after a function, once the round that was named is charged."""
    from shoal.federation.coordinator import RemoteCohort
    from shoal.federation.flower.transport import Transport
    from shoal.training.budget import Spending

    owner: Any
    owner, name, before = {
        "charged": (RemoteCohort, "train", True),
        "asked": (Transport, "send", False),
        "answered": (RemoteCohort, "train", False),
        "written": (Spending, "commit", True),
        "committed": (Spending, "commit", False),
    }[index]
    now = 0
    was, intend = getattr(owner, name), Spending.intend

    def counted(self: Spending, first: int, last: int) -> int:
        nonlocal now
        attempt = intend(self, first, last)
        now = last
        return attempt

    def dying(*given: Any, **named: Any) -> Any:
        if now == at and before:
            os.kill(os.getpid(), signal.SIGKILL)
        found = was(*given, **named)
        if now == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, dying)
    Spending.intend = counted  # type: ignore[method-assign]
