"""A run's folder as a report reads it: without a lock and without changes, also while the run goes on."""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shoal.accounting.hash_chain import Verification
from shoal.errors import RunError
from shoal.renamed import current
from shoal.report.proof import Proof, proof_of
from shoal.report.scores import Scores, number
from shoal.toml_text import flat

State = Literal["finished", "running", "stopped"]
REPORT, RESULT, BASELINE, METRICS = "report.html", "result.json", "baseline.jsonl", "metrics.jsonl"
AUDIT = "audit/audit.json"


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Attributes:
        path: Its folder.
        state: `finished`, `running` or `stopped`.
        config: Its configuration, as in config.toml.
        metrics: One entry a round.
        baseline: The same of the run without clipping and noise.
        result: What it wrote at its end; None before.
        environment: Versions and device.
        proof: What its ledger says; None only in the process that writes the ledger.
        audit: Rows of `shoal audit --run`.
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
        """The folder's name."""
        return self.path.resolve().name

    @property
    def algorithm(self) -> str:
        """The method's name."""
        return str(self.config.get("algorithm", "?"))

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return str(_table(self.config, "data").get("name", "?"))

    @property
    def budget(self) -> dict[str, Any]:
        """The privacy budget in the configuration."""
        return _table(self.config, "budget")

    @property
    def rounds(self) -> int:
        """The number of rounds in the configuration."""
        rounds = self.config.get("rounds", 0)
        return rounds if isinstance(rounds, int) else 0

    @property
    def done(self) -> int:
        """The number of rounds completed."""
        if self.result is not None:
            return int(self.result["rounds"])
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @cached_property
    def scores(self) -> Scores:
        """The figures of the released model, or of the last evaluation."""
        return Scores.so_far(self.metrics) if self.result is None else Scores.of(self.result)

    @property
    def ledger(self) -> Verification | None:
        """The verification of the ledger."""
        return None if self.proof is None else self.proof.ledger

    @property
    def proven(self) -> list[dict[str, Any]]:
        """Claims for every unit and observer, from the ledger; in the running process by RDP, from its metrics.

        For a run that a private selection chose, those of the selection. A broken ledger proves nothing.
        """
        if self.proof is not None:
            return self.proof.proven
        current = self.metrics[-1].get("proven", []) if self.metrics else []
        return [{"accountant": "rdp", "because": None} | claim for claim in current]

    @property
    def by_client(self) -> dict[str, Any] | None:
        """Record-level epsilon by client, where the ledger confirms it."""
        costs = (self.result or {}).get("by_client")
        confirmed = self.proof is not None and self.proof.by_client
        return costs if confirmed and isinstance(costs, dict) else None

    @property
    def selected(self) -> bool:
        """Whether a private selection chose this run."""
        return self.proof is not None and self.proof.selected

    @property
    def simulated(self) -> bool:
        """Whether its clients are simulated: records of one data set were assigned to them."""
        known = self.proof is not None and self.proof.simulated
        claimed = any(claim.get("simulated") for claim in self.proven)
        return known or claimed or bool((self.result or {}).get("simulated_clients"))

    @property
    def published(self) -> list[dict[str, Any]]:
        """What the method's paper claims for this setting."""
        return list((self.result or {}).get("published", []))

    @property
    def seconds(self) -> float | None:
        """How long it took."""
        if self.result is not None:
            return number(self.result.get("seconds"))
        return sum(number(line.get("seconds")) or 0.0 for line in self.metrics) if self.metrics else None

    @property
    def started(self) -> datetime:
        """When it started: from its name, else from config.toml's time stamp."""
        try:
            return datetime.strptime("-".join(self.name.split("-")[:2]), "%Y%m%d-%H%M%S")
        except ValueError:
            path = self.path / "config.toml"
            return datetime.fromtimestamp(path.stat().st_mtime if path.exists() else 0)

    def epsilon(self, unit: str, observer: str) -> float | None:
        """The epsilon proven for a unit and an observer; None where there is none."""
        return number(self._claim(unit, observer).get("epsilon"))

    def adjacency(self, unit: str, observer: str) -> str | None:
        """The adjacency of that claim; None in older runs."""
        return self._claim(unit, observer).get("adjacency")

    def _claim(self, unit: str, observer: str) -> dict[str, Any]:
        asked = (unit, observer)
        return next((each for each in self.proven if (each.get("unit"), each.get("observer")) == asked), {})

    def flat_config(self) -> dict[str, Any]:
        """Every key of the configuration, as `-c` takes it."""
        return flat(self.config)


def read_run(path: Path, *, check_ledger: bool = True, every_round: bool = True) -> Run:
    """Read a run.

    Args:
        path: Its folder.
        check_ledger: Whether to verify the ledger and read the claims from it.
        every_round: Whether to read the metrics of a finished run, which takes longer.

    Raises:
        RunError: Where it is no run folder.
    """
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
    """The configuration in a run's folder.

    Raises:
        RunError: Where there is none, or it cannot be read.
    """
    try:
        return tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is not a run folder: it has no config.toml; `shoal runs list` lists them") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path / 'config.toml'} cannot be read: {error}") from None


def state_of(path: Path) -> State:
    """Whether the run in this folder is running, finished or stopped."""
    if is_running(path):
        return "running"
    return "finished" if (path / RESULT).is_file() else "stopped"


def is_running(path: Path) -> bool:
    """Whether a process holds the folder's lock."""
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
    """The rounds in a file of JSON lines; malformed lines are skipped."""
    found: list[dict[str, Any]] = []
    if not path.is_file():  # a device, say, has no end
        return found
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    read = current(json.loads(line))
                    if isinstance(read, dict) and isinstance(read.get("round"), int):
                        found.append(read)
    except OSError:
        pass
    return found


def read_result(path: Path) -> dict[str, Any] | None:
    """The result.json in a run's folder; None where there is none that can be read."""
    read = _read_json(path / RESULT)
    return read if isinstance(read.get("rounds"), int) else None


def _read_audit(path: Path) -> list[dict[str, Any]]:
    """The rows of `shoal audit --run`, one a claim."""
    rows = _read_json(path).get("rows")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none that can be read."""
    try:
        read = current(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _read_environment(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    except OSError:
        return []
    return [(key, value.strip()) for key, _, value in (line.partition(":") for line in lines)]


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}
