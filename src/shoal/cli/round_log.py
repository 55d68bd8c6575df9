"""What a coordinator logs of its rounds where there is no terminal for a progress bar: one line a round."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.run import stop_on_signal

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.federation.operations.logs import Log
    from shoal.training.trainer import Trainer


class RoundLog:
    """Logs what `run.Watch` shows."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._restore: Callable[[], None] = lambda: None

    def start(self, config: Config, trainer: Trainer[Any], run: Path) -> None:
        """Log what is run; let Ctrl-C or SIGTERM, as a service manager sends it, stop it at its next checkpoint."""
        words = f"{config.algorithm.name} on {config.data.name}: {trainer.setting.clients} sites, {run}"
        self._log.write(logging.INFO, words, {"kind": "start", "run": str(run), "rounds": trainer.rounds})
        for note in trainer.notes:
            self._log(f"note: {note}")
        self._budget, self._rounds = config.budget, trainer.rounds
        self._headline = trainer.evaluation.dataset.task.headline
        self._restore = stop_on_signal(trainer, self._log, signal.SIGINT, signal.SIGTERM)

    def round(self, line: dict[str, Any]) -> None:
        """Log a round's headline figure and epsilon, but not how many sites took part, which sampling may hide."""
        from shoal.accounting.rounding import up
        from shoal.report.plots import whose
        from shoal.report.scores import name_of, short

        facts: dict[str, Any] = {"kind": "round", "round": line["round"], "rounds": self._rounds}
        words = f"round {line['round']} of {self._rounds} done"
        if (score := line.get(self._headline)) is not None:
            facts[self._headline] = score
            words += f", {name_of(self._headline)} {short(score)}"
        for claim in line["proven"]:
            if (claim["unit"], claim["observer"]) == (self._budget.unit, self._budget.observer):
                facts["epsilon"] = claim["epsilon"]
                words += f", epsilon {up(claim['epsilon'], 3)} for {whose(claim)}"
        self._log.write(logging.INFO, words, facts)

    def end(self) -> None:
        """Restore the signal handlers."""
        self._restore()
