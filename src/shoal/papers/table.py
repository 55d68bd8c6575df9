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

from shoal.bibliography import GEYER, PFL, THESIS, WEI

Line = dict[str, Any]
"""One measurement: a line of a results file."""


def _no_progress(share: float) -> None:
    pass


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        seed: The run's seed.
        device: `auto`, `cpu` or `cuda`.
        quick: Whether to measure the cell's small version.
        unfinished: Where the folders of unfinished runs are.
        progress: Called with the share that is done, 0 to 1.
    """

    seed: int
    device: str
    quick: bool
    unfinished: Path
    progress: Callable[[float], None] = _no_progress


def unfinished_folder(unfinished: Path, key: str, seed: int) -> Path:
    """The folder of a measurement until its line is written; an interrupted one resumes from there."""
    return unfinished / f"{key}-{seed}"


class Work(Protocol):
    """How a cell is measured. Works with equal keys measure the same thing and share their lines."""

    @property
    def seeded(self) -> bool:
        """Whether another seed gives another figure."""

    @property
    def instant(self) -> bool:
        """Whether it is arithmetic, computed when it is shown."""

    def key(self, quick: bool) -> str:
        """What identifies the measurement."""

    def needs(self, quick: bool) -> str:
        """Its data set; empty where it needs none."""

    def measure(self, job: Job) -> Line:
        """Measure it."""

    def figures(self, line: Line) -> dict[str, float]:
        """The figures in a line, by measure."""


@dataclass(frozen=True)
class Claim:
    """An epsilon that a paper states.

    Attributes:
        unit: `client` or `example`.
        observer: The observer that the claim must hold against.
        epsilon: The stated figure.
        contradicted: Why the claim is wrong, not only unproven.
        add_or_remove: What is proven under add-or-remove, where the paper means that; Shoal proves replace-one.
        amended: A change that makes the claim true, and what is proven with it.
    """

    unit: str
    observer: str
    epsilon: float
    contradicted: str = ""
    add_or_remove: Callable[[], float] | None = None
    amended: tuple[str, Callable[[], float]] | None = None


@dataclass(frozen=True)
class Cell:
    """A row and a column of a table, and how its figures are measured.

    Attributes:
        row: The row of the published table.
        column: Its column.
        work: How it is measured.
        measures: Which published figures it is compared with.
        change: How it differs from the paper's setting.
        claim: The epsilon that the paper states.
        proves: The unit and the observer whose epsilon is shown where nothing is claimed.
        attacked: Its name in the file that `benchmarks/attacks.py` writes.
        unneeded: Why it need not be run, shown where it was not.
    """

    row: str
    column: str
    work: Work
    measures: tuple[str, ...] = ("accuracy",)
    change: str = ""
    claim: Claim | None = None
    proves: tuple[str, str] | None = None
    attacked: str = ""
    unneeded: str = ""

    @property
    def name(self) -> str:
        """Row, column, measures unless it is accuracy, change."""
        tail = [] if "accuracy" in self.measures else ["+".join(self.measures)]
        return "/".join([self.row, self.column, *tail, *([self.change] if self.change else [])])

    @property
    def protects(self) -> tuple[str, str] | None:
        """The unit and the observer that its epsilon is about."""
        return self.proves if self.claim is None else (self.claim.unit, self.claim.observer)


@dataclass(frozen=True)
class Table:
    """A table, or a figure that is plotted from runs.

    Attributes:
        name: For example `geyer-table1`.
        needs: Its data sets.
        minutes: Roughly, for one seed of all cells on an H200.
        cells: What is measured.
        plots: The quantities that the figure plots.
    """

    name: str
    needs: tuple[str, ...]
    minutes: float
    cells: tuple[Cell, ...]
    plots: tuple[str, ...] = ()

    @property
    def paper(self) -> str:
        """The short citation; `Shoal` for tables of our own."""
        reference = PAPERS.get(self.name.partition("-")[0])
        return reference.short if reference else "Shoal"

    @property
    def title(self) -> str:
        """What the table shows."""
        return str(_entry(self.name)["title"])

    @property
    def about(self) -> str:
        """What the published figure shows, from its caption and the paper's text."""
        return str(_entry(self.name).get("about", ""))

    @property
    def published(self) -> dict[str, dict[str, dict[str, float]]]:
        """measure -> row -> column -> figure."""
        return published(self.name)


PAPERS = {"thesis": THESIS, "geyer": GEYER, "pfl": PFL, "alphacdp": WEI}


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
