"""What a proven claim allows at most: the ROC curve that no membership attack passes (Dong, Roth & Su 2022).

    TPR <= e^epsilon FPR + delta    and    1 - FPR <= e^epsilon (1 - TPR) + delta

for every pair of the run's curve delta(epsilon), so the least of many pairs is drawn: straight lines, whose corners
are all among the points, so that a line from point to point lies nowhere below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.accounting import accountants
from shoal.accounting.claims import Proven, nothing, prove
from shoal.accounting.events import Event
from shoal.accounting.rounding import up
from shoal.accounting.theorems import Adjacency
from shoal.errors import ConfigError

MEMBERSHIP: Adjacency = "add-or-remove"  # a record is a member, or it is not
EPSILONS = np.append(0.0, np.geomspace(0.01, 30.0, 60))
RATES = np.append(0.0, np.geomspace(1e-5, 1.0, 201))
ROUNDING = 1e-12


@dataclass(frozen=True)
class Allowed:
    """The claim for a record against who sees released models, and the curve that follows from it."""

    claim: Proven
    points: list[tuple[float, float]]

    @classmethod
    def by(cls, event: Event, delta: float) -> Allowed | None:
        """The curve of these events; None where nothing is proven."""
        claim = claimed(event, delta)
        if claim.epsilon is None:
            return None
        answers = [accountants.delta(event, float(each), adjacency=MEMBERSHIP) for each in EPSILONS]
        deltas = np.array([each.delta if each.valid and each.delta is not None else 1.0 for each in answers])
        pairs = np.append(EPSILONS, claim.epsilon), np.append(deltas, delta)
        rates = np.union1d(RATES, corners(*pairs))
        most = most_true_positives(rates, *pairs)
        return cls(claim, [(float(x), float(y)) for x, y in zip(rates, most, strict=True)])

    def tpr(self, fpr: float) -> float:
        """The most true positives at this rate of false ones."""
        return float(np.interp(fpr, *np.array(self.points).T))

    def row(self) -> dict[str, Any]:
        """The figures that the best attack allowed would have."""
        fpr, tpr = np.array(self.points).T
        return {
            "attack": f"most at epsilon {up(self.claim.epsilon or 0.0, 3)}",
            "advantage": float((tpr - fpr).max()),
            "auc": float(np.trapezoid(tpr, fpr)),
            "tpr_at_0_1_percent_fpr": self.tpr(0.001),
            "tpr_at_1_percent_fpr": self.tpr(0.01),
        }


def claimed(event: Event, delta: float) -> Proven:
    """What is proven for a record that is trained on or not; nothing where no theorem covers that."""
    try:
        return prove("record", "release", event, delta, adjacency=MEMBERSHIP)
    except ConfigError as error:
        return nothing("record", "release", str(error), MEMBERSHIP)


def most_true_positives(fpr: np.ndarray, epsilons: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """The most true positives at each rate of false ones that all pairs allow."""
    slopes, offsets = _lines(epsilons, deltas)
    most: np.ndarray = (slopes * fpr[:, None] + offsets).min(1)
    return most


def corners(epsilons: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """The rates of false positives at which the most true ones that all pairs allow go from one line to another."""
    slopes, offsets = _lines(epsilons, deltas)
    one, other = np.triu_indices(len(slopes), 1)
    steeper = slopes[one] != slopes[other]
    one, other = one[steeper], other[steeper]
    at = (offsets[other] - offsets[one]) / (slopes[one] - slopes[other])
    inside = (at > 0) & (at < 1)
    at, one = at[inside], one[inside]
    lowest = slopes[one] * at + offsets[one] <= most_true_positives(at, epsilons, deltas) + ROUNDING
    found: np.ndarray = at[lowest]
    return found


def _lines(epsilons: np.ndarray, deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slopes and offsets of the lines that both inequalities of every pair draw; the last is TPR = 1."""
    factors = np.exp(epsilons)
    slopes, offsets = np.append(factors, 1 / factors), np.append(deltas, 1 - (1 - deltas) / factors)
    return np.append(slopes, 0.0), np.append(offsets, 1.0)
