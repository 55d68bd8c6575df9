"""The user's own data as arrays: `from_arrays`, `from_clients`, .npz files, and new records to predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.data.array_parts import (
    Array,
    array_of,
    channels_first,
    features_of,
    given_codes,
    inputs_of,
    label_array,
    owners_of,
    split,
    targets_of,
    users_of,
)
from shoal.data.columns import plain, refuse_alike
from shoal.data.dataset import Dataset
from shoal.data.readers import read_npy, read_npz
from shoal.data.scaling import STANDARD
from shoal.data.scaling import pictures as scaled_pictures
from shoal.data.sequences import Padding, are_sequences, by_name
from shoal.errors import DataError, nearest
from shoal.inputs import Inputs, InputShape, Shape, parts, take
from shoal.inputs import count as count_of
from shoal.tasks import Classification, MultiLabel, Regression, Task

NPZ_PLAIN = ("x", "y", "client", "client_names", "classes", "user")
NPZ_SPLIT = ("train_x", "train_y", "test_x", "test_y", "train_client", "client_names", "classes", "train_user")


def from_arrays(
    x: Array | Mapping[str, Array],
    y: Array,
    *,
    client: Array | None = None,
    user: Array | None = None,
    test: tuple[Array, Array] | None = None,
    classes: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    scale: str = "unit",
    name: str = "arrays",
    notes: tuple[str, ...] = (),
    task: Task | None = None,
    pictures: bool = True,
    length: int | None = None,
    mask: str | None = "attention_mask",
) -> Dataset:
    """A data set from features, labels and, where known, the owner of each row.

    Args:
        x: `[N, F]`, or pictures `[N, H, W]`, `[N, C, H, W]` or `[N, H, W, C]` (where both could be meant, the
            channels come first). Whole numbers `[N, T]` stay whole numbers, for models that take tokens. Or several
            arrays by name, each of any shape `[N, ...]`: the model is called with keyword arguments of these names.
            A list of sequences of different lengths is padded with 0 to a `length`, and their targets with -100.
        y: Labels `[N]`, whole numbers or text; or other numbers `[N]` or `[N, D]`, labels `[N, L]` of 0 and 1 with
            their names in `classes`, or the tokens `[N, T]` of a vocabulary `classes`, -100 for padding.
        client: The owner of each row: whole numbers or text.
        user: The user whom each row is about, whole numbers or text `[N]`; or several, `[N, U]`, with -1 or '' where
            a row has fewer.
        test: Test rows and labels. Without them a fixed share of the rows is held out: of each client where owners
            are known, else by the rows' numbers alone, so that no row's label decides where another one goes.
        classes: The classes' names; labels are then these names or, where not all names are whole numbers, numbers
            from 0. Without them the classes are the different labels, in order.
        test_fraction: The share that is held out.
        scale: 'unit', 'standard' or 'raw', for pixels (uint8).
        name: What messages and reports call the data.
        notes: Facts that reports repeat.
        task: The task; targets are then taken as they are, and must be as it needs them.
        pictures: Whether arrays of three or four axes are pictures; False takes them as they are, such as series
            `[N, T, F]` or `[N, C, L]`.
        length: The public length to which lists of sequences are padded, or cut.
        mask: The name under which a model that takes its inputs by name gets 1 for a sequence's own steps and 0 for
            padding; None for one that takes no mask.

    Returns:
        The data set.

    Raises:
        DataError: Rows or labels are malformed.
        ConfigError: `scale` or `test_fraction` cannot be used.
    """
    where = f"data '{name}'"
    padding = Padding(where, length, mask)
    x, y = padding.features(x), padding.targets(y, x)
    test = None if test is None else (padding.features(test[0]), padding.targets(test[1], test[0]))
    train_x = inputs_of(x, where, scale, pictures)
    rows = count_of(train_x)
    owners, owner_names = (None, ()) if client is None else owners_of(client, rows, where)
    users = None if user is None else users_of(user, rows, where)
    test_owners = test_users = None
    if test is None:
        (codes,), class_names = targets_of([y], [rows], classes, where, task)
        keep, out = split(np.zeros(rows, np.int64) if owners is None else owners, test_fraction, where)
        test_x, test_y = take(train_x, out), codes[out]
        train_x, train_y = take(train_x, keep), codes[keep]
        owners, test_owners = (None, None) if owners is None else (owners[keep], owners[out])
        users, test_users = (None, None) if users is None else (users[keep], users[out])
    else:
        test_x = inputs_of(test[0], f"{where}, test", scale, pictures)
        (train_y, test_y), class_names = targets_of([y, test[1]], [rows, count_of(test_x)], classes, where, task)
    return Dataset(
        name=name,
        train_x=train_x,
        train_y=torch.from_numpy(train_y),
        test_x=test_x,
        test_y=torch.from_numpy(test_y),
        classes=class_names,
        owners=owners,
        owner_names=owner_names,
        notes=notes,
        test_owners=test_owners,
        known_task=task,
        users=users,
        test_users=test_users,
        held_out=test is None,
        read_classes=classes is None and bool(class_names),
    )


def from_clients(
    clients: Sequence[tuple[Array, Array]],
    *,
    test: tuple[Array, Array] | None = None,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    scale: str = "unit",
    name: str = "clients",
    pictures: bool = True,
    length: int | None = None,
    mask: str | None = "attention_mask",
) -> Dataset:
    """A data set from one pair (x, y) a client; `partition='column'` gives each client its rows back.

    The other arguments are those of `from_arrays`.

    Args:
        clients: Features and labels of each client, as `from_arrays` takes them.
        names: The clients' names.

    Returns:
        The data set.

    Raises:
        DataError: A client has no rows, or other rows than the first.
    """
    if not isinstance(clients, Sequence) or not all(
        isinstance(each, Sequence) and len(each) == 2 for each in clients
    ):
        raise DataError(f"data '{name}': clients must be a list of pairs (x, y), one per client")
    if not len(clients):
        raise DataError(f"data '{name}': no clients given")
    if names is not None and len(names) != len(clients):
        raise DataError(f"data '{name}': {len(clients)} clients but {len(names)} names")
    ragged = length is not None
    xs = [_of_client(x, ragged, f"data '{name}', client {k}, x") for k, (x, _) in enumerate(clients)]
    ys = [_of_client(y, ragged, f"data '{name}', client {k}, y") for k, (_, y) in enumerate(clients)]
    sizes = [_rows(x, y, xs[0], f"data '{name}', client {k}") for k, (x, y) in enumerate(zip(xs, ys, strict=True))]
    dataset = from_arrays(
        _together(xs),
        _together(ys),
        client=np.repeat(np.arange(len(xs)), sizes),
        test=test,
        classes=classes,
        test_fraction=test_fraction,
        scale=scale,
        name=name,
        pictures=pictures,
        length=length,
        mask=mask,
    )
    return dataset if names is None else _named(dataset, names)


def read_own_npz(
    path: Path, *, classes: Sequence[str] | None, test_fraction: float, scale: str, name: str
) -> Dataset:
    """A data set from a .npz with x, y (client) or train_x, train_y, test_x, test_y (train_client).

    Several features by name are `x.NAME`, or `train_x.NAME` and `test_x.NAME`.
    `classes` and `client_names` may be there too: what the numbers in y and client stand for.
    """
    arrays = _grouped(read_npz(path, str(path)))
    split = "train_x" in arrays
    allowed = NPZ_SPLIT if split else NPZ_PLAIN
    for key in arrays:
        if key not in allowed:
            raise DataError(f"{path}: array '{key}' is not known{nearest(key, allowed)}")
    needed = NPZ_SPLIT[:4] if split and {"test_x", "test_y"} & set(arrays) else allowed[:2]
    for key in needed:
        if key not in arrays:
            raise DataError(f"{path}: lacks the array '{key}', has {', '.join(sorted(arrays)) or 'none'}")
    given = None if "classes" not in arrays else [str(c) for c in arrays["classes"].reshape(-1)]
    dataset = from_arrays(
        arrays[allowed[0]],
        _by_name(arrays[allowed[1]], given),
        client=arrays.get("train_client" if split else "client"),
        user=arrays.get("train_user" if split else "user"),
        test=(arrays["test_x"], _by_name(arrays["test_y"], given)) if "test_x" in arrays else None,
        classes=classes or given,
        test_fraction=test_fraction,
        scale=scale,
        name=name,
    )
    return _named(dataset, arrays["client_names"].reshape(-1)) if "client_names" in arrays else dataset


def _grouped(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Arrays `x.NAME` as one mapping `x`."""
    found: dict[str, Any] = {}
    for key, array in arrays.items():
        kind, _, name = key.partition(".")
        if name and kind in ("x", "train_x", "test_x") and kind not in arrays:
            found.setdefault(kind, {})[name] = array
        else:
            found[key] = array
    return found


def read_arrays(path: Path) -> tuple[Any, np.ndarray | None]:
    """Records to predict, and their targets if they are there: a .npy, or a .npz with x, y or test_x, test_y."""
    if path.suffix == ".npy":
        return read_npy(path), None
    arrays = _grouped(read_npz(path, str(path)))
    found = next((key for key in ("x", "test_x") if key in arrays), None)
    if found is None:
        raise DataError(f"{path}: lacks the array 'x', has {', '.join(sorted(arrays)) or 'none'}")
    return arrays[found], arrays.get(found.replace("x", "y"))


def new_records(
    x: Array | Mapping[str, Array],
    y: Array | None,
    where: str,
    *,
    shape: InputShape,
    scale: str,
    name: str,
    classes: Sequence[str],
    task: Task,
) -> tuple[Inputs, torch.Tensor | None]:
    """Records to predict as a model for these data takes them, and their targets where they are known.

    Args:
        x: Records, as `from_arrays` takes them.
        y: Their targets.
        where: What messages call them.
        shape: The shape of a record as the model takes it; arrays of this shape need no other.
        scale: As for `from_arrays`.
        name: The data set whose public constants scale pixels.
        classes: The names of classes.
        task: The task, which checks the targets.

    Raises:
        DataError: They are malformed.
    """
    if isinstance(shape, dict):
        given = x if isinstance(x, Mapping) else {}
        if lacks := [part for part in shape if part not in given]:
            raise DataError(f"{where}: lacks {', '.join(lacks)}; the model takes {', '.join(shape)}")
        found: Inputs = {
            part: _new(given[part], f"{where} '{part}'", own, scale, name) for part, own in shape.items()
        }
    elif isinstance(x, Mapping):
        raise DataError(f"{where}: several arrays ({', '.join(x)}), but the model takes one")
    else:
        found = _new(x, where, shape, scale, name)
    if len(set(map(len, parts(found).values()))) > 1:
        raise DataError(f"{where}: the arrays have different numbers of rows")
    if y is None:
        return found, None
    known = _known_targets(array_of(y, f"{where}, y"), count_of(found), tuple(classes), task, where)
    targets = torch.from_numpy(known)
    task.check_targets(targets, where)
    return found, targets


def _new(value: Array, where: str, shape: Shape, scale: str, name: str) -> torch.Tensor:
    array = array_of(value, f"{where}, x")
    pixels = array.dtype == np.uint8
    if pixels and scale == "standard" and name in STANDARD:
        return scaled_pictures(channels_first(array, where), scale, name=name)
    return features_of(array, where, scale if pixels else "unit", pictures=array.shape[1:] != shape)


def _known_targets(values: np.ndarray, rows: int, classes: tuple[str, ...], task: Task, where: str) -> np.ndarray:
    """Targets of records to predict; classes by their names or, where these are no numbers, by their places."""
    if isinstance(task, Classification):
        labels = label_array(values, rows, where)
        named = labels.astype(np.str_)
        return given_codes(named if np.isin(named, classes).all() else labels, classes, where).astype(np.int64)
    if len(values) != rows:
        raise DataError(f"{where}: {rows} rows but {len(values)} targets")
    if values.dtype.kind not in "biuf":
        raise DataError(f"{where}: targets are of type {values.dtype}, expected numbers")
    real = isinstance(task, Regression | MultiLabel) or values.dtype.kind == "f"
    return values.astype(np.float32 if real else np.int64)


def _by_name(y: np.ndarray, classes: list[str] | None) -> np.ndarray:
    """The names of the classes that whole numbers in a file stand for: elsewhere they may have another order."""
    codes = classes and y.ndim == 1 and y.dtype.kind in "iu" and y.size and y.min() >= 0 and y.max() < len(classes)
    return np.array(classes)[y] if codes else y


def _named(dataset: Dataset, names: Sequence[str] | np.ndarray) -> Dataset:
    """The data set with names for its owners, who were numbered 0, 1, 2, ..."""
    if dataset.owner_names != tuple(str(k) for k in range(len(names))):
        raise DataError(
            f"data '{dataset.name}': {len(names)} client names need clients numbered 0 to {len(names) - 1}"
        )
    found = tuple(map(plain, names))
    name, times = Counter(found).most_common(1)[0]
    if times > 1:
        raise DataError(f"data '{dataset.name}': {times} clients have the name '{name}'; join their rows")
    refuse_alike(found, f"data '{dataset.name}'")
    return replace(dataset, owner_names=found)


def _of_client(value: Array, ragged: bool, where: str) -> Array:
    """Arrays by name, an array or, where they are padded, a list of sequences."""
    if isinstance(value, Mapping):
        return {name: _of_client(own, ragged, f"{where} '{name}'") for name, own in value.items()}
    return value if ragged and are_sequences(value) else array_of(value, where)


def _rows(x: Array, y: Array, first: Array, where: str) -> int:
    """How many rows a client has, which must be like those of the first."""
    own, theirs = by_name(x), by_name(first)
    if own.keys() != theirs.keys():
        raise DataError(f"{where}: has the features {sorted(own)}, client 0 has {sorted(theirs)}")
    for name, values in own.items():
        _check_client(values, y, theirs[name], where)
    return len(y)


def _check_client(x: Array, y: Array, first: Array, where: str) -> None:
    if not len(x):
        raise DataError(f"{where}: has no rows; leave it out")
    if len(x) != len(y):
        raise DataError(f"{where}: {len(x)} rows but {len(y)} labels")
    if isinstance(x, np.ndarray) != isinstance(first, np.ndarray):
        raise DataError(f"{where}: rows are sequences for one client and an array for another")
    if isinstance(x, np.ndarray) and (x.shape[1:] != first.shape[1:] or x.dtype != first.dtype):
        raise DataError(
            f"{where}: rows are {x.dtype} {x.shape[1:]}, those of client 0 {first.dtype} {first.shape[1:]}"
        )


def _together(values: Sequence[Array]) -> Array:
    """The rows of all clients, one after the other."""
    if isinstance(values[0], Mapping):
        return {name: _together([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    return [row for value in values for row in value]
