"""Heart disease in four hospitals (UCI heart-disease, the processed files): 920 patients, ill or healthy.

Categories are those of heart-disease.names. It states no ranges: those of the numbers are ours, from physiology. A
number outside its range counts as missing (Switzerland writes 0 for a cholesterol that was not measured), as do `?`
and -9. A missing number becomes the middle of its range, and every column but age and sex has an indicator of
missing values; nothing is computed from patients.

Two forms of the Hungarian file are in circulation, with the same patients: UCI's own, and one made from UCI's
`reprocessed.hungarian.data` by a program that took the first patient for a header and numbered its repeated values
(0.1 for the second 0). So whole numbers are cut off at the point, and that file has no checksum.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.known import Known
from shoal.data.scaling import numbers
from shoal.data.sources import File
from shoal.errors import DataError

CLASSES = ("healthy", "ill")
HOSPITALS = {"cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200}
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
)
RANGES = {
    "age": (20, 90),  # years
    "trestbps": (60, 220),  # resting blood pressure, mm Hg
    "chol": (50, 650),  # cholesterol, mg/dl
    "thalach": (50, 220),  # greatest heart rate
    "oldpeak": (-3, 7),  # ST depression, mm
    "ca": (0, 3),  # vessels coloured by fluoroscopy
}
CATEGORIES = {
    "sex": (0, 1),
    "cp": (1, 2, 3, 4),
    "fbs": (0, 1),
    "restecg": (0, 1, 2),
    "exang": (0, 1),
    "slope": (1, 2, 3),
    "thal": (3, 6, 7),
}
NEVER_MISSING = ("age", "sex")
FEATURES = (
    *RANGES,
    *(f"{column}={value}" for column, values in CATEGORIES.items() for value in values[len(values) == 2 :]),
    *(f"{column} missing" for column in (*RANGES, *CATEGORIES) if column not in NEVER_MISSING),
)


def parse_heart(data: bytes | bytearray, where: str) -> np.ndarray:
    """The 14 columns `[N, 14]` of one hospital, NaN where a value is missing."""
    try:
        lines = data.decode("ascii").split()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not plain text: {error}") from error
    rows = [_parse_row(line, f"{where}, line {number}") for number, line in enumerate(lines, start=1)]
    if not rows:
        raise DataError(f"{where}: holds no rows")
    return np.array(rows, np.float64)


def encode(table: np.ndarray, scale: str) -> np.ndarray:
    """The features in float32: numbers in the scale asked for, categories and missing values as 0 and 1."""
    columns = dict(zip(COLUMNS, table.T, strict=True))
    low, high = np.array(list(RANGES.values()), np.float64).T
    raw = np.stack([columns[column] for column in RANGES], axis=1)
    raw = np.where(np.isnan(raw), (low + high) / 2, raw)
    one_hot = [
        columns[column] == float(value) for column, value in (name.split("=") for name in FEATURES if "=" in name)
    ]
    missing = [np.isnan(columns[name.removesuffix(" missing")]) for name in FEATURES if name.endswith(" missing")]
    return np.column_stack([numbers((raw - low) / (high - low), raw, scale), *one_hot, *missing]).astype(np.float32)


def _parse_row(line: str, where: str) -> list[float]:
    fields = line.split(",")
    if len(fields) != len(COLUMNS):
        raise DataError(f"{where}: {len(fields)} fields, expected {len(COLUMNS)}")
    row = [_number(text, column, where) for column, text in zip(COLUMNS, fields, strict=True)]
    if math.isnan(row[-1]):
        raise DataError(f"{where}: num is {fields[-1][:40]!r}, expected 0 (healthy) or 1 to 4 (ill)")
    return row


def _number(text: str, column: str, where: str) -> float:
    """A value that the column allows, or NaN."""
    if text.strip() in ("", "?"):
        return math.nan
    try:
        value = float(text)
    except ValueError:
        raise DataError(f"{where}: {column} is {text[:40]!r}, expected a number or ?") from None
    if column != "oldpeak" and math.isfinite(value):
        value = math.floor(value)
    if column in RANGES:
        low, high = RANGES[column]
        return value if low <= value <= high else math.nan
    return value if value in CATEGORIES.get(column, range(5)) else math.nan


def _read(known: Known, scale: str, mirror: str | None) -> Dataset:
    contents = zip(HOSPITALS, known.files, known.contents(mirror), strict=True)
    tables = [_hospital(name, parse_heart(data, file.path)) for name, file, data in contents]
    table = np.concatenate(tables)
    x, ill = torch.from_numpy(encode(table, scale)), torch.from_numpy((table[:, -1] > 0).astype(np.int64))
    owners = np.repeat(np.arange(len(tables)), [len(part) for part in tables])
    return known.with_owners(x, ill, owners, tuple(HOSPITALS), CLASSES)


def _hospital(name: str, table: np.ndarray) -> np.ndarray:
    if len(table) != HOSPITALS[name]:
        raise DataError(f"processed.{name}.data: {len(table)} patients, expected {HOSPITALS[name]}; get it again")
    return table


UCI_HEART = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
SHA256 = {
    "cleveland": (18_461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
    "hungarian": (20_000, None),
    "switzerland": (4_109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
    "va": (6_737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
}


def _file(hospital: str) -> File:
    name, (size, sha256) = f"processed.{hospital}.data", SHA256[hospital]
    others = (f"natural/heart/{name}", f"heart-disease/{name}")
    return File(f"heart/{name}", size, sha256, (UCI_HEART + name,), others)


DATASETS = (
    Known(
        "heart",
        *((len(FEATURES),), 736, 184, 2),
        source="UCI heart-disease: Cleveland, Budapest, Zurich and Basel, Long Beach",
        licence="CC BY 4.0",
        read=_read,
        files=tuple(map(_file, HOSPITALS)),
    ),
)
