"""Several runs on one page: accuracy against proven epsilon, one point a run, and a table that sorts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import RunError
from shoal.report.folder import REPORT, Run, number
from shoal.report.page import render, write_page
from shoal.report.plots import OBSERVERS, PLAIN, UNITS
from shoal.report.series import Plot, build, column, figure, in_seconds, percent

MOST_LINES = 6
"""Runs whose accuracy is drawn over rounds: more cannot be told apart."""
MOST_KEYS = 8
_NOT_A_CHOICE = {"noise_seed", "log", "engine.device", "budget.calibrate"}


@dataclass(frozen=True)
class Entry:
    """A run in a comparison; `run` is None where it came to nothing, and `failed` says why."""

    name: str
    run: Run | None
    choice: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    best: bool = False

    @property
    def label(self) -> str:
        """What was chosen for it in a few words, or nothing where that takes too many."""
        said = ", ".join(f"{key.rpartition('.')[2]} {word(value)}" for key, value in self.choice.items())
        return said if len(said) < 30 else ""


@dataclass(frozen=True)
class Words:
    """What a comparison says besides its figures."""

    title: str
    heading: str
    state: str
    stopped: str
    rows_title: str = "All runs"
    texts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tables: list[tuple[str, list[dict[str, str]]]] = field(default_factory=list)
    choices_first: bool = False


def write_comparison(path: Path, runs: Sequence[Run], unit: str = "client", observer: str = "release") -> Path:
    """Compare finished and unfinished runs; where the page is."""
    keys = differing(runs)
    entries = [Entry(run.name, run, {key: run.flat_config().get(key) for key in keys}) for run in runs]
    words = Words(
        title=f"{len(runs)} runs",
        heading=f"{len(runs)} runs compared",
        state="finished",
        stopped=", ".join(sorted({run.dataset for run in runs})),
        warnings=[
            "Not a release: accuracy is a figure without noise. Choosing one of these runs by looking at it costs "
            "privacy that no single run's ledger knows of."
        ],
    )
    return write_page(path, comparison_page(path, entries, words, unit, observer))


def comparison_page(path: Path, entries: Sequence[Entry], words: Words, unit: str, observer: str) -> str:
    """The whole page; links to the runs' own pages are relative to where it will lie."""
    if not entries:
        raise RunError("there is nothing to compare: name at least one run's folder")
    points = [_point(entry, unit, observer) for entry in entries if entry.run and entry.run.accuracy is not None]
    whom = f"{UNITS.get(unit, unit)}, against {OBSERVERS.get(observer, observer)}"
    plots: list[dict[str, Any]] = []
    if len(points) > 1:
        plots.append(
            {
                "id": "frontier",
                "title": f"Proven for {whom}",
                "note": "One point a run. The line joins the best accuracy that each epsilon buys.",
                "about": _about(points),
                "points": points,
            }
        )
    columns, rows = _table(entries, path, words.choices_first)
    lines = _over_rounds(entries)
    if lines is not None:
        plots.append(lines.to_json())
    return render(
        kind="comparison",
        title=words.title,
        live=False,
        heading=words.heading,
        state=words.state,
        stopped=words.stopped,
        rows_title=words.rows_title,
        texts=words.texts,
        warnings=words.warnings,
        tables=words.tables,
        plots=plots,
        columns=columns,
        rows=rows,
        data={"plots": plots},
    )


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which the runs' configurations differ, but for those that the table shows anyway."""
    flat = [run.flat_config() for run in runs]
    names: dict[str, None] = {}
    for one in flat:
        names |= dict.fromkeys(one)
    shown = {"algorithm", "data.name", "rounds"} | _NOT_A_CHOICE
    found = [name for name in names if name not in shown and len({repr(one.get(name)) for one in flat}) > 1]
    return found[:MOST_KEYS]


def _point(entry: Entry, unit: str, observer: str) -> dict[str, Any]:
    run = entry.run
    assert run is not None
    assert run.accuracy is not None
    epsilon = run.epsilon(unit, observer)
    details = [
        ("method", run.algorithm),
        ("data", run.dataset),
        ("accuracy", percent(run.accuracy)),
        ("proven epsilon", "none" if epsilon is None else figure(epsilon)),
        ("adjacency", run.adjacency(unit, observer) or "not named"),
        ("rounds", f"{run.done:,}"),
        *((key, word(value)) for key, value in entry.choice.items()),
    ]
    return {
        "name": entry.name,
        "label": entry.label or run.algorithm,
        "group": run.algorithm,
        "x": epsilon,
        "y": run.accuracy,
        "details": details,
    }


def _over_rounds(entries: Sequence[Entry]) -> Plot | None:
    shown = [entry for entry in entries if entry.run and column(entry.run.metrics, "accuracy")]
    if not 1 < len(shown) <= MOST_LINES:
        return None
    methods = {entry.run.algorithm for entry in shown if entry.run}
    by_method = len(methods) == len(shown)
    columns = [
        (
            entry.label or (entry.run.algorithm if by_method else entry.name),
            column(entry.run.metrics, "accuracy"),
            tone,
            False,
        )
        for tone, entry in enumerate(shown, start=1)
        if entry.run
    ]
    return build("over-rounds", "Accuracy over rounds", columns, format="share")


def _table(
    entries: Sequence[Entry], page: Path, choices_first: bool
) -> tuple[list[tuple[str, bool]], list[dict[str, Any]]]:
    """The columns (name, numeric) and the rows; a column that says nothing is left out."""
    rows = [_cells(entry, choices_first) for entry in entries]
    names = list(dict.fromkeys(name for row in rows for name in row))
    told = [name for name in names if any(name in row and row[name]["text"] for row in rows)]
    if choices_first:  # a sweep, where these are mostly the same
        told = [
            name for name in told if name not in _SAME or len({row[name]["text"] for row in rows if name in row}) > 1
        ]
    numeric = {name for name in told if any(name in row and row[name]["value"] is not None for row in rows)}
    made = [
        {
            "cells": [row.get(name, _cell("")) for name in told],
            "href": _link(entry.run, page) if entry.run else "",
            "best": entry.best,
        }
        for entry, row in zip(entries, rows, strict=True)
    ]
    return [(name, name in numeric) for name in told], made


_SAME = ("Method", "Data")


def _cells(entry: Entry, choices_first: bool) -> dict[str, dict[str, Any]]:
    run = entry.run
    choice = {key: _cell(word(value), value) for key, value in entry.choice.items()}
    state = entry.failed or (run.state if run else "not run yet")
    head = {"Run": _cell(entry.name)} | (choice if choices_first else {})
    if run is None:
        return head | {"State": _cell(state)}
    delta = min((claim["delta"] for claim in run.proven if claim.get("delta")), default=None)
    published = next((number(claim.get("epsilon")) for claim in run.published), None)
    client, record = run.epsilon("client", "release"), run.epsilon("example", "release")
    made_up = " (simulated)" if run.simulated else ""
    told = {
        "Method": _cell(run.algorithm),
        "Data": _cell(run.dataset),
        "Accuracy": _cell("" if run.accuracy is None else percent(run.accuracy), run.accuracy),
        PLAIN.capitalize(): _cell(
            "" if run.plain_accuracy is None else percent(run.plain_accuracy), run.plain_accuracy
        ),
        "ε a client": _cell("none" if client is None else figure(client) + made_up, client),
        "ε a record": _cell("none" if record is None else figure(record), record),
        "δ": _cell("" if delta is None else f"{delta:g}", delta),
        "ε published": _cell("" if published is None else f"{published:.3g}", published),
        "Rounds": _cell(f"{run.done:,}", run.done),
        "Time": _cell("" if run.seconds is None else in_seconds(run.seconds), run.seconds),
    }
    return head | told | ({} if choices_first else choice) | {"State": _cell(state)}


def _link(run: Run, page: Path) -> str:
    """From the page to the run's own, for a reader of both on the same disk."""
    if not (run.path / REPORT).is_file():
        return ""
    from urllib.parse import quote

    relative = os.path.relpath(run.path.resolve() / REPORT, page.resolve().parent)
    return quote(Path(relative).as_posix())


def _cell(text: str, value: Any = None) -> dict[str, Any]:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return {"text": text, "value": value if numeric else None}


def word(value: Any) -> str:
    """A value of the configuration as people write it."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _about(points: Sequence[dict[str, Any]]) -> str:
    said = []
    for point in points[:20]:
        epsilon = "nothing proven" if point["x"] is None else f"epsilon {figure(point['x'])}"
        said.append(f"{point['name']}: accuracy {percent(point['y'])}, {epsilon}")
    more = f"; and {len(points) - 20} more" if len(points) > 20 else ""
    return "; ".join(said) + more + "."
