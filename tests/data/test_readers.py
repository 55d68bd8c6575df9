"""Readers accept what is right, refuse everything else with DataError, and believe no claim about size."""

from __future__ import annotations

import gzip
import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import adult
from shoal.data.readers import parse_cifar, parse_idx, parse_idx_pair, read_npz
from shoal.data.sources import unpacked
from shoal.data.table_files import read_table
from shoal.data.tables import encode_table
from shoal.errors import DataError, ShoalError

PERSON = (
    b"39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, "
    b"White, Male, 2174, 0, 40, United-States, <=50K"
)
MEMORY = 32 << 20  # bytes that refusing a lying file of a few kB may take at most


def idx(shape: tuple[int, ...], values: bytes) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + values


def npz(**arrays: np.ndarray) -> bytes:
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    return packed.getvalue()


def npz_with_header(header: str, values: bytes = b"") -> bytes:
    """A .npz whose one array has this header, whatever it says."""
    text = header.encode() + b" " * 20 + b"\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + values)
    return packed.getvalue()


def refused(action: Callable[[], object]) -> None:
    """The action raises nothing but one of our errors, or succeeds, and takes little memory."""
    tracemalloc.start()
    try:
        action()
    except ShoalError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY


def test_idx_gives_back_the_array() -> None:
    values = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    assert np.array_equal(parse_idx(idx((2, 3, 4), values.tobytes()), "f", 3), values)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an IDX"),
        (b"\x00\x00\x08", "not an IDX"),
        (b"\x00\x00\x08\x03\x00\x00", "broken off"),
        (bytes((0, 0, 9, 3)) + bytes(12), "not an IDX"),
        (idx((2, 2), bytes(4)), "not an IDX"),
        (idx((2, 2, 2), bytes(7)), "claims the shape"),
        (idx((2, 2, 2), bytes(9)), "claims the shape"),
        (idx((0, 2, 2), b""), "no values"),
        (idx((10**9, 1000, 1), bytes(1000)), "claims the shape"),
        (idx((2**32 - 1, 2**32 - 1, 2**32 - 1), bytes(1000)), "claims the shape"),
    ],
)
def test_idx_that_lies_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        parse_idx(data, "f", 3)


def test_idx_labels_must_fit_the_pictures_and_the_classes() -> None:
    pictures = idx((2, 1, 1), bytes(2))
    x, y = parse_idx_pair(pictures, idx((2,), b"\x00\x09"), "f")
    assert (x.shape, y.tolist()) == ((2, 1, 1, 1), [0, 9])
    with pytest.raises(DataError, match="0 to 10, expected 0 to 9"):
        parse_idx_pair(pictures, idx((2,), b"\x00\x0a"), "f")
    with pytest.raises(DataError, match="2 pictures but 3 labels"):
        parse_idx_pair(pictures, idx((3,), bytes(3)), "f")


def test_cifar_rows_are_label_then_channels() -> None:
    row = b"\x07" + b"\x01" * 1024 + b"\x02" * 1024 + b"\x03" * 1024
    x, y = parse_cifar(row * 2, "f")
    assert x.shape == (2, 3, 32, 32)
    assert y.tolist() == [7, 7]
    assert x[1].reshape(3, -1).max(1).tolist() == x[1].reshape(3, -1).min(1).tolist() == [1, 2, 3]


@pytest.mark.parametrize("data", [b"", bytes(3072), bytes(3074), b"\x0a" + bytes(3072)])
def test_cifar_that_is_damaged_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="f: "):
        parse_cifar(data, "f")


def test_adult_has_105_features_and_keeps_missing_values() -> None:
    assert len(adult.FEATURES) == len(set(adult.FEATURES)) == 105
    missing = PERSON.replace(b"State-gov", b"?").replace(b"<=50K", b">50K.")
    values, codes, labels = adult.parse_adult(b"|1x3 Cross validator\n" + PERSON + b"\n" + missing + b"\n\n", "f")
    x = adult.encode(values, codes, "unit")
    assert x.shape == (2, 105)
    assert labels.tolist() == [0, 1]
    names = [{adult.FEATURES[at] for at in np.flatnonzero(row == 1)} for row in x]
    assert names[0] - names[1] == {"workclass=State-gov"}
    assert names[1] - names[0] == {"workclass=?"}
    assert "sex=Male" in names[0]
    assert x[0, 0] == np.float32(0.39)
    assert x.min() >= 0
    assert x.max() <= 1
    assert adult.encode(values, codes, "raw")[0, :4].tolist() == [39, 2174, 0, 40]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"Bachelors", b"Bachelor", "education is 'Bachelor'"),
        (b"39,", b"-39,", "age is '-39'"),
        (b"39,", b"101,", "age is '101'"),
        (b"2174", b"9" * 5000, "capital-gain"),
        (b"39,", "\u0663\u0669,".encode(), "not plain text"),
        (b"<=50K", b"50K", "class '50K'"),
        (b", Male", b"", "14 fields"),
        (b"White", b"?", "race is '?'"),
    ],
)
def test_adult_row_that_is_damaged_is_refused(old: bytes, new: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason.replace("?", r"\?")):
        adult.parse_adult(PERSON + b"\n" + PERSON.replace(old, new), "f")


def test_npz_gives_back_numbers_and_text() -> None:
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "t": np.array(["é", "b"]),
        "big": np.arange(3, dtype=">i4"),
        "one": np.array(5),
    }
    back = read_npz(io.BytesIO(npz(**arrays)), "f")
    assert set(back) == set(arrays)
    assert all(np.array_equal(back[key], arrays[key]) for key in arrays)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a .npz"),
        (b"PK\x03\x04 and no more", "not a .npz"),
        (npz(x=np.array([{"a": 1}], dtype=object)), "only numbers and text"),
        (npz(x=np.zeros(2, [("a", int), ("b", float)])), "only numbers and text"),
        (
            npz_with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"),
            "claims the shape",
        ),
        (
            npz_with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }", bytes(8)),
            "claims the shape",
        ),
        (
            npz_with_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n"),
            "only numbers",
        ),
        (
            npz_with_header("{'descr': '<U0', 'fortran_order': False, 'shape': (10000000000,), }"),
            "only numbers",
        ),
        (npz_with_header("(" * 9000), "not a .npz"),
        (npz_with_header("[" * 200 + "]" * 200), "not a .npz"),
    ],
    ids=["empty", "stub", "objects", "records", "huge", "negative", "pickle", "no size", "deep", "nested"],
)
def test_npz_that_lies_is_refused(data: bytes, reason: str) -> None:
    def read() -> None:
        with pytest.raises(DataError, match=reason):
            read_npz(io.BytesIO(data), "f")

    refused(read)


def test_npz_over_the_limit_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(DataError, match="more than 1,000"):
        read_npz(io.BytesIO(npz(x=np.zeros(100_000))), "f", limit=1000)


words = st.integers(0, 2**32 - 1)


@pytest.mark.slow
@given(st.binary(max_size=4), st.lists(words, max_size=5), st.binary(max_size=200), st.integers(1, 4))
@settings(deadline=None)
def test_any_idx_is_read_or_refused(start: bytes, sizes: list[int], rest: bytes, dimensions: int) -> None:
    head = (start + bytes((0, 0, 8, dimensions)))[-4:]
    data = head + struct.pack(f">{len(sizes)}I", *sizes) + rest
    refused(lambda: parse_idx(data, "f", dimensions))


@given(st.binary(max_size=100), st.integers(0, 3))
@settings(deadline=None)
def test_any_cifar_batch_is_read_or_refused(start: bytes, rows: int) -> None:
    refused(lambda: parse_cifar((start + bytes(3073 * rows))[: 3073 * rows or None], "f"))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, len(PERSON) * 2), st.binary(max_size=3)), max_size=6))
@settings(deadline=None)
def test_any_adult_file_is_read_or_refused(edits: list[tuple[int, bytes]]) -> None:
    data = PERSON + b"\n" + PERSON + b"\n"
    for at, piece in edits:
        data = data[:at] + piece + data[at + 1 :]
    refused(lambda: adult.parse_adult(data, "f"))


GOOD_NPZ = npz(x=np.arange(60.0).reshape(20, 3), y=np.arange(20) % 2)
GOOD_STORED = npz_with_header("{'descr': '|u1', 'fortran_order': False, 'shape': (8,), }", bytes(8))


@pytest.mark.slow
@given(
    st.sampled_from([GOOD_NPZ, GOOD_STORED]),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=8),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=300)
def test_any_npz_is_read_or_refused(good: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(good)
    for at, value in edits:
        data[at % len(data)] = value
    refused(lambda: read_npz(io.BytesIO(data[: len(data) - cut % len(data) // 4]), "f"))


@pytest.mark.slow
@given(st.text(max_size=120))
@settings(deadline=None)
def test_any_npz_header_is_read_or_refused(header: str) -> None:
    refused(lambda: read_npz(io.BytesIO(npz_with_header(header)), "f"))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8))
@settings(deadline=None)
def test_any_gz_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]) -> None:
    data = bytearray(gzip.compress(bytes(range(256)) * 20))
    for at, value in edits:
        data[at % len(data)] = value
    place = tmp_path_factory.getbasetemp() / "fuzz.gz"
    place.write_bytes(data)
    refused(lambda: unpacked(place, 100_000))


def read_and_encode(place: Path) -> None:
    encode_table(read_table(place), "f")


@pytest.mark.slow
@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_csv_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    place = tmp_path_factory.getbasetemp() / "fuzz.csv"
    place.write_bytes(b"a,b,label\n" + body)
    refused(lambda: read_and_encode(place))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    place = tmp_path_factory.mktemp("parquet") / "good.parquet"
    parquet.write_table(pa.table({"a": [1.0, 2.0], "t": ["u", "v"], "label": [0, 1]}), place)
    return place.read_bytes()


def test_a_broken_parquet_is_refused(tmp_path: Path, parquet: bytes) -> None:
    place = tmp_path / "t.parquet"
    for data in (b"", b"PAR1", parquet[:-1], parquet[:100], parquet[4:], b"PAR1" + bytes(100) + b"PAR1"):
        place.write_bytes(data)
        with pytest.raises(DataError, match=r"t\.parquet"):
            read_table(place)


def test_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    place = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"t": ["Köln", "Köln"], "label": [0, 1]}), place, compression="none")
    place.write_bytes(place.read_bytes().replace("Köln".encode(), b"K\xff\xffln"))
    with pytest.raises(DataError, match="UTF"):
        read_table(place)
    csv = tmp_path / "t.csv"
    csv.write_bytes(b"t,label\nK\xff\xffln,0\nx,1\n")
    with pytest.raises(DataError, match=r"is not UTF-8 text \(byte 0xff\)"):
        read_and_encode(csv)
