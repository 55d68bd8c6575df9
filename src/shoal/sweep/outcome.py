"""The outcome of a sweep: its cells, its frontier, its cost, and its page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.accounting.claims import Proven
from shoal.accounting.privacy_ledger import FILE, Ledger, Record
from shoal.errors import LedgerError, RunError
from shoal.files import write_whole
from shoal.models.bundle import DESCRIPTION, read_bundle
from shoal.report.claim_rows import proven_rows
from shoal.report.compare import MOST_LINES, Entry, Words, by_headline, comparison_page
from shoal.report.run_page import write_page, write_report
from shoal.report.run_reader import RESULT, Run, read_run
from shoal.saved_model import restated
from shoal.sweep import cost
from shoal.sweep.cells import cell_folder, is_done, run_folder, why_failed
from shoal.sweep.plan import Plan

PAGE = "sweep.html"
LOOKING_COSTS = (
    "Each cell's epsilon holds for that cell alone. Choosing the best by its results on private data costs more: the "
    "sum of all cells (--charge), or the price of a private selection (--private-selection)."
)
ONLY_THE_BEST = (
    "Only the chosen model is covered. The number of trials (visible in its folder's name, and in the times of its "
    "ledger to whoever knows when the sweep began) and the results of the others must stay secret; records that "
    "figures are measured on are not protected."
)


@dataclass(frozen=True)
class Outcome:
    """A sweep's cells and claims.

    Attributes:
        folder: The sweep's folder.
        plan: Its plan.
        entries: Its cells in order.
        best: The cell with the best headline figure; None where none has finished, or where figures differ.
        proven: What is proven of all cells together, or of the chosen one.
    """

    folder: Path
    plan: Plan
    entries: list[Entry]
    best: int | None
    proven: list[Proven] = field(default_factory=list)

    @property
    def failed(self) -> list[Entry]:
        """The cells that failed."""
        return [entry for entry in self.entries if entry.failed]

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON; after a private selection without the other trials."""
        summary = {
            "sweep": str(self.folder),
            "page": str(self.folder / PAGE),
            "best": None if self.best is None else self.entries[self.best].name,
            "warning": ONLY_THE_BEST if self.plan.selection else LOOKING_COSTS,
        }
        claims = [claim.to_json() for claim in self.proven]
        if self.plan.selection:
            chosen = [] if self.best is None else [self.entries[self.best]]
            return summary | {"cells": [_cell(entry) for entry in chosen], "selected": claims}
        return summary | {"cells": [_cell(entry) for entry in self.entries], "charged": claims}


def outcome_of(folder: Path, plan: Plan) -> Outcome:
    """Read a sweep's cells, and compute the cost where it is asked for."""
    entries = [_entry(folder, plan, number) for number in range(len(plan.cells))]
    chosen = chosen_before(folder, plan)
    best = best_of(entries) if chosen is None else chosen
    proven: list[Proven] = []
    if chosen is not None:  # as it was: other trials' folders, whose ledgers may have cost more, need not be here
        proven = [Proven(**claim) for claim in _selected(folder, chosen) or []]
    elif plan.selection is not None:
        proven = cost.of_the_best(folder, plan)
    elif plan.charge:
        proven = cost.all_together(folder, plan)
    if best is not None:
        entries[best] = replace(entries[best], best=True)
    if best is not None and plan.selection is not None:
        entries[best] = _chosen(entries[best], proven)
        replace(plan, chosen=best).write(folder)
    return Outcome(folder, plan, entries, best, proven)


def chosen_before(folder: Path, plan: Plan) -> int | None:
    """The trial that a private selection has chosen. It never chooses another: its price is that of one model.

    Raises:
        RunError: Its run is gone.
    """
    trials = range(len(plan.cells) if plan.selection else 0) if plan.chosen is None else [plan.chosen]
    found = next((number for number in trials if _selected(folder, number) is not None), None)
    if found is None and plan.chosen is not None:
        raise RunError(
            f"the run that this private selection chose is no longer in {cell_folder(folder, plan.chosen)}: "
            f"put it back; another choice would be a second release"
        )
    return found


def _selected(folder: Path, number: int) -> list[dict[str, Any]] | None:
    """What is proven of a trial that a private selection chose; None for any other, also without a ledger."""
    run = run_folder(folder, number)
    try:
        return None if run is None else Record.read(run / FILE)[1].selected
    except LedgerError:
        return None


def best_of(entries: Sequence[Entry]) -> int | None:
    """The finished cell with the best headline figure, of those that learnt something if there are any."""
    done = {
        place: entry.run.scores
        for place, entry in enumerate(entries)
        if entry.run is not None and entry.run.state == "finished" and entry.run.scores.score is not None
    }
    if len({scores.headline for scores in done.values()}) > 1:
        return None
    return max(done, key=lambda place: (done[place].learnt, done[place].height), default=None)


def _chosen(entry: Entry, proven: list[Proven]) -> Entry:
    """The chosen trial; its claims are now those of the selection."""
    assert entry.run is not None
    claims = [claim.to_json() for claim in proven]
    path = entry.run.path
    # Before the ledger: a crash in between leaves no chosen model that states what its run alone would prove.
    write_whole(path / DESCRIPTION, restated(read_bundle(path), claims).to_json().encode())
    with Ledger(path / FILE) as ledger:
        ledger.select(claims)
    result = (entry.run.result or {}) | {"selected": {"proven": claims}}
    write_page(path / RESULT, json.dumps(result, indent=1) + "\n")
    write_report(path)
    return replace(entry, name="chosen", run=read_run(path))


def write_sweep_page(outcome: Outcome) -> Path:
    """Write the sweep's page; after a private selection it shows the chosen cell alone."""
    plan, folder = outcome.plan, outcome.folder
    private = plan.selection is not None
    entries = outcome.entries
    if private and outcome.best is not None:
        entries = [entries[outcome.best]]
    unit, observer = whom(plan)
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
    )
    page = folder / PAGE
    return write_page(page, comparison_page(page, entries, words, unit, observer))


def frontier(outcome: Outcome) -> list[Entry]:
    """The Pareto frontier of the headline figure and proven epsilon.

    A cell that is no better than a constant answer is never on it. Cells of different figures have a frontier each.
    """
    unit, observer = whom(outcome.plan)
    kept: list[Entry] = []
    for group in by_headline(outcome.entries).values():
        scored = [
            (epsilon, -run.scores.height, place)
            for place, (_, run) in enumerate(group)
            if run.scores.learnt and (epsilon := run.epsilon(unit, observer)) is not None
        ]
        least = math.inf
        for _, depth, place in sorted(scored):
            if depth < least:
                least = depth
                kept.append(group[place][0])
    return kept


def whom(plan: Plan) -> tuple[str, str]:
    """The unit and the observer of the budget, for which cells are compared."""
    budget = plan.config(0).budget
    return budget.unit, budget.observer


def _entry(folder: Path, plan: Plan, number: int) -> Entry:
    path = run_folder(folder, number)
    few = len(plan.cells) <= MOST_LINES
    run: Run | None = read_run(path, every_round=few) if path is not None else None
    failed = None if is_done(folder, number) else why_failed(folder, number)
    return Entry(f"{number + 1:04d}", run, plan.cells[number], f"failed: {failed}" if failed else None)


def _progress(outcome: Outcome) -> str:
    if outcome.plan.selection is not None:
        return "finished: one model was chosen" if outcome.best is not None else "no trial finished"
    done = sum(entry.run is not None and entry.run.state == "finished" for entry in outcome.entries)
    failed = f", {len(outcome.failed)} failed" if outcome.failed else ""
    return f"{done} of {len(outcome.entries)} cells finished{failed}"


def _cell(entry: Entry) -> dict[str, Any]:
    run = entry.run
    scores = run.scores if run else None
    return {
        "cell": entry.name,
        "choice": entry.choice,
        "run": str(run.path) if run else None,
        "state": "failed" if entry.failed else run.state if run else "waiting",
        "failed": entry.failed,
        "accuracy": scores.figures.get("accuracy") if scores else None,
        "headline": scores.headline if scores else None,
        "score": scores.score if scores else None,
        "learnt": scores.learnt if scores else None,
        "seconds": run.seconds if run else None,
        "proven": run.proven if run else [],
    }
