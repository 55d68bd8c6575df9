"""Marks that students of ETH Zurich gave lectures (R's lme4::InstEval): 73,421 from 1 to 5, by 2,972 students.

A client is a student, a record one mark (see shoal.data.ratings). Its tokens are the lecturer, the student's age in
semesters, how long ago the lecture was, and the department together with whether the lecture serves another one.
Lecturers are numbered from 1 to 2,160; about half of them were rated.
"""

from __future__ import annotations

import numpy as np

from shoal.data.dataset import Dataset
from shoal.data.known import Known
from shoal.data.ratings import dataset, numbered
from shoal.data.rdatasets import Columns, Table

SCALE, PRIOR = (1.0, 5.0), 3.0
LECTURERS, STUDENT_AGES, LECTURE_AGES, DEPARTMENTS = 2160, (2, 4, 6, 8), 6, 15
TABLE = Table(
    "lme4",
    "InstEval",
    ("insteval/insteval.csv", "natural/insteval/insteval.csv", "InstEval.csv"),
    dict.fromkeys(("s", "d", "studage", "lectage", "service", "dept", "y"), int),
    "e494ece3c814d9a0591381d6df10d7cc5093cd6b92ab1bedd068886c5757e20c",
)


def tokens(columns: Columns) -> tuple[np.ndarray, int]:
    """The four tokens of each mark, and how many there are."""
    lecturer, age, lecture_age, service, department = (
        np.array(columns[name]) for name in ("d", "studage", "lectage", "service", "dept")
    )
    return numbered(
        (lecturer - 1, LECTURERS),
        (np.searchsorted(STUDENT_AGES, age), len(STUDENT_AGES)),
        (lecture_age - 1, LECTURE_AGES),
        (2 * (department - 1) + service, 2 * DEPARTMENTS),
    )


def _read(known: Known, scale: str, mirror: str | None) -> Dataset:
    columns = TABLE.read()
    marks, students = np.array(columns["y"], np.float64), np.array(columns["s"])
    return dataset(known, marks, students, tokens(columns)[0], SCALE, PRIOR)


DATASETS = (
    Known(
        "insteval",
        *((5,), 58_737, 14_684, 0),
        source="ETH Zurich, by R's lme4",
        licence="GPL (>= 2), as lme4",
        read=_read,
        state=TABLE.state,
    ),
)
