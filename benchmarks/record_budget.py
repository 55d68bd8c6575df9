"""What steps of DP-SGD cost a record, and the noise that they need."""

from __future__ import annotations

from shoal.accounting import accountants, calibration
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
