"""The kinds of a table's columns, and how each becomes numbers by public constants alone.

number     scaled from its public range to [-1, 1]; with `missing`, a public constant, a missing value is filled by it
           and marked in a column of its own
category   one column a public category; any other value, or none, is zero in all of them
text       `buckets`: which of this many hashed words occur; `tokens`: its first bytes as whole numbers, padded by 0
ignore     left out
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import ClassVar

import numpy as np

from shoal.errors import ConfigError, DataError, listed

MISSING_TEXTS = frozenset(("", "?", ".", "NA", "<NA>", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL"))
CATEGORY_LIMIT = 1000
LARGE_FLOAT = re.compile(r"-?\d+(\.0+|(\.\d+)?e\+\d+)", re.ASCII | re.IGNORECASE)  # spreadsheets write E+18
CODE = re.compile(r"\d+|-[1-9]\d*", re.ASCII)
DIGEST = re.compile(r"\d+e\d+", re.ASCII | re.IGNORECASE)  # some in hexadecimal digits look so
GROUPED = re.compile(r"[+-]?\d{1,3}([,_'\s]\d{3})+")  # 1,000 or 1_000, but not 1_23
INEXACT = "{} was stored as a float, without its last digits; store whole numbers or text"
WIDEST_TEXT = 65_536
VOCABULARY = 257  # the 256 bytes, each one more than its value, and 0 for padding
Texts = np.ndarray
"""An array of str, None where a cell is missing."""


@dataclass
class Tally:
    """How many cells of each column were changed by the public constants: facts of the data, not for release."""

    filled: Counter[str]
    clipped: Counter[str]
    unknown: Counter[str]

    @classmethod
    def new(cls) -> Tally:
        return cls(Counter(), Counter(), Counter())

    def notes(self) -> tuple[str, ...]:
        """One line for each kind of change."""
        counted = (
            (self.filled, "missing values filled by public constants"),
            (self.clipped, "values clipped to their public ranges"),
            (self.unknown, "values in no public category, taken as none of them"),
        )
        return tuple(
            f"{words}: {_counts(found)} (counts of the data, not for release)" for found, words in counted if +found
        )


def _counts(found: Counter[str]) -> str:
    changed = +found  # columns of which none was changed are not named
    return listed([f"{name} {count:,}" for name, count in changed.most_common()], 5)


@dataclass(frozen=True)
class Number:
    """A number within a public range; `missing` is the public constant for missing values."""

    kind: ClassVar = "number"
    range: tuple[float, float]
    missing: float | None = None

    def check(self, key: str) -> None:
        check_range(f"{key}.range", self.range)
        if self.missing is not None and not self.range[0] <= self.missing <= self.range[1]:
            raise ConfigError(f"{key}.missing {self.missing:g} is outside its range {list(self.range)}")

    @property
    def width(self) -> int:
        return 1 if self.missing is None else 2

    def features(self, name: str) -> list[str]:
        return [name] if self.missing is None else [name, f"{name} is missing"]

    def encode(self, name: str, numbers: np.ndarray, tally: Tally) -> np.ndarray:
        """Numbers [N], NaN where missing, as [N, 1] or [N, 2]."""
        absent = np.isnan(numbers)
        if absent.any():
            if self.missing is None:
                raise DataError(
                    f"{absent.sum():,} of {len(numbers):,} values are missing; set schema.columns.{name}.missing to "
                    f"a public constant that fills them"
                )
            tally.filled[name] += int(absent.sum())
        inside = scaled(np.where(absent, self.missing or 0.0, numbers), self.range, name, tally)[:, None]
        return inside if self.missing is None else np.hstack([inside, absent[:, None]])


@dataclass(frozen=True)
class Category:
    """One of the public categories; `missing` names the one for missing values."""

    kind: ClassVar = "category"
    categories: tuple[str, ...]
    missing: str | None = None

    def check(self, key: str) -> None:
        check_names(f"{key}.categories", self.categories, least=1)
        if self.missing is not None and self.missing not in self.categories:
            raise ConfigError(f"{key}.missing {self.missing!r} is not among its categories: add it to them")

    @property
    def width(self) -> int:
        return len(self.categories)

    def features(self, name: str) -> list[str]:
        return [f"{name}={value}" for value in self.categories]

    def encode(self, name: str, texts: Texts, tally: Tally) -> np.ndarray:
        codes = codes_of(texts, self.categories)
        absent = texts == None  # noqa: E711  each element
        if self.missing is not None:
            codes[absent] = self.categories.index(self.missing)
            tally.filled[name] += int(absent.sum())
        tally.unknown[name] += int((codes < 0).sum())
        one_hot: np.ndarray = codes[:, None] == np.arange(len(self.categories))
        return one_hot


@dataclass(frozen=True)
class Text:
    """Text, as the hashed words that occur in it, or as the bytes it begins with."""

    kind: ClassVar = "text"
    buckets: int | None = None
    tokens: int | None = None

    def check(self, key: str) -> None:
        if (self.buckets is None) == (self.tokens is None):
            raise ConfigError(f"{key}: text needs either buckets (hashed words) or tokens (bytes), for example 256")
        name = "buckets" if self.tokens is None else "tokens"
        if not 1 <= (size := getattr(self, name)) <= WIDEST_TEXT:
            raise ConfigError(f"{key}.{name} must be in 1 to {WIDEST_TEXT:,}, got {size}")

    @property
    def width(self) -> int:
        return self.buckets or self.tokens or 0

    def features(self, name: str) -> list[str]:
        return [f"{name} #{place}" for place in range(self.width)]

    def encode(self, name: str, texts: Texts, tally: Tally) -> np.ndarray:
        if self.tokens is not None:
            return _tokens(texts, self.tokens)
        assert self.buckets is not None
        found = np.zeros((len(texts), self.buckets), np.bool_)
        for row, text in enumerate(texts):
            places = [_bucket(word, self.buckets) for word in re.findall(r"\w+", (text or "").lower())]
            found[row, places] = True
        return found


@dataclass(frozen=True)
class Ignore:
    """A column that is left out."""

    kind: ClassVar = "ignore"
    width: ClassVar = 0

    def check(self, key: str) -> None:
        pass

    def features(self, name: str) -> list[str]:
        return []


Column = Number | Category | Text | Ignore
KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (Number, Category, Text, Ignore)}


def plain(value: object) -> str:
    """A category, class or owner as text, as different tables write the same: 1.0 is '1', True 'true', ' F ' 'F'.

    An accent is part of its letter (NFC), however it was typed. A whole number stored as a float is written in full.
    """
    text = unicodedata.normalize("NFC", str(value)).strip()
    if re.fullmatch(r"-?\d(\.\d+)?e\+\d\d", text, re.ASCII):  # as Arrow writes floats from 1e10
        text = format(Decimal(text), "f")
    if re.fullmatch(r"-?\d+\.0+", text):
        return text.partition(".")[0]
    return text.lower() if text.lower() in ("true", "false") else text


def owner(value: object) -> str:
    """A client or user as `plain` text.

    Raises:
        DataError: It was a float from 2**53 on, which does not tell whole numbers apart: one may be two, or two one.
    """
    text = str(value).strip()
    if LARGE_FLOAT.fullmatch(text) and abs(float(text)) >= 2**53:
        raise DataError(INEXACT.format(text))
    return plain(text)


def refuse_alike(names: Collection[str], where: str) -> None:
    """Raise a DataError where two clients or users are one whole number, such as 1e3 and 1000: one, or two?

    Two codes of digits alone, such as 007 and 7, are two, and so are 1e10 and 10e9, which may be digests.
    """
    written: dict[Decimal | str, str] = {Decimal(name): name for name in names if CODE.fullmatch(name)}
    forms = [(name, number) for name in names if not CODE.fullmatch(name) and (number := _whole(name)) is not None]
    for name, number in sorted(forms, key=lambda form: DIGEST.fullmatch(form[0]) is not None):  # digests last
        digest = DIGEST.fullmatch(name) and number not in written
        other = written.setdefault(name.lower() if digest else number, name)
        if other != name:
            raise DataError(
                f"{where}: '{other}' and '{name}' are one number, and may be one client or user, or two; "
                f"write one in one way only, or put a letter before the numbers of two"
            )


def _whole(name: str) -> Decimal | None:
    """The whole number that a text is, in any form."""
    if GROUPED.fullmatch(name):
        name = re.sub(r"[,_'\s]", "", name)
    if "_" in name:  # Decimal reads 1_23
        return None
    try:
        number = Decimal(name)
    except InvalidOperation:
        return None
    return number if number.is_finite() and number == number.to_integral_value() else None


def codes_of(texts: Texts, names: tuple[str, ...]) -> np.ndarray:
    """The place of each text among the names, -1 where it has none."""
    place = {name: at for at, name in enumerate(names)}
    return np.fromiter((-1 if text is None else place.get(text, -1) for text in texts), np.int64, len(texts))


def scaled(numbers: np.ndarray, bounds: tuple[float, float], name: str, tally: Tally) -> np.ndarray:
    """Numbers of a public range as -1 to 1, those outside clipped."""
    low, high = bounds
    tally.clipped[name] += int(((numbers < low) | (numbers > high)).sum())
    found: np.ndarray = 2 * (np.clip(numbers, low, high) - low) / (high - low) - 1
    return found


def check_range(key: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not (low < high and math.isfinite(high - low) and high - low > 1e-30):
        raise ConfigError(f"{key} must be two numbers [low, high], low < high, got {list(bounds)}")


def check_names(key: str, names: tuple[str, ...], least: int) -> None:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ConfigError(f"{key} names {', '.join(map(repr, twice))} twice")
    if not least <= len(names) <= CATEGORY_LIMIT:
        raise ConfigError(f"{key} must name {least} to {CATEGORY_LIMIT} values, got {len(names)}")


def _bucket(word: str, buckets: int) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest()) % buckets


def _tokens(texts: Texts, length: int) -> np.ndarray:
    found = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        start = np.frombuffer((text or "").encode("utf-8", "replace")[:length], np.uint8)
        found[row, : len(start)] = start.astype(np.int64) + 1
    return found
