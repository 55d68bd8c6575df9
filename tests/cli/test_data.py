"""`shoal data list|check|import`: what is here, what is damaged, and the user's own data by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal import release
from shoal.accounting.claims import COLUMNS
from shoal.data import imported, load
from shoal.data.catalogue import entries, import_file, inspect
from shoal.data.known import KNOWN
from shoal.data.sources import locate
from shoal.errors import ConfigError, DataError, ShoalError

# typer 0.20 reads names that click 8.5 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "data"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "people.csv"
    rows = [f"{k * 10},{'ab'[k % 2]},{k % 2},{k // 5}" for k in range(60)]
    path.write_text("\n".join(["age,group,label,client", *rows]))
    return path


def invoke(*arguments: str) -> Any:
    """The outcome of `shoal data ...`: exit_code, stdout, exception."""
    from typer.testing import CliRunner

    from shoal.cli.data import app

    return CliRunner().invoke(app, arguments)


def shoal_data(*arguments: str) -> Any:
    """What the command prints as JSON."""
    result = invoke(*arguments, "--json")
    assert result.exception is None
    return json.loads(result.stdout)


@pytest.mark.slow
def test_list_names_all_and_says_what_is_missing(folder: Path) -> None:
    listed = {entry["name"]: entry for entry in shoal_data("list")["datasets"]}
    assert set(listed) == set(KNOWN)
    assert set(listed) >= {"digits", "cancer", "mnist", "fashion-mnist", "cifar10", "adult", "lfw", "heart", "milton"}
    assert {name for name, entry in listed.items() if entry["state"] == "embedded"} == {"digits", "cancer"}
    assert listed["mnist"]["state"] == "missing"
    assert (listed["mnist"]["shape"], listed["mnist"]["train_rows"]) == ([1, 28, 28], 60_000)
    assert all(entry["source"] and entry["licence"] for entry in listed.values())


@pytest.mark.slow
def test_list_for_people_names_every_set(folder: Path) -> None:
    result = invoke("list")
    assert all(name in result.stdout for name in KNOWN)
    assert max(map(len, result.stdout.splitlines())) <= 110


@pytest.mark.slow
def test_a_damaged_file_is_found_by_list_and_check(folder: Path) -> None:
    (folder / "adult").mkdir(parents=True)
    for name in ("adult.data", "adult.test"):
        (folder / "adult" / name).write_bytes(b"39, State-gov")
    entry = inspect("adult")
    assert entry.state == "damaged"
    assert [file.state for file in entry.files] == ["damaged", "damaged"]
    result = invoke("check", "--json")
    assert isinstance(result.exception, DataError)
    assert "adult.data" in str(result.exception)
    damaged = [entry["name"] for entry in json.loads(result.stdout)["datasets"] if entry["state"] == "damaged"]
    assert damaged == ["adult"]
    with pytest.raises(DataError, match="wrong checksum"):
        load("adult")


def test_check_of_a_missing_set_says_how_to_get_it(folder: Path) -> None:
    result = invoke("check", "mnist", "--json")
    assert isinstance(result.exception, DataError)
    assert "SHOAL_DATA" in str(result.exception)
    assert "train-images" in str(result.exception)


def test_check_of_an_unknown_set_names_the_nearest(folder: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'mnist'"):
        inspect("mnis")


def test_real_files_are_verified_and_one_wrong_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [locate(file) for file in KNOWN["adult"].files]
    if None in places:
        pytest.skip("adult is not here: set SHOAL_DATA to a folder with adult/adult.data and adult/adult.test")
    assert inspect("adult").state == "verified"
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    (tmp_path / "adult").mkdir()
    for place in places:
        shutil.copyfile(place, tmp_path / "adult" / place.name)
    changed = tmp_path / "adult" / places[1].name
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    assert [file.state for file in inspect("adult").files] == ["verified", "damaged"]


@pytest.mark.slow
def test_imported_data_are_loaded_by_name(folder: Path, table: Path) -> None:
    shown = shoal_data("import", str(table), "--name", "mine", "--range", "age=0:600")
    assert shown["datasets"][0]["name"] == "mine"
    assert shown["datasets"][0]["state"] == "verified"
    assert (folder / "imported" / "mine.npz").is_file()
    by_name, by_path = load("mine"), load(table, ranges={"age": (0, 600)})
    assert torch.equal(by_name.train_x, by_path.train_x)
    assert torch.equal(by_name.test_y, by_path.test_y)
    assert np.array_equal(by_name.owners, by_path.owners)
    assert by_name.owner_names == by_path.owner_names == tuple(map(str, range(12)))
    assert by_name.classes == by_path.classes
    assert by_name.notes == by_path.notes != ()
    assert entries()[-1].name == "mine"


def test_an_import_replaces_nothing_unless_told(folder: Path, table: Path) -> None:
    import_file(table)
    with pytest.raises(ConfigError, match="'people' already exists"):
        import_file(table)
    import_file(table, drop=["age"], overwrite=True)
    assert load("people").input_shape == (2,)


def test_imported_copies_are_for_their_owner_alone(folder: Path, table: Path) -> None:
    (folder / "imported").mkdir(parents=True, mode=0o755)
    result = invoke("import", str(table), "--name", "mine")
    places = [folder / "imported", *sorted((folder / "imported").iterdir())]
    assert [path.name for path in places] == ["imported", "mine.json", "mine.npz"]
    assert [path.stat().st_mode & 0o777 for path in places] == [0o700, 0o600, 0o600]
    assert str(folder / "imported") in result.stdout
    assert "shoal data remove mine" in result.stdout


def test_removed_data_are_gone_and_it_says_where_they_lay(folder: Path, table: Path) -> None:
    import_file(table, "mine")
    import_file(table, "other")
    assert str(folder / "imported" / "mine.npz") in invoke("remove", "mine").stdout
    assert sorted(path.name for path in (folder / "imported").iterdir()) == ["other.json", "other.npz"]
    assert table.is_file()
    with pytest.raises(DataError, match="'mine' is neither known nor a file of"):
        load("mine")
    for name in ("mine", "mnist", "../imported/other"):
        result = invoke("remove", name)
        assert isinstance(result.exception, DataError)
        assert "no imported data" in str(result.exception)
    assert load("other").name == "other"


@pytest.mark.parametrize("name", ["mnist", "../evil", "", ".hidden", "a/b", "a" * 65, "x.npz"])
def test_bad_names_are_refused(folder: Path, table: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name '"):
        import_file(table, name)
    assert not folder.exists()


def test_an_imported_file_that_was_changed_is_refused(folder: Path, table: Path) -> None:
    import_file(table, "mine")
    stored = folder / "imported" / "mine.npz"
    data = bytearray(stored.read_bytes())
    data[300] ^= 1
    stored.write_bytes(data)
    assert inspect("mine").state == "damaged"
    with pytest.raises(DataError, match="was changed since its import"):
        load("mine")
    stored.with_suffix(".json").write_text('{"name": "mine"}')
    with pytest.raises(DataError, match=r"mine\.json is damaged"):
        load("mine")


@pytest.mark.slow
def test_one_damaged_import_does_not_hide_the_others(folder: Path, table: Path) -> None:
    import_file(table, "good")
    import_file(table, "bad")
    (folder / "imported" / "bad.json").write_text("no json")
    states = {entry.name: entry.state for entry in entries()}
    assert (states["good"], states["bad"]) == ("verified", "damaged")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--range", "age"], "COLUMN=LOW:HIGH"),
        (["--range", "age=1:x"], "COLUMN=LOW:HIGH"),
        (["--label", "lable"], "did you mean 'label'"),
        (["--test-fraction", "2"], "test_fraction"),
    ],
)
def test_bad_options_of_import_are_refused_and_nothing_is_written(
    folder: Path, table: Path, arguments: list[str], reason: str
) -> None:
    result = invoke("import", str(table), *arguments)
    assert isinstance(result.exception, ShoalError)
    assert reason in str(result.exception)
    assert not folder.exists()


def test_what_is_no_table_is_not_imported(folder: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "none.csv", tmp_path, Path(__file__)):
        with pytest.raises(DataError, match="cannot import"):
            import_file(place)


def test_the_command_itself_imports_nothing_heavy() -> None:
    code = "import sys, shoal.cli.data; print(sorted({'torch', 'sklearn', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_loading_one_set_imports_only_what_it_needs() -> None:
    code = "import sys, shoal.data; print(sorted({'sklearn', 'pyarrow', 'PIL'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_an_imported_table_is_as_private_as_the_file_it_was_read_from(
    folder: Path, table: Path, tmp_path: Path
) -> None:
    """Its categories were read from the data, and its held-out rows were cut from it: a copy changes neither."""
    import_file(table, "mine")
    by_name, by_path = load("mine"), load(table)
    assert (by_name.read_columns, by_name.held_out) == (by_path.read_columns, by_path.held_out) == (True, True)
    private = {"algorithm": "dp-sgd", "model": "linear", "rounds": 1, "random": "secure", "clients.sampling": "all"}
    result = shoal.run(private, data="mine", runs=tmp_path / "runs")
    assert json.loads((result.run / "model.json").read_text())["release"] == release.FROM_DATA
    assert all(COLUMNS in claim["because"] for claim in result.proven if claim["epsilon"] is not None)
    with pytest.raises(ConfigError, match="were cut from the same table"):
        shoal.run(private | {"stop": {"patience": 1, "public": True}}, data="mine", runs=tmp_path / "runs")


def test_an_imported_table_named_by_the_path_of_its_copy_or_a_link_is_the_same(
    folder: Path, table: Path, tmp_path: Path
) -> None:
    import_file(table, "mine")
    copy = imported.find("mine")
    assert copy is not None
    (tmp_path / "linked.npz").symlink_to(copy)
    for path in (copy, tmp_path / "linked.npz"):
        found = load(path)
        assert (found.read_columns, found.read_classes, found.held_out) == (True, True, True)


def test_an_import_keeps_the_users_of_rows_and_that_test_rows_were_given(folder: Path, tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2
    np.savez(tmp_path / "visits.npz", train_x=x, train_y=y, test_x=x, test_y=y, train_user=np.arange(20) // 4)
    import_file(tmp_path / "visits.npz")
    kept = load("visits")
    assert kept.users is not None
    assert np.array_equal(kept.users[:, 0], np.arange(20) // 4)
    assert not kept.held_out
