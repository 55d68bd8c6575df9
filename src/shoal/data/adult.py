"""UCI Adult as Wei et al. (2023) use it: 48,842 rows, 105 features, 36,631 for training and 12,211 for testing.

Which columns make 105: seven text columns one-hot, with '?' as a category of its own where values are missing
(workclass 9, education 16, marital-status 7, occupation 15, relationship 6, race 5, native-country 42: 100),
sex as one column (1 = Male), and 4 numbers: age, capital-gain, capital-loss, hours-per-week. Left out are
fnlwgt (a weight of the survey, no fact about the person) and education-num (education again, as a number).
The paper does not list its columns. All columns, with a missing value as a row of zeros, would give 105 as well.

Categories are those of the published adult.names, and numbers are scaled by public constants: age and hours
by 100, gain and loss (five digits in the survey) as log(1 + v) / log(1 + 99,999); none is computed from rows.
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

CLASSES = ("<=50K", ">50K")
ROWS = 48_842
MISSING = "?"
NUMBERS = {"age": 100, "capital-gain": 99_999, "capital-loss": 99_999, "hours-per-week": 100}  # greatest value
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
)
CATEGORIES: dict[str, tuple[str, ...]] = {
    column: tuple(values.split())
    for column, values in {
        "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay "
        "Never-worked ?",
        "education": "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
        "Masters 1st-4th 10th Doctorate 5th-6th Preschool",
        "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse",
        "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv "
        "Protective-serv Armed-Forces ?",
        "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
        "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
        "sex": "Female Male",
        "native-country": "United-States Cambodia England Puerto-Rico Canada Germany "
        "Outlying-US(Guam-USVI-etc) India Japan Greece South China Cuba Iran Honduras Philippines Italy "
        "Poland Jamaica Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
        "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru "
        "Hong Holand-Netherlands ?",
    }.items()
}
FEATURES = (
    *NUMBERS,
    *(f"{c}={value}" for c, values in CATEGORIES.items() if c != "sex" for value in values),
    "sex=Male",
)
CODES = {column: {value: code for code, value in enumerate(values)} for column, values in CATEGORIES.items()}


def parse_adult(data: bytes | bytearray, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers `[N, 4]`, codes of categories `[N, 8]` and labels `[N]` of adult.data or adult.test."""
    try:
        lines = data.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not plain text: {error}") from error
    rows = [
        _parse_row(line, f"{where}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("|")
    ]
    if not rows:
        raise DataError(f"{where}: holds no rows")
    table = np.array(rows, np.int64)
    return table[:, : len(NUMBERS)].astype(np.float64), table[:, len(NUMBERS) : -1], table[:, -1]


def encode(values: np.ndarray, codes: np.ndarray, scale: str) -> np.ndarray:
    """The 105 features in float32: numbers in the scale asked for, categories as 0 and 1."""
    one_hot = [
        codes[:, at, None] == np.arange(len(CATEGORIES[column]))
        for at, column in enumerate(CATEGORIES)
        if column != "sex"
    ]
    is_male = codes[:, [list(CATEGORIES).index("sex")]]
    scaled = numbers(_unit(values), values, scale)
    return np.concatenate([scaled, *one_hot, is_male], axis=1).astype(np.float32)


def _unit(values: np.ndarray) -> np.ndarray:
    unit = np.empty_like(values)
    for at, (column, most) in enumerate(NUMBERS.items()):
        money = column.startswith("capital")
        unit[:, at] = np.log1p(values[:, at]) / math.log1p(most) if money else values[:, at] / most
    return unit


def _parse_row(line: str, where: str) -> list[int]:
    *fields, label = (field.strip() for field in line.split(","))
    if len(fields) != len(COLUMNS):
        raise DataError(f"{where}: {len(fields) + 1} fields, expected {len(COLUMNS) + 1}")
    row = dict(zip(COLUMNS, fields, strict=True))
    label = label.removesuffix(".")
    if label not in CLASSES:
        raise DataError(f"{where}: class {label[:40]!r}, expected {' or '.join(CLASSES)}")
    counts = [_number(row[column], column, most, where) for column, most in NUMBERS.items()]
    codes = [_code(row[column], column, where) for column in CATEGORIES]
    return [*counts, *codes, CLASSES.index(label)]


def _number(text: str, column: str, most: int, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
        raise DataError(f"{where}: {column} is {text[:40]!r}, expected a whole number from 0 to {most:,}")
    return int(text)


def _code(text: str, column: str, where: str) -> int:
    code = CODES[column].get(text)
    if code is None:
        raise DataError(f"{where}: {column} is {text[:40]!r}, which adult.names does not list")
    return code


def _read(known: Known, scale: str, mirror: str | None) -> Dataset:
    contents = zip(known.files, known.contents(mirror), strict=True)
    parts = [parse_adult(data, file.path) for file, data in contents]
    values, codes, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return known.in_one_part(torch.from_numpy(encode(values, codes, scale)), labels, CLASSES)


UCI_ADULT = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
ADULT_FILES = (
    File(
        "adult/adult.data",
        3_974_305,
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        (UCI_ADULT + "adult.data",),
    ),
    File(
        "adult/adult.test",
        2_003_153,
        "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        (UCI_ADULT + "adult.test",),
    ),
)
DATASETS = (
    Known(
        "adult",
        *((105,), 36_631, 12_211, 2),
        source="UCI Adult (US census 1994)",
        licence="CC BY 4.0",
        read=_read,
        files=ADULT_FILES,
    ),
)
