"""The data sets that come with scikit-learn, so that a first run works anywhere: digits and breast cancer."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.known import Known
from shoal.data.scaling import numbers, pictures

DIGITS = "datasets/data/digits.csv.gz"
DIGITS_TOP = 16.0
# The least and greatest value of each feature as the data set's public description states them
# (ten features: mean, standard error, worst).
CANCER_LOW = (
    *(6.981, 9.71, 43.79, 143.5, 0.053, 0.019, 0.0, 0.0, 0.106, 0.05),
    *(0.112, 0.36, 0.757, 6.802, 0.002, 0.002, 0.0, 0.0, 0.008, 0.001),
    *(7.93, 12.02, 50.41, 185.2, 0.071, 0.027, 0.0, 0.0, 0.156, 0.055),
)
CANCER_HIGH = (
    *(28.11, 39.28, 188.5, 2501.0, 0.163, 0.345, 0.427, 0.201, 0.304, 0.097),
    *(2.873, 4.885, 21.98, 542.2, 0.031, 0.135, 0.396, 0.053, 0.079, 0.03),
    *(36.04, 49.54, 251.2, 4254.0, 0.223, 1.058, 1.252, 0.291, 0.664, 0.208),
)


@cache
def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 pictures `[N, 1, 8, 8]` from 0 to 16, and labels; read once, so neither can be written to.

    From scikit-learn's file, as importing all that is beside its own reader takes a second; by that reader, where a
    later release keeps the file elsewhere.
    """
    found = find_spec("sklearn")
    if found and found.origin and (path := Path(found.origin).parent / DIGITS).exists():
        table = np.loadtxt(path, delimiter=",")
        x, y = table[:, :-1], table[:, -1].astype(np.int64)
    else:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
    for array in (x, y):
        array.flags.writeable = False
    return x.reshape(-1, 1, 8, 8), y


def read_cancer(scale: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """569 rows of 30 numbers in the scale asked for, labels, and the names of the classes."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    low, high = np.array(CANCER_LOW), np.array(CANCER_HIGH)
    unit = np.clip((bunch.data - low) / (high - low), 0, 1)
    return (numbers(unit, bunch.data, scale).astype(np.float32), bunch.target, tuple(map(str, bunch.target_names)))


def _digits(known: Known, scale: str, mirror: str | None) -> Dataset:
    x, y = read_digits()
    return known.in_one_part(pictures(x, scale, name="digits", top=DIGITS_TOP), y, tuple("0123456789"))


def _cancer(known: Known, scale: str, mirror: str | None) -> Dataset:
    x, y, classes = read_cancer(scale)
    return known.in_one_part(torch.from_numpy(x), y, classes)


DATASETS = (
    Known(
        "digits",
        *((1, 8, 8), 1437, 360, 10),
        source="UCI Optical Recognition of Handwritten Digits, with scikit-learn",
        licence="CC BY 4.0",
        read=_digits,
    ),
    Known(
        "cancer",
        *((30,), 426, 143, 2),
        source="UCI Breast Cancer Wisconsin (Diagnostic), with scikit-learn",
        licence="CC BY 4.0",
        read=_cancer,
    ),
)
