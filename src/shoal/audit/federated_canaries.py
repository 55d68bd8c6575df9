"""What the canary clients of a real federation say about its epsilon, from the one run that trained the model.

Two figures, for whoever sees the final model alone and for whoever sees the model of every round:

- `estimate` (Andrew et al. 2023): the epsilon of two Gaussians with the means of seen and unseen canaries' scores and
  their common spread. It is no bound: it assumes that scores are normal and independent, as they are for the Gaussian
  mechanism in many dimensions. `estimate_least` is the lower end of its confidence interval, by the same assumptions.
- `least` (Mahloujifar, Melis & Chaudhuri 2024): a lower bound, whatever the mechanism, from guesses who was in the
  run. A fair coin had decided that for each canary.

A canary's score for the final model is how far the model moved along its direction, which is the cosine times the
length of the move, the same for all canaries. For every round it is the log-likelihood ratio of those moves, each in
units of their spread, for a client that takes part at the run's rate under the run's noise. No score uses the coins.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shoal.audit import bounds
from shoal.audit.one_run_bounds import Count, epsilon_at, guesses_of
from shoal.errors import RunError
from shoal.report.proof import proof_of
from shoal.report.run_reader import read_result
from shoal.training.canaries import Noted, read

Array = npt.NDArray[np.float64]
Verdict = Literal["consistent", "above the claim, if scores are normal", "VIOLATED", "no claim"]
ALPHA = 0.01  # how often a lower bound may be wrong: with few canaries a smaller one has no power
NORMAL_ALPHA = 1e-3  # how often the lower end of an estimate may be too high
LARGEST_SHIFT = 1e3


@dataclass(frozen=True)
class Seen:
    """What an observer's scores say."""

    observer: str
    shift: float
    estimate: float
    estimate_least: float
    least: float
    guesses: int
    right: int


@dataclass(frozen=True)
class Measured:
    """The canaries of a run, beside what is proven for a client who sees all released models."""

    canaries: int
    included: int
    rounds: int
    claimed: float | None
    delta: float
    seen: tuple[Seen, ...]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def audit_federation(run: Path) -> Measured:
    """Measure by the canary clients of the run in this folder, which may still be going on.

    Raises:
        RunError: It has no canaries, or its ledger is broken.
    """
    noted, proof = read(run), proof_of(run, read_result(run))
    if proof.ledger is None or not proof.ledger.whole:
        raise RunError(f"the ledger in {run} is broken or missing, so there is no claim to compare with")
    claim = next(each for each in proof.proven if (each["unit"], each["observer"]) == ("client", "release"))
    return measured(noted, claim["epsilon"], claim["delta"] or 1e-5)


def measured(noted: Noted, claimed: float | None, delta: float) -> Measured:
    """What these canaries say; the lower bounds hold together, and so do the lower ends of the estimates."""
    coins = noted.canaries.included
    if not 2 <= coins.sum() <= len(coins) - 2:
        raise RunError(f"{len(coins)} canaries are too few, {coins.sum()} of which were in the run: use at least 100")
    scores = {"final model": noted.along[-1] - noted.along[0], "every round": ratios(noted)}
    seen = tuple(_seen(name, each, coins, delta) for name, each in scores.items())
    verdict: Verdict = "consistent"
    if claimed is None:
        verdict = "no claim"
    elif any(each.least > claimed for each in seen):
        verdict = "VIOLATED"
    elif any(each.estimate_least > claimed for each in seen):
        verdict = "above the claim, if scores are normal"
    return Measured(len(coins), int(coins.sum()), len(noted.rates), claimed, delta, seen, verdict)


def ratios(noted: Noted) -> Array:
    """Each canary's log-likelihood ratio over all rounds: was it there, at the rate and under the noise noted?"""
    total = np.zeros(noted.canaries.count)
    for moved, rate, noise in zip(np.diff(noted.along, axis=0), noted.rates, noted.noises, strict=True):
        spread = 1.4826 * float(np.median(np.abs(moved - np.median(moved))))  # of a normal: robust to those that came
        shift = 1 / max(noise, 1e-3)
        present = shift * moved / max(spread, 1e-300) - shift**2 / 2
        total += present if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + present)
    return total


def _seen(observer: str, scores: Array, coins: npt.NDArray[np.bool_], delta: float) -> Seen:
    shift, error = _shift(scores[coins], scores[~coins])
    estimate, low = (_epsilon(each, delta) for each in (shift, shift - _quantile(NORMAL_ALPHA / 2) * error))
    guesses, order = guesses_of(len(scores)), np.argsort(scores)
    highest, lowest = order[-(guesses // 2) :], order[: guesses // 2]
    right = int(coins[highest].sum() + (~coins[lowest]).sum())
    least = epsilon_at(Count(len(scores), guesses, right), delta, ALPHA / 2)
    return Seen(observer, shift, estimate, low, least, guesses, right)


def _shift(seen: Array, unseen: Array) -> tuple[float, float]:
    """The distance of both means in units of the common spread, and its standard error (Hedges & Olkin 1985)."""
    n, m = len(seen), len(unseen)
    spread = math.sqrt(((n - 1) * seen.var(ddof=1) + (m - 1) * unseen.var(ddof=1)) / (n + m - 2))
    shift = float(seen.mean() - unseen.mean()) / max(spread, 1e-300)
    shift = max(-LARGEST_SHIFT, min(shift, LARGEST_SHIFT))
    return shift, math.sqrt(1 / n + 1 / m + shift**2 / (2 * (n + m)))


def _epsilon(shift: float, delta: float) -> float:
    return bounds.epsilon_of_shift(shift, delta)


def _quantile(alpha: float) -> float:
    from scipy.stats import norm

    return float(norm.isf(alpha))
