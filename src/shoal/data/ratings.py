"""Ratings of things by people as records: whole numbers that a model of ratings (shoal.models.ratings) takes.

A record is `[own mean, token, token, ...]`. The tokens are public facts about the thing and the rating, numbered one
kind after the other; 0 is no token. The own mean is that of the client's other ratings, in thousandths of the scale:
what a client knows of itself, and never sends. It makes records depend on each other, so that only clients can be
protected.
"""

from __future__ import annotations

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.known import Known
from shoal.data.split import held_out
from shoal.tasks import Regression

THOUSANDTHS = 1000
PRIOR_RATINGS = 5


def numbered(*kinds: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """Tokens `[N, kinds]` and how many there are, 0 (none) included.

    Args:
        kinds: Of each kind of token the numbers from 0, -1 for none (`[N]` or `[N, several]`), and how many it has.
    """
    columns, first = [], 1
    for numbers, count in kinds:
        columns.append(np.where(numbers >= 0, numbers + first, 0))
        first += count
    return np.column_stack(columns).astype(np.int64), first


def own_mean(ratings: np.ndarray, owners: np.ndarray, train: np.ndarray, prior: float) -> np.ndarray:
    """The mean of each owner's other training ratings, with `PRIOR_RATINGS` ratings of `prior` among them.

    Held-out ratings are in nobody's mean.
    """
    trained = np.zeros(len(ratings))
    trained[train] = 1
    total, count = (
        np.bincount(owners, trained * each)[owners] - trained * each for each in (ratings, np.ones_like(ratings))
    )
    mean: np.ndarray = (total + PRIOR_RATINGS * prior) / (count + PRIOR_RATINGS)
    return mean


def dataset(
    known: Known,
    ratings: np.ndarray,
    people: np.ndarray,
    tokens: np.ndarray,
    scale: tuple[float, float],
    prior: float,
) -> Dataset:
    """The data set of ratings by these people, who are its clients."""
    names, owners = np.unique(people, return_inverse=True)
    train, _ = held_out(owners, known.test_rows)
    low, high = scale
    own = np.rint((own_mean(ratings, owners, train, prior) - low) / (high - low) * THOUSANDTHS)
    return known.with_owners(
        torch.from_numpy(np.column_stack([own, tokens]).astype(np.int64)),
        torch.from_numpy(ratings.astype(np.float32)),
        owners,
        tuple(map(str, names)),
        task=Regression(low=low, high=high),
        linked=True,
    )
