"""Films rated by users of MovieLens (R's dslabs::movielens): 100,004 ratings from 0.5 to 5 by 671 users.

A client is a user, a record one rating (see shoal.data.ratings). Its tokens are the film, its decade and its genres.
Films are numbered by MovieLens, up to some 164,000. Which of them were rated is private; so a film's token is its
number modulo 16,384, in which 2,977 of the ratings share a token with a film that was rated more often.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.data.dataset import Dataset
from shoal.data.known import Known
from shoal.data.ratings import dataset, numbered
from shoal.data.rdatasets import Columns, Table

SCALE, PRIOR = (0.5, 5.0), 3.5
FILMS, DECADES, FIRST_YEAR, MOST_GENRES = 1 << 14, 14, 1890, 10
GENRES = (
    *("Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "IMAX", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


def _year(value: Any) -> int:
    """The year, or 0 where it is not known."""
    year = float(value or "nan")
    return 0 if math.isnan(year) else int(year)


TABLE = Table(
    "dslabs",
    "movielens",
    ("movielens/ratings.csv", "natural/movielens/ratings.csv", "movielens.csv"),
    {"userId": int, "movieId": int, "year": _year, "genres": str, "rating": float},
    "d14b5c46c7ddc64bb006541ae923cd8de0f7ac872f570f9925cab8da04e7843f",
)


def tokens(columns: Columns) -> tuple[np.ndarray, int]:
    """The tokens of each rating, and how many there are."""
    film, year = np.array(columns["movieId"]), np.array(columns["year"])
    decade = np.clip((year - FIRST_YEAR) // 10, 0, DECADES - 1)
    return numbered(
        (film % FILMS, FILMS),
        (np.where(year > 0, decade, -1), DECADES),
        (np.array([_genres(names) for names in columns["genres"]]), len(GENRES)),
    )


def _genres(names: str) -> list[int]:
    found = [GENRES.index(name) for name in names.split("|") if name in GENRES][:MOST_GENRES]
    return found + [-1] * (MOST_GENRES - len(found))


def _read(known: Known, scale: str, mirror: str | None) -> Dataset:
    columns = TABLE.read()
    ratings, users = np.array(columns["rating"]), np.array(columns["userId"])
    return dataset(known, ratings, users, tokens(columns)[0], SCALE, PRIOR)


DATASETS = (
    Known(
        "movielens",
        *((13,), 80_004, 20_000, 0),
        source="GroupLens, by R's dslabs",
        licence="for research, not to be redistributed",
        read=_read,
        state=TABLE.state,
    ),
)
