"""The user's own data: arrays, arrays a client, .npz, .csv, .parquet; what cannot be used is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from shoal.data import from_arrays, from_clients, load, partition
from shoal.errors import ConfigError, DataError, ShoalError
from shoal.random.streams import Streams

X = np.arange(40.0).reshape(20, 2)
Y = np.arange(20) % 2


def test_arrays_are_split_by_row_and_no_label_moves_another_row() -> None:
    data = from_arrays(X, Y)
    assert (data.input_shape, data.classes, data.owners) == ((2,), ("0", "1"), None)
    assert (len(data.train_y), len(data.test_y)) == (16, 4)
    rows = torch.cat([data.train_x, data.test_x]).tolist()
    assert sorted(rows) == X.tolist()
    assert all(int(row[0]) // 2 % 2 == label for row, label in zip(data.train_x, data.train_y, strict=True))
    for changed in range(20):
        labels = np.where(np.arange(20) == changed, 1 - Y, Y)
        assert torch.equal(from_arrays(X, labels).train_x, data.train_x)


def test_given_test_rows_are_kept_apart() -> None:
    data = from_arrays(X, Y, test=(X[:3] + 0.5, Y[:3]))
    assert data.train_x.tolist() == X.tolist()
    assert data.test_x.tolist() == (X[:3] + 0.5).tolist()


def test_tensors_lists_and_other_types_are_taken_too() -> None:
    for x in (
        torch.from_numpy(X),
        torch.from_numpy(X).bfloat16(),
        X.tolist(),
        X.astype(">f4"),
    ):
        data = from_arrays(x, Y.tolist())
        assert (data.train_x.dtype, data.train_y.dtype) == (torch.float32, torch.int64)
    tokens = from_arrays(X.astype(np.int16), Y).train_x
    assert tokens.dtype == torch.int64
    assert (tokens == from_arrays(X, Y).train_x).all()
    for y in (torch.from_numpy(Y), Y.astype(np.uint8), Y.astype(bool), Y.astype(float)):
        assert from_arrays(X, y).train_y.tolist() == from_arrays(X, Y).train_y.tolist()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6, 5), (5,)),
        ((6, 4, 5), (1, 4, 5)),
        ((6, 3, 4, 5), (3, 4, 5)),
        ((6, 3, 3, 3), (3, 3, 3)),
        ((6, 7, 5, 3), (3, 7, 5)),
        ((6, 7, 5, 1), (1, 7, 5)),
        ((6, 2, 5, 7), (2, 5, 7)),
        ((6, 13, 64, 32), (13, 64, 32)),
        ((6, 64, 32, 13), (13, 64, 32)),
    ],
)
def test_pictures_get_channels_first(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape)).reshape(shape)
    data = from_arrays(x, [0, 1] * 3, test=(x, [0, 1] * 3))
    assert data.input_shape == expected
    if shape == (6, 7, 5, 3):
        assert data.train_x[2, 1, 3, 4] == x[2, 3, 4, 1]


def test_pixels_are_scaled_by_255_and_other_numbers_are_left_alone() -> None:
    pixels = np.full((4, 2, 2), 255, np.uint8)
    y = [0, 1, 0, 1]
    assert float(from_arrays(pixels, y).train_x.max()) == 1
    assert float(from_arrays(pixels, y, scale="raw").train_x.max()) == 255
    assert float(from_arrays(pixels // 255 * 0, y, scale="standard").train_x.max()) == -1
    assert float(from_arrays(pixels.astype(float), y).train_x.max()) == 255
    with pytest.raises(ConfigError, match="'standard' is for pixels"):
        from_arrays(X, Y, scale="standard")


def test_labels_may_be_any_whole_numbers_or_text() -> None:
    data = from_arrays(X, np.where(Y == 0, -1, 7), test=(X[:2], [7, -1]))
    assert (data.classes, data.train_y.tolist(), data.test_y.tolist()) == (("-1", "7"), Y.tolist(), [1, 0])
    data = from_arrays(X, np.where(Y == 0, "no", "yes"), classes=("yes", "no"), test=(X[:1], ["yes"]))
    assert (data.train_y.tolist(), data.test_y.tolist()) == ((1 - Y).tolist(), [0])
    assert from_arrays(X, Y, classes=("a", "b", "c")).class_count == 3


@pytest.mark.parametrize(
    ("x", "y", "options", "reason"),
    [
        (np.where(X == 7, np.nan, X), Y, {}, "row 3 holds NaN or Inf"),
        (np.where(X == 38, np.inf, X), Y, {}, "row 19 holds NaN or Inf"),
        (X * 1e300, Y, {}, "too large for float32"),
        (X, np.where(Y == 1, np.nan, Y), {}, "target in row 1 is NaN or Inf"),
        (X, np.array(["no"] * 20), {}, "all labels are 'no'; at least two classes"),
        (X, Y[:-1], {}, "20 rows but 19 labels"),
        (X, Y, {"classes": ("one",)}, "label 1 in row 1 is outside 0 to 0"),
        (X, Y, {"classes": ("a", "a")}, "named twice"),
        (X, np.where(Y == 0, "cat", "dgo"), {"classes": ("cat", "dog")}, "did you mean 'dog'"),
        (X, np.array([None] * 20), {}, "labels are of type object"),
        (np.zeros((0, 2)), [], {}, "no data"),
        (np.zeros((20, 0)), Y, {}, "no data"),
        (np.zeros(20), Y, {}, r"shape \(20,\)"),
        (np.zeros((20, 9, 7, 8)), Y, {}, "1, 3 or 4 channels"),
        (np.array([["a", "b"]] * 20), Y, {}, "expected numbers"),
        (X * 1j, Y, {}, "expected numbers"),
        ([[1, 2], [3]], [0, 1], {}, r"rows have 1 to 2 values; if they are sequences.*length=\.\.\."),
        ([[[1, 2], [3]], [[1]]], [0, 1], {"length": 2}, "differ in T alone"),
        (X, Y, {"length": 3}, "length=3 has no effect"),
        ([[1, 2], [3]], [0, 1], {"length": 0}, "length must be at least 1"),
        (3.0, Y, {}, "a single value"),
        (X, Y, {"client": Y[:3]}, r"client has shape \(3,\)"),
        (X, Y, {"client": Y + 0.5}, "client is of type float64"),
        (X, Y, {"test": (X[:, :1], Y)}, "test rows"),
        (X, Y, {"test": (X[:2], [0, 5]), "classes": ("a", "b")}, "label 5 in row 21"),
        (X, Y, {"client": np.arange(20)}, "no row can be held out"),
        (X, Y, {"test_fraction": 0.0}, "test_fraction must be"),
        (X, Y, {"test_fraction": 1.0}, "test_fraction must be"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(x: Any, y: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ShoalError, match=reason):
        from_arrays(x, y, **options)


def test_clients_keep_their_rows() -> None:
    parts = [(np.full((n, 3), k), np.arange(n) % 2) for k, n in enumerate((5, 1, 10, 4))]
    data = from_clients(parts, names=["a", "b", "c", "d"])
    assert data.owner_names == ("a", "b", "c", "d")
    assert (len(data.train_y), len(data.test_y)) == (16, 4)
    split = partition(
        "column", data.train_y, clients=None, owners=data.owners, generator=Streams(0).generator("partition")
    )
    assert len(split) == 4
    for k in range(4):
        assert set(data.train_x[split.records(k)].flatten().tolist()) == {k}
    everything = from_clients(parts, test=(np.zeros((2, 3)), [0, 1]))
    assert Counter(everything.owners.tolist()) == {0: 5, 1: 1, 2: 10, 3: 4}


@pytest.mark.slow
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.floats(0.05, 0.95))
@settings(deadline=None)
def test_every_client_has_a_training_row(sizes: list[int], fraction: float) -> None:
    if max(sizes) == 1:
        sizes = [*sizes, 2]
    parts = [(np.zeros((n, 1)), np.arange(n) % 2) for n in sizes]
    data = from_clients(parts, classes=("a", "b"), test_fraction=fraction)
    assert set(data.owners) == set(range(len(sizes)))
    wanted = max(1, round(fraction * sum(sizes)))
    assert len(data.test_y) == min(wanted, sum(sizes) - len(sizes))


@pytest.mark.parametrize(
    ("parts", "options", "reason"),
    [
        ([], {}, "no clients"),
        ([(X, Y), (X[:0], Y[:0])], {}, "client 1: has no rows"),
        ([(X, Y), (X[:, :1], Y)], {}, r"client 1: rows are float64 \(1,\)"),
        ([(X, Y), (X, Y[:3])], {}, "client 1: 20 rows but 3 labels"),
        ([(X, Y), (X, Y)], {"names": ["a"]}, "2 clients but 1 names"),
        ([(X, Y), (X, Y)], {"names": ["a", "a "]}, "2 clients have the name 'a'"),
    ],
)
def test_clients_that_do_not_fit_are_refused(parts: list[Any], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        from_clients(parts, **options)


def test_npz_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x=X, y=Y, client=Y)
    data = load(path)
    assert (data.name, len(data.train_y), data.owner_names) == ("mine", 16, ("0", "1"))
    np.savez(path, train_x=X, train_y=Y, test_x=X[:4], test_y=Y[:4], train_client=Y, classes=["n", "p"])
    data = load(str(path))
    assert (len(data.train_y), len(data.test_y), data.classes) == (20, 4, ("n", "p"))
    assert data.owners.tolist() == Y.tolist()
    np.savez(path, train_x=X, train_y=Y)
    assert len(load(path).test_y) == 4


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": X}, "lacks the array 'y'"),
        ({"x": X, "y": Y, "clients": Y}, "'clients' is not known; did you mean 'client'"),
        ({"train_x": X, "train_y": Y, "test_x": X}, "lacks the array 'test_y'"),
        ({"x": X, "y": Y, "client": Y, "client_names": ["a", "b", "c"]}, "3 client names"),
        ({}, "lacks the array 'x'"),
    ],
)
def test_npz_with_wrong_arrays_is_refused(tmp_path: Path, arrays: dict[str, Any], reason: str) -> None:
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=reason):
        load(tmp_path / "mine.npz")


TABLE = {
    "age": [20, 30, 40, 50, 60, 70, 80, 90],
    "city": ["Ulm", None, "Bonn", "Ulm", "Ulm", "Bonn", "Ulm", "Bonn"],
    "member": [True, False] * 4,
    "label": ["yes", "no", "yes", "no"] * 2,
    "client": ["x", "x", "x", "x", "y", "y", "y", "y"],
}


def write(path: Path, table: dict[str, list[Any]]) -> Path:
    made = pa.table(table)
    if path.suffix == ".parquet":
        parquet.write_table(made, path)
    else:
        from pyarrow import csv

        csv.write_csv(made, path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_are_encoded(tmp_path: Path, suffix: str) -> None:
    data = load(write(tmp_path / f"people{suffix}", TABLE), test_fraction=0.25)
    assert (data.input_shape, data.classes, data.owner_names) == ((5,), ("no", "yes"), ("x", "y"))
    assert np.bincount(data.owners).tolist() == [3, 3]
    rows = {row[0]: row[1:] for row in torch.cat([data.train_x, data.test_x]).tolist()}
    assert rows[30] == [1, 0, 0, 0]  # missing text is the category '?', which sorts before Bonn and Ulm
    assert rows[40] == [0, 1, 0, 1]
    assert rows[20] == [0, 0, 1, 1]
    assert len(data.notes) == 1
    assert "city" in data.notes[0]


def test_public_ranges_and_categories_leave_nothing_to_note(tmp_path: Path) -> None:
    path = write(tmp_path / "people.csv", TABLE)
    data = load(path, ranges={"age": (0, 100)}, categories={"city": ("Bonn", "Rom")}, drop=["member"])
    assert data.input_shape == (3,)
    assert data.notes == ()
    rows = {round(row[0] * 100): row[1:] for row in torch.cat([data.train_x, data.test_x]).tolist()}
    assert rows[40] == [1, 0]
    assert rows[20] == rows[30] == [0, 0]


def test_a_dictionary_column_is_text_and_a_number_may_be_a_category(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    coded = pa.array(["u", "v", None, "u"]).dictionary_encode()
    parquet.write_table(pa.table({"t": coded, "zip": [10, 20, 10, 30], "label": [0, 1, 0, 1]}), path)
    assert load(path, categories={"zip": ("10", "20")}).input_shape == (5,)


@pytest.mark.slow
def test_the_type_of_a_column_is_taken_from_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    rows = [f"{k},{k % 2}" for k in range(300_000)]
    path.write_text("\n".join(["a,label", *rows, "0.5,1"]))
    assert path.stat().st_size > 2 << 20
    data = load(path)
    assert len(data.train_y) + len(data.test_y) == 300_001


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({}, {"label": "lable"}, "no label column 'lable'; did you mean 'label'"),
        ({}, {"client": "owner"}, "no client column 'owner'"),
        ({}, {"client": "label"}, "both label and client"),
        ({}, {"drop": ["agee"]}, "no drop column 'agee'; did you mean 'age'"),
        ({}, {"drop": ["age", "city", "member"]}, "no feature columns"),
        ({}, {"ranges": {"agee": (0, 1)}}, "ranges names column 'agee'; did you mean 'age'"),
        ({}, {"ranges": {"age": (1, 1)}}, "low < high, got 1, 1"),
        ({}, {"ranges": {"city": (0, 1)}}, "'city' is text"),
        ({"age": [1, None, 3, None, 5, 6, 7, 8]}, {}, "numbers are missing \\(age 2\\); `shoal init`"),
        ({"age": [1, 2, float("inf"), 4, 5, 6, 7, 8]}, {}, "'age': row 2 holds inf"),
        ({"label": [0, None] * 4}, {}, "'label': 4 of 8 values are missing"),
        ({"client": [None, "x"] * 4}, {}, "'client': 4 of 8 values are missing"),
        ({"label": ["same"] * 8}, {}, "at least two classes"),
        ({"label": ["x" * 300, "y"] * 4}, {}, "300 characters is too long for a name"),
        ({"city": [None] * 8}, {}, "'city' is empty"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_that_cannot_be_used_are_refused(
    tmp_path: Path, suffix: str, change: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path / f"t{suffix}", TABLE | change)
    with pytest.raises(ShoalError, match=reason):
        load(path, **options)


def test_columns_of_other_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    for values in (pa.array([[1], [2]]), pa.array([0, 1], pa.timestamp("s")), pa.array([b"a", b"b"])):
        parquet.write_table(pa.table({"a": values, "label": [0, 1]}), path)
        with pytest.raises(DataError, match="column 'a' is of type"):
            load(path)


def test_free_text_is_no_category(tmp_path: Path) -> None:
    table = {"name": [f"person {k}" for k in range(1001)], "label": [k % 2 for k in range(1001)]}
    with pytest.raises(DataError, match="1001 different texts"):
        load(write(tmp_path / "t.csv", table))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read"),
        ("a,label\n", "no rows"),
        ("a,a,label\n1,2,0\n", "several columns named 'a'"),
        ("a,label\n1,0\n1\n", "cannot be read"),
    ],
)
def test_broken_csv_files_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=reason):
        load(path)


def test_a_question_mark_is_a_missing_number(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,label\n1,0\n?,1\n3,0\n")
    with pytest.raises(DataError, match=r"numbers are missing \(a 1\)"):
        load(path)


def test_a_path_that_is_no_data_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file .*none\.csv"):
        load(tmp_path / "none.csv")
    with pytest.raises(DataError, match="neither known nor a file"):
        load(tmp_path / "data.xlsx")


def test_labels_that_are_numbers_are_found_by_name_not_by_place(tmp_path):
    """A site that has none of class 5 agrees with the others on what 1 is."""
    x, y = np.zeros((40, 2), np.float32), 1 + np.arange(40) % 4
    data = from_arrays(x, y, test=(x, y), classes=["1", "2", "5", "3", "4"])
    assert data.train_y[:4].tolist() == [0, 1, 3, 4]
    with pytest.raises(DataError, match="label 4 in row 3 is not among the classes"):
        from_arrays(x, y, classes=["1", "2", "3"])
    np.savez(tmp_path / "own.npz", train_x=x, train_y=y - 1, test_x=x, test_y=y - 1, classes=["d", "c", "b", "a"])
    there = load(str(tmp_path / "own.npz"), classes=["a", "b", "c", "d"])
    assert there.train_y[:4].tolist() == [3, 2, 1, 0]
    assert load(str(tmp_path / "own.npz")).train_y[:4].tolist() == [0, 1, 2, 3]


def test_an_accent_typed_in_two_ways_makes_no_second_client_or_user() -> None:
    x, y = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8) % 2
    names = np.array(["Z\u00fcrich", "Zu\u0308rich", "Genf", "Genf"] * 2)
    data = from_arrays(x, y, client=names, user=names)
    assert data.owner_names == ("Genf", "Z\u00fcrich")
    assert data.users is not None
    assert len(np.unique(data.users)) == 2


@pytest.mark.parametrize("ways", [["7", "7.0"], ["north", " north "], ["True", "true"], [7.0, "7"]])
def test_a_name_written_in_two_ways_makes_no_second_client_or_user(ways: list[Any]) -> None:
    x, y = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8) % 2
    data = from_arrays(x, y, client=ways * 4, user=ways * 4)
    assert len(data.owner_names) == 1
    assert data.users is not None
    assert len(np.unique(data.users)) == 1


@pytest.mark.parametrize(
    "ways",
    ["1000 1e3", "1_000 1000", "1,000 1000", "1e3 1E+3", "1E18 1e18", "7 +7", "-0 0", "007 7 7.", "3 \uff13"],
)
def test_names_that_are_one_number_in_two_ways_are_refused_as_they_may_be_one_client_or_two(ways: str) -> None:
    x, y = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12) % 2
    names = np.resize(ways.split(), 12)
    for whose in ({"client": names}, {"user": names}, {"user": np.stack([names, names[::-1]], axis=1)}):
        with pytest.raises(DataError, match="are one number, and may be one client or user, or two; write one in"):
            from_arrays(x, y, **whose)
    with pytest.raises(DataError, match="are one number"):
        from_clients([(x, y)] * len(ways.split()), names=ways.split())


def test_a_number_in_another_form_is_a_name_like_any_other() -> None:
    """Of digests in hexadecimal digits some look so; and codes of digits alone keep their zeros."""
    x, y = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8) % 2
    names = ["1e18", "12e4", "1_000", "007", "7", "nan", "1e999999999999999999999", "\u00b2"]
    assert from_arrays(x, y, client=names, test=(x, y)).owner_names == tuple(sorted(names))


@pytest.mark.parametrize("names", ["0e123456 0e654321", "1e10 10e9", "1.1 1.10", "1_23 12_3", "1,5 15"])
def test_codes_in_several_parts_or_of_hexadecimal_digits_are_no_numbers(names: str) -> None:
    x, y = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8) % 2
    assert from_arrays(x, y, client=names.split() * 4).owner_names == tuple(sorted(names.split()))


def test_a_float_too_large_to_be_one_users_number_is_refused() -> None:
    """As text it is 1152921504606847000, the same number as an integer 1152921504606846976."""
    x, y = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8) % 2
    for owner in ("client", "user"):
        with pytest.raises(DataError, match="stored as a float"):
            from_arrays(x, y, **{owner: [str(2.0**60), str(2**60)] * 4})
        from_arrays(x, y, **{owner: [str(2**60), str(2**60 + 1)] * 4})


def test_users_may_have_negative_numbers() -> None:
    x, y = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8) % 2
    data = from_arrays(x, y, user=np.array([[-5, 3], [-5, -1]] * 4))  # -1: it has no second one
    assert data.users is not None
    assert len(np.unique(data.users[:, 0])) == 1
    assert (data.users[:, 0] >= 0).all()
    assert (data.users[:, 1] < 0).any()
