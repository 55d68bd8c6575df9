"""The tutorials: a reader who gives every command of a page, and runs all its Python, meets no error."""

from __future__ import annotations

import json
import shlex
import tomllib

import pytest

from shoal.accounting.privacy_ledger import verify
from support.deployed import Deployed
from support.markdown import Reader, blocks
from support.paths import ROOT
from support.ports import free_port

FOLDER = ROOT / "docs" / "tutorials"
SMALL = ("rounds=3", "engine.threads=1")


@pytest.fixture
def reader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Reader(tmp_path, SMALL)


def page(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def result(folder):
    """The newest run's."""
    files = sorted(folder.glob("runs/*/result.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(files[-1].read_text(encoding="utf-8"))


@pytest.mark.slow
def test_first_model(reader, tmp_path):
    list(reader.follow(page("first-model").replace("rounds=20", "rounds=3")))
    assert (tmp_path / "comparison.html").is_file()
    assert (tmp_path / "predictions.csv").read_text(encoding="utf-8").startswith("class,probability_0")
    assert result(tmp_path)["proven"][0]["epsilon"] <= 2


@pytest.mark.slow
def test_hospital_table(reader, tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra 'tables'")
    shown = [block for block in reader.follow(page("hospital-table")) if block.language == "toml"]
    wanted = tomllib.loads(shown[0].text)["schema"]
    proposed = tomllib.loads((tmp_path / "experiment.toml").read_text(encoding="utf-8"))["schema"]
    assert set(proposed["unconfirmed"]) == set(wanted["columns"]), "the page confirms all that init marks"
    claims = {(each["unit"], each["observer"]): each["epsilon"] for each in result(tmp_path)["proven"]}
    assert claims["record", "server"] == pytest.approx(4, rel=1e-2)


@pytest.mark.slow
def test_text_model_with_lora(reader, tmp_path):
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    list(reader.follow(page("text-lora").replace("rounds=15", "rounds=2")))
    claim = result(tmp_path)["proven"][0]
    assert claim["unit"] == "client"
    assert claim["epsilon"] <= 8


@pytest.mark.slow
def test_reading_a_report(reader, tmp_path):
    list(reader.follow(page("read-a-report")))
    assert list(tmp_path.glob("runs/*/report.html"))


@pytest.mark.slow
def test_from_claim_to_certificate(reader, tmp_path):
    list(reader.follow(page("certificate")))
    (file,) = tmp_path.glob("runs/*/certificate.json")
    assert json.loads(file.read_text(encoding="utf-8"))["signature"]


@pytest.mark.slow
def test_work_in_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (FOLDER.parent / "how-to" / "python.md").read_text(encoding="utf-8")
    names = {}
    for block in blocks(text):
        if block.language == "python":
            exec(compile(block.text, "python.md", "exec"), names)
    assert names["classifier"].score(names["X"], names["y"]) > 0.8
    assert "\n3 0." in capsys.readouterr().out, "on_round was called with the third round's accuracy"


@pytest.mark.slow
def test_federation_of_three_sites(reader, tmp_path):
    """Its four processes are forked from one that has imported everything."""
    pytest.importorskip("flwr", reason="needs the extra 'deploy'")
    text = page("federation").replace("rounds = 10", "rounds = 2").replace("steps = 10", "steps = 2")
    (shown,) = [block for block in blocks(text) if block.language == "processes"]
    before, after = text.split("```processes\n")
    list(reader.follow(before))
    federation = Deployed(tmp_path, free_port())
    try:
        children = [
            federation._start(f"{n}.log", words(line, federation.port)) for n, line in enumerate(lines(shown))
        ]
        assert federation.ended(*children) == [0, 0, 0, 0], children[0].said
    finally:
        federation.away()
    list(reader.follow(after.partition("```\n")[2]))
    assert verify(tmp_path / "north" / "site" / "ledger.jsonl").whole


def lines(block):
    return block.text.splitlines()


def words(line, port):
    """A command on a port that is free."""
    found = shlex.split(line)[1:]
    return [*found, "--port", str(port)] if found[0] == "serve" else [found[0], f"localhost:{port}", *found[2:]]
