"""Measure a table cell by cell: a line is appended as soon as a cell ends, and what is there is not run again.

A cell that fails leaves a line with the reason; the others go on, and the next call tries it again.
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
from itertools import product
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from threading import Thread

from shoal.errors import ConfigError, RunError, ShoalError
from shoal.files import atomic, fix_of
from shoal.papers import tables
from shoal.papers.table import Cell, Job, Line, Table, unfinished_folder
from shoal.papers.work import Run
from shoal.renamed import current
from shoal.training.engine_settings import cores, of_one_job

KEPT = Path("docs/results")
SEEDS = 5  # fewer say little about the spread
KILLED = "its process was killed, perhaps for memory: try fewer --jobs"
ROOM = 1 << 20  # bytes that the disk must have free, more than any line needs
Progress = Callable[[str, int, float], None]
"""(cell, cells done, the same with the part of the running one)"""


def results_file(table: str, quick: bool, given: Path | None = None) -> Path:
    """Where a table's lines are appended: `given`, or `papers/NAME.jsonl`."""
    return given or Path("papers") / (f"{table}-quick.jsonl" if quick else f"{table}.jsonl")


def known_files(table: str, quick: bool) -> list[Path]:
    """The results that `compare` reads by default: those that the repository keeps, then those of this folder.

    Those of all tables, since tables repeat each other's cells.
    """
    own = results_file(table, quick)
    return [own] if quick else [*sorted(KEPT.glob("*.jsonl")), own]


def read_lines(path: Path) -> list[Line]:
    """The lines of a results file, without a last one that a crash left half written.

    Raises:
        RunError: Where the file or one of its lines cannot be read.
    """
    try:
        written = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"results file {path} cannot be read: {error}") from None
    lines = []
    for number, text in enumerate(written, 1):
        try:
            lines.append(current(dict(json.loads(text))))
        except (ValueError, TypeError):
            if number < len(written):
                raise RunError(f"line {number} of {path} is not valid JSON; correct or remove it") from None
    return lines


def chosen(table: Table, rows: str = "") -> list[Cell]:
    """Select cells of a table.

    Args:
        table: The table.
        rows: A regular expression, case aside, for names; if none matches, for data sets or TABLE/DATA.

    Raises:
        ConfigError: Where it is no regular expression, or nothing matches.
    """
    try:
        pattern = re.compile(rows, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--rows '{rows}' is not a regular expression: {error}") from None
    names: tuple[Callable[[Cell], str], ...] = (
        lambda cell: cell.name,
        lambda cell: cell.work.needs(False),
        lambda cell: f"{table.name}/{cell.work.needs(False)}" if cell.work.needs(False) else "",
    )
    for name in names:
        if cells := [cell for cell in table.cells if name(cell) and pattern.search(name(cell))]:
            return cells
    if table.cells:
        raise ConfigError(f"no cell of {table.name} matches '{rows}'; an example is '{table.cells[0].name}'")
    return []


def plan(cells: Iterable[Cell], seeds: int, quick: bool, lines: Iterable[Line]) -> list[tuple[Cell, int]]:
    """The measurements still to be made, as (cell, seed); those that several cells share are made once.

    A line counts for a cell if it has all the cell's measures.
    """
    found = {(line["key"], line.get("seed", 0)): line for line in lines if "key" in line and "failed" not in line}
    todo: dict[tuple[str, int], tuple[Cell, int]] = {}
    for seed, cell in product(range(seeds), cells):
        one = (cell.work.key(quick), seed)
        if cell.work.instant or (seed and not cell.work.seeded):
            continue
        if one not in found or not set(cell.measures) <= cell.work.figures(found[one]).keys():
            todo.setdefault(one, (cell, seed))
    return list(todo.values())


def prove_again(results: Path, progress: Progress) -> tuple[int, int, int]:
    """Rewrite the claims in a results file as this version proves them.

    Returns:
        How many lines have other claims now, how many keep theirs because they do not hold the noise of their run,
        and how many because they are of no cell of a table, or of one whose settings were others.

    Raises:
        RunError: A line is malformed; the file stays as it is.
    """
    cells = [cell for table in tables().values() for cell in table.cells]
    works = {(cell.work.key(quick), quick): cell.work for cell in cells for quick in (False, True)}
    lines, changed, unknown, foreign = read_lines(results), 0, 0, 0
    for number, line in enumerate(lines):
        work = works.get((line.get("key", ""), line.get("quick", False)))
        if "proven" not in line:
            continue
        if not isinstance(work, Run):
            foreign += 1
            continue
        progress(line.get("cell", ""), number, number)
        try:
            lines[number] = work.proven_again(line)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise RunError(f"line {number + 1} of {results} is malformed: {error}; correct or remove it") from None
        changed += lines[number] != line
        unknown += lines[number] is line
    lines += read_lines(results)[len(lines) :]  # measured in the meantime
    try:
        with atomic(results) as file:
            file.writelines(f"{json.dumps(line)}\n".encode() for line in lines)
    except OSError as error:
        raise RunError(f"results file {results} cannot be written: {error.strerror}; {fix_of(error)}") from None
    progress("", len(lines), len(lines))
    return changed, unknown, foreign


def play(
    todo: list[tuple[Cell, int]],
    table: Table,
    results: Path,
    device: str,
    quick: bool,
    progress: Progress,
    jobs: int = 1,
) -> list[Line]:
    """Measure cells and append their lines to a results file.

    Args:
        todo: Cells and seeds, from `plan`.
        table: Their table.
        results: The file.
        device: `auto`, `cpu` or `cuda`.
        quick: Whether to measure small versions.
        progress: Called as cells go on.
        jobs: Cells at a time, each in its own process.

    Returns:
        The lines that were written.
    """
    unfinished = results.parent / "unfinished"
    if todo:
        _refuse_unfit(todo, device, quick, jobs)
        _refuse_unwritable(results, unfinished)
    jobs = min(jobs, len(todo))
    work = [(cell, Job(seed, device, quick, unfinished)) for cell, seed in todo]
    written = []
    for line in _in_parallel(work, table.name, progress, jobs) if jobs > 1 else _in_order(work, table.name, progress):
        _append(results, line)
        written.append(line)
        if line.get("failed") != KILLED:  # which resumes from its checkpoint
            shutil.rmtree(unfinished_folder(unfinished, line["key"], line["seed"]), ignore_errors=True)
    with suppress(OSError):  # not empty while another process uses it
        unfinished.rmdir()
    progress("", len(todo), len(todo))
    return written


def _refuse_unfit(todo: list[tuple[Cell, int]], device: str, quick: bool, jobs: int) -> None:
    """Raise once, before the first cell, what would fail in all of them."""
    from shoal.data import load
    from shoal.training.context import pick_device

    pick_device(device)
    timed = next((cell for cell, _ in todo if "step_seconds" in cell.measures), None)
    if timed and min(jobs, len(todo)) > 1:
        raise ConfigError(
            f"--jobs {jobs}: '{timed.name}' measures the time of a step and must run alone; give --jobs 1"
        )
    for name in sorted({cell.work.needs(quick) for cell, _ in todo} - {""}):
        load(name)


def _refuse_unwritable(results: Path, unfinished: Path) -> None:
    """Raise before hours are spent on lines that cannot be written."""
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


def _in_order(work: list[tuple[Cell, Job]], table: str, progress: Progress) -> Iterator[Line]:
    for done, (cell, job) in enumerate(work):
        progress(cell.name, done, done)

        def part(share: float, name: str = cell.name, done: int = done) -> None:
            progress(name, done, done + share)

        yield _line(table, cell, replace(job, progress=part))


def _in_parallel(work: list[tuple[Cell, Job]], table: str, progress: Progress, jobs: int) -> Iterator[Line]:
    """Lines as cells end. Where a process is killed, all cells that are left become failures."""
    threads = max(1, cores() // jobs)
    progress(f"{jobs} at a time", 0, 0)
    context = get_context("spawn")
    numbers = context.SimpleQueue()
    for number in range(jobs):
        numbers.put(number)
    with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(threads, numbers)) as pool:
        try:
            started = {pool.submit(_line, table, cell, job): (cell, job) for cell, job in work}
            for done, future in enumerate(as_completed(started), 1):
                cell, job = started[future]
                killed = isinstance(future.exception(), BrokenProcessPool)
                line = _head(table, cell, job) | {"failed": KILLED} if killed else future.result()
                line.pop("step_seconds", None)  # only a cell that runs alone has a valid time
                yield line
                progress(cell.name, done, done)
        except BaseException:  # Ctrl-C too: an interrupted run resumes from its checkpoint
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()
            raise


def _begin(threads: int, numbers: SimpleQueue[int]) -> None:
    """Ctrl-C reaches these processes too: they end without a traceback. Each has a GPU of its own, if any."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ |= of_one_job(numbers.get())
    Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(threads)


def _end_with_parent() -> None:
    """End when the parent is killed (kill -9)."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _head(table: str, cell: Cell, job: Job) -> Line:
    from shoal.training.context import pick_device

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
    except Exception as error:  # the other cells go on
        line["failed"] = f"{type(error).__name__}: {error}"
    return line | {"seconds": round(time.perf_counter() - start, 1)}


def _append(path: Path, line: Line) -> None:
    """Append a line; a last one that a crash left half written is removed first."""
    try:
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.truncate(path.read_bytes().rfind(b"\n") + 1)
            file.write(json.dumps(line).encode() + b"\n")
    except OSError as error:
        raise _unwritable(path, error) from None
