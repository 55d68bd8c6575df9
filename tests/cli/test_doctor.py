"""`shoal doctor`: one screen of facts, and an exit code that says whether something is wrong."""

import json

import pytest
from typer.testing import CliRunner

from shoal.cli import doctor
from shoal.cli.main import app
from shoal.random import platform_checks


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def examined(*words):
    return CliRunner().invoke(app, ["doctor", *words])


@pytest.mark.slow
def test_everything_fits_on_one_screen_and_names_what_was_found(tmp_path):
    done = examined()
    assert done.exit_code == 0, done.output
    lines = dict(line.split(maxsplit=1) for line in done.output.splitlines())
    assert len(lines) == len(done.output.splitlines()) <= 24
    assert "torch" in lines["packages"]
    assert "embedded: digits" in lines["data"]
    assert str(tmp_path / "cache") in lines["cache"]
    assert "GiB free" in lines["disk"]
    assert (lines["secure"], lines["problems"]) == ("random=secure can be used", "none")


@pytest.mark.slow
def test_a_fact_that_secure_mode_needs_and_a_full_disk_are_problems_with_a_fix(monkeypatch):
    fact = (lambda: False, "it rounds as it likes", "use another machine")
    monkeypatch.setattr(platform_checks, "_FACTS", (*platform_checks._FACTS, fact))
    monkeypatch.setattr(doctor, "LITTLE", 2**80)
    done = examined("--json")
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert found["secure"] == "random=secure cannot be used"
    assert found["problems"][0] == "it rounds as it likes; use another machine"
    assert "make room" in found["problems"][1]


@pytest.mark.slow
def test_a_damaged_data_set_is_a_problem(tmp_path):
    (tmp_path / "data" / "adult").mkdir(parents=True)
    (tmp_path / "data" / "adult" / "adult.data").write_text("not the one", encoding="utf-8")
    done = examined()
    assert done.exit_code == 1
    assert "adult.data" in done.output.splitlines()[-1]
