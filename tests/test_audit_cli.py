"""`shoal audit` on the command line: a table, one JSON object, exit code 3 where a claim is refuted."""

import json

import pytest
from typer.testing import CliRunner

from shoal.audit import auditing
from shoal.audit.auditing import Effort
from shoal.cli.main import app
from shoal.errors import ConfigError


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(auditing, "QUICK", Effort(600, 120, 2000, 40, 4))


def invoke(*words):
    return CliRunner().invoke(app, ["audit", *words])


def test_a_consistent_method_ends_with_0_and_tells_how(tmp_path):
    done = invoke("--algorithm", "dp-sgd", "--quick", "--runs", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "consistent" in done.output
    assert "noise x 1/4 would be caught by game" in " ".join(done.output.split())
    assert len(list(tmp_path.glob("audit-*-dp-sgd/report.html"))) == 1


def test_a_violated_claim_ends_with_3_and_json_is_one_object(tmp_path):
    done = invoke("--algorithm", "fed-alpha-cdp", "--quick", "--json", "--runs", str(tmp_path))
    assert done.exit_code == 3
    told = json.loads(done.stdout)
    (row,) = told["rows"]
    assert (row["verdict"], row["kind"], row["unit"]) == ("VIOLATED", "published", "example")
    assert row["measured"] > 4 * row["claimed"]


def test_only_what_is_proven_is_audited_where_a_ci_asks_for_that(tmp_path):
    done = invoke("--algorithm", "end-to-end", "--claim", "proven", "--quick", "--json", "--runs", str(tmp_path))
    assert done.exit_code == 0
    assert [row["kind"] for row in json.loads(done.stdout)["rows"]] == ["proven"]


def test_the_methods_keys_may_be_changed(tmp_path):
    words = ("--algorithm", "fed-cdp", "-c", "per_example.layers=split", "--quick", "--json", "--runs", str(tmp_path))
    assert json.loads(invoke(*words).stdout)["rows"][0]["verdict"] == "consistent"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say which method"),
        (("--all", "--algorithm", "pfl"), "say which method"),
        (("--algorithm", "pfll"), "did you mean 'pfl'"),
        (("--algorithm", "pfl", "--epsilon", "-1"), "--epsilon must be > 0"),
        (("--all", "-c", "rounds=3"), "belongs to one method"),
        (("--algorithm", "pfl", "--claim", "published", "--quick"), "nothing that is published"),
    ],
)
def test_what_cannot_be_audited_is_said_so_and_nothing_is_written(words, said, tmp_path):
    done = invoke(*words, "--runs", str(tmp_path))
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)
    assert list(tmp_path.iterdir()) == []
