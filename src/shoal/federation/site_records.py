"""A site's records: all rows of its own file, or one client's part of a built-in data set, as simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shoal.data import Dataset, ListedPartition, load
from shoal.data.load import with_schema
from shoal.data.schema import Schema
from shoal.data.table_files import missing_columns, other_type
from shoal.errors import ConfigError, DataError, listed
from shoal.federation.consent import Refused
from shoal.federation.terms import Terms
from shoal.inputs import each, joined, take
from shoal.prepare import parted, with_features, with_task

NOBODY: dict[str, Any] = {"owners": None, "owner_names": (), "test_owners": None, "test_users": None}
"""A site is one client."""


def reader(
    name: str, label: str | None = None, part: int | None = None, schema: Schema | None = None
) -> Callable[[Terms], Dataset]:
    """Return a function that loads the named data for given terms; a site trains on all of its rows.

    Args:
        name: A file, or a built-in data set.
        label: The label column, where its name differs from the federation's.
        part: One client's part of a built-in data set.
        schema: The only schema that the owner accepts; None accepts the federation's.
    """
    if "." in name and not Path(name).is_file():
        raise ConfigError(f"--data {name}: there is no such file")

    def read(terms: Terms) -> Dataset:
        task = replace(terms.settings.task, metrics=())  # a site evaluates nothing, so it imports no figures
        return with_task(features_of(terms), task, terms.allowed)

    def features_of(terms: Terms) -> Dataset:
        section = terms.settings.data
        if schema is not None:
            refuse_other(schema, terms.settings.schema)
        if part is not None:
            return with_features(_part(_named(name, terms, label), terms, part), section.features)
        dataset = _of_schema(name, terms.settings.schema, label) if terms.schema else _named(name, terms, label)
        x, y = joined(dataset.train_x, dataset.test_x), torch.cat([dataset.train_y, dataset.test_y])
        everything = replace(dataset, train_x=x, train_y=y, **NOBODY)
        if dataset.users is not None and dataset.test_users is not None:
            everything = replace(everything, users=np.concatenate([dataset.users, dataset.test_users]))
        return with_features(capped(everything, terms.settings.algorithm.records.max_per_user), section.features)

    return read


def capped(dataset: Dataset, most: int | None) -> Dataset:
    """A site's records, at most this many of each user."""
    if most is None:
        return dataset
    if dataset.users is None:
        raise Refused(f"the terms allow {most} records of a user, but name no column of users (schema.user_column)")
    rows = np.arange(len(dataset.train_y), dtype=np.int32)
    kept = ListedPartition(rows, np.array([0, len(rows)]), users=dataset.users).capped(most).indices
    return _rows(dataset, kept)


def _rows(dataset: Dataset, rows: np.ndarray) -> Dataset:
    chosen = torch.from_numpy(rows).long()
    users = None if dataset.users is None else dataset.users[rows]
    return replace(dataset, train_x=take(dataset.train_x, chosen), train_y=dataset.train_y[chosen], users=users)


def columns_read(terms: Terms, dataset: Dataset) -> str:
    """In words for the owner, who may accept no schema but one (--schema): what is learnt from which columns."""
    schema, label = terms.settings.schema, terms.settings.data.label
    names = list(dataset.features if schema is None else schema.inputs)
    if not names:
        return "trains on all arrays of the data"
    if schema is not None:
        label = ", ".join(schema.labels) or names[0]
    return f"learns '{label}' from {listed(names)}"


def refuse_other(own: Schema, theirs: Schema | None) -> None:
    """Raise Refused where the federation's schema is not the site's own; all columns that differ are named."""
    if theirs is None:
        raise Refused("the federation has no schema, but this site accepts only its own (--schema)")
    if own.digest == theirs.digest:
        return
    names = own.columns.keys() | theirs.columns.keys()
    differ = sorted(name for name in names if own.columns.get(name) != theirs.columns.get(name))
    raise Refused(
        f"the federation's schema is not this site's (--schema): it differs in {', '.join(differ) or 'the label'}"
    )


def _of_schema(name: str, schema: Schema | None, label: str | None) -> Dataset:
    if Path(name).suffix not in (".csv", ".parquet"):
        raise Refused(
            f"the federation has a schema, so data must be a .csv or .parquet file, got {name}"
            f"{other_type(Path(name))}"
        )
    assert schema is not None
    if label is not None:
        schema = replace(schema, label=label)
    return with_schema(Path(name), schema, owners=False)


def _named(name: str, terms: Terms, label: str | None) -> Dataset:
    """Data without a schema: its columns must not depend on its contents, and are found by name."""
    section = terms.settings.data
    classes = terms.classes or None if "." in name else None  # built-in data sets bring their own
    dataset = load(name, scale=section.scale, label=label or section.label, classes=classes)
    if dataset.notes:
        raise Refused(
            f"the columns of {name} depend on its contents ({dataset.notes[0]}), so other sites may have different "
            f"ones; make all columns numeric, or give the federation a schema (`shoal init`)"
        )
    if not (terms.features and dataset.features) or dataset.features == terms.features:
        return dataset
    if lacks := missing_columns(terms.features, dataset.features):
        raise DataError(f"{name}: {lacks}")
    order = [dataset.features.index(feature) for feature in terms.features]
    train, test = (each(x, lambda part: part[:, order]) for x in (dataset.train_x, dataset.test_x))
    return replace(dataset, train_x=train, test_x=test, features=terms.features)


def _part(dataset: Dataset, terms: Terms, part: int) -> Dataset:
    """Client `part` in a simulation of this configuration."""
    settings = terms.settings
    if settings.data.partition == "auto":
        kind: Literal["iid", "column"] = "iid" if dataset.owners is None else "column"
        settings = replace(settings, data=replace(settings.data, partition=kind))
    parts = parted(settings, dataset)
    if not 0 <= part < len(parts):
        raise ConfigError(f"--part must be in 0 to {len(parts) - 1}, got {part}")
    return replace(_rows(dataset, parts.records(part)), **NOBODY)
