"""Run cells in parallel, each in its own process; one that fails does not stop the others.

A cell's folder is `cells/0001/`: its configuration, its log, and its run's folder, from which it can be resumed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import release
from shoal.config import to_toml
from shoal.report.run_reader import METRICS, RESULT
from shoal.sweep.plan import Plan
from shoal.training.engine_settings import cores, gpus, of_one_job

MEMORY_OF_A_CELL = 1.5 * 2**30
_PATIENCE = 60.0  # seconds that a cell gets to reach a checkpoint
_POLL = 0.2  # seconds

Progress = Callable[[int, int, float], None]
"""(cells done, cells failed, cells done with the parts of running ones)"""


def cell_folder(sweep: Path, number: int) -> Path:
    """The folder of a cell."""
    return sweep / "cells" / f"{number + 1:04d}"


def run_folder(sweep: Path, number: int) -> Path | None:
    """The newest run of a cell."""
    found = sorted(path.parent for path in cell_folder(sweep, number).glob("*/config.toml"))
    return found[-1] if found else None


def is_done(sweep: Path, number: int) -> bool:
    """Whether a cell has finished."""
    run = run_folder(sweep, number)
    return run is not None and (run / RESULT).is_file()


def why_failed(sweep: Path, number: int) -> str | None:
    """The last message of a cell that failed; None where it did not."""
    path = cell_folder(sweep, number) / "failed.txt"
    return path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else None


def sensible_jobs(cells: int, device: str = "auto") -> int:
    """How many cells to run at once: as cores and memory allow; one for each GPU where there are GPUs."""
    if device.startswith("cuda") or (device == "auto" and gpus()):
        return max(1, min(cells, len(gpus())))
    return max(1, min(cells, cores(), int(_free_memory() // MEMORY_OF_A_CELL)))


def _free_memory() -> float:
    """Available bytes, the disk cache included."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


@dataclass
class _Running:
    number: int
    process: subprocess.Popen[bytes]
    rounds: int
    job: int
    read: int = 0
    lines: int = 0


class Pool:
    """Runs the unfinished cells, `jobs` at a time, each with its share of the cores and of the GPUs."""

    def __init__(self, sweep: Path, plan: Plan, jobs: int) -> None:
        self._sweep, self._plan, self._jobs = sweep, plan, max(1, jobs)
        self._threads = max(1, cores() // self._jobs)
        self._running: list[_Running] = []

    def run(self, progress: Progress | None = None) -> None:
        """Run all cells; Ctrl-C lets running ones reach a checkpoint, then raises KeyboardInterrupt."""
        waiting = [n for n in range(len(self._plan.cells)) if not is_done(self._sweep, n)]
        done, failed = len(self._plan.cells) - len(waiting), 0
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._jobs:
                    self._start(waiting.pop(0))
                for cell in self._take_ended():
                    done, failed = done + 1, failed + (not self._ended(cell))
                if progress:
                    progress(done, failed, done + sum(map(self._share, self._running)))
                time.sleep(_POLL)
        finally:
            self._stop()

    def _take_ended(self) -> list[_Running]:
        ended = [cell for cell in self._running if cell.process.poll() is not None]
        self._running = [cell for cell in self._running if cell not in ended]
        return ended

    def _start(self, number: int) -> None:
        folder = cell_folder(self._sweep, number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failed.txt").unlink(missing_ok=True)
        config = self._plan.config(number)
        before = run_folder(self._sweep, number)
        words = ["--resume", str(before)] if before else [str(folder / "cell.toml"), "--runs", str(folder)]
        if not before:
            note = f"# {release.KEY}: {release.SWEEP}\n"
            (folder / "cell.toml").write_text(note + to_toml(config), encoding="utf-8")
            (folder / "log.txt").write_text(f"{release.KEY}: {release.LOG}\n", encoding="utf-8")
            if self._plan.no_guarantee:
                words.append("--no-guarantee")
        threads = {"OMP_NUM_THREADS": str(self._threads), "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "1000"}
        job = min(set(range(self._jobs)) - {cell.job for cell in self._running})
        with (folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "shoal", "run", *words, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | threads | of_one_job(job),
                start_new_session=True,
            )
        self._running.append(_Running(number, process, config.rounds, job))

    def _ended(self, cell: _Running) -> bool:
        """Whether it finished; if not, write the reason to its folder."""
        code = cell.process.returncode
        if code == 0 and is_done(self._sweep, cell.number):
            return True
        folder = cell_folder(self._sweep, cell.number)
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").split("\n")
        messages = [line.strip() for line in lines if line.strip()]
        if code < 0:
            name = next((each.name for each in signal.Signals if each == -code), str(-code))
            because = f"killed ({name}), perhaps for memory: try fewer --jobs"
        else:
            because = (messages[-1] if messages else f"exit code {code}").removeprefix("shoal: ")
        (folder / "failed.txt").write_text(f"{because[:500]}\n{release.KEY}: {release.LOG}\n", encoding="utf-8")
        return False

    def _share(self, cell: _Running) -> float:
        """The share of a running cell that is done, by the rounds in its metrics."""
        run = run_folder(self._sweep, cell.number)
        try:
            with ((run or self._sweep) / METRICS).open("rb") as file:
                file.seek(cell.read)
                fresh = file.read()
        except OSError:
            return 0.0
        cell.read += len(fresh)
        cell.lines += fresh.count(b"\n")
        return min(0.99, cell.lines / cell.rounds)

    def _stop(self) -> None:
        for cell in self._running:
            _signal(cell.process, signal.SIGINT)
        until = time.monotonic() + _PATIENCE
        for cell in self._running:
            try:
                cell.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(cell.process, signal.SIGKILL)
                cell.process.wait()


def _signal(process: subprocess.Popen[Any], what: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(what)
