"""`shoal audit` on the command line: a table, one JSON object, exit code 3 where a claim is refuted."""

import json

import pytest
from typer.testing import CliRunner

import shoal
from shoal.algorithms import algorithms
from shoal.audit import auditing
from shoal.audit.auditing import Effort
from shoal.audit.campaign import Campaign
from shoal.cli.main import app
from shoal.errors import ConfigError, RunError
from shoal.report.run_page import run_page
from shoal.report.run_reader import read_run

pytestmark = pytest.mark.usefixtures("rarely")


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(auditing, "QUICK", Effort(600, 120, 2000, 40, 4))


def invoke(*words):
    return CliRunner().invoke(app, ["audit", *words])


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=5e-7)
def test_a_consistent_method_ends_with_0_and_tells_how(tmp_path):
    done = invoke("--algorithm", "dp-sgd", "--quick", "--runs", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "consistent" in done.output
    assert "noise x 1/4: caught by game" in " ".join(done.output.split())
    assert len(list(tmp_path.glob("audit-*-dp-sgd/report.html"))) == 1


@pytest.mark.slow
def test_a_violated_claim_ends_with_3_and_json_is_one_object(tmp_path):
    done = invoke("--algorithm", "fed-alpha-cdp", "--quick", "--json", "--runs", str(tmp_path))
    assert done.exit_code == 3
    told = json.loads(done.stdout)
    (row,) = told["rows"]
    assert (row["verdict"], row["kind"], row["unit"]) == ("VIOLATED", "published", "record")
    assert row["measured"] > 4 * row["claimed"]


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=5e-7)
def test_only_what_is_proven_is_audited_where_a_ci_asks_for_that(tmp_path):
    done = invoke("--algorithm", "end-to-end", "--claim", "proven", "--quick", "--json", "--runs", str(tmp_path))
    assert done.exit_code == 0
    assert [row["kind"] for row in json.loads(done.stdout)["rows"]] == ["proven"]


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=5e-7)
def test_the_methods_keys_may_be_changed(tmp_path):
    words = ("--algorithm", "fed-cdp", "-c", "per_record.layers=split", "--quick", "--json", "--runs", str(tmp_path))
    assert json.loads(invoke(*words).stdout)["rows"][0]["verdict"] == "consistent"


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=5e-7)
def test_the_audit_of_a_run_is_of_its_own_method_and_on_its_page(tmp_path, monkeypatch):
    """With so few trials that the verdict may be that they are too weak to tell."""
    monkeypatch.setattr(auditing, "QUICK", Effort(20, 20, 20, 4, 4))
    changes = ["rounds=1", "clients.sampling=fixed-size", "clients.cohort=40", "per_round.noise_multiplier=3"]
    run = shoal.run({"algorithm": "geyer-private"}, overrides=changes, runs=tmp_path).run
    assert "Not audited" in (run / "report.html").read_text()
    done = invoke("--run", str(run), "--quick", "--level", "client")
    assert done.exit_code == 0, done.output
    (row,) = json.loads((run / "audit" / "audit.json").read_text())["rows"]
    assert (row["algorithm"], row["verdict"]) == ("geyer-private", "too weak to tell")
    page = (run / "report.html").read_text()
    assert "Not audited" not in page
    assert 'href="audit/report.html"' in page
    assert "2 of 4 clients (fixed-size)" in page
    (run / "audit" / "audit.json").write_text('{"rows": [7, {"measured": "x", "verdict": "<b>odd"}]}')
    assert "&lt;b&gt;odd" in run_page(read_run(run))


@pytest.mark.slow
def test_repeats_are_pooled(tmp_path, monkeypatch):
    monkeypatch.setattr(auditing, "QUICK", Effort(20, 20, 100, pairs=0))
    done = invoke("--algorithm", "dp-sgd", "--quick", "--repeats", "2", "--runs", str(tmp_path))
    assert "of 100 guesses correct, 100 canaries, 2 runs" in " ".join(done.output.split())


@pytest.mark.slow
def test_a_budget_is_spent_stopped_and_resumed_and_ends_in_a_picture(tmp_path, monkeypatch):
    kept = {name: algorithms()[name] for name in ("dp-sgd", "fed-alpha-cdp")}
    monkeypatch.setattr("shoal.algorithms.algorithms", lambda: kept)
    monkeypatch.setattr(auditing, "FIRST_LOOK", Effort(400, 20, 100, pairs=0))
    spend, words = Campaign.spend, ("--all", "--runs", str(tmp_path), "--level", "record")

    def stopped(self, seconds, say):
        spend(self, 0.001, say)
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(Campaign, "spend", stopped)
        done = invoke(*words, "--budget", "1m")
    assert isinstance(done.exception, RunError)
    assert done.exception.exit_code == 130
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["audit.jsonl"]
    assert '"claim": "dp-sgd record"' in (folder / "audit.jsonl").read_text()
    done = invoke(*words, "--budget", "1s", "--resume", "--json")
    assert done.exit_code == 3, done.output
    rows = {row["algorithm"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["fed-alpha-cdp"]["verdict"] == "VIOLATED"
    assert {path.name for path in folder.iterdir()} == {"audit.jsonl", "audit.json", "audit.png", "report.html"}


def test_a_place_that_cannot_be_written_is_told_of_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(auditing, "audit", lambda *_, **__: pytest.fail("the work was begun"))
    (tmp_path / "file").write_text("")
    done = invoke("--algorithm", "pfl", "--runs", str(tmp_path / "file"))
    assert isinstance(done.exception, RunError)
    assert "cannot be made" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name the method to audit"),
        (("--all", "--algorithm", "pfl"), "name the method to audit"),
        (("--run", "none"), "none is not a run folder"),
        (("--run", "none", "-c", "rounds=3"), "needs one method"),
        (("--algorithm", "pfll"), "did you mean 'pfl'"),
        (("--algorithm", "pfl", "--epsilon", "-1"), "--epsilon must be > 0"),
        (("--all", "--quick", "--budget", "10m"), "chooses trials and runs itself: omit --repeats and --quick"),
        (("--all", "-c", "rounds=3"), "needs one method"),
        (("--algorithm", "pfl", "--claim", "published", "--quick"), "there is no published claim"),
        (("--algorithm", "pfl", "--repeats", "0"), "--repeats must be between 1 and 1000, got 0"),
        (("--algorithm", "pfl", "--budget", "10m"), "--budget 10m needs --all"),
        (("--all", "--budget", "10m", "--repeats", "2"), "chooses trials and runs itself"),
        (("--all", "--budget", "10"), "--budget must be a time such as 90s, 10m or 2h, got 10"),
        (("--all", "--budget", "0s"), "--budget must be a time"),
        (("--all", "--resume"), "--resume needs --budget"),
        (("--all", "--budget", "1s", "--resume"), "there is no audit with a budget"),
    ],
)
def test_what_cannot_be_audited_is_said_so_and_nothing_is_written(words, said, tmp_path):
    done = invoke(*words, "--runs", str(tmp_path))
    assert isinstance(done.exception, ConfigError | RunError)
    assert said in str(done.exception)
    assert list(tmp_path.iterdir()) == []
