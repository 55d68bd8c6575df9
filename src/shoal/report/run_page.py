"""The page of a run: one HTML file that opens offline, made from the run's folder."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from shoal import __version__, release
from shoal.accounting.rounding import IN_NAME_ONLY, plain
from shoal.errors import RunError
from shoal.report.claim_rows import WEAK, audit_rows, in_words, main_claim, proven_rows, published_rows, shared_notes
from shoal.report.plots import OBSERVERS, plots_of, spread_of, whose
from shoal.report.run_reader import REPORT, Run, read_run
from shoal.report.scores import DIVERGED, LOWER_IS_BETTER, Scores, in_percent, number, percent, title_of
from shoal.report.series import figure, in_seconds

HERE = Path(__file__).parent
CHOSEN = (
    "A private selection chose this run as the best of several; the claims here include its cost. The number of "
    "trials and their results must stay secret."
)
MOST_IN_MATRIX = 24
"""The most classes that a confusion matrix shows; with more only the table by class is legible."""


def write_report(path: Path) -> Path:
    """Make the page of the run in this folder and return its path."""
    return write_page(path / REPORT, run_page(read_run(path)))


def run_page(run: Run) -> str:
    """The whole page of one run."""
    plots, spread = plots_of(run), spread_of(run.scores)
    return render(
        kind="run",
        title=run.name,
        live=run.state == "running",
        plots=plots,
        spread=spread,
        data={"plots": [plot.to_json() for plot in (*([spread] if spread else []), *plots)]},
        **_context(run),
    )


def render(**context: Any) -> str:
    """Fill the template; its CSP allows this one script, by hash, and no fetching."""
    script = _text("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json.dumps(_finite(context["data"]), separators=(",", ":"), allow_nan=False)
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    context |= {"data": data, "css": _text("page.css"), "script": script, "digest": digest, "version": __version__}
    context["release"] = release.PAGE
    return str(_template().render(context))


def write_page(path: Path, page: str) -> Path:
    """Write a file whole or not at all, without fsync: it can be made again.

    Args:
        path: Where to write.
        page: The text.

    Returns:
        The path.

    Raises:
        RunError: Where it cannot be written.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path} cannot be written: {error.strerror or error}; choose another path") from None
    return path


def _context(run: Run) -> dict[str, Any]:
    result = run.result or {}
    rows, shared = shared_notes(proven_rows(run.proven))
    return {
        "run": run,
        "headline": _headline(run),
        "figures": _figures(run.scores) if run.scores.others else [],
        "verdict": run.scores.verdict(run.scores.shown),
        "stopped": _ending(run),
        "facts": _facts(run),
        "proven": rows,
        "shared": shared,
        "published": published_rows(run.published),
        "by_client": _by_client(run.by_client),
        "audit": audit_rows(run.audit),
        "in_words": in_words(run),
        "confusion": _confusion(result),
        "notes": [str(note) for note in result.get("notes", [])],
        "warnings": [str(warning) for warning in result.get("warnings", [])],
        "chosen": CHOSEN if run.selected else "",
        "config": [(key, _word(value)) for key, value in run.flat_config().items()],
    }


def _headline(run: Run) -> dict[str, str]:
    scores = run.scores
    shown = {"figure": title_of(scores.headline) or "Score", "score": scores.shown(scores.score), "tone": "bad"}
    if scores.trivial_score is not None:
        shown |= {"trivial": scores.shown(scores.trivial_score), "trivial_answer": scores.trivial_answer}
    if scores.plain_diverged or scores.plain_score is not None:
        shown["plain"] = DIVERGED if scores.plain_diverged else scores.shown(scores.plain_score)
    claim = main_claim(run)
    if claim is not None:
        observer = str(claim.get("observer"))
        epsilon = float(claim["epsilon"])
        shown["epsilon"] = figure(epsilon)
        shown["tone"] = "good" if epsilon <= WEAK else "" if epsilon <= IN_NAME_ONLY else "void"
        shown["delta"] = plain(claim.get("delta") or 0.0)
        shown["whom"] = f"{whose(claim)}; observer: {OBSERVERS.get(observer, observer)}"
    budget = number(run.budget.get("epsilon"))
    if budget is not None and not run.selected:  # the cost of a selection is not part of a run's budget
        shown["budget"] = f"{budget:g}"
    if run.seconds is not None:
        shown["time"] = in_seconds(run.seconds)
    return shown


def _figures(scores: Scores) -> list[dict[str, Any]]:
    """Every figure beside those of the constant answer and of training without clipping and noise."""
    return [
        {
            "name": title_of(name),
            "value": in_percent(name, value),
            "trivial": in_percent(name, scores.trivial[name]) if name in scores.trivial else "",
            "plain": in_percent(name, scores.plain[name])
            if name in scores.plain and not scores.plain_diverged
            else "",
            "lower": name in LOWER_IS_BETTER,
            "headline": name == scores.headline,
        }
        for name, value in scores.figures.items()
    ]


def _ending(run: Run) -> str:
    if run.state == "running":
        return f"running: round {run.done} of {run.rounds}"
    if run.result is None:
        return f"stopped after round {run.done} of {run.rounds}; it can be resumed"
    if run.result.get("stopped") == "budget":
        return f"ended after round {run.done}: the budget is spent"
    if run.result.get("stopped") == "early":
        return f"ended after round {run.done} of {run.rounds}: no better any more; all planned rounds count"
    if run.result.get("stopped") == "sites":
        return f"ended after round {run.done} of {run.rounds}: too few sites were left"
    return f"finished: {run.done} rounds" if run.done != 1 else "finished: 1 round"


def _facts(run: Run) -> list[tuple[str, str]]:
    result = run.result or {}
    known = [
        ("method", run.algorithm),
        ("data", run.dataset),
        ("task", result.get("task")),
        ("simulated clients" if run.simulated else "clients", result.get("clients")),
        ("training records", result.get("train_rows")),
        ("held-out records", result.get("test_rows")),
        ("model", run.config.get("model")),
        ("parameters", result.get("parameters")),
        ("gradients", _gradients(result.get("gradients"))),
        ("random numbers", dict(run.environment).get("random", run.config.get("random"))),  # the mode that was used
        ("started", run.started.strftime("%Y-%m-%d %H:%M")),
    ]
    return [
        (name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in known if value is not None
    ]


def _gradients(found: Any) -> str | None:
    """How they were computed, and why not by rules; None of earlier versions and of sites."""
    if not isinstance(found, dict) or not found.get("way"):
        return None
    return f"by {found['way']}" + (f": {found['because']}" if found.get("because") else "")


def _by_client(costs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Record-level epsilon by client, the greatest first."""
    if costs is None or len({row["epsilon"] for row in costs.get("clients") or ()}) < 2:
        return None  # the bound above says it all
    most = max(number(row["epsilon"]) or 0.0 for row in costs["clients"]) or 1.0
    return {
        "release": costs.get("release", ""),
        "delta": plain(costs.get("delta") or 0.0),
        "more": int(costs.get("more") or 0),
        "rows": [_client_row(row, most) for row in costs["clients"]],
    }


def _client_row(row: dict[str, Any], most: float) -> dict[str, Any]:
    epsilon = number(row["epsilon"])
    return {
        "name": str(row["client"]),
        "records": row["records"],
        "value": -1 if epsilon is None else epsilon,
        "epsilon": "none" if epsilon is None else figure(epsilon),
        "share": (epsilon or 0.0) / most,
    }


def _confusion(result: dict[str, Any]) -> dict[str, Any] | None:
    """The confusion matrix, and by class its training records, its errors, and the class it is mostly taken for."""
    classes, matrix = result.get("classes"), result.get("confusion")
    if not classes or not matrix:
        return None
    names = [str(name) for name in classes]
    numbered = any(len(name) > 5 for name in names)  # too long for the head of a column
    trained = result.get("train_classes") or [None] * len(names)
    rows = [_class_row(names, place, counts) for place, counts in enumerate(matrix)]
    for place, row in enumerate(rows):
        row |= {"label": f"{place + 1} {row['name']}" if numbered else row["name"], "trained": trained[place]}
    columns = [(str(place) if numbered else name, name) for place, name in enumerate(names, start=1)]
    wrong = sum(row["wrong"] for row in rows)
    return {"columns": columns, "rows": rows, "matrix": len(names) <= MOST_IN_MATRIX, "wrong": wrong}


def _class_row(names: list[str], place: int, counts: list[int]) -> dict[str, Any]:
    total, wrong = sum(counts), sum(counts) - counts[place]
    others = [(count, names[other]) for other, count in enumerate(counts) if other != place and count]
    most, mostly = max(others, default=(0, ""))
    return {
        "name": names[place],
        "total": total,
        "wrong": wrong,
        "share": wrong / total if total else None,
        "mostly": f"{mostly} ({most})" if most else "",
        "cells": [
            {"count": count, "share": count / total if total else 0.0, "right": other == place}
            for other, count in enumerate(counts)
        ],
    }


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _finite(value: Any) -> Any:
    """The same with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


@lru_cache(maxsize=4)
def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(HERE)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = percent
    return environment.get_template("page.html")
