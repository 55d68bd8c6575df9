"""The schema of a table: what its columns are, by public constants alone, the label, the owner of a row, the task.

    [schema]
    label = "died"
    classes = ["0", "1"]
    client_column = "hospital"
    user_column = "patient_id"

    [schema.columns]
    age = {kind = "number", range = [0, 120], missing = 60}
    sex = {kind = "category", categories = ["F", "M"]}
    note = {kind = "text", buckets = 256}

Nothing is computed from the data. Columns are found by name and encoded in the order of their names, so that neither
a file's order nor the schema's own can change what a model sees. The same schema serves a simulation, the sites of a
federation, and predictions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from shoal.checked import checked, short
from shoal.data.columns import KINDS, VOCABULARY, Column, Ignore, Text, check_names, check_range, plain
from shoal.data.table_files import COLUMN_LIMIT
from shoal.errors import ConfigError, nearest

TaskKind = Literal["classification", "multi-label", "regression", "next-token"]
HINTS = {word: get_type_hints(kind) for word, kind in KINDS.items()}
FEATURE_LIMIT = 1 << 20  # numbers of a row
NAMES = tuple[str | bool | int | float, ...]  # of categories and classes, as people write them


@dataclass(frozen=True)
class Schema:
    """What a table's columns are.

    Attributes:
        columns: The kind of each column, by its name; columns of a table that are not here are not read.
        label: The column that is predicted; several for multi-label; not set for next-token prediction.
        classes: The label's public classes (classification).
        range: The label's public range (regression).
        client_column: The column with each row's owner.
        user_column: The column with the user whom each row is about, such as a patient with several visits; several
            columns where a row may have several users.
        task: What is learnt.
        unconfirmed: Columns whose range or categories were proposed from the data; nobody has confirmed them yet.
    """

    columns: Mapping[str, Column] = field(hash=False)
    label: str | tuple[str, ...] | None = None
    classes: tuple[str, ...] = ()
    range: tuple[float, float] | None = None
    client_column: str | None = None
    user_column: str | tuple[str, ...] | None = None
    task: TaskKind = "classification"
    unconfirmed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError("schema.columns has no column to learn from: give one of kind number, category or text")
        for name, column in self.columns.items():
            if "".join(name.splitlines()) != name:
                raise ConfigError(f"schema.columns {name!r}: a column's name cannot hold a line break")
            column.check(f"schema.columns.{name}")
        if (width := sum(column.width for column in self.columns.values())) > FEATURE_LIMIT:
            raise ConfigError(f"schema.columns makes {width:,} numbers of a row, more than {FEATURE_LIMIT:,}")
        self._check_roles()
        self._check_label()
        if (
            len(tokens := [name for name, column in self.inputs.items() if _is_tokens(column)])
            and len(self.inputs) > 1
        ):
            raise ConfigError(
                f"schema.columns.{tokens[0]}: tokens must be the only input, beside none of the others: give buckets "
                f"instead (hashed words), or several arrays by name in Python, shoal.from_arrays({{...}})"
            )

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Schema:
        """The schema in a plain mapping, as TOML and JSON hold it.

        Raises:
            ConfigError: A key or a value cannot be used.
        """
        given = _known("schema", mapping, [each.name for each in fields(cls)])
        columns = checked("schema.columns", given.pop("columns", {}), dict[str, Any])
        if len(columns) > COLUMN_LIMIT:
            raise ConfigError(f"schema.columns has {len(columns):,} columns, more than {COLUMN_LIMIT:,}")
        hints = get_type_hints(cls)
        values = {key: _value(f"schema.{key}", value, hints[key]) for key, value in given.items()}
        values.setdefault("task", _task(values))
        return cls({name: _column(name, each) for name, each in columns.items()}, **values)

    def to_mapping(self) -> dict[str, Any]:
        """The schema as TOML and JSON hold it; `of` reads it back."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "columns"}
        found["columns"] = {name: {"kind": each.kind} | _settings(each) for name, each in self.columns.items()}
        return {key: _listed(value) for key, value in found.items() if value not in (None, ())}

    @property
    def digest(self) -> str:
        """The SHA-256 of all that decides what a model sees."""
        found = self.to_mapping()
        found = {key: value for key, value in found.items() if key not in ("unconfirmed", "client_column")}
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()

    @property
    def inputs(self) -> dict[str, Column]:
        """The columns that are learnt from, in the order of their names."""
        return {
            name: self.columns[name] for name in sorted(self.columns) if not isinstance(self.columns[name], Ignore)
        }

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the numbers that a row becomes."""
        return tuple(made for name, column in self.inputs.items() for made in column.features(name))

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns that are predicted."""
        return (self.label,) if isinstance(self.label, str) else self.label or ()

    @property
    def users(self) -> tuple[str, ...]:
        """The columns that name a row's users."""
        return (self.user_column,) if isinstance(self.user_column, str) else self.user_column or ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the classes, labels or tokens that a model scores; none for numbers."""
        if self.task == "next-token":
            return tuple(map(str, range(VOCABULARY)))
        return self.labels if self.task == "multi-label" else self.classes

    def _check_roles(self) -> None:
        roles = [(f"schema.{role}", name) for role, names in self._roles().items() for name in names]
        taken: dict[str, str] = {}
        for role, name in roles:
            if name in taken:
                raise ConfigError(f"{role} and {taken[name]} both name column '{name}'")
            taken[name] = role
            if not isinstance(self.columns.get(name, Ignore()), Ignore):
                raise ConfigError(f"column '{name}' is {role}, so it is no input: remove schema.columns.{name}")

    def _roles(self) -> dict[str, tuple[str, ...]]:
        client = (self.client_column,) if self.client_column else ()
        return {"label": self.labels, "client_column": client, "user_column": self.users}

    def _check_label(self) -> None:
        task = self.task
        if task == "next-token":
            if self.labels or not all(map(_is_tokens, self.inputs.values())):
                raise ConfigError(
                    "schema.task next-token predicts a text from itself: one column of tokens, no label"
                )
            return
        if not self.labels:
            raise ConfigError("schema.label is missing: name the column that is to be predicted")
        if (len(self.labels) > 1) and task == "classification":
            raise ConfigError(f"schema.label names {len(self.labels)} columns, but schema.task is {task}")
        if (self.range is not None) != (task == "regression"):
            raise ConfigError(
                f"schema.range, the label's public range [low, high], belongs to regression, not {task}"
            )
        if self.range is not None:
            check_range("schema.range", self.range)
        if bool(self.classes) != (task == "classification"):
            raise ConfigError(f"schema.classes, the label's public classes, belong to classification, not {task}")
        if self.classes:
            check_names("schema.classes", self.classes, least=2)


def _is_tokens(column: Column) -> bool:
    return isinstance(column, Text) and column.tokens is not None


def _task(values: Mapping[str, Any]) -> TaskKind:
    if values.get("label") is None:
        return "next-token" if not {"classes", "range"} & set(values) else "classification"
    if values.get("range") is not None:
        return "regression"
    return "multi-label" if isinstance(values["label"], tuple) else "classification"


def _column(name: str, mapping: Any) -> Column:
    key = f"schema.columns.{name}"
    given = dict(checked(key, mapping, dict[str, Any]))
    word = given.pop("kind", None)
    if word not in KINDS:
        raise ConfigError(f"{key}.kind cannot be {short(word)}: it is one of {', '.join(KINDS)}")
    kind = KINDS[word]
    given = _known(key, given, [each.name for each in fields(kind)])
    if lacks := [each.name for each in fields(kind) if each.default is MISSING and each.name not in given]:
        raise ConfigError(f"{key} is a {word}, so it needs {' and '.join(lacks)}, a public fact")
    hints = HINTS[word]
    return kind(**{field_: _value(f"{key}.{field_}", value, hints[field_]) for field_, value in given.items()})


def _value(key: str, value: Any, kind: Any) -> Any:
    """Checked; the names of categories and classes may be numbers, and are kept as text."""
    if key.rpartition(".")[2] in ("categories", "classes"):
        return tuple(plain(each) for each in checked(key, value, NAMES))
    if kind == str | None and isinstance(value, bool | int | float):
        return plain(value)
    return checked(key, value, kind)


def _known(where: str, mapping: Any, names: list[str]) -> dict[str, Any]:
    for key in mapping:
        if key not in names:
            raise ConfigError(f"there is no key '{where}.{key}'{nearest(str(key), names)}")
    return dict(mapping)


def _settings(column: Column) -> dict[str, Any]:
    found = {each.name: getattr(column, each.name) for each in fields(column)}
    return {key: _listed(value) for key, value in found.items() if value is not None}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
