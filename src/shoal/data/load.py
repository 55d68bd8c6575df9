"""Load a data set by name (the seven that Shoal knows, or an imported one) or from the user's own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from shoal.data import adult, embedded, imported, lfw
from shoal.data.dataset import Dataset
from shoal.data.known import DIGITS, GARMENTS, KNOWN, THINGS
from shoal.data.own import from_arrays, read_own_npz
from shoal.data.readers import parse_cifar, parse_idx_pair
from shoal.data.scaling import check_scale, pictures
from shoal.data.sources import content, obtain
from shoal.data.split import held_out
from shoal.data.tables import encode_table, read_table
from shoal.errors import DataError, nearest

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
    test_fraction: float = TEST_FRACTION,
    mirror: str | None = None,
) -> Dataset:
    """The data set of this name, or in this .npz, .csv or .parquet file.

    `scale` is unit, standard or raw (see shoal.data.scaling). For the user's own tables `label` and `client`
    name columns, `drop` columns to leave out, `ranges` public bounds by which numbers are put into [0, 1],
    `categories` and `classes` public vocabularies; `test_fraction` of the rows is held out.
    `mirror` replaces the public addresses from which missing files are downloaded (also SHOAL_MIRROR).
    """
    check_scale(scale)
    of_tables = {
        "label": label != "label",
        "client": client,
        "drop": drop,
        "ranges": ranges,
        "categories": categories,
    }
    of_files = of_tables | {"test_fraction": test_fraction != TEST_FRACTION}
    if str(name) in KNOWN:
        _refuse(of_files, f"{name} comes with its own")
        return _known(str(name), scale, mirror)
    if (found := imported.find(str(name))) is not None:
        _refuse(of_files, f"{name} has that from when it was imported")
        return imported.read(found, scale=scale)
    path = Path(name).expanduser()
    if path.suffix not in FILE_TYPES:
        raise DataError(f"data '{name}' is neither known nor a file{nearest(str(name), _names())}")
    if not path.is_file():
        raise DataError(f"there is no file {path}; give a path, or a name: {', '.join(_names())}")
    if path.suffix == ".npz":
        _refuse(of_tables, f"{path.name} holds arrays that are ready")
        return read_own_npz(path, classes=classes, test_fraction=test_fraction, scale=scale, name=path.stem)
    table = encode_table(
        read_table(path),
        str(path),
        label=label,
        client=client,
        drop=drop,
        ranges=ranges,
        categories=categories,
    )
    return from_arrays(
        table.x,
        table.y,
        client=table.client,
        classes=classes,
        test_fraction=test_fraction,
        scale=scale,
        name=path.stem,
        notes=table.notes,
    )


def _refuse(given: Mapping[str, object], because: str) -> None:
    """What would do nothing is not passed over in silence."""
    for key in (key for key, value in given.items() if value):
        raise DataError(f"data.{key} would be ignored, since {because}; leave it out")


def _names() -> list[str]:
    return [*KNOWN, *imported.names(), *(f"FILE{suffix}" for suffix in FILE_TYPES)]


def _known(name: str, scale: str, mirror: str | None) -> Dataset:
    readers: dict[str, Callable[[], Dataset]] = {
        "digits": lambda: _digits(scale),
        "cancer": lambda: _cancer(scale),
        "mnist": lambda: _idx(name, DIGITS, scale, mirror),
        "fashion-mnist": lambda: _idx(name, GARMENTS, scale, mirror),
        "cifar10": lambda: _cifar(scale, mirror),
        "adult": lambda: _adult(scale, mirror),
        "lfw": lambda: _lfw(scale),
    }
    return readers[name]()


def _contents(name: str, mirror: str | None) -> list[bytearray]:
    known = KNOWN[name]
    paths = obtain(known.files, archive=known.archive, mirror=mirror)
    return [content(file, path) for file, path in zip(known.files, paths, strict=True)]


def _idx(name: str, classes: tuple[str, ...], scale: str, mirror: str | None) -> Dataset:
    files = _contents(name, mirror)
    train_x, train_y = parse_idx_pair(files[0], files[1], f"{name}, train")
    test_x, test_y = parse_idx_pair(files[2], files[3], f"{name}, test")
    return _official(name, (train_x, train_y), (test_x, test_y), classes, scale)


def _cifar(scale: str, mirror: str | None) -> Dataset:
    batches = [
        parse_cifar(data, file.path)
        for file, data in zip(KNOWN["cifar10"].files, _contents("cifar10", mirror), strict=True)
    ]
    train_x, train_y = (np.concatenate(part) for part in zip(*batches[:-1], strict=True))
    return _official("cifar10", (train_x, train_y), batches[-1], THINGS, scale)


def _adult(scale: str, mirror: str | None) -> Dataset:
    files = zip(KNOWN["adult"].files, _contents("adult", mirror), strict=True)
    parts = [adult.parse_adult(data, file.path) for file, data in files]
    values, codes, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return _split("adult", torch.from_numpy(adult.encode(values, codes, scale)), labels, adult.CLASSES)


def _lfw(scale: str) -> Dataset:
    images, labels, names = lfw.read(lfw.obtain())
    return _split("lfw", pictures(images, scale, name="lfw"), labels, names)


def _digits(scale: str) -> Dataset:
    x, y = embedded.read_digits()
    return _split("digits", pictures(x, scale, name="digits", top=embedded.DIGITS_TOP), y, DIGITS)


def _cancer(scale: str) -> Dataset:
    x, y, classes = embedded.read_cancer(scale)
    return _split("cancer", torch.from_numpy(x), y, classes)


def _official(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    classes: tuple[str, ...],
    scale: str,
) -> Dataset:
    """A data set of pictures that is published in two parts."""
    return Dataset(
        name=name,
        train_x=pictures(train[0], scale, name=name),
        train_y=torch.from_numpy(train[1].astype(np.int64)),
        test_x=pictures(test[0], scale, name=name),
        test_y=torch.from_numpy(test[1].astype(np.int64)),
        classes=classes,
    )


def _split(name: str, x: torch.Tensor, y: np.ndarray, classes: tuple[str, ...]) -> Dataset:
    """A data set that is published in one part: the fixed split, each class in proportion."""
    train, test = held_out(y, KNOWN[name].test_rows)
    labels = torch.from_numpy(y.astype(np.int64))
    return Dataset(
        name=name,
        train_x=x[train],
        train_y=labels[train],
        test_x=x[test],
        test_y=labels[test],
        classes=classes,
    )
