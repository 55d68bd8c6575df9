"""A progress bar for notebooks: one line of HTML that is replaced while the run goes on. It needs IPython alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from shoal.accounting.rounding import epsilon as epsilon_words
from shoal.errors import ConfigError
from shoal.report.plots import whose
from shoal.report.scores import name_of, short

Callback = Callable[..., None]
EVERY = 0.2  # seconds between two pictures of the bar, at least


def display() -> Any:
    """IPython's module `display` where this process is the kernel of a notebook, else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.modules.get("IPython.display") if hasattr(shell, "kernel") else None


class Bar:
    """A bar over rounds, with the headline figure and epsilon so far."""

    def __init__(self) -> None:
        self._display = display()
        if self._display is None:
            raise ConfigError("progress=True shows a bar in notebooks alone; here use on_round, or `shoal run`")
        self._next, self._words = 0.0, ""

    def start(self, config: Any, trainer: Any, _run: Path) -> None:
        """Show an empty bar."""
        self._name, self._budget, self._rounds = config.algorithm.name, config.budget, trainer.rounds
        self._headline = trainer.evaluation.dataset.task.headline
        self._shown = self._display.display(self._html(trainer.done), display_id=True)

    def round(self, line: dict[str, Any]) -> None:
        """Show a round, unless the last one was shown just now."""
        if (score := line.get(self._headline)) is not None:
            self._words = f", {name_of(self._headline)} {short(score)}"
        spent = [
            f", epsilon {epsilon_words(claim['epsilon'])} for {whose(claim)}"
            for claim in line["proven"]
            if (claim["unit"], claim["observer"]) == (self._budget.unit, self._budget.observer)
        ]
        if time.monotonic() >= self._next or line["round"] == self._rounds:
            self._next = time.monotonic() + EVERY
            self._shown.update(self._html(line["round"], "".join(spent)))

    def _html(self, done: int, spent: str = "") -> Any:
        words = escape(f"{self._name}: round {done} of {self._rounds}{self._words}{spent}")
        bar = f'<progress value="{done}" max="{self._rounds}" aria-label="rounds"></progress>'
        return self._display.HTML(f"{bar} {words}")


def with_bar(*callbacks: Callback | None) -> tuple[Callback, Callback]:
    """The callbacks on_start and on_round, each after what the bar does."""
    bar, (start, each) = Bar(), callbacks
    return _both(bar.start, start), _both(bar.round, each)


def _both(first: Callback, then: Callback | None) -> Callback:
    def call(*given: Any) -> None:
        first(*given)
        if then is not None:
            then(*given)

    return call
