"""What a run shows while it goes on: its page, refreshed now and then, and event files where asked for.

A page that cannot be written is logged once and the run goes on: nothing here may cost a run or its ledger.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import release
from shoal.report.run_reader import BASELINE, REPORT, RESULT, Run, State, read_run

if TYPE_CHECKING:
    from shoal.report import mlflow_board, tensorboard

    Board = tensorboard.Board | mlflow_board.Board

EVERY = 2.0  # seconds between two pages, at least
SHARE = 0.02  # of the run's time that pages may take, about

_log = logging.getLogger("shoal")


class Recorder:
    """Records one run: `round` for each round, then `end`, or `stop` where it did not finish."""

    def __init__(self, path: Path, board: Board | None = None) -> None:
        self._path, self._board = path, board
        self._run: Run | None = None
        self._warned: set[str] = set()
        self._next = 0.0
        self._guard("result", lambda: (path / RESULT).unlink(missing_ok=True))
        self._guard("page", self._first)

    def round(self, line: dict[str, Any]) -> None:
        """Add a round's metrics, and refresh the page if it is time."""
        board = self._board
        if board is not None:
            self._guard("log", lambda: board.add(line))
        if self._run is None:
            return
        self._run.metrics.append(line)
        if time.monotonic() >= self._next:
            self._guard("page", self._refresh)

    def keep(self, name: str, make: Callable[[], str]) -> None:
        """Write a file that the page needs."""
        from shoal.report.run_page import write_page

        self._guard(name, lambda: write_page(self._path / name, make()))

    def end(self, result: Callable[[], dict[str, Any]], baseline: list[dict[str, Any]]) -> None:
        """Finish: write the result, and the final page from the folder."""
        if baseline:
            noted = [json.dumps({release.KEY: release.METRICS, **line}) + "\n" for line in baseline]
            self.keep(BASELINE, lambda: "".join(noted))
        self.keep(RESULT, lambda: json.dumps(result(), indent=1) + "\n")
        self._close("finished")

    def stop(self) -> None:
        """Write the page of a run that was stopped or has failed."""
        self._close("stopped")

    def _first(self) -> None:
        self._run = replace(read_run(self._path, check_ledger=False), state="running", result=None)
        self._refresh()

    def _refresh(self) -> None:
        started = time.monotonic()
        self._next = started + EVERY  # also where writing fails
        self._write("running")
        self._next = started + max(EVERY, (time.monotonic() - started) / SHARE)

    def _close(self, state: State) -> None:
        if self._board is not None:
            self._guard("log", self._board.close)
        self._guard("page", lambda: self._from_folder(state))

    def _from_folder(self, state: State) -> None:
        self._run = read_run(self._path)
        self._write(state)

    def _write(self, state: State) -> None:
        from shoal.report.run_page import run_page, write_page

        assert self._run is not None
        write_page(self._path / REPORT, run_page(replace(self._run, state=state)))

    def _guard(self, what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            if what not in self._warned:
                self._warned.add(what)
                _log.warning("the %s of %s could not be written: %s; the run goes on", what, self._path, error)
