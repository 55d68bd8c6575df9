"""How good a run's model is: its figures, those of a constant answer beside them, and the spread over clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from shoal.accounting.rounding import plain

NAMES = {"auroc": "AUROC", "f1": "F1", "mae": "MAE", "r2": "R²", "rmse": "RMSE"}
SHARES = {"accuracy", "balanced_accuracy", "exact_match", "label_accuracy"}
"""Shown as percentages on pages."""
UP_TO_ONE = {"auroc", "average_precision", "calibration_error", "f1", "r2"}
LOWER_IS_BETTER = {"calibration_error", "mae", "mean_loss", "perplexity", "rmse"}
DIVERGED = "diverged"
WORST = 3
"""How many of the worst clients are named."""


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def percent(value: float) -> str:
    """0.953 as `95.3%`."""
    return f"{100 * value:.1f}%"


def short(value: float) -> str:
    """Four digits."""
    return plain(value, 4)


def name_of(figure: str) -> str:
    """A figure in words: `balanced accuracy`, `RMSE`."""
    return NAMES.get(figure, figure.replace("_", " "))


def title_of(figure: str) -> str:
    """The same at the head of a column."""
    name = name_of(figure)
    return name[:1].upper() + name[1:]


def in_percent(figure: str, value: float | None) -> str:
    """A value as pages show it."""
    if value is None:
        return "–"
    return percent(value) if figure in SHARES else f"{value:.3f}" if figure in UP_TO_ONE else short(value)


@dataclass(frozen=True)
class Client:
    """The headline figure on one client's held-out records."""

    name: str
    records: int
    score: float


@dataclass(frozen=True)
class Scores:
    """The figures of one model.

    Attributes:
        headline: The figure that says how good it is; empty before the first evaluation.
        higher_is_better: Which way the headline figure goes.
        figures: All figures on the held-out records.
        trivial: The same of the best constant answer, where that is known.
        trivial_answer: That answer in words.
        plain: The figures of the same training without clipping and noise, where that was asked for.
        plain_diverged: Whether that training diverged.
        clients: The headline figure by client, the worst first.
    """

    headline: str
    higher_is_better: bool = True
    figures: Mapping[str, float | None] = field(default_factory=dict)
    trivial: Mapping[str, float | None] = field(default_factory=dict)
    trivial_answer: str = ""
    plain: Mapping[str, float | None] = field(default_factory=dict)
    plain_diverged: bool = False
    clients: Sequence[Client] = ()

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Scores:
        """From result.json. Older ones have an accuracy alone, or of the baseline the headline alone."""
        headline, higher = str(result.get("headline", "accuracy")), bool(result.get("higher_is_better", True))
        baseline = {} if result.get("baseline") is None else {headline: result["baseline"]}
        clients = [
            Client(str(row["client"]), int(row["records"]), score)
            for row in result.get("figures_by_client") or []
            if (score := number(row["figures"].get(headline))) is not None
        ]
        clients.sort(key=lambda client: (client.score if higher else -client.score, -client.records))
        return cls(
            headline=headline,
            higher_is_better=higher,
            figures=_numbers(result.get("figures") or {"accuracy": result.get("accuracy")}),
            trivial=_numbers(result.get("trivial") or {}),
            trivial_answer=str(result.get("trivial_answer", "")),
            plain=_numbers(result.get("baseline_figures") or baseline),
            plain_diverged=bool(result.get("baseline_diverged", False)),
            clients=clients,
        )

    @classmethod
    def so_far(cls, metrics: Sequence[Mapping[str, Any]]) -> Scores:
        """From the rounds of a run that has no result yet: a round that was evaluated begins with its figure."""
        line: Mapping[str, Any] = next((line for line in reversed(metrics) if "loss" in line), {})
        headline = next((name for name in line if name not in ("release", "round", "loss")), "")
        return cls(headline, headline not in LOWER_IS_BETTER, {headline: number(line.get(headline))})

    @property
    def name(self) -> str:
        """The headline figure in words."""
        return name_of(self.headline)

    @property
    def score(self) -> float | None:
        """The headline figure."""
        return self.figures.get(self.headline)

    def of_headline(self, figure: str) -> float | None:
        """The headline figure, where it is this one."""
        return self.score if figure == self.headline else None

    @property
    def trivial_score(self) -> float | None:
        """The same of the constant answer."""
        return self.trivial.get(self.headline)

    @property
    def plain_score(self) -> float | None:
        """The same without clipping and noise; None where that training diverged, or was not asked for."""
        return None if self.plain_diverged else self.plain.get(self.headline)

    @property
    def learnt(self) -> bool:
        """False where the model is known to be no better than the constant answer."""
        score, trivial = self.score, self.trivial_score
        return trivial is None or (score is not None and self.better(score, trivial))

    def better(self, score: float, other: float) -> bool:
        """Whether a value of the headline figure is better than another."""
        return score > other if self.higher_is_better else score < other

    @property
    def height(self) -> float:
        """The headline figure, with its sign such that more is better; the least where it is not finite."""
        return -math.inf if self.score is None else self.score if self.higher_is_better else -self.score

    def verdict(self, say: Callable[[float], str] = short) -> str:
        """What must be said of a model that is no better than the constant answer; empty for others."""
        if self.learnt:
            return ""
        found, trivial = ("not finite" if each is None else say(each) for each in (self.score, self.trivial_score))
        said = f"This model is no better than a constant answer ({self.trivial_answer}): {self.name} {found} against "
        ranked, balanced = self.figures.get("auroc"), self.figures.get("balanced_accuracy")
        said = f"{said}{trivial}." + (f" Its AUROC is {ranked:.3f}; a constant has 0.5." if ranked else "")
        constant = self.trivial.get("balanced_accuracy")
        if balanced is None or constant is None or balanced < constant + 0.01:
            return said
        return f"{said} Its balanced accuracy is {balanced:.3f}; a constant has {constant:.3g}."

    @property
    def others(self) -> dict[str, float]:
        """The figures besides the headline."""
        return {name: value for name, value in self.figures.items() if name != self.headline and value is not None}

    @property
    def median(self) -> float:
        """Over clients."""
        return median(client.score for client in self.clients)

    @property
    def worst(self) -> Sequence[Client]:
        """The clients with the worst headline figures."""
        return self.clients[:WORST]

    @property
    def format(self) -> Literal["share", "number"]:
        """How plots write the headline figure."""
        return "share" if self.headline in SHARES else "number"

    def shown(self, value: float | None) -> str:
        """A value of the headline figure as pages show it."""
        return in_percent(self.headline, value)


def _numbers(figures: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: number(value) for name, value in figures.items()}
