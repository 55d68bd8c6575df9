"""Tables too large for memory: their copies on disk train as rows in memory do, and are treated as patients' data."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from shoal.config import configure
from shoal.data import large_tables, propose, table_files
from shoal.data.large_tables import copies, read_large, remove_copy
from shoal.data.load import load, with_schema
from shoal.data.schema import Schema
from shoal.errors import DataError
from shoal.prepare import prepare

ROWS = 300
KINDS = {
    "age": {"kind": "number", "range": [0, 90], "missing": 60},
    "ward": {"kind": "category", "categories": ["icu", "surgery"]},
    "note": {"kind": "text", "buckets": 4},
}
CLASSES = {"label": "died", "classes": ["no", "yes"], "client_column": "hospital", "columns": KINDS}
SCHEMAS = {
    "classification": CLASSES,
    "one owner": {key: value for key, value in CLASSES.items() if key != "client_column"},
    "regression": {"label": "stay", "range": [0, 10], "client_column": "hospital", "columns": KINDS},
    "multi-label": {"label": ["fever", "cough"], "client_column": "hospital", "columns": KINDS},
    "next-token": {"client_column": "hospital", "columns": {"note": {"kind": "text", "tokens": 6}}},
}


def patients(path: Path, rows: int = ROWS, **columns: list) -> Path:
    rng = np.random.default_rng(3)
    age = rng.integers(20, 100, rows).astype(object)
    age[::7] = None
    table = pa.table(
        {
            "hospital": rng.choice(["north", "south", "10", "9"], rows),
            "age": pa.array(list(age), "float64"),
            "ward": rng.choice(["icu", "surgery", "other"], rows),
            "note": rng.choice(["fever since monday", "cough", "none"], rows),
            "stay": rng.uniform(0, 12, rows).round(1),
            "fever": rng.integers(0, 2, rows),
            "cough": rng.integers(0, 2, rows),
            "died": np.where(rng.random(rows) < 0.3, "yes", "no"),
        }
        | columns
    )
    parquet.write_table(table, path, row_group_size=64) if path.suffix == ".parquet" else csv.write_csv(table, path)
    return path


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A cache of its own, and next to nothing fits into memory."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(large_tables, "IN_MEMORY", 1)
    monkeypatch.setattr(large_tables, "PIECE", 1200)
    monkeypatch.setattr(table_files, "BLOCK", 64)
    return tmp_path


def in_memory(path, schema, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(large_tables, "IN_MEMORY", 1 << 30)
        return with_schema(path, schema)


def by_owner(dataset):
    """Each owner's rows and targets, to train on and held out."""
    parts = (dataset.train_x, dataset.train_y, dataset.owners), (dataset.test_x, dataset.test_y, dataset.test_owners)
    for x, y, owners in parts:
        for name, number in [("", None)] if owners is None else zip(dataset.owner_names, range(99), strict=False):
            own = slice(None) if owners is None else torch.from_numpy(owners == number)
            yield name, x[own], y[own]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("task", SCHEMAS)
def test_a_copy_holds_what_would_be_in_memory(task, suffix, small, monkeypatch):
    path, schema = patients(small / f"patients{suffix}"), Schema.of(SCHEMAS[task])
    expected, found = in_memory(path, schema, monkeypatch), with_schema(path, schema)
    assert len(found.files) == 6
    assert (found.notes, found.classes, found.features) == (expected.notes, expected.classes, expected.features)
    assert (found.owner_names, found.task, found.name) == (expected.owner_names, expected.task, expected.name)
    for (name, x, y), (other, other_x, other_y) in zip(by_owner(found), by_owner(expected), strict=True):
        assert name == other
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_a_client_whose_number_is_written_in_two_ways_is_refused_also_in_the_first_and_the_last_row(small):
    path = patients(small / "far.csv", hospital=["1e3", *["north"] * (ROWS - 2), "1000"])
    with pytest.raises(DataError, match="'1000' and '1e3' are one number"):
        with_schema(path, Schema.of(CLASSES))


@pytest.mark.slow
def test_each_client_is_one_stretch_and_trains_as_in_memory(small, monkeypatch):
    path, schema = patients(small / "patients.parquet"), Schema.of(CLASSES)
    config = configure({"algorithm": "fedavg", "model": "linear", "rounds": 2, "clients.sampling": "all"})
    models = []
    for data in (in_memory(path, schema, monkeypatch), with_schema(path, schema)):
        trainer = prepare(config, data, None)[1]
        for _ in range(2):
            trainer.run_round(0)
        models.append((trainer.params, trainer.evaluation.metrics(trainer.model)["loss"]))
        trainer.close()
    assert torch.equal(models[0][0], models[1][0])
    assert models[0][1] == pytest.approx(models[1][1], rel=1e-6)
    assert (np.diff(data.owners) >= 0).all()


def test_a_copy_is_its_owners_alone_and_says_where_it_lies(small, capsys):
    path = patients(small / "patients.csv")
    with_schema(path, Schema.of(CLASSES))
    (copy,) = copies()
    said = capsys.readouterr().err
    assert f"converting {path} into {copy.where}, readable by you alone" in said
    assert f"`shoal data remove {path}` deletes the copy" in said
    assert (copy.source, copy.where.parent) == (str(path), small / "cache" / "tables")
    assert os.stat(copy.where.parent).st_mode & 0o777 == os.stat(copy.where).st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in copy.where.iterdir()} == {0o600}


@pytest.mark.parametrize("change", ["rows", "schema", "fraction", "owners"])
def test_it_is_made_once_and_again_when_something_changed(change, small, capsys):
    path, schema, keys = patients(small / "patients.csv"), CLASSES, {"test_fraction": 0.2, "owners": True}
    for _ in range(2):
        first = read_large(path, Schema.of(schema), **keys)
    assert capsys.readouterr().err.count("converting") == 1
    if change == "rows":
        patients(path, ROWS + 20)
    elif change == "schema":
        schema = CLASSES | {"columns": KINDS | {"ward": {"kind": "ignore"}}}
    else:
        keys |= {"test_fraction": 0.5} if change == "fraction" else {"owners": False}
    again = read_large(path, Schema.of(schema), **keys)
    assert capsys.readouterr().err.count("converting") == 1
    shapes = (len(again.train_x), again.input_shape, again.owner_names)
    assert shapes != (len(first.train_x), first.input_shape, first.owner_names)
    assert len(copies()) == 1
    with pytest.raises(DataError, match="was changed during the run"):
        first.files[0].refuse_changed()


def test_a_table_of_the_same_size_whose_time_was_set_back_is_another(small):
    """As `cp -p`, `rsync -t` and archives do."""
    path, schema = patients(small / "patients.csv"), Schema.of(CLASSES)
    first, before = with_schema(path, schema).train_x.clone(), path.stat()
    path.write_text(path.read_text().replace("north", "-----").replace("south", "north").replace("-----", "south"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert not torch.equal(with_schema(path, schema).train_x, first)


def test_no_file_of_a_copy_is_ever_open_to_others(small, monkeypatch):
    """Nor is what is left where the machine fails in the middle."""
    modes, encode = set(), large_tables.encode_piece

    def watched(*args, **named):
        (part,) = (each.where for each in copies())
        modes.update(file.stat().st_mode & 0o777 for file in part.iterdir())
        return encode(*args, **named)

    monkeypatch.setattr(large_tables, "encode_piece", watched)
    with_schema(patients(small / "patients.csv"), Schema.of(CLASSES))
    assert modes == {0o600}


def test_what_nobody_confirmed_is_noted_though_the_copy_is_older(small):
    path = patients(small / "patients.csv")
    assert not any("proposed" in note for note in with_schema(path, Schema.of(CLASSES)).notes)
    found = with_schema(path, Schema.of(CLASSES | {"unconfirmed": ["age"]}))
    assert "proposed" in found.notes[0]
    assert found.read_columns


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"age": ["12"] * 290 + ["old"] * 10}, "column 'age': data row 291 holds 'old', which is not a number"),
        ({"died": ["no"] * 280 + ["maybe"] * 20}, "label column 'died': data row 281 holds 'maybe', which"),
        ({"died": ["no"] * 299 + [None]}, "values are missing, first in data row 300; remove"),
        ({"hospital": ["north"] * 250 + [None] * 50}, "column 'hospital': 1 of"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_by_its_row_in_the_file_and_nothing_is_left(columns, reason, small):
    path = patients(small / "patients.parquet", **columns)
    with pytest.raises(DataError) as refused:
        with_schema(path, Schema.of(CLASSES))
    assert reason in str(refused.value) or "first in data row 251" in str(refused.value)
    assert copies() == []


def test_a_conversion_that_was_cut_off_is_listed_removed_and_made_anew(small, capsys):
    path = patients(small / "patients.csv")
    with_schema(path, Schema.of(CLASSES))
    (copy,) = copies()
    part = copy.where.with_name(f".{copy.name}.part")
    copy.where.rename(part)
    (part / "about.json").unlink()
    (left,) = copies()
    assert (left.name, left.source) == (copy.name, None)
    with_schema(path, Schema.of(CLASSES))
    assert [each.where for each in copies()] == [copy.where]
    part.mkdir()
    assert sorted(remove_copy(str(path))) == sorted([copy.where, part])
    assert copies() == remove_copy(copy.name) == []


def test_a_damaged_copy_is_refused_or_made_again(small):
    path = patients(small / "patients.csv")
    with_schema(path, Schema.of(CLASSES))
    (copy,) = copies()
    (copy.where / "about.json").write_text("{}")
    assert len(with_schema(path, Schema.of(CLASSES)).train_y) == 240
    (copy.where / "client.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"client\.npy cannot be read as an array"):
        with_schema(path, Schema.of(CLASSES))


def test_a_full_disk_is_said_before_anything_is_written(small, monkeypatch):
    path = patients(small / "patients.csv")
    usage = large_tables.shutil.disk_usage(small)
    monkeypatch.setattr(large_tables.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(DataError, match=r"its copy takes .* GiB, but .* has 0\.0 GiB left; set SHOAL_CACHE"):
        with_schema(path, Schema.of(CLASSES))
    assert copies() == []


@pytest.mark.slow
def test_shoal_data_lists_and_removes_copies(small):
    from typer.testing import CliRunner

    from shoal.cli.main import app

    path = patients(small / "patients.csv")
    load(path, schema=Schema.of(CLASSES))
    (copy,) = copies()
    listed = json.loads(CliRunner().invoke(app, ["data", "list", "--json"]).stdout)["copies"]
    assert listed == [{"name": copy.name, "where": str(copy.where), "source": str(path)}]
    assert f"{copy.name}: copy of {path}" in CliRunner().invoke(app, ["data", "list"]).stdout
    assert CliRunner().invoke(app, ["data", "remove", str(path)]).stdout == f"removed {copy.where}\n"
    assert not copy.where.exists()
    assert path.exists()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_schema_is_proposed_from_some_rows_of_a_large_table(suffix, small, monkeypatch):
    path = patients(small / f"patients{suffix}")
    whole = propose.propose(path, ["died"], "hospital")
    monkeypatch.setattr(propose, "CELLS", 8 * 60)
    some = propose.propose(path, ["died"], "hospital")
    assert "one row of" in some.hints[-1]
    assert whole.hints == ()
    assert (some.rows, some.sizes) == (whole.rows, whole.sizes)
    assert {name: type(each) for name, each in some.schema.columns.items()} == {
        name: type(each) for name, each in whole.schema.columns.items()
    }
