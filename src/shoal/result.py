"""How a run ended: what `shoal.run` returns, and what it raises where the user stopped it."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import release
from shoal.errors import RunError
from shoal.html_text import html_table
from shoal.report.claim_rows import HEAD, Claims, published_rows, shown_rows
from shoal.report.scores import Scores

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(repr=False)
class Result:
    """How a run ended.

    Attributes:
        run: Its folder.
        stopped: Why it ended: `rounds`, `budget`, `early` (see the section `stop`), or `sites` (too few were left in
            a federation).
        baseline: The headline figure of the same training without clip and noise, where that was asked for.
        baseline_figures: All its figures.
        baseline_diverged: Whether that training diverged.
        headline: The figure that says how good the model is: `score` is its value.
        figures: All figures on the held-out records.
        trivial: The same of the best constant prediction, `trivial_answer` in words.
        figures_by_client: The figures on each client's held-out records.
        proven: The proven bounds.
        published: The paper's own figures.
        model: The released parameters, by name.
        metrics: The metrics of every round.
    """

    run: Path
    algorithm: str
    dataset: str
    rounds: int
    stopped: str
    seconds: float = 0.0
    random: str = "research"
    baseline: float | None = None
    baseline_figures: dict[str, float | None] = field(default_factory=dict)
    baseline_diverged: bool = False
    task: str = "classification"
    headline: str = "accuracy"
    higher_is_better: bool = True
    trivial_answer: str = ""
    figures: dict[str, float | None] = field(default_factory=dict)
    trivial: dict[str, float | None] = field(default_factory=dict)
    figures_by_client: list[dict[str, Any]] = field(default_factory=list, repr=False)
    proven: Claims = field(default_factory=Claims)
    published: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    model: dict[str, Tensor] = field(default_factory=dict, repr=False)
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        claims = "; ".join(claim.brief() for claim in self.proven.least) or "nothing is proven"
        return f"Result({self._words()}; {claims}; {self.run})"

    def _repr_html_(self) -> str:
        published = [
            (row["unit"], "published, not proven", row["epsilon"], row["delta"], row["recipe"])
            for row in published_rows(self.published)
        ]
        notes = [*filter(None, [Scores.of(self.to_json()).verdict()]), *self.warnings]
        notes += [f"page: {self.run / 'report.html'}"]
        return html_table(self._words(), [*shown_rows(self.proven), *published], HEAD, notes)

    def _words(self) -> str:
        score = "not finite" if self.score is None else f"{self.score:.4g}"
        return f"{self.algorithm} on {self.dataset}: {self.headline} {score} after {self.rounds} rounds"

    @property
    def score(self) -> float | None:
        """The headline figure; None where the model has diverged."""
        return self.figures.get(self.headline)

    @property
    def accuracy(self) -> float:
        """The accuracy, of a task that has one."""
        if "accuracy" not in self.figures:
            raise RunError(f"a {self.task} has no accuracy; its headline figure is {self.headline}: result.score")
        return self.figures["accuracy"] or 0.0

    @property
    def learnt(self) -> bool:
        """Is the model better than the best constant prediction?"""
        score, trivial = self.score, self.trivial.get(self.headline)
        if score is None or trivial is None:
            return score is not None
        return score > trivial if self.higher_is_better else score < trivial

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        names = [each.name for each in fields(self) if each.name not in ("run", "model", "metrics")]
        accuracy = {"accuracy": self.accuracy} if "accuracy" in self.figures else {}
        head = {release.KEY: release.RESULT, "run": str(self.run)} | accuracy | {"score": self.score}
        return head | {name: getattr(self, name) for name in names} | {"learnt": self.learnt}


def resume_with(run: Path) -> str:
    return f"resume with: shoal run --resume {shlex.quote(os.fspath(run))}"


class Interrupted(RunError):
    """The run was stopped by the user between two rounds, and can be resumed."""

    exit_code = 130

    def __init__(self, run: Path, done: int, rounds: int) -> None:
        super().__init__(f"stopped after round {done} of {rounds}; {resume_with(run)}")
        self.run, self.done = run, done
