"""What steps of DP-SGD cost a record, and the noise that they need."""

from __future__ import annotations

from pathlib import Path

from shoal.accounting import accountants, calibration, privacy_ledger
from shoal.accounting.events import Compose, Event, Gaussian, Repeat, Sampled

DELTA = 1e-5


def steps_of(noise: float, rate: float, steps: int) -> Event:
    return Repeat(Sampled("poisson", rate, Gaussian(noise)), steps)


def noise_for(epsilon: float, rate: float, steps: int, *besides: Event) -> float:
    """The noise multiplier at which all steps, with what happens besides, cost epsilon, add-or-remove."""
    return calibration.noise(
        lambda noise: Compose((steps_of(noise, rate, steps), *besides)), calibration.Budget(epsilon, DELTA)
    ).value


def spent(*events: Event) -> dict[str, float | None]:
    """What these events cost together, by adjacency."""
    return {
        adjacency: accountants.epsilon(Compose(events), DELTA, "pld", adjacency).epsilon
        for adjacency in ("add-or-remove", "replace-one")
    }


def charged(runs: Path) -> int:
    """How many rounds the runs of a folder were charged for; one whose noise was drawn again counts again."""
    read = [privacy_ledger.Record.read(ledger)[1] for ledger in runs.glob(f"*/{privacy_ledger.FILE}")]
    return sum(intent.rounds for record in read for intent in record.charged)
