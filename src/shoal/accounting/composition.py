"""The textbook accountants as used in Wei et al. (2023), Table 11: basic and advanced composition, and zCDP.

They recompute published figures. Their results are seldom a bound, and each says when it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.accounting.events import Gaussian, Leaf, Sampled
from shoal.accounting.theorems import Adjacency
from shoal.errors import ConfigError


@dataclass(frozen=True)
class Step:
    """A Gaussian on a sampled batch, `count` times."""

    rate: float
    noise: float
    count: int
    kind: str


def steps(counts: Mapping[Leaf, int], adjacency: Adjacency, accountant: str) -> list[Step]:
    """The events as sampled Gaussians; these accountants understand no others."""
    shift = 2 if adjacency == "replace-one" else 1
    found = []
    for leaf, n in counts.items():
        match leaf:
            case Gaussian(noise):
                found.append(Step(1.0, noise / shift, n, "none"))
            case Sampled("poisson", rate, Gaussian(noise)):
                found.append(Step(rate, noise / shift, n, leaf.kind))
            case Sampled("fixed-size", rate, Gaussian(noise)):  # a unit that enters displaces another
                found.append(Step(rate, noise / 2, n, leaf.kind))
            case _:
                raise ConfigError(f"the {accountant} accountant does not understand {leaf}; use pld")
    return found


def zcdp_rho(done: list[Step]) -> float:
    """Sum of 1/(2 noise^2) (Bun & Steinke 2016); for a sampled step rate^2/noise^2, as Wei et al. (2023) have it."""
    return sum(s.count * (0.5 if s.kind == "none" else s.rate**2) / s.noise**2 for s in done)


def zcdp_epsilon(done: list[Step], delta: float) -> float:
    """The epsilon of these events at this delta, by zCDP."""
    rho = zcdp_rho(done)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def zcdp_delta(done: list[Step], epsilon: float) -> float:
    """The delta of these events at this epsilon, by zCDP."""
    rho = zcdp_rho(done)
    if rho == 0:
        return 0.0
    return math.exp(-((epsilon - rho) ** 2) / (4 * rho)) if epsilon > rho else 1.0


def zcdp_flaw(done: list[Step]) -> str | None:
    """Why the figure is no proof; None where it is one."""
    if any(s.kind != "none" for s in done):
        return "zCDP has no amplification by sampling: rho = rate^2/noise^2 is not a bound"
    return None


def one_step(step: Step, delta: float) -> float:
    """A step's epsilon: sqrt(2 ln(1.25/delta))/noise (Dwork & Roth 2014, A.1), amplified by sampling."""
    alone = math.sqrt(2 * math.log(1.25 / delta)) / step.noise
    if alone < 500:
        return math.log1p(step.rate * math.expm1(alone))
    return alone + math.log(step.rate)


def basic_epsilon(done: list[Step], delta: float) -> float:
    """Epsilons add up; each step takes the whole delta."""
    return sum(s.count * one_step(s, delta) for s in done)


def advanced_epsilon(done: list[Step], delta: float) -> float:
    """Dwork, Rothblum, Vadhan 2010; each step takes the whole delta, and so does the composition."""
    squares = drift = 0.0
    for s in done:
        epsilon = one_step(s, delta)
        squares += s.count * epsilon**2
        drift += s.count * epsilon * math.expm1(min(epsilon, 700))
    return math.sqrt(2 * math.log(1 / delta) * squares) + drift


def composition_flaw(done: list[Step], delta: float, slack: float) -> str | None:
    """Why basic (slack 0) or advanced (slack 1) composition at this delta is not a bound, or None."""
    spent = delta * (slack + sum(s.count * s.rate for s in done))
    if spent > delta * (1 + 1e-9):
        return f"every step spends delta anew: the total delta is {min(spent, 1.0):.3g}, not {delta:g}"
    if any(math.sqrt(2 * math.log(1.25 / delta)) > s.noise for s in done):
        return "a step's epsilon is above 1, where sqrt(2 ln(1.25/delta))/noise is no longer proven"
    return None
