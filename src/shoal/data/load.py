"""Load a data set by name (one that Shoal or an installed package knows, or an imported one) or from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shoal.data import imported
from shoal.data.arrays import from_arrays, read_own_npz
from shoal.data.dataset import Dataset
from shoal.data.known import KNOWN
from shoal.data.large_tables import is_large, read_large
from shoal.data.mapped import is_folder, read_folder
from shoal.data.scaling import check_scale
from shoal.data.schema import Schema
from shoal.data.schema_encoding import encode_by_schema, read_by_schema
from shoal.data.table_files import other_type, read_columns, read_table
from shoal.data.tables import CLIENT, encode_table
from shoal.errors import DataError, nearest
from shoal.tasks import TaskSettings, choose

FILE_TYPES = (".npz", ".csv", ".parquet")
TEST_FRACTION = 0.2


def load(
    name: str | Path,
    *,
    scale: str = "unit",
    label: str = "label",
    client: str | None = None,
    drop: Sequence[str] = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    classes: Sequence[str] | None = None,
    schema: Schema | None = None,
    test_fraction: float = TEST_FRACTION,
    mirror: str | None = None,
) -> Dataset:
    """The data set of this name, or in this .npz, .csv or .parquet file, or in this folder of .npy files.

    `scale` is unit, standard or raw (see shoal.data.scaling). For the user's own tables `label` and `client`
    name columns, `drop` columns to leave out, `ranges` public bounds by which numbers are put into [0, 1],
    `categories` and `classes` public vocabularies; a `schema` says all of that. `test_fraction` of the rows is held
    out.
    `mirror` replaces the public addresses from which missing files are downloaded (also SHOAL_MIRROR).
    """
    check_scale(scale)
    of_tables = {
        "data.label": label != "label",
        "data.client_column": client,
        "drop": drop,
        "ranges": ranges,
        "categories": categories,
        "schema": schema,
    }
    of_files = of_tables | {"data.test_fraction": test_fraction != TEST_FRACTION}
    path = Path(name).expanduser()
    if str(name) not in KNOWN.own and (found := imported.find(str(name)) or imported.at(path)) is not None:
        _refuse(of_files, f"{name} has that from when it was imported")
        return imported.read(found, scale=scale)
    if is_folder(path) and str(name) not in KNOWN:
        _refuse(of_files, f"{path.name} holds arrays that are ready")
        return read_folder(path, classes=classes)
    if path.suffix not in FILE_TYPES and str(name) in KNOWN:
        _refuse(of_files, f"{name} comes with its own")
        known = KNOWN[str(name)]
        dataset = known.read(known, scale, mirror)
        read_classes = dataset.read_classes and str(name) not in KNOWN.own
        return replace(dataset, name=str(name), read_classes=read_classes, known=True)
    if path.suffix not in FILE_TYPES:
        fix = other_type(path) if path.is_file() else nearest(str(name), _names())
        raise DataError(f"data '{name}' is neither known nor a file of {', '.join(FILE_TYPES)}{fix}")
    if not path.is_file():
        raise DataError(f"there is no file {path}; give a path, or a name: {', '.join(_names())}")
    if path.suffix == ".npz":
        _refuse(of_tables, f"{path.name} holds arrays that are ready")
        return read_own_npz(path, classes=classes, test_fraction=test_fraction, scale=scale, name=path.stem)
    if schema is not None:
        _refuse({key: value for key, value in of_tables.items() if key != "schema"}, "the schema says it")
        return with_schema(path, schema, test_fraction=test_fraction)
    table = encode_table(
        read_table(path), str(path), label=label, client=client, drop=drop, ranges=ranges, categories=categories
    )
    if path.suffix == ".csv" and table.owners is not None:
        _refuse_merged(path, client or CLIENT, table.owners)
    dataset = from_arrays(
        table.inputs,
        table.targets,
        client=table.owners,
        classes=classes,
        test_fraction=test_fraction,
        scale=scale,
        name=path.stem,
        notes=table.notes,
    )
    return replace(dataset, features=table.features, ranges=dict(ranges or {}), read_columns=bool(table.notes))


def _refuse_merged(path: Path, client: str, owners: np.ndarray) -> None:
    """Raise a DataError where the file names more owners than were read, since 007 and 7 are one number."""
    written = {str(text).strip() for text in read_columns(path, [client])[client].unique().to_pylist()}
    if owners.dtype.kind in "iu" and len(written) > len(np.unique(owners)):
        raise DataError(
            f"{path}: client column '{client}' holds codes such as 007 and 7, which would be one client as numbers; "
            f"`shoal init {path}` writes a schema that keeps them apart, or write them alike"
        )


def with_schema(path: Path, schema: Schema, *, test_fraction: float = TEST_FRACTION, owners: bool = True) -> Dataset:
    """The data set in a table, as its schema says; of one that is too large for memory a copy on disk is made."""
    if is_large(path, schema) and schema.users:
        raise DataError(f"{path} is too large for schema.user_column: rows of users must fit into memory")
    if is_large(path, schema):
        return read_large(path, schema, test_fraction=test_fraction, owners=owners)
    table = encode_by_schema(schema, read_by_schema(schema, path, owners=owners), str(path), owners=owners)
    targets = torch.from_numpy(table.targets)
    dataset = from_arrays(
        table.inputs,
        table.targets,
        client=table.owners,
        user=table.users,
        classes=schema.outputs,
        test_fraction=test_fraction,
        name=path.stem,
        notes=table.notes,
        task=choose(TaskSettings(kind=schema.task, range=schema.range), targets, schema.outputs),
    )
    return replace(dataset, features=table.features, schema=schema, read_columns=bool(schema.unconfirmed))


def _refuse(given: Mapping[str, object], because: str) -> None:
    """Options that have no effect are errors."""
    for key in (key for key, value in given.items() if value):
        raise DataError(f"{key} would be ignored, since {because}; leave it out")


def _names() -> list[str]:
    return [*KNOWN, *imported.names(), *(f"FILE{suffix}" for suffix in FILE_TYPES)]
