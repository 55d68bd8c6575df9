"""Figures of classes and labels, as scikit-learn defines them but without its checks of every argument.

They are computed for each class of each client: there the checks took most of the time that a small run takes.
"""

from __future__ import annotations

import numpy as np


def f1(hits: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """F1 of each class from what is true and what is answered, both bool [N, classes]; 0 where neither ever is."""
    found: np.ndarray = 2 * (hits & answers).sum(0) / np.maximum(hits.sum(0) + answers.sum(0), 1)
    return found


def rankings(hits: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """The means over classes of what `ranking` gives; both arguments are [N, classes]."""
    found = [ranking(hits[:, k], scores[:, k]) for k in range(hits.shape[1])]
    return dict(zip(("auroc", "average_precision"), map(float, np.mean(found, axis=0)), strict=True))


def ranking(hits: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    """The area under the ROC curve and the average precision of one class, which some records have and some have not.

    Args:
        hits: Which records have the class, bool [N].
        scores: What the model says of each, [N]; records with the same score count together.
    """
    order = np.argsort(scores)[::-1]
    scores = scores[order]
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    right = np.append(0, np.cumsum(hits[order])[last])  # above each threshold
    wrong = np.append(0, last + 1) - right
    area = np.trapezoid(right, wrong) / (right[-1] * wrong[-1])
    precision = (np.diff(right) * right[1:] / (last + 1)).sum() / right[-1]
    return area, precision
