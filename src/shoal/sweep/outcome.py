"""What a sweep came to: its cells, those that no other beats, what they cost together, and its page."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.accounting.claims import Proven
from shoal.accounting.ledger import FILE, Ledger
from shoal.report.claims import proven_rows
from shoal.report.compare import MOST_LINES, Entry, Words, comparison_page
from shoal.report.folder import RESULT, Run, read_run
from shoal.report.page import write_page, write_report
from shoal.sweep import cost
from shoal.sweep.cells import is_done, run_folder, why_failed
from shoal.sweep.plan import Plan

PAGE = "sweep.html"
LOOKING_COSTS = (
    "Each cell's epsilon holds for that cell alone. Choosing the best one by looking at what came out of private "
    "data costs more: all cells together (--charge), or what a private selection says (--private-selection)."
)
ONLY_THE_BEST = (
    "Only the chosen model is covered. How many trials there were (its folder's number tells), and what the others "
    "gave, must not be told; records that accuracy is measured on are not protected."
)


@dataclass(frozen=True)
class Outcome:
    """The cells in their order, the best of them, and what is proven of all or of the chosen one."""

    folder: Path
    plan: Plan
    entries: list[Entry]
    best: int | None
    proven: list[Proven] = field(default_factory=list)

    @property
    def failed(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.failed]

    def to_json(self) -> dict[str, Any]:
        told = {
            "sweep": str(self.folder),
            "page": str(self.folder / PAGE),
            "best": None if self.best is None else self.entries[self.best].name,
            "warning": ONLY_THE_BEST if self.plan.selection else LOOKING_COSTS,
        }
        claims = [claim.to_json() for claim in self.proven]
        if self.plan.selection:
            chosen = [] if self.best is None else [self.entries[self.best]]
            return told | {"cells": [_told(entry) for entry in chosen], "selected": claims}
        return told | {"cells": [_told(entry) for entry in self.entries], "charged": claims}


def outcome_of(folder: Path, plan: Plan) -> Outcome:
    """Read what there is; the costs are counted where they are asked for."""
    entries = [_entry(folder, plan, number) for number in range(len(plan.cells))]
    scores = {
        place: entry.run.accuracy
        for place, entry in enumerate(entries)
        if entry.run is not None and entry.run.state == "finished" and entry.run.accuracy is not None
    }
    best = max(scores, key=lambda place: scores[place], default=None)
    proven: list[Proven] = []
    if plan.selection is not None:
        proven = cost.of_the_best(folder, plan)
    elif plan.charge:
        proven = cost.all_together(folder, plan)
    if best is not None:
        entries[best] = replace(entries[best], best=True)
    if best is not None and plan.selection is not None:
        entries[best] = _chosen(entries[best], proven)
    return Outcome(folder, plan, entries, best, proven)


def _chosen(entry: Entry, proven: list[Proven]) -> Entry:
    """The trial that was chosen: what is proven of it from now on is what the selection says."""
    assert entry.run is not None
    claims = [claim.to_json() for claim in proven]
    path = entry.run.path
    with Ledger(path / FILE) as ledger:
        ledger.select(claims)
    result = (entry.run.result or {}) | {"selected": {"proven": claims}}
    write_page(path / RESULT, json.dumps(result, indent=1) + "\n")
    write_report(path)
    return replace(entry, name="chosen", run=read_run(path))


def write_sweep_page(outcome: Outcome) -> Path:
    """The page with the frontier; under private selection it shows the chosen one alone."""
    plan, folder = outcome.plan, outcome.folder
    private = plan.selection is not None
    entries = outcome.entries
    if private and outcome.best is not None:
        entries = [entries[outcome.best]]
    unit, observer = _whom(plan)
    proven = [claim.to_json() for claim in outcome.proven]
    title = "What the chosen model reveals" if private else "All cells together"
    words = Words(
        title=folder.resolve().name,
        heading="The best of a private selection" if private else f"A sweep of {len(entries)} cells",
        state="finished" if not outcome.failed else "stopped",
        stopped=_progress(outcome),
        rows_title="The chosen cell" if private else "All cells",
        warnings=[ONLY_THE_BEST if private else LOOKING_COSTS],
        tables=[(title, proven_rows(proven))] if proven else [],
        choices_first=True,
    )
    page = folder / PAGE
    return write_page(page, comparison_page(page, entries, words, unit, observer))


def frontier(outcome: Outcome) -> list[Entry]:
    """Cells that no other beats in both accuracy and proven epsilon."""
    unit, observer = _whom(outcome.plan)
    scored = [
        (epsilon, -entry.run.accuracy, place)
        for place, entry in enumerate(outcome.entries)
        if entry.run is not None
        and entry.run.accuracy is not None
        and (epsilon := entry.run.epsilon(unit, observer)) is not None
    ]
    kept: list[Entry] = []
    highest = -1.0
    for _, loss, place in sorted(scored):
        if -loss > highest:
            highest = -loss
            kept.append(outcome.entries[place])
    return kept


def _whom(plan: Plan) -> tuple[str, str]:
    budget = plan.config(0).budget
    return budget.unit, budget.observer


def _entry(folder: Path, plan: Plan, number: int) -> Entry:
    path = run_folder(folder, number)
    few = len(plan.cells) <= MOST_LINES
    run: Run | None = read_run(path, every_round=few) if path is not None else None
    failed = None if is_done(folder, number) else why_failed(folder, number)
    said = f"failed: {failed}" if failed else None
    return Entry(f"{number + 1:04d}", run, plan.cells[number], said)


def _progress(outcome: Outcome) -> str:
    if outcome.plan.selection is not None:
        return "finished: one model was chosen" if outcome.best is not None else "no trial came to an end"
    done = sum(entry.run is not None and entry.run.state == "finished" for entry in outcome.entries)
    failed = f", {len(outcome.failed)} failed" if outcome.failed else ""
    return f"{done} of {len(outcome.entries)} cells finished{failed}"


def _told(entry: Entry) -> dict[str, Any]:
    run = entry.run
    return {
        "cell": entry.name,
        "choice": entry.choice,
        "run": str(run.path) if run else None,
        "state": "failed" if entry.failed else run.state if run else "waiting",
        "failed": entry.failed,
        "accuracy": run.accuracy if run else None,
        "seconds": run.seconds if run else None,
        "proven": run.proven if run else [],
    }
