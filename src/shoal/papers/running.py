"""Measuring a table, cell by cell: a line is appended as soon as a cell ends, and what is there is not run again.

A cell that crashes becomes a line that says so; the others go on, and it is tried again the next time.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from shoal.errors import ConfigError, RunError, ShoalError
from shoal.papers.base import Cell, Job, Line, Table

KEPT = Path("docs/results")
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
            lines.append(json.loads(text))
        except ValueError:
            if number < len(written):
                raise RunError(f"line {number} of {path} is not JSON; mend it or take it out") from None
    return lines


def chosen(table: Table, rows: str = "") -> list[Cell]:
    """The cells whose names match, case aside."""
    try:
        pattern = re.compile(rows, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--rows '{rows}' is no regular expression: {error}") from None
    cells = [cell for cell in table.cells if pattern.search(cell.name)]
    if not cells and table.cells:
        raise ConfigError(
            f"no cell of {table.name} matches '{rows}'; they are called for example '{table.cells[0].name}'"
        )
    return cells


def plan(cells: Iterable[Cell], seeds: int, quick: bool, lines: Iterable[Line]) -> list[tuple[Cell, int]]:
    """The measurements that are still to be made; one that several cells show is made once."""
    done = {(line["key"], line["seed"]) for line in lines if "key" in line and "failed" not in line}
    todo = []
    for seed in range(seeds):
        for cell in cells:
            one = (cell.work.key(quick), seed)
            if one in done or cell.work.instant or (seed and not cell.work.seeded):
                continue
            done.add(one)
            todo.append((cell, seed))
    return todo


def play(
    todo: list[tuple[Cell, int]], table: Table, results: Path, device: str, quick: bool, told: Told
) -> list[Line]:
    """Measure and write; the lines that were written."""
    results.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for done, (cell, seed) in enumerate(todo):
        told(cell.name, done, done)

        def part(share: float, name: str = cell.name, done: int = done) -> None:
            told(name, done, done + share)

        line = _line(table, cell, Job(seed, device, quick, results.parent / "unfinished", part))
        _append(results, line)
        written.append(line)
    with suppress(OSError):  # not empty where another process is at work there
        (results.parent / "unfinished").rmdir()
    told("", len(todo), len(todo))
    return written


def _line(table: Table, cell: Cell, job: Job) -> Line:
    line: Line = {"table": table.name, "cell": cell.name, "key": cell.work.key(job.quick), "seed": job.seed}
    line |= {"quick": job.quick, "device": job.device, "when": datetime.now(UTC).isoformat(timespec="seconds")}
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
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
