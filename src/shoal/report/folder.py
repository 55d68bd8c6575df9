"""A run's folder as a report reads it: no lock is taken, nothing is changed, a run that goes on may be read too."""

from __future__ import annotations

import fcntl
import json
import math
import os
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from shoal.accounting.chain import Line, Verification, verify
from shoal.errors import LedgerError, RunError

State = Literal["finished", "running", "stopped"]
REPORT, RESULT, BASELINE, METRICS = "report.html", "result.json", "baseline.jsonl", "metrics.jsonl"
AUDIT, CHECKPOINT = "audit/audit.json", "checkpoint/state.safetensors"


@dataclass(frozen=True)
class Run:
    """All that is known of a run. `result` is what it wrote at its end, None before; `checked`: the ledger was."""

    path: Path
    state: State
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    baseline: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    environment: list[tuple[str, str]] = field(default_factory=list)
    ledger: Verification | None = None
    checked: bool = False
    audit: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", "?"))

    @property
    def dataset(self) -> str:
        return str(_table(self.config, "data").get("name", "?"))

    @property
    def budget(self) -> dict[str, Any]:
        return _table(self.config, "budget")

    @property
    def rounds(self) -> int:
        """How many rounds were to be played."""
        rounds = self.config.get("rounds", 0)
        return rounds if isinstance(rounds, int) else 0

    @property
    def done(self) -> int:
        if self.result is not None:
            return int(self.result["rounds"])
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def accuracy(self) -> float | None:
        """Of the model that was given out, or of the last round that was evaluated."""
        if self.result is not None:
            return number(self.result.get("accuracy"))
        return next((number(line["accuracy"]) for line in reversed(self.metrics) if "accuracy" in line), None)

    @property
    def plain_accuracy(self) -> float | None:
        """Of the same training with neither clip nor noise, where that was asked for."""
        return number((self.result or {}).get("baseline"))

    @property
    def proven(self) -> list[dict[str, Any]]:
        """By PLD for every unit and observer; while the run goes on, by RDP, where something is proven.

        Of a run that a private selection chose, what holds is what that says, which is more. Nothing is proven from
        a ledger that is broken.
        """
        if not self.checked or (self.ledger is not None and self.ledger.whole):
            return self._claimed
        why = "there is no ledger" if self.ledger is None else "the ledger is broken"
        return [claim | {"epsilon": None, "because": why} for claim in self._claimed]

    @property
    def _claimed(self) -> list[dict[str, Any]]:
        if self.selected is not None:
            return list(self.selected["proven"])
        if self.result is not None:
            return list(self.result.get("proven", []))
        so_far = self.metrics[-1].get("proven", []) if self.metrics else []
        return [{"accountant": "rdp", "because": None} | claim for claim in so_far]

    @property
    def selected(self) -> dict[str, Any] | None:
        """What a private selection, if one chose this run, says of it."""
        held = (self.result or {}).get("selected")
        return held if isinstance(held, dict) and isinstance(held.get("proven"), list) else None

    @property
    def simulated(self) -> bool:
        """Were records dealt to clients that do not exist?"""
        claimed = any(claim.get("simulated") for claim in self._claimed)
        return claimed or bool((self.result or {}).get("simulated_clients"))

    @property
    def published(self) -> list[dict[str, Any]]:
        return list((self.result or {}).get("published", []))

    @property
    def seconds(self) -> float | None:
        if self.result is not None:
            return number(self.result.get("seconds"))
        return sum(number(line.get("seconds")) or 0.0 for line in self.metrics) if self.metrics else None

    @property
    def started(self) -> datetime:
        """As its name says, else as its configuration's file does."""
        try:
            return datetime.strptime("-".join(self.name.split("-")[:2]), "%Y%m%d-%H%M%S")
        except ValueError:
            path = self.path / "config.toml"
            return datetime.fromtimestamp(path.stat().st_mtime if path.exists() else 0)

    def epsilon(self, unit: str, observer: str) -> float | None:
        """What is proven for that unit against that observer, if anything is."""
        return number(self._claim(unit, observer).get("epsilon"))

    def adjacency(self, unit: str, observer: str) -> str | None:
        """By what neighbours differ in that claim; older runs do not say."""
        return self._claim(unit, observer).get("adjacency")

    def _claim(self, unit: str, observer: str) -> dict[str, Any]:
        asked = (unit, observer)
        return next((each for each in self.proven if (each.get("unit"), each.get("observer")) == asked), {})

    def flat_config(self) -> dict[str, Any]:
        """Every key of the configuration, as `-c` takes it."""
        flat: dict[str, Any] = {}
        for key, value in self.config.items():
            if isinstance(value, dict):
                flat |= {f"{key}.{name}": inner for name, inner in value.items()}
            else:
                flat[key] = value
        return flat


def read_run(path: Path, *, check_ledger: bool = True, every_round: bool = True) -> Run:
    """The run in this folder; without `every_round` a finished one is known by its result alone, which is quick."""
    result = _read_result(path / RESULT)
    rounds = every_round or result is None
    return Run(
        path=path,
        state=state_of(path),
        config=read_config(path),
        metrics=read_lines(path / METRICS) if rounds else [],
        baseline=read_lines(path / BASELINE) if rounds else [],
        result=result,
        environment=_read_environment(path / "environment.txt"),
        ledger=check(path) if check_ledger else None,
        checked=check_ledger,
        audit=_read_audit(path / AUDIT),
    )


def read_config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(
            f"{path} is no run folder: it has no config.toml; `shoal runs list` shows those there are"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path / 'config.toml'} cannot be read: {error}") from None


def state_of(path: Path) -> State:
    if is_running(path):
        return "running"
    return "finished" if (path / RESULT).is_file() else "stopped"


def is_running(path: Path) -> bool:
    """Does a process hold the folder's lock?"""
    try:
        handle = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def check(path: Path) -> Verification | None:
    """Is the ledger whole, and does the result say what it says? None where there is none."""
    ledger = path / "ledger.jsonl"
    if not ledger.is_file():
        return None
    last: dict[str, Any] = {}

    def look(line: Line) -> None:
        last.clear()
        last.update(line.body if line.kind == "close" else {})

    try:
        found = verify(ledger, checkpoint_head(path), look)
    except LedgerError as error:
        return Verification(False, 0, "", because=str(error))
    told = (_read_result(path / RESULT) or {}).get("proven")
    if found.whole and told is not None and "proven" in last and told != last["proven"]:
        return replace(found, whole=False, because=f"{RESULT} says something else is proven than its last line does")
    return found


def checkpoint_head(path: Path) -> str | None:
    """The hash of the ledger's line after which the run's checkpoint was written: it must be there still.

    None where there is no checkpoint that can be read.
    """
    checkpoint = path / CHECKPOINT
    if not checkpoint.is_file():
        return None
    with suppress(SafetensorError, OSError), safe_open(checkpoint, framework="np") as file:
        notes: dict[str, str] = file.metadata() or {}
        return notes.get("ledger")
    return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rounds of a file of JSON lines; a line that is not whole is left out."""
    found: list[dict[str, Any]] = []
    if not path.is_file():  # a device, say, has no end
        return found
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    read = json.loads(line)
                    if isinstance(read, dict) and isinstance(read.get("round"), int):
                        found.append(read)
    except OSError:
        pass
    return found


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _read_result(path: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) and isinstance(read.get("rounds"), int) else None


def _read_audit(path: Path) -> list[dict[str, Any]]:
    """What `shoal audit --run` found, a row a claim."""
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        return []
    rows = read.get("rows") if isinstance(read, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _read_environment(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    except OSError:
        return []
    return [(key, value.strip()) for key, _, value in (line.partition(":") for line in lines)]


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}
