"""Several runs on one page: the headline figure against proven epsilon, and a sortable table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.accounting.rounding import IN_NAME_ONLY, plain
from shoal.accounting.rounding import epsilon as epsilon_words
from shoal.errors import RunError
from shoal.report.plots import OBSERVERS, PLAIN, unit_in_words
from shoal.report.run_page import render, write_page
from shoal.report.run_reader import REPORT, Run
from shoal.report.scores import DIVERGED, Scores, name_of, number, title_of
from shoal.report.series import build, column, figure, in_seconds

MOST_LINES = 6
"""The most runs that are plotted over rounds: more cannot be distinguished."""
MOST_KEYS = 8
LONGEST = 60
"""The characters of a setting in a column, at most; longer ones, such as a schema's columns, are named above it."""
MOST_VALUES = 5
"""The most values of a setting that are named above the table."""
NOTHING_LEARNT = "no better than a constant answer"
_NOT_A_CHOICE = {"noise_seed", "log", "engine.device", "budget.calibrate"}


@dataclass(frozen=True)
class Entry:
    """A run in a comparison.

    Attributes:
        name: How it is called in the table.
        run: None where it has not run or has failed.
        choice: The settings in which it differs from the others.
        failed: Why it failed.
        best: Whether it is highlighted.
    """

    name: str
    run: Run | None
    choice: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    best: bool = False

    @property
    def label(self) -> str:
        """Its choice in a few words: the first settings that fit."""
        words = [f"{key.rpartition('.')[2]} {word(value)}" for key, value in self.choice.items()]
        fitting = [", ".join(words[:count]) for count in range(1, len(words) + 1)]
        return max((text for text in fitting if len(text) < 30), key=len, default="")


@dataclass(frozen=True)
class Words:
    """The headings and texts of a comparison."""

    title: str
    heading: str
    state: str
    stopped: str
    rows_title: str = "All runs"
    texts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tables: list[tuple[str, list[dict[str, str]]]] = field(default_factory=list)


def write_comparison(path: Path, runs: Sequence[Run], unit: str | None = None, observer: str = "release") -> Path:
    """Write the page that compares these runs.

    Args:
        path: Where to write it.
        runs: Finished or unfinished runs.
        unit: The unit of the epsilon in the plot; by default the largest for which a run proves something.
        observer: Its observer.

    Returns:
        The path.
    """
    found = differing(runs)
    fits = [key for key in found if all(len(word(run.flat_config().get(key))) <= LONGEST for run in runs)]
    keys = fits[:MOST_KEYS]
    more = [key for key in found if key not in keys]
    entries = [Entry(run.name, run, {key: run.flat_config().get(key) for key in keys}) for run in runs]
    words = Words(
        title=f"{len(runs)} runs",
        heading=f"{len(runs)} runs compared",
        state="finished",
        stopped=", ".join(sorted({run.dataset for run in runs})),
        texts=[f"These differ too, without a column: {', '.join(more)}."] if more else [],
        warnings=[
            "Not for release: figures are computed without noise. Choosing among these runs by their results "
            "costs privacy that no single ledger records."
        ],
    )
    proving = (each for each in ("client", "user") if any(run.epsilon(each, observer) is not None for run in runs))
    return write_page(path, comparison_page(path, entries, words, unit or next(proving, "record"), observer))


def comparison_page(path: Path, entries: Sequence[Entry], words: Words, unit: str, observer: str) -> str:
    """The page as HTML, with links relative to `path`.

    Raises:
        RunError: Where there is nothing to compare.
    """
    if not entries:
        raise RunError("nothing to compare: name at least one run folder")
    by_figure = by_headline(entries)
    groups, names = list(by_figure.values()), ", ".join(map(name_of, by_figure))
    axes_note = [f"Different headline figures ({names}) are not put on one axis."] if len(groups) > 1 else []
    frontiers = [_frontier(group, place, unit, observer) for place, group in enumerate(groups)]
    lines = [_over_rounds(group, place) for place, group in enumerate(groups)]
    plots = [plot for plot in (*frontiers, *lines) if plot is not None]
    columns, rows, same = _table(entries, path)
    return render(
        kind="comparison",
        title=words.title,
        live=False,
        heading=words.heading,
        state=words.state,
        stopped=words.stopped,
        rows_title=words.rows_title,
        texts=[*_settings(entries, same), *words.texts, *axes_note],
        warnings=words.warnings,
        tables=words.tables,
        plots=plots,
        columns=columns,
        rows=rows,
        data={"plots": plots},
    )


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which the runs' configurations differ, without those that have their own column."""
    flat = [run.flat_config() for run in runs]
    names: dict[str, None] = {}
    for one in flat:
        names |= dict.fromkeys(one)
    shown = {"algorithm", "data.name", "rounds"} | _NOT_A_CHOICE
    return [name for name in names if name not in shown and len({repr(one.get(name)) for one in flat}) > 1]


def by_headline(entries: Iterable[Entry]) -> dict[str, list[tuple[Entry, Run]]]:
    """The entries that have a headline figure, by its name."""
    groups: dict[str, list[tuple[Entry, Run]]] = {}
    for entry in entries:
        if entry.run is not None and entry.run.scores.score is not None:
            groups.setdefault(entry.run.scores.headline, []).append((entry, entry.run))
    return groups


def _frontier(group: Sequence[tuple[Entry, Run]], place: int, unit: str, observer: str) -> dict[str, Any] | None:
    """The headline figure of each run against its epsilon; runs of other figures have a plot of their own."""
    if len(group) < 2:
        return None
    scores = group[0][1].scores
    points = [_point(entry, run, unit, observer) for entry, run in group]
    whom = f"{unit_in_words(unit, *(run for _, run in group))}; observer: {OBSERVERS.get(observer, observer)}"
    note = f"One point per run. The line is the best {scores.name} at each epsilon"
    unlearnt = any(not point["learnt"] for point in points)
    return {
        "id": f"frontier-{place}" if place else "frontier",
        "title": f"{title_of(scores.headline)}, proven for {whom}",
        "note": f"{note}; hollow points are {NOTHING_LEARNT}." if unlearnt else f"{note}.",
        "about": _about(points, scores),
        "figure": scores.name,
        "format": scores.format,
        "higher": scores.higher_is_better,
        "points": points,
        "lines": _constant(run.scores for _, run in group),
    }


def _constant(found: Iterable[Scores]) -> list[dict[str, Any]]:
    """Where the constant answer stands, if that is the same for all."""
    levels = {(scores.trivial_score, scores.trivial_answer) for scores in found}
    (level, answer), *others = levels
    return [] if others or level is None else [{"y": level, "label": answer}]


def _point(entry: Entry, run: Run, unit: str, observer: str) -> dict[str, Any]:
    scores, epsilon = run.scores, run.epsilon(unit, observer)
    details = [
        ("method", run.algorithm),
        ("data", run.dataset),
        (scores.name, scores.shown(scores.score)),
        *([] if scores.learnt else [("", NOTHING_LEARNT)]),
        ("proven epsilon", "none" if epsilon is None else figure(epsilon)),
        ("adjacency", run.adjacency(unit, observer) or "not recorded"),
        ("rounds", f"{run.done:,}"),
        *((key, word(value)) for key, value in entry.choice.items()),
    ]
    return {
        "name": entry.name,
        "label": entry.label or run.algorithm,
        "group": run.algorithm,
        "x": epsilon,
        "y": scores.score,
        "learnt": scores.learnt,
        "details": details,
    }


def _over_rounds(group: Sequence[tuple[Entry, Run]], place: int) -> dict[str, Any] | None:
    scores = group[0][1].scores
    shown = [(entry, run) for entry, run in group if column(run.metrics, scores.headline)]
    if not 1 < len(shown) <= MOST_LINES:
        return None
    by_method = len({run.algorithm for _, run in shown}) == len(shown)
    names = [entry.label or (run.algorithm if by_method else entry.name) for entry, run in shown]
    if len(set(names)) < len(names):
        names = [entry.name for entry, _ in shown]
    columns = [
        (names[place], column(run.metrics, scores.headline), place + 1, False) for place, (_, run) in enumerate(shown)
    ]
    id, title = f"over-rounds-{place}" if place else "over-rounds", f"{title_of(scores.headline)} over rounds"
    plot = build(id, title, columns, format=scores.format, lines=_constant(run.scores for _, run in shown))
    return None if plot is None else plot.to_json()


def _settings(entries: Sequence[Entry], same: dict[str, str]) -> list[str]:
    """Which settings differ and what they are, then what is the same in all runs."""
    values: dict[str, dict[str, None]] = {}
    for entry in entries:
        for key, value in entry.choice.items():
            values.setdefault(key, {})[word(value)] = None
    differ = [
        f"{key} ({', '.join(list(found)[:MOST_VALUES])}{', …' * (len(found) > MOST_VALUES)})"
        for key, found in values.items()
    ]
    shared = [f"{name[:1].lower()}{name[1:]} {text}" for name, text in same.items()]
    found = {"These settings differ": differ, "The same in all runs": shared}
    return [f"{what}: {'; '.join(words)}." for what, words in found.items() if words and len(entries) > 1]


def _table(
    entries: Sequence[Entry], page: Path
) -> tuple[list[tuple[str, bool]], list[dict[str, Any]], dict[str, str]]:
    """The columns (name, numeric), the rows, and the texts of columns that are left out: the same in all rows."""
    figures = list(by_headline(entries))
    rows = [_cells(entry, figures) for entry in entries]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, _cell("")) for row in rows] for name in names}
    texts = {name: {cell["text"] for cell in cells} for name, cells in columns.items()}
    always = {"Run", *map(title_of, figures), *(name for name in names if name.startswith("ε"))}
    same = {name: min(found) for name, found in texts.items() if len(found) == 1 < len(rows) and name not in always}
    shown = {name: cells for name, cells in columns.items() if name not in same and texts[name] != {""}}
    made = [
        {
            "cells": [cells[place] for cells in shown.values()],
            "href": _link(entry.run, page) if entry.run else "",
            "best": entry.best,
        }
        for place, entry in enumerate(entries)
    ]
    numeric = [(name, any(cell["value"] is not None for cell in cells)) for name, cells in shown.items()]
    return numeric, made, {name: text for name, text in same.items() if text}


def _cells(entry: Entry, figures: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The run's name, the settings in which it differs, its results."""
    run, state = entry.run, entry.failed or (entry.run.state if entry.run else "not run yet")
    head = {"Run": _cell(entry.name)}
    head |= {} if run is None else {"Method": _cell(run.algorithm), "Data": _cell(run.dataset)}
    head |= {key: _cell(word(value), value) for key, value in entry.choice.items()}
    return head | ({} if run is None else _results(run, figures)) | {"State": _cell(state)}


def _results(run: Run, figures: Sequence[str]) -> dict[str, dict[str, Any]]:
    delta = min((claim["delta"] for claim in run.proven if claim.get("delta")), default=None)
    published = next((number(claim.get("epsilon")) for claim in run.published), None)
    client = "ε a simulated client" if run.simulated else "ε a client"
    scores, beaten = run.scores, "" if run.scores.learnt else ", not beaten"
    return {
        **{title_of(name): _optional(scores.of_headline(name), scores.shown) for name in figures},
        "Constant answer": _optional(scores.trivial_score, lambda value: scores.shown(value) + beaten),
        PLAIN.capitalize(): _optional(scores.plain_score, scores.shown, DIVERGED if scores.plain_diverged else ""),
        client: _optional(run.epsilon("client", "release"), _epsilon, "none"),
        "ε a record": _optional(run.epsilon("record", "release"), _epsilon, "none"),
        "δ": _optional(delta, plain),
        "ε published": _optional(published, lambda value: plain(value, 3)),
        "Rounds": _cell(f"{run.done:,}", run.done),
        "Time": _optional(run.seconds, in_seconds),
    }


def _optional(value: float | None, text: Callable[[float], str], missing: str = "") -> dict[str, Any]:
    return _cell(missing if value is None else text(value), value)


def _epsilon(value: float) -> str:
    return epsilon_words(value) if value > IN_NAME_ONLY else figure(value)


def _link(run: Run, page: Path) -> str:
    """The relative link from the page to the run's own; empty where that has no page."""
    if not (run.path / REPORT).is_file():
        return ""
    from urllib.parse import quote

    relative = os.path.relpath(run.path.resolve() / REPORT, page.resolve().parent)
    return quote(Path(relative).as_posix())


def _cell(text: str, value: Any = None) -> dict[str, Any]:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return {"text": text, "value": value if numeric else None}


def word(value: Any) -> str:
    """A configuration value as text."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return plain(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _about(points: Sequence[dict[str, Any]], scores: Scores) -> str:
    words = []
    for point in points[:20]:
        epsilon = "nothing proven" if point["x"] is None else f"epsilon {figure(point['x'])}"
        words.append(f"{point['name']}: {scores.name} {scores.shown(point['y'])}, {epsilon}")
    more = f"; and {len(points) - 20} more" if len(points) > 20 else ""
    return "; ".join(words) + more + "."
