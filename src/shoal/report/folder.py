"""A run's folder as a report reads it: no lock is taken, nothing is changed, a run that goes on may be read too."""

from __future__ import annotations

import fcntl
import json
import math
import os
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from shoal.accounting.chain import Verification
from shoal.errors import RunError
from shoal.report.proof import Proof, proof_of

State = Literal["finished", "running", "stopped"]
REPORT, RESULT, BASELINE, METRICS = "report.html", "result.json", "baseline.jsonl", "metrics.jsonl"
AUDIT = "audit/audit.json"


@dataclass(frozen=True)
class Run:
    """All that is known of a run.

    `result` is what it wrote at its end, None before; `proof` what its ledger says, None only in the process that
    writes that ledger.
    """

    path: Path
    state: State
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    baseline: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    environment: list[tuple[str, str]] = field(default_factory=list)
    proof: Proof | None = None
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
    def ledger(self) -> Verification | None:
        """What a check of the ledger found."""
        return None if self.proof is None else self.proof.ledger

    @property
    def proven(self) -> list[dict[str, Any]]:
        """For every unit and observer, from the ledger; in the process that plays the run, by RDP, from its metrics.

        Of a run that a private selection chose, what holds is what that says, which is more. Nothing is proven from
        a ledger that is broken.
        """
        if self.proof is not None:
            return self.proof.proven
        so_far = self.metrics[-1].get("proven", []) if self.metrics else []
        return [{"accountant": "rdp", "because": None} | claim for claim in so_far]

    @property
    def by_client(self) -> dict[str, Any] | None:
        """What a record of each client costs, where the ledger bears that out."""
        told = (self.result or {}).get("by_client")
        borne_out = self.proof is not None and self.proof.by_client
        return told if borne_out and isinstance(told, dict) else None

    @property
    def selected(self) -> bool:
        """Did a private selection choose this run?"""
        return self.proof is not None and self.proof.selected

    @property
    def simulated(self) -> bool:
        """Were records dealt to clients that do not exist?"""
        known = self.proof is not None and self.proof.simulated
        claimed = any(claim.get("simulated") for claim in self.proven)
        return known or claimed or bool((self.result or {}).get("simulated_clients"))

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
    """The run in this folder; without `every_round` a finished one is known by result and ledger, which is quick."""
    result = read_result(path)
    rounds = every_round or result is None
    return Run(
        path=path,
        state=state_of(path),
        config=read_config(path),
        metrics=read_lines(path / METRICS) if rounds else [],
        baseline=read_lines(path / BASELINE) if rounds else [],
        result=result,
        environment=_read_environment(path / "environment.txt"),
        proof=proof_of(path, result) if check_ledger else None,
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


def read_result(path: Path) -> dict[str, Any] | None:
    """What the run in this folder wrote at its end, None where there is nothing that can be read."""
    path = path / RESULT
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
