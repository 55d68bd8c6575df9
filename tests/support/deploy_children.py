"""`shoal ...` as a process of its own, forked from one that has imported everything: a federation starts in no time.

The processes that it starts in its turn, a sweep's cells and a run's other ranks, are forked as well. It may kill
itself with SIGKILL at a named moment of a named round:

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
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = [
    "shoal.cli.main",
    "shoal.prepare",
    "shoal.federation.federated_run",
    "shoal.federation.flower.superlink",
    "shoal.federation.flower.node",
    "shoal.federation.operations.status_server",
    "shoal.report.recorder",
    "shoal.report.run_page",
    "shoal.saved_model",
    "dp_accounting.pld",
    "httpcore",
    "jinja2",
    "uvicorn.loops.auto",
]
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Child:
    """A process that was started, and the files with what it says: one, or one for each stream."""

    process: BaseProcess
    words: str
    log: Path
    errors: Path

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    @property
    def complained(self) -> str:
        """What it said on standard error."""
        return self.errors.read_text(encoding="utf-8")

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


def start(
    folder: Path,
    log: str,
    words: list[str],
    index: str = "never",
    round: int = 0,
    skew: float = 0.0,
    errors: str | None = None,
    first: str = "",
) -> Child:
    """`shoal WORDS` in that folder, with what it prints in that file and a clock that is ahead by `skew` seconds.

    Standard error goes to the file `errors`, where one is named. `first` is code that goes before everything, and
    is known to the processes that it starts as well.
    """
    made = _forked(_child, str(folder), log, words, index, round, skew, errors or log, first)
    return Child(made, shlex.join(["shoal", *words]), folder / log, folder / (errors or log))


def said_by(function: Callable[[list[str]], None], folder: Path, *words: object) -> str:
    """What `function(words)` prints in a process of its own, in that folder; it must end well."""
    given = list(map(str, words))
    made = _forked(_call, function, str(folder), given)
    child = Child(made, shlex.join([function.__module__, *given]), folder / "printed", folder / "errors")
    assert child.ended(time.monotonic() + 1800.0) == 0, child.complained
    return child.said


def run_script(words: list[str]) -> None:
    """For `said_by`: the first word is a script, the others are its own."""
    sys.argv[1:] = words[1:]
    exec(words[0], {})


def _forked(target: Callable[..., None], *given: Any) -> BaseProcess:
    os.environ["OMP_NUM_THREADS"] = "1"
    _context.set_forkserver_preload(PRELOADED)
    made = _context.Process(target=target, args=given)
    made.start()
    return made


def _begin(folder: str, log: str, errors: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests were started in the background
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    with open(log, "ab") as out, open(errors, "ab") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115


def _call(function: Callable[[list[str]], None], folder: str, words: list[str]) -> None:
    _begin(folder, "printed", "errors")
    function(words)


def _child(
    folder: str, log: str, words: list[str], index: str, round: int, skew: float, errors: str, first: str
) -> None:
    _begin(folder, log, errors)
    subprocess.Popen = Forked  # type: ignore[misc]
    os.fsync = os.fstat  # type: ignore[assignment]  # as in conftest.py
    exec(first, {})
    if index != "never":
        _die(index, round)
    if skew:
        true_time = time.time
        time.time = lambda: true_time() + skew
    _main(words)


def _main(words: list[str]) -> None:
    from shoal.cli.main import main

    sys.argv = ["shoal", *words]
    main()


class Forked(subprocess.Popen[Any]):
    """`python -m shoal ...` as a fork of this process; any other program as ever."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if args[:3] != [sys.executable, "-m", "shoal"]:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        env, (stdin, _, _, stdout, _, stderr) = rest[5], rest[9:15]
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            _fork(args[3:], env, {0: stdin, 1: stdout, 2: stderr})


def _fork(words: list[str], env: Mapping[str, str], streams: Mapping[int, int]) -> NoReturn:
    """In the new process: what a program that is started finds, and `shoal WORDS`."""
    code: Any = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, file in streams.items():
            if file >= 0:
                os.dup2(file, number)
        os.closerange(3, 1024)
        os.environ.clear()
        os.environ.update(env)
        _main(words)
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        os._exit(code)


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
