"""The seven data sets of the papers: rows, shapes, ranges and fixed splits. Those that are not here are skipped."""

from __future__ import annotations

import hashlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data import Dataset, embedded, lfw, load
from shoal.data.known import KNOWN
from shoal.data.scaling import pictures
from shoal.data.sources import locate
from shoal.data.split import held_out
from shoal.errors import ConfigError, DataError

PAPERS = ("digits", "cancer", "mnist", "fashion-mnist", "cifar10", "adult", "lfw")
FILES = {name: tuple(file.path for file in KNOWN[name].files) for name in PAPERS} | {"lfw": (lfw.PATH,)}


def real(name: str, scale: str = "unit") -> Dataset:
    """A data set, or a skip if its files are not on this machine; never a download."""
    here = lfw.locate() is not None if name == "lfw" else all(map(locate, KNOWN[name].files))
    if not here:
        pytest.skip(f"{name} is not here: set SHOAL_DATA to a folder with {', '.join(FILES[name])}")
    return load(name, scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_rows_shapes_and_classes_are_as_listed(name: str) -> None:
    data, known = real(name), KNOWN[name]
    assert data.name == name
    assert data.input_shape == known.shape
    assert (len(data.train_x), len(data.test_x)) == (known.train_rows, known.test_rows)
    assert (len(data.train_y), len(data.test_y)) == (known.train_rows, known.test_rows)
    assert data.class_count == known.class_count
    assert torch.equal(data.train_y.unique(), torch.arange(known.class_count))
    assert torch.equal(data.test_y.unique(), torch.arange(known.class_count))
    assert data.train_x.dtype == torch.float32
    assert float(data.train_x.min()) == 0
    assert float(data.train_x.max()) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [("digits", "64c531995efcd520"), ("adult", "936ceaecd0fc63d9"), ("lfw", "dc5e87045658f535")],
)
def test_the_split_is_the_same_for_ever(name: str, expected: str) -> None:
    data = real(name, "raw")
    assert hashlib.sha256(data.test_y.numpy().tobytes()).hexdigest()[:16] == expected


def test_the_parts_of_a_split_share_no_row() -> None:
    data = load("cancer", scale="raw")
    rows = torch.cat([data.train_x, data.test_x])
    assert len(rows.unique(dim=0)) == len(rows) == 569


def test_adult_is_48842_rows_in_one_hot() -> None:
    data = real("adult")
    x = torch.cat([data.train_x, data.test_x])
    assert x.shape == (48_842, 105)
    # Seven one-hot blocks, so every row has exactly seven ones in them.
    assert torch.equal(x[:, 4:-1].sum(1), torch.full((48_842,), 7.0))
    assert int((torch.cat([data.train_y, data.test_y]) == 1).sum()) == 11_687


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("mnist", -0.1307 / 0.3081, (1 - 0.1307) / 0.3081), ("fashion-mnist", -1, 1), ("digits", -1, 1)],
)
def test_standard_scale_uses_the_published_constants(name: str, low: float, high: float) -> None:
    data = real(name, "standard")
    assert float(data.train_x.min()) == pytest.approx(low, rel=1e-5)
    assert float(data.train_x.max()) == pytest.approx(high, rel=1e-5)


def test_cifar_is_scaled_channel_by_channel() -> None:
    white = pictures(np.full((1, 3, 2, 2), 255, np.uint8), "standard", name="cifar10")
    expected = [(1 - 0.4914) / 0.2023, (1 - 0.4822) / 0.1994, (1 - 0.4465) / 0.2010]
    assert white[0, :, 0, 0].tolist() == pytest.approx(expected, rel=1e-5)


def test_raw_scale_is_what_was_published() -> None:
    assert float(load("digits", scale="raw").train_x.max()) == 16
    assert float(load("cancer", scale="raw").test_x.max()) == 4254
    assert float(pictures(np.full((1, 1, 1, 1), 255, np.uint8), "raw", name="mnist").max()) == 255


@pytest.mark.parametrize("file", [embedded.DIGITS, "elsewhere.csv.gz"])
def test_digits_are_those_that_scikit_learn_reads(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    monkeypatch.setattr(embedded, "DIGITS", file)
    x, y = load_digits(return_X_y=True)
    ours, labels = embedded.read_digits.__wrapped__()
    assert ours.dtype == x.dtype
    assert labels.dtype == y.dtype
    assert np.array_equal(ours, x.reshape(-1, 1, 8, 8))
    assert np.array_equal(labels, y)
    assert not ours.flags.writeable
    assert not labels.flags.writeable


def test_cancer_is_scaled_by_its_public_description() -> None:
    from sklearn.datasets import load_breast_cancer

    from shoal.data.embedded import CANCER_HIGH, CANCER_LOW

    description = load_breast_cancer().DESCR.split("Min    Max")[1].splitlines()[2:32]
    assert [tuple(map(float, line.split()[-2:])) for line in description] == list(
        zip(CANCER_LOW, CANCER_HIGH, strict=True)
    )
    data = load("cancer", scale="standard")
    assert float(data.train_x.min()) == -1
    assert float(data.train_x.max()) == 1


@pytest.mark.parametrize(("name", "near"), [("mnits", "mnist"), ("cifar-10", "cifar10"), ("digit", "digits")])
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(DataError, match=f"'{name}'.*did you mean '{near}'"):
        load(name)


@pytest.mark.parametrize("given", [{"label": "digit"}, {"client": "site"}, {"drop": ["x"]}, {"test_fraction": 0.5}])
def test_what_would_be_ignored_is_refused(given: dict[str, Any]) -> None:
    (key,) = given
    with pytest.raises(DataError, match=rf"{key}\w* would be ignored.*digits"):
        load("digits", **given)


def test_an_unknown_scale_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'units'.*did you mean 'unit'"):
        load("digits", scale="units")


@pytest.mark.parametrize(("rows", "count"), [(100, 20), (101, 33), (10, 1)])
def test_held_out_rows_are_as_many_as_asked_and_proportional(rows: int, count: int) -> None:
    groups = np.arange(rows) % 4
    train, test = held_out(groups, count)
    assert len(test) == count
    assert sorted([*train, *test]) == list(range(rows))
    shares = np.bincount(groups[test], minlength=4) - count * np.bincount(groups) / rows
    assert np.abs(shares).max() <= 1
    assert not np.array_equal(held_out(groups, count, seed=1)[1], test)


def test_no_group_loses_its_last_row() -> None:
    groups = np.array([0, 1, 2, 3, 3, 3, 3, 3])
    train, test = held_out(groups, 7)
    assert set(groups[train]) == {0, 1, 2, 3}
    assert len(test) == 4


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SHOAL_MIRROR", raising=False)
    return tmp_path


@pytest.mark.slow
def test_lfw_is_made_from_scikit_learns_copy(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the download: the layout of the file, and that other people are not accepted."""
    people = types.SimpleNamespace(
        images=np.linspace(0, 1, 3023 * 62 * 47 * 3, dtype=np.float32).reshape(3023, 62, 47, 3),
        target=np.arange(3023) % 62,
        target_names=np.array([f"person {k}" for k in range(62)]),
    )

    def fetch(**options: object) -> types.SimpleNamespace:
        assert (options["min_faces_per_person"], options["color"]) == (20, True)
        return people

    monkeypatch.setitem(sys.modules, "sklearn.datasets", types.SimpleNamespace(fetch_lfw_people=fetch))
    path = lfw.obtain()
    assert path == empty / "lfw" / "lfw62.npz"
    with np.load(path) as made:
        assert (made["images"].shape, made["images"].dtype) == ((3023, 32, 32, 3), np.uint8)
        assert made["labels"].dtype == np.int64
        assert (made["images"][0].mean() < 5, made["images"][-1].mean() > 250) == (True, True)
    with pytest.raises(DataError, match="labels and names have SHA-256"):
        lfw.read(path)


def test_without_a_network_lfw_says_how_to_make_it(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(**options: object) -> None:
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "sklearn.datasets", types.SimpleNamespace(fetch_lfw_people=fetch))
    with pytest.raises(DataError, match=r"no network[\s\S]*fetch_lfw_people\(min_faces_per_person=20"):
        load("lfw")
    assert list(empty.rglob("*.npz")) == []


@pytest.mark.slow
def test_lfw_pixels_may_differ_but_people_may_not(tmp_path: Path) -> None:
    if (found := lfw.locate()) is None:
        pytest.skip(f"lfw is not here: set SHOAL_DATA to a folder with {lfw.PATH}")
    with np.load(found) as arrays:
        images, labels, names = arrays["images"], arrays["labels"], arrays["names"]
    again = tmp_path / "lfw62.npz"
    np.savez(again, images=images // 2, labels=labels, names=names)
    pixels, _, _ = lfw.read(again)
    assert not lfw.has_reference_pixels(pixels)
    assert lfw.has_reference_pixels(lfw.read(found)[0])
    np.savez(again, images=images, labels=labels[::-1], names=names)
    with pytest.raises(DataError, match="labels and names"):
        lfw.read(again)
