"""A schema proposed for a table: from the columns' names and types where they say enough, else from the data.

What is proposed from the data, a range of most values or the categories that occur, is no public fact: the schema
lists it as unconfirmed until its owner has put something public in its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.cell_values import NUMBER, WRITE_POINTS, by_name, has_commas, numbers_of, texts_of
from shoal.data.columns import MISSING_TEXTS, Category, Column, Ignore, Number, Text, plain
from shoal.data.common_columns import DATE, IDENTIFIER, RANGES, VOCABULARIES, find_person, words
from shoal.data.schema import Schema, TaskKind
from shoal.data.schema_encoding import bits_of
from shoal.data.table_files import (
    MANY,
    column_names,
    missing_columns,
    read_columns,
    read_some,
    refuse_names,
    refuse_wide,
    row_count,
)
from shoal.errors import DataError

CELLS = 50_000_000  # of a table that are looked at; of more, evenly spaced rows
FEW = 50  # categories, at most
SEEN = 10  # rows that a category needs to be proposed: a rarer one would point to a few people
MOST_CLASSES = 20
UNEVEN = 0.05
ABSENT = "not known"  # the category of missing values


@dataclass(frozen=True)
class Guess:
    """What a column is taken for, why, and whether that was read from the data."""

    column: Column
    why: str
    from_data: bool = False


@dataclass(frozen=True)
class Proposal:
    """A schema, and what a reader should know of it.

    Attributes:
        schema: The schema.
        why: The reason for each column, the label included.
        rows: How many rows there are.
        sizes: How many rows each client has; empty where no column names clients.
        hints: Further remarks, one line each.
    """

    schema: Schema
    why: dict[str, str]
    rows: int
    sizes: tuple[int, ...]
    hints: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """How many a linear model of the schema has."""
        return (len(self.schema.features) + 1) * max(1, len(self.schema.outputs))


def propose(path: Path, labels: Sequence[str], client: str | None, task: TaskKind | None = None) -> Proposal:
    """A schema for a table.

    Args:
        path: A .csv or .parquet file.
        labels: The columns that are predicted; several for multi-label.
        client: The column of owners, or None.
        task: What is learnt; by default as the label looks.

    Raises:
        DataError: The table cannot be read or used.
    """
    names = column_names(path)
    refuse_wide(path, len(names))
    refuse_names(path, names)
    roles = [*labels, *([client] if client else [])]
    if lacks := missing_columns(roles, names):
        raise DataError(f"{path}: {lacks}")
    inputs = [name for name in names if name not in roles]
    every = max(1, row_count(path) * len(names) // CELLS)
    table = by_name(read_columns(path, names if every == 1 else roles))
    if every > 1:
        table |= by_name(read_some(path, inputs, every))
    _refuse_gaps(path, {name: table[name] for name in roles})
    _refuse_commas(path, {name: column for name, column in table.items() if name != client})
    guesses = {name: _guess(name, table[name], f"{path}: column '{name}'") for name in inputs}
    guesses = _with_text(guesses)
    target = _label(path, table, labels, task)
    why = {name: guess.why for name, guess in guesses.items()} | {labels[0]: target.why}
    read = tuple(name for name, guess in guesses.items() if guess.from_data) + (
        (labels[0],) if target.from_data else ()
    )
    columns = {name: guess.column for name, guess in guesses.items()}
    sizes = _sizes(table[client], f"{path}: column '{client}'") if client else ()
    if sizes and max(sizes) == 1:
        raise DataError(
            f"{path}: column '{client}' names another owner in every row, so no client has a row to hold out; give "
            f"--client-column none: one owner has all rows, and privacy protects each of them"
        )
    schema = Schema(columns, client_column=client, unconfirmed=read, **target.keys)
    hints = _hints(table, client, inputs) + _uneven(schema, table) + _spellings(schema)
    if every > 1:
        hints += (f"the table is large: inputs were looked at in one row of {every:,}, label and clients in all",)
    return Proposal(schema, why, len(table[labels[0]]), sizes, hints)


def _refuse_gaps(path: Path, roles: Mapping[str, Any]) -> None:
    """Raise a DataError that names all columns without which a row is of no use, but which have missing values."""
    found = []
    for name, column in roles.items():
        absent = _texts(column, f"{path}: column '{name}'") == None  # noqa: E711  each element
        if absent.any():
            found.append(
                f"{name} in {absent.sum():,} of {len(absent):,} rows, first in data row {absent.argmax() + 1}"
            )
    if found:
        raise DataError(f"{path}: values are missing ({'; '.join(found)}); remove these rows")


def _texts(column: Any, where: str) -> np.ndarray:
    """Texts, None where a cell is missing."""
    return texts_of(column, where, lambda text: None if text.strip() in MISSING_TEXTS else plain(text))


def _refuse_commas(path: Path, table: Mapping[str, Any]) -> None:
    """Raise a DataError that names all columns of numbers with decimal commas: as texts they would be lost."""
    found = []
    for name, column in table.items():
        with suppress(DataError):
            texts = {text.strip() for text in texts_of(column, name) if text is not None} - MISSING_TEXTS
            found += [name] if len(texts) >= SEEN and has_commas(texts) else []
    if found:
        shown = ", ".join(found[:MANY]) + (f" and {len(found) - MANY} more" if found[MANY:] else "")
        raise DataError(f"{path}: numbers have commas (columns {shown}); {WRITE_POINTS}")


def _guess(name: str, column: Any, where: str) -> Guess:
    try:
        texts = _texts(column, where)
    except DataError as error:
        return Guess(Ignore(), str(error).removeprefix(where).strip())
    known = texts[texts != None]  # noqa: E711  each element
    if not len(known):
        return Guess(Ignore(), "empty")
    if IDENTIFIER.search(words(name)):
        return Guess(Ignore(), "an identifier, by its name")
    gaps = len(known) < len(texts)
    try:
        return _number(name, numbers_of(column, where), gaps)
    except DataError:
        guess = _category(known)
    if gaps and isinstance(guess.column, Category):
        return _with_gaps(Category((*guess.column.categories, ABSENT), missing=ABSENT), guess.why)
    return guess


def _number(name: str, numbers: np.ndarray, gaps: bool) -> Guess:
    there = numbers[~np.isnan(numbers)]
    if set(np.unique(there)) <= {0.0, 1.0}:
        return Guess(Number((0, 1), 0.0 if gaps else None), "a flag, 0 or 1", from_data=True)
    for known, low, high, typical in RANGES:
        named = re.search(rf"(^|_)({known})(_|$)", words(name)) is not None
        if named and np.mean((there < low) | (there > high)) < 0.01:
            why = "range known by the column's name"
            return _with_gaps(Number((low, high), typical), why) if gaps else Guess(Number((low, high)), why)
    bounds = rounded_range(there)
    middle = float(np.clip(float(f"{np.median(there):.1g}"), *bounds))
    return Guess(Number(bounds, middle if gaps else None), "range of most values, rounded outwards", from_data=True)


def _with_gaps(column: Column, why: str) -> Guess:
    """A column with a constant for missing values: a single one decides that, and how many inputs a model has."""
    return Guess(column, f"{why}, with missing values", from_data=True)


def _category(known: np.ndarray) -> Guess:
    values, counts = np.unique(known.astype(np.str_), return_counts=True)
    for listed in VOCABULARIES:
        if set(values) <= set(listed):
            return Guess(Category(listed), "the usual names of such categories")
    if np.mean([DATE.match(value) is not None for value in values[:1000]]) > 0.9:
        return Guess(Ignore(), "dates or times; turn them into numbers, such as days since admission, to use them")
    if len(values) == len(known) > SEEN and not any(" " in value for value in values):
        return Guess(Ignore(), "another word in every row, as of identifiers")
    if (unit := _unit(values)) is not None:
        return Guess(Ignore(), f"numbers with '{unit}' after them; leave that out to use them")
    often = tuple(str(value) for value, count in zip(values, counts, strict=True) if count >= SEEN)
    if 1 <= len(often) <= FEW and counts[counts >= SEEN].sum() > 0.5 * len(known):
        return Guess(Category(often), f"categories of {SEEN} rows or more", from_data=True)
    others = [value for value in values if not (NUMBER.fullmatch(value) and math.isfinite(float(value)))]
    if len(others) < len(values) / 2:
        frequent = [f" such as '{value}'" for value in others if value in often]  # a rarer one may be one person's
        return Guess(Ignore(), f"numbers but for cells{(frequent or [''])[0]}; leave those empty to use it")
    return Guess(Ignore(), 'text of many values; {kind = "text", buckets = 64} would use its words')


def _unit(values: np.ndarray) -> str | None:
    """The one word that stands after each of several numbers, such as kg or %."""
    parts = [re.fullmatch(rf"({NUMBER.pattern})\s*([^\W\d][^\d\s]*|%)", value) for value in values]
    units = {part[part.re.groups] for part in parts if part is not None}
    return units.pop() if len(units) == 1 and None not in parts and len(values) > 2 else None


def _with_text(guesses: dict[str, Guess]) -> dict[str, Guess]:
    """Text is used where there is nothing else."""
    if any(not isinstance(guess.column, Ignore) for guess in guesses.values()):
        return guesses
    texts = {name: guess for name, guess in guesses.items() if guess.why.startswith("text")}
    if not texts:
        others = ", ".join(f"{name} ({each.why})" for name, each in guesses.items())
        raise DataError(f"no column to learn from: {others or 'there is none besides the label'}")
    return guesses | {name: Guess(Text(buckets=64), "its words, hashed") for name in texts}


@dataclass(frozen=True)
class _Target:
    keys: dict[str, Any]
    why: str
    from_data: bool = False


def _label(path: Path, table: Any, labels: Sequence[str], task: TaskKind | None) -> _Target:
    if len(labels) > 1 and task in (None, "multi-label"):
        for label in labels:
            bits_of(table[label], f"{path}: label column '{label}'")
        return _Target({"label": tuple(labels), "task": "multi-label"}, "several labels, each 0 or 1")
    name = labels[0]
    where = f"{path}: label column '{name}'"
    texts = _texts(table[name], where)
    values = sorted({text for text in texts if text is not None}, key=_natural)
    if len(values) < 2:
        raise DataError(f"{where} holds {', '.join(map(repr, values)) or 'nothing'} only; two classes are needed")
    numbers = _numbers_or_none(table[name], where)
    if task is None:
        varied = numbers is not None and len(values) > MOST_CLASSES
        fractions = numbers is not None and bool((np.nan_to_num(numbers) % 1 != 0).any())
        task = "regression" if varied or fractions else "classification"
    if task == "regression":
        if numbers is None:
            raise DataError(f"{where} holds text, which regression cannot predict; use --task classification")
        guess = _number(name, numbers, gaps=False)
        assert isinstance(guess.column, Number)
        return _Target({"label": name, "range": guess.column.range, "task": task}, guess.why, guess.from_data)
    if len(values) > FEW:
        raise DataError(
            f"{where} holds {len(values):,} different texts, more than {FEW} classes; name another --label"
        )
    kinds = (("0", "1"), *VOCABULARIES)
    known = next((listed for listed in kinds if set(values) <= set(listed)), None)
    classes = known or tuple(values)
    why = "the usual names of such classes" if known else "classes that the data hold"
    return _Target({"label": name, "classes": classes, "task": "classification"}, why, known is None)


def _numbers_or_none(column: Any, where: str) -> np.ndarray | None:
    try:
        return numbers_of(column, where)
    except DataError:
        return None


def _natural(text: str) -> tuple[float, str]:
    return (float(text), text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else (math.inf, text)


def rounded_range(numbers: np.ndarray) -> tuple[float, float]:
    """A round range around all but the outermost hundredth of some numbers."""
    low, high = (float(each) for each in np.quantile(numbers, (0.01, 0.99)))
    half = (high - low) / 2 or abs(high) / 2 or 0.5
    power = 10.0 ** math.floor(math.log10(half))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= half * 0.999)
    digits = max(0, -math.floor(math.log10(step)) + 1)
    bottom, top = math.floor(low / step) * step, math.ceil(high / step) * step
    return round(bottom, digits), round(top if top > bottom else bottom + step, digits)


def _sizes(column: Any, where: str) -> tuple[int, ...]:
    texts = _texts(column, where)
    _, counts = np.unique(texts[texts != None].astype(np.str_), return_counts=True)  # noqa: E711  each element
    return tuple(int(count) for count in counts)


def _hints(table: Any, client: str | None, inputs: Sequence[str]) -> tuple[str, ...]:
    """A person with several rows is not protected as a record, nor a client that is written in two ways."""
    person, alike = find_person(inputs), _alike(_texts(table[client], "")) if client else None
    hints = (
        (f"column '{client}' holds {alike[0]!r} and {alike[1]!r}, two clients: write them alike if they are one",)
        if alike
        else ()
    )
    if person is None or person == client:
        return hints
    people = _sizes(table[person], person)
    if len(people) == sum(people):
        return hints
    return (
        *hints,
        f"column '{person}' repeats: record privacy protects one row, not all rows of a person; for that, give "
        f"--client-column {person}",
    )


def _uneven(schema: Schema, table: Any) -> tuple[str, ...]:
    """A model learns little of numbers of which most lie in a small part of their range."""
    if schema.range is None:
        return ()
    low, high = np.quantile(numbers_of(table[schema.labels[0]], ""), (0.25, 0.75))
    if high - low > UNEVEN * (schema.range[1] - schema.range[0]):
        return ()
    return (
        f"half of the values of '{schema.labels[0]}' lie within {UNEVEN:.0%} of its range, so a model can hardly "
        f"tell them apart: predict the logarithm instead, or narrow schema.range",
    )


def _spellings(schema: Schema) -> tuple[str, ...]:
    """Categories that are probably one."""
    listed = {name: column.categories for name, column in schema.columns.items() if isinstance(column, Category)}
    found = {name: pair for name, categories in listed.items() if (pair := _alike(categories))}
    return tuple(
        f"column '{name}' holds {pair[0]!r} and {pair[1]!r}, two categories: write them alike if they are one"
        for name, pair in found.items()
    )


def _alike(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that differ in capitals, spaces or leading zeros only."""
    seen: dict[str, str] = {}
    for name in sorted(set(names)):
        if (other := seen.setdefault(" ".join(name.lower().split()).lstrip("0"), name)) != name:
            return other, name
    return None
