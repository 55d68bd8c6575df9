"""What a proven claim allows at most: the ROC curve that no membership attack passes (Dong, Roth & Su 2022).

    TPR <= e^epsilon FPR + delta    and    1 - FPR <= e^epsilon (1 - TPR) + delta

for every pair of the run's curve delta(epsilon), so the least of many pairs is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.accounting import accountants
from shoal.accounting.claims import Proven, prove
from shoal.accounting.events import Event
from shoal.accounting.theorems import Adjacency

MEMBERSHIP: Adjacency = "add-or-remove"  # a record is a member, or it is not
EPSILONS = np.append(0.0, np.geomspace(0.01, 30.0, 60))
RATES = np.append(0.0, np.geomspace(1e-5, 1.0, 201))
"""With 0.001 and 0.01 among them: between two points the curve lies above the line."""


@dataclass(frozen=True)
class Allowed:
    """The claim for a record against who sees released models, and the curve that follows from it."""

    claim: Proven
    points: list[tuple[float, float]]

    @classmethod
    def by(cls, event: Event, delta: float) -> Allowed | None:
        """The curve of these events; None where nothing is proven."""
        claim = prove("record", "release", event, delta, adjacency=MEMBERSHIP)
        if claim.epsilon is None:
            return None
        answers = [accountants.delta(event, float(each), adjacency=MEMBERSHIP) for each in EPSILONS]
        deltas = np.array([each.delta if each.valid and each.delta is not None else 1.0 for each in answers])
        most = most_true_positives(RATES, np.append(EPSILONS, claim.epsilon), np.append(deltas, delta))
        return cls(claim, [(float(x), float(y)) for x, y in zip(RATES, most, strict=True)])

    def tpr(self, fpr: float) -> float:
        """The most true positives at this rate of false ones."""
        return float(np.interp(fpr, *np.array(self.points).T))

    def row(self) -> dict[str, Any]:
        """The figures that the best attack allowed would have."""
        fpr, tpr = np.array(self.points).T
        return {
            "attack": f"most at epsilon {self.claim.epsilon:.3g}",
            "advantage": float((tpr - fpr).max()),
            "auc": float(np.trapezoid(tpr, fpr)),
            "tpr_at_0_1_percent_fpr": self.tpr(0.001),
            "tpr_at_1_percent_fpr": self.tpr(0.01),
        }


def most_true_positives(fpr: np.ndarray, epsilons: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """The most true positives at each rate of false ones that all pairs allow."""
    steep = np.exp(epsilons) * fpr[:, None] + deltas
    flat = 1 - np.exp(-epsilons) * (1 - deltas - fpr[:, None])
    most: np.ndarray = np.minimum(np.minimum(steep, flat).min(1), 1.0)
    return most
