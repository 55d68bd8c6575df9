"""An audit with a budget: each claim once, then where the gap is widest; it resumes as if never stopped."""

import json
from itertools import count
from types import SimpleNamespace

import pytest

from shoal.algorithms import algorithm
from shoal.audit import campaign, one_run_bounds
from shoal.audit.auditing import Effort
from shoal.audit.one_run_bounds import Count
from shoal.errors import ConfigError, RunError

TINY = Effort(step_trials=30, round_trials=5, canaries=100, pairs=0)
SETTINGS = {"epsilon": 4.0, "seed": 0, "power": False, "level": "record", "claim": None}
METHODS = ["dp-sgd", "fed-alpha-cdp"]


@pytest.fixture(autouse=True)
def counted_time(monkeypatch):
    """Each look at the clock takes a second."""
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: 0.0)
    monkeypatch.setattr(campaign, "time", clock)


def begun(folder, resume=False, **changes):
    folder.mkdir(exist_ok=True)
    found = campaign.start(folder, list(map(algorithm, METHODS)), SETTINGS | changes, TINY, resume)
    found.more = TINY
    return found


def quiet(_):
    pass


@pytest.mark.slow
def test_every_claim_comes_once_and_then_runs_are_added_where_the_gap_is_widest(tmp_path):
    found = begun(tmp_path / "a")
    found.spend(2.5, quiet)
    assert [row["kind"] for row in found.rows()] == ["proven", "published"]
    assert found.left == 0
    found.spend(3.5, quiet)
    assert len(found.standings["dp-sgd record"].counts) == 4
    assert not found.standings["fed-alpha-cdp record"].counts, "nothing is proven: no canaries"
    assert found.standings["fed-alpha-cdp record"].promise() == 0


def test_what_is_proven_and_what_is_published_of_the_same_unit_are_two_claims():
    found = dict(campaign._claims([algorithm("dpsur")], SETTINGS))
    assert {key: standing.case.kind for key, standing in found.items()} == {
        "dpsur record": "proven",
        "dpsur record published": "published",
    }


def test_the_widest_gap_for_the_time_comes_first():
    claims = [*map(algorithm, ("dp-sgd", "pfl", "naive"))]
    near, far, slow = dict(campaign._claims(claims, SETTINGS)).values()
    for standing, measured, seconds in ((near, 2.0, 1.0), (far, 1.0, 1.0), (slow, 1.0, 2.0)):
        standing.row = {"measured": measured, "verdict": "consistent"}
        standing.counts, standing.seconds = [Count(100, 50, 30)], seconds
    assert far.promise() > near.promise() > slow.promise() > 0
    far.counts *= 4
    assert near.promise() > slow.promise() == 2 * far.promise()
    far.counts *= 16
    assert far.promise() == 0, "enough is enough"


@pytest.mark.slow
def test_an_audit_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    whole, first = begun(tmp_path / "whole"), begun(tmp_path / "parts")
    whole.spend(4.5, quiet)
    first.spend(2.5, quiet)
    path = tmp_path / "parts" / campaign.LINES
    path.write_text(path.read_text() + '{"claim": "dp-sgd re')
    second = begun(tmp_path / "parts", resume=True)
    second.spend(2.5, quiet)
    for row in [*whole.rows(), *second.rows()]:
        row.pop("seconds")
    assert second.rows() == whole.rows()
    assert len(path.read_text().splitlines()) == 1 + 4


@pytest.mark.slow
def test_bounds_hold_together_however_often_one_looks():
    """After 1, 4, 16 runs alpha is a half, a quarter, an eighth of 0.05; between them nothing is said."""
    standing = next(iter(dict(campaign._claims([algorithm("dp-sgd")], SETTINGS)).values()))
    row = {"game": 0.1, "measured": 0.1, "flagged": [], "verdict": "consistent", "seconds": 3.0}
    standing.take({"row": row | {"one_run": {"canaries": 1000, "guesses": 200, "right": 160, "epsilon": 9.0}}})
    assert standing.seconds == 3, "until a run with canaries was timed"
    counts, said = [Count(1000, 200, 160)], []
    for right in range(165, 180):
        said.append(standing.row["measured"])
        counts.append(Count(1000, 200, right))
        standing.take({"count": [1000, 200, right], "seconds": 1.0})
    bounds = [
        one_run_bounds.epsilon(counts[:runs], 1e-5, 0.05 * share)
        for runs, share in ((1, 1 / 2), (4, 1 / 4), (16, 1 / 8))
    ]
    assert said == [bounds[0]] * 3 + [max(bounds[:2])] * 12
    assert bounds[0] < bounds[1] < bounds[2]
    assert standing.row["measured"] == max(bounds)
    assert standing.row["verdict"] == "consistent"


@pytest.mark.slow
def test_runs_that_refute_a_claim_together_violate_it():
    standing = next(iter(dict(campaign._claims([algorithm("dp-sgd")], SETTINGS)).values()))
    row = {"game": 0.1, "measured": 0.1, "flagged": [], "verdict": "consistent", "seconds": 3.0}
    standing.take({"row": row | {"one_run": {"canaries": 4000, "guesses": 200, "right": 199, "epsilon": 9.0}}})
    assert standing.row["verdict"] == "consistent", "one run alone is judged by the audit itself"
    for _ in range(3):
        standing.take({"count": [4000, 200, 200], "seconds": 1.0})
    assert (standing.row["verdict"], standing.row["flagged"]) == ("VIOLATED", ["canaries"])
    assert standing.promise() == 0


def test_what_cannot_be_resumed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no audit with a budget"):
        campaign.newest(tmp_path)
    begun(tmp_path / "audit-1-all")
    assert campaign.newest(tmp_path) == tmp_path / "audit-1-all"
    with pytest.raises(ConfigError, match=r"--epsilon is 1\.0, and .* was begun with 4\.0"):
        begun(tmp_path / "audit-1-all", resume=True, epsilon=1.0)
    for text in ("", "7\n{", json.dumps({"claim": 1}) + "\n", "{]\n"):
        (tmp_path / "audit-1-all" / campaign.LINES).write_text(text)
        with pytest.raises(RunError, match="begin anew"):
            begun(tmp_path / "audit-1-all", resume=True)
