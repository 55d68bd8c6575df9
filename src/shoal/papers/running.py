"""Measuring a table, cell by cell: a line is appended as soon as a cell ends, and what is there is not run again.

A cell that crashes becomes a line that says so; the others go on, and it is tried again the next time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread

from shoal.engine.settings import cores
from shoal.errors import ConfigError, RunError, ShoalError
from shoal.papers.base import Cell, Job, Line, Table, begun

KEPT = Path("docs/results")
SEEDS = 5  # fewer say little about how far seeds lie apart
KILLED = "its process was killed, perhaps for memory: try fewer --jobs"
ROOM = 1 << 20  # bytes that the disk must have, more than any line has
Told = Callable[[str, int, float], None]
"""(cell, cells done, cells done with a part of the running one)"""


def results_file(table: str, quick: bool, given: Path | None = None) -> Path:
    return given or Path("papers") / (f"{table}-quick.jsonl" if quick else f"{table}.jsonl")


def known_files(table: str, quick: bool) -> list[Path]:
    """Where `compare` looks unless it is told: what the repository keeps (run from its root), then what was run here.

    All tables are looked at, since tables repeat each other's cells.
    """
    own = results_file(table, quick)
    return [own] if quick else [*sorted(KEPT.glob("*.jsonl")), own]


def read_lines(path: Path) -> list[Line]:
    """The lines of a results file; a last one that was torn by a crash is left out."""
    try:
        written = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"results file {path} cannot be read: {error}") from None
    lines = []
    for number, text in enumerate(written, 1):
        try:
            lines.append(dict(json.loads(text)))
        except (ValueError, TypeError):
            if number < len(written):
                raise RunError(f"line {number} of {path} is no result in JSON; mend it or take it out") from None
    return lines


def chosen(table: Table, rows: str = "") -> list[Cell]:
    """The cells whose names match, case aside; if none does, those whose data set (or TABLE/DATA) matches."""
    try:
        pattern = re.compile(rows, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--rows '{rows}' is no regular expression: {error}") from None
    cells = [cell for cell in table.cells if pattern.search(cell.name)]
    for place in ("", f"{table.name}/"):
        named = ((cell, cell.work.needs(False)) for cell in table.cells)
        cells = cells or [cell for cell, data in named if data and pattern.search(place + data)]
    if not cells and table.cells:
        raise ConfigError(
            f"no cell of {table.name} matches '{rows}'; they are called for example '{table.cells[0].name}'"
        )
    return cells


def plan(cells: Iterable[Cell], seeds: int, quick: bool, lines: Iterable[Line]) -> list[tuple[Cell, int]]:
    """The measurements that are still to be made; one that several cells show is made once.

    A line counts for a cell that finds all its measures in it.
    """
    found = {(line["key"], line.get("seed", 0)): line for line in lines if "key" in line and "failed" not in line}
    todo: dict[tuple[str, int], tuple[Cell, int]] = {}
    for seed in range(seeds):
        for cell in cells:
            one = (cell.work.key(quick), seed)
            if cell.work.instant or (seed and not cell.work.seeded):
                continue
            if one not in found or not set(cell.measures) <= cell.work.figures(found[one]).keys():
                todo.setdefault(one, (cell, seed))
    return list(todo.values())


def play(
    todo: list[tuple[Cell, int]], table: Table, results: Path, device: str, quick: bool, told: Told, jobs: int = 1
) -> list[Line]:
    """Measure and write; the lines that were written. `jobs`: cells at a time, each in a process of its own."""
    unfinished = results.parent / "unfinished"
    if todo:
        _refuse_unfit(todo, device, quick, jobs)
        _refuse_unwritable(results, unfinished)
    jobs = min(jobs, len(todo))
    work = [(cell, Job(seed, device, quick, unfinished)) for cell, seed in todo]
    written = []
    for line in _side_by_side(work, table.name, told, jobs) if jobs > 1 else _one_by_one(work, table.name, told):
        _append(results, line)
        written.append(line)
        if line.get("failed") != KILLED:  # that one goes on from its checkpoint
            shutil.rmtree(begun(unfinished, line["key"], line["seed"]), ignore_errors=True)
    with suppress(OSError):  # not empty where another process is at work there
        unfinished.rmdir()
    told("", len(todo), len(todo))
    return written


def _refuse_unfit(todo: list[tuple[Cell, int]], device: str, quick: bool, jobs: int) -> None:
    """What would fail in every cell is said once, before the first."""
    from shoal.data import load
    from shoal.engine.stage import pick_device

    pick_device(device)
    timed = next((cell for cell, _ in todo if "step_seconds" in cell.measures), None)
    if timed and min(jobs, len(todo)) > 1:
        raise ConfigError(
            f"--jobs {jobs}: '{timed.name}' measures the time of a step, which needs the machine for itself; "
            "give --jobs 1"
        )
    for name in sorted({cell.work.needs(quick) for cell, _ in todo} - {""}):
        load(name)


def _refuse_unwritable(results: Path, unfinished: Path) -> None:
    """A results file that cannot be written is found before hours are spent on its lines."""
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.open("ab").close()
        unfinished.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=unfinished) as file:
            file.write(bytes(ROOM))
    except OSError as error:
        raise _unwritable(results, error) from None


def _unwritable(results: Path, error: OSError) -> RunError:
    return RunError(f"results file {results} cannot be written: {error.strerror or error}; choose another --results")


def _one_by_one(work: list[tuple[Cell, Job]], table: str, told: Told) -> Iterator[Line]:
    for done, (cell, job) in enumerate(work):
        told(cell.name, done, done)

        def part(share: float, name: str = cell.name, done: int = done) -> None:
            told(name, done, done + share)

        yield _line(table, cell, replace(job, told=part))


def _side_by_side(work: list[tuple[Cell, Job]], table: str, told: Told, jobs: int) -> Iterator[Line]:
    """Lines as they come. Where a process is killed, whatever was not done yet becomes lines that say so."""
    threads = max(1, cores() // jobs)
    told(f"{jobs} at a time", 0, 0)
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin, initargs=(threads,)) as pool:
        try:
            begun = {pool.submit(_line, table, cell, job): (cell, job) for cell, job in work}
            for done, future in enumerate(as_completed(begun), 1):
                cell, job = begun[future]
                killed = isinstance(future.exception(), BrokenProcessPool)
                line = _head(table, cell, job) | {"failed": KILLED} if killed else future.result()
                line.pop("step_seconds", None)  # a time belongs to a cell that had the machine for itself
                yield line
                told(cell.name, done, done)
        except BaseException:  # also Ctrl-C: a run that is stopped goes on from its checkpoint the next time
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()
            raise


def _begin(threads: int) -> None:
    """Ctrl-C reaches these processes too, and they have nothing to say to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(threads)


def _end_with_parent() -> None:
    """A parent that is killed (kill -9) leaves nobody behind."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _head(table: str, cell: Cell, job: Job) -> Line:
    from shoal.engine.stage import pick_device

    line: Line = {"table": table, "cell": cell.name, "key": cell.work.key(job.quick), "seed": job.seed}
    device = pick_device(job.device).type  # not "auto": the same seed draws other noise on a GPU
    return line | {"quick": job.quick, "device": device, "when": datetime.now(UTC).isoformat(timespec="seconds")}


def _line(table: str, cell: Cell, job: Job) -> Line:
    line = _head(table, cell, job)
    start = time.perf_counter()
    try:
        line |= cell.work.measure(job)
    except ShoalError as error:
        line["failed"] = str(error)
    except Exception as error:  # whatever it is, the other cells go on
        line["failed"] = f"{type(error).__name__}: {error}"
    return line | {"seconds": round(time.perf_counter() - start, 1)}


def _append(path: Path, line: Line) -> None:
    """A torn last line (a crash while it was written) is ended first, so that it spoils no other."""
    try:
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.truncate(path.read_bytes().rfind(b"\n") + 1)
            file.write(json.dumps(line).encode() + b"\n")
    except OSError as error:
        raise _unwritable(path, error) from None
