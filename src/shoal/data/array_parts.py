"""A user's arrays as features, targets and owners; one that is malformed is an error that names it.

Nothing is standardised from the data: a mean or deviation of private rows would itself be a release. Pixels
(uint8) are divided by the public constant 255; other numbers are taken as they are, so scale them with
constants that are public. Which classes and clients there are counts as public.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal.data.columns import owner, refuse_alike
from shoal.data.dataset import NOT_FINITE, first_bad_row
from shoal.data.scaling import check_scale
from shoal.data.split import held_out
from shoal.errors import ConfigError, DataError, nearest
from shoal.inputs import Inputs
from shoal.tasks import Task

Array = Any  # a numpy array, a torch tensor, or nested sequences of numbers
CHANNELS = (1, 3, 4)


def array_of(value: Array, where: str) -> np.ndarray:
    """Any array of the user's."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return np.asarray(value.float() if value.dtype == torch.bfloat16 else value)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: not an array: {error}") from error
    if array.ndim == 0:
        raise DataError(f"{where}: a single value, expected an array")
    texts = array.dtype == object and all(isinstance(each, str) for each in array.flat)  # as pandas holds them
    return array.astype(np.str_) if texts else array


def inputs_of(x: Array | Mapping[str, Array], where: str, scale: str, pictures: bool) -> Inputs:
    """Features as one tensor, or as several by name, where bytes of three or more axes are pictures."""
    if not isinstance(x, Mapping):
        return features_of(x, where, scale, pictures)
    found = {}
    for name, value in x.items():
        array = array_of(value, f"{where}, x '{name}'")
        found[str(name)] = features_of(array, f"{where} '{name}'", scale, array.dtype == np.uint8 and array.ndim > 2)
    return found


def features_of(value: Array, where: str, scale: str, pictures: bool = True) -> torch.Tensor:
    """Features as float32 `[N, F]` or `[N, C, H, W]`, or whole numbers as int64 `[N, T]`; others as they are."""
    check_scale(scale)
    array = array_of(value, f"{where}, x")
    if array.dtype.kind not in "biuf":
        raise DataError(f"{where}: features are of type {array.dtype}, expected numbers")
    if not array.size:
        raise DataError(f"{where}: no data, shape {array.shape}")
    pixels = array.dtype == np.uint8
    if scale == "standard" and not pixels:
        raise ConfigError(
            f"{where}: scale 'standard' is for pixels (uint8), these are {array.dtype}; scale them yourself "
            "with public constants and use scale 'unit'"
        )
    if (array.ndim == 2 or not pictures) and array.dtype.kind in ("iu" if pictures else "biu") and not pixels:
        return torch.from_numpy(np.ascontiguousarray(array).astype(np.int64))
    with np.errstate(over="ignore"):
        shaped = channels_first(array, where) if pictures else array
        x = torch.from_numpy(np.ascontiguousarray(shaped).astype(np.float32))
    if (row := first_bad_row(x)) is not None:
        raise DataError(f"{where}: row {row} {NOT_FINITE}")
    if pixels and scale != "raw":
        x.div_(255)
    return x.sub_(0.5).div_(0.5) if scale == "standard" else x


def channels_first(array: np.ndarray, where: str) -> np.ndarray:
    """Pictures as [N, C, H, W]; rows of a table as they are."""
    if array.ndim == 2:
        return array
    if array.ndim == 3:
        return array[:, None]
    if array.ndim == 4 and array.shape[1] in CHANNELS:
        return array
    if array.ndim == 4 and array.shape[3] in CHANNELS:
        return array.transpose(0, 3, 1, 2)
    if array.ndim == 4 and array.shape[1] < min(array.shape[2:]):
        return array
    if array.ndim == 4 and array.shape[3] < min(array.shape[1:3]):
        return array.transpose(0, 3, 1, 2)
    raise DataError(
        f"{where}: features of shape {array.shape}; expected [N, F], or pictures [N, H, W], [N, C, H, W] or "
        "[N, H, W, C] with 1, 3 or 4 channels, or with fewer channels than rows and columns"
    )


def targets_of(
    values: Sequence[Array], rows: Sequence[int], classes: Sequence[str] | None, where: str, task: Task | None = None
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Targets of several parts: codes of classes, numbers, or tokens; and the names of what they stand for."""
    parts = [array_of(value, f"{where}, y") for value in values]
    if task is not None:
        return parts, tuple(map(str, classes or ()))
    several, real = parts[0].ndim > 1, [part for part in parts if part.dtype.kind == "f"]
    if not several and (classes is not None or all((part == np.floor(part)).all() for part in real)):
        return _labels(parts, rows, classes, where)
    for part, count in zip(parts, rows, strict=True):
        if len(part) != count:
            raise DataError(f"{where}: {count} rows but {len(part)} targets")
        if part.dtype.kind not in "biuf":
            raise DataError(f"{where}: targets are of type {part.dtype}, expected numbers")
        if not np.isfinite(part).all():
            row = int((~np.isfinite(part).reshape(count, -1).all(1)).argmax())
            raise DataError(f"{where}: target in row {row} is NaN or Inf; fill in or remove such rows first")
    tokens = several and all(part.dtype.kind in "iu" for part in parts)
    return [part.astype(np.int64 if tokens else np.float32) for part in parts], tuple(map(str, classes or ()))


def _labels(
    values: Sequence[Array], rows: Sequence[int], classes: Sequence[str] | None, where: str
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Labels of several parts as int64 codes, and the names of the classes."""
    parts = [label_array(value, count, where) for value, count in zip(values, rows, strict=True)]
    labels = np.concatenate(parts)
    if classes is None:
        found, codes = np.unique(labels, return_inverse=True)
        if len(found) < 2 and labels.dtype.kind == "U":  # numbers may be those of a regression
            raise DataError(f"{where}: all labels are {found[0].item()!r}; at least two classes are needed")
        names = tuple(str(value) for value in found)
    else:
        names = tuple(map(str, classes))
        codes = given_codes(labels, names, where)
    return np.split(codes.astype(np.int64), np.cumsum(rows)[:-1]), names


def label_array(value: Array, rows: int, where: str) -> np.ndarray:
    """Labels [N], whole numbers or text."""
    y = array_of(value, f"{where}, y")
    if y.ndim != 1:
        raise DataError(f"{where}: labels have shape {y.shape}, expected [N]; of one-hot rows take the argmax")
    if len(y) != rows:
        raise DataError(f"{where}: {rows} rows but {len(y)} labels")
    if y.dtype.kind == "f":
        whole = np.isfinite(y) & (y == np.floor(y)) & (np.abs(y) < 2**53)
        if not whole.all():
            row = int((~whole).argmax())
            raise DataError(f"{where}: label {y[row]} in row {row} is not a whole number; labels name classes")
        return y.astype(np.int64)
    if y.dtype.kind not in "biuU":
        raise DataError(f"{where}: labels are of type {y.dtype}, expected whole numbers or text")
    return y if y.dtype.kind == "U" else y.astype(np.int64)


def given_codes(labels: np.ndarray, names: tuple[str, ...], where: str) -> np.ndarray:
    """The places of labels among the names of classes."""
    if len(set(names)) != len(names):
        raise DataError(f"{where}: classes are named twice in {list(names)}")
    if labels.dtype.kind == "U":
        found, inverse = np.unique(labels, return_inverse=True)
        for label in found:
            if label not in names:
                raise DataError(f"{where}: label '{label}' is not among the classes{nearest(str(label), names)}")
        return np.array([names.index(label) for label in found])[inverse]
    numbers = [int(name) for name in names if name.removeprefix("-").isdecimal()]
    if len(numbers) == len(names):  # classes 1 to 5 are no codes 0 to 4
        if (outside := ~np.isin(labels, numbers)).any():
            row = int(outside.argmax())
            raise DataError(f"{where}: label {labels[row]} in row {row} is not among the classes {list(names)[:10]}")
        return np.argsort(numbers)[np.searchsorted(np.sort(numbers), labels)]
    outside = (labels < 0) | (labels >= len(names))
    if outside.any():
        row = int(outside.argmax())
        raise DataError(f"{where}: label {labels[row]} in row {row} is outside 0 to {len(names) - 1}")
    return labels


def owners_of(client: Array, rows: int, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Owners numbered from 0, and their names."""
    array = array_of(client, f"{where}, client")
    if array.shape != (rows,):
        raise DataError(f"{where}: client has shape {array.shape}, expected one owner for each of {rows} rows")
    if array.dtype.kind not in "iuU":
        raise DataError(f"{where}: client is of type {array.dtype}, expected whole numbers or text")
    found, codes = np.unique(_plain(array, where), return_inverse=True)
    return codes.astype(np.int64), tuple(str(value) for value in found)


def _plain(array: np.ndarray, where: str) -> np.ndarray:
    """Names as tables with a schema have them: one client or user, however it was written."""
    if array.dtype.kind != "U" or not array.size:
        return array
    found, codes = np.unique(array, return_inverse=True)
    names = np.array([owner(name) for name in found])
    refuse_alike(names.tolist(), where)
    return names[codes.reshape(array.shape)]


def users_of(user: Array, rows: int, where: str) -> np.ndarray:
    """The users of each row, numbered from 0, [N, U]; -1 where a row has fewer ('' or -1), or names one twice."""
    array = _plain(array_of(user, f"{where}, user"), where)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or len(array) != rows or array.dtype.kind not in "iuU":
        raise DataError(
            f"{where}: user is {array.dtype} {array.shape}, expected whole numbers or text, one or more for each of "
            f"{rows} rows"
        )
    absent = array == ("" if array.dtype.kind == "U" else -1)
    codes: np.ndarray = np.unique(array, return_inverse=True)[1].reshape(array.shape).astype(np.int64)
    for column in range(1, codes.shape[1]):
        absent[:, column] |= (codes[:, :column] == codes[:, [column]]).any(axis=1)
    if (nobody := absent.all(axis=1)).any():
        raise DataError(f"{where}: row {int(nobody.argmax())} has no user; remove such rows, or name their users")
    return np.where(absent, -1, codes)


def split(groups: np.ndarray, test_fraction: float, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers to train on and to test with, of each group in proportion."""
    if not 0 < test_fraction < 1:
        raise ConfigError(f"{where}: test_fraction must be between 0 and 1, got {test_fraction}")
    keep, out = held_out(groups, max(1, round(test_fraction * len(groups))))
    if not len(out):
        raise DataError(
            f"{where}: no row can be held out, as there is one row only, or one of each client; give test rows"
        )
    return keep, out
