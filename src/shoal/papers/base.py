"""A table of a paper: its published figures, and the cells that are measured to stand beside them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

Line = dict[str, Any]
"""What is kept of one measurement: a line of a results file."""


def _nobody(share: float) -> None:
    """Told how far a measurement is, and does nothing."""


@dataclass(frozen=True)
class Job:
    """One measurement: with which seed, where, and whom to tell how far it is (a share, 0 to 1)."""

    seed: int
    device: str
    quick: bool
    unfinished: Path
    told: Callable[[float], None] = _nobody


def begun(unfinished: Path, key: str, seed: int) -> Path:
    """The folder of a measurement until its line is written: one that was stopped goes on from there."""
    return unfinished / f"{key}-{seed}"


class Work(Protocol):
    """How a cell is measured. Works with the same key measure the same thing, and share their lines.

    `seeded`: other seeds give other figures. `instant`: arithmetic, done when it is looked at. `needs`: its data set.
    """

    @property
    def seeded(self) -> bool: ...

    @property
    def instant(self) -> bool: ...

    def key(self, quick: bool) -> str: ...

    def needs(self, quick: bool) -> str: ...

    def measure(self, job: Job) -> Line: ...

    def figures(self, line: Line) -> dict[str, float]: ...


@dataclass(frozen=True)
class Claim:
    """An epsilon that the paper states for a unit; `observer` is who sees what the proof must hold against.

    `contradicted`: why it is not only unproven but wrong. `comes`: what is proven for a record that comes or goes,
    where the paper means that; Shoal's own figure is for a record that changes. `mended`: a change that makes it
    true, in words, and what is proven with it.
    """

    unit: str
    observer: str
    epsilon: float
    contradicted: str = ""
    comes: Callable[[], float] | None = None
    mended: tuple[str, Callable[[], float]] | None = None


@dataclass(frozen=True)
class Cell:
    """A row and a column of a table, what measures them, and which of their published figures that stands beside.

    `change` names what differs from what is printed. `proves`: the unit and the observer whose epsilon is shown where
    nothing is claimed. `attacked`: its name in the file that `benchmarks/attacks.py` writes.
    """

    row: str
    column: str
    work: Work
    measures: tuple[str, ...] = ("accuracy",)
    change: str = ""
    claim: Claim | None = None
    proves: tuple[str, str] | None = None
    attacked: str = ""

    @property
    def name(self) -> str:
        tail = [] if "accuracy" in self.measures else ["+".join(self.measures)]
        return "/".join([self.row, self.column, *tail, *([self.change] if self.change else [])])

    @property
    def protects(self) -> tuple[str, str] | None:
        """The unit and the observer that its epsilon is about."""
        return self.proves if self.claim is None else (self.claim.unit, self.claim.observer)


@dataclass(frozen=True)
class Table:
    """A table, or a figure that is drawn (`plots`) from runs.

    `needs`: data sets. `minutes`: roughly, for one seed of all cells on one H200.
    """

    name: str
    needs: tuple[str, ...]
    minutes: float
    cells: tuple[Cell, ...]
    plots: tuple[str, ...] = ()

    @property
    def paper(self) -> str:
        return PAPERS[self.name.partition("-")[0]]

    @property
    def title(self) -> str:
        return str(_entry(self.name)["title"])

    @property
    def about(self) -> str:
        """What the published picture shows, as caption and text tell it."""
        return str(_entry(self.name).get("about", ""))

    @property
    def published(self) -> dict[str, dict[str, dict[str, float]]]:
        """measure -> row -> column -> figure."""
        return published(self.name)


PAPERS = {"thesis": "000", "geyer": "001/003", "pfl": "002", "alphacdp": "004", "beyond": "none"}


def published(name: str) -> dict[str, dict[str, dict[str, float]]]:
    """The figures that are printed in a table; accuracies as shares."""
    entry = _entry(name)
    columns, scale = entry.get("columns", []), entry.get("scale", 1)
    measures = {measure: rows for measure, rows in entry.items() if isinstance(rows, Mapping)}
    return {
        measure: {row: _row(columns, values, scale) for row, values in rows.items()}
        for measure, rows in measures.items()
    }


def _row(columns: list[str], values: list[float], scale: float) -> dict[str, float]:
    shown = zip(columns, values, strict=True)
    return {
        column: round(value * scale, 10) if scale != 1 else value for column, value in shown if not math.isnan(value)
    }


def _entry(name: str) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = read(name.partition("-")[0])[name]
    return entry


@cache
def read(paper: str) -> dict[str, Any]:
    """The file of one paper's figures."""
    file = resources.files("shoal.papers") / "published" / f"{paper}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))
