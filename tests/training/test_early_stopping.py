"""Early stopping looks at public records alone, and every planned round is charged."""

import dataclasses

import numpy as np
import pytest

import shoal
from shoal.accounting.privacy_ledger import verify
from shoal.config import configure
from shoal.config_sections import StopSection
from shoal.errors import ConfigError
from shoal.report.certificate import certificate
from shoal.report.run_reader import read_run
from support.tiny import FEDAVG, PRIVATE, dataset, network, play

STILL = {"local.lr": 1e-9}  # nothing is learnt, so no round is better than the first


def public():
    """The same records for clients, and held-out ones that are nobody's."""
    return dataclasses.replace(dataset(), test_owners=None, held_out=False)


def stopped(folder, config, **changes):
    return shoal.run(config | STILL, data=public(), model=network(), runs=folder, **changes)


@pytest.mark.parametrize(
    ("scores", "reached"),
    [
        ([0.5, 0.5, 0.5], True),
        ([0.5, 0.5], False),
        ([0.5, 0.4, 0.6], False),
        ([0.5, 0.6, 0.6, 0.5], True),
        ([0.5, None, None], True),
    ],
)
def test_patience_counts_evaluations_without_a_better_figure(scores, reached):
    assert StopSection(patience=2).reached(scores, True) == reached
    lower = [None if score is None else 1 - score for score in scores]
    assert StopSection(patience=2).reached(lower, False) == reached


def test_an_improvement_must_be_large_enough_where_one_is_asked_for():
    assert StopSection(patience=1, min_improvement=0.1).reached([0.5, 0.59], True)
    assert not StopSection(patience=1, min_improvement=0.1).reached([0.5, 0.61], True)


@pytest.mark.slow
def test_it_stops_early_and_claims_what_all_planned_rounds_cost(tmp_path):
    """What is claimed must not depend on when it stopped."""
    noisy = PRIVATE | {"rounds": 10, "server.lr": 1e-9}  # the model hardly moves
    result = stopped(tmp_path, noisy | {"stop": {"patience": 2, "public": True}})
    whole = stopped(tmp_path, noisy)
    assert (result.stopped, result.rounds) == ("early", 3)
    assert result.proven == whole.proven
    run = read_run(result.run)
    assert verify(result.run / "ledger.jsonl").whole
    assert "no better any more" in (result.run / "report.html").read_text(encoding="utf-8")
    assert run.proven == result.proven
    assert certificate(result.run)["rounds"] == 10


@pytest.mark.slow
def test_a_run_that_has_stopped_early_stays_stopped_and_is_charged_once(tmp_path):
    config = PRIVATE | {"rounds": 10, "server.lr": 1e-9, "stop": {"patience": 2, "public": True}}
    result = stopped(tmp_path, config)
    lines = (result.run / "ledger.jsonl").read_text(encoding="utf-8")
    again = shoal.run(resume=result.run, data=public(), model=network())
    assert (again.stopped, again.rounds, again.proven) == ("early", 3, result.proven)
    assert (result.run / "ledger.jsonl").read_text(encoding="utf-8") == lines


def test_private_held_out_records_are_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"stop.patience 2 looks at .*stop.public=true") as told:
        stopped(tmp_path, PRIVATE | {"stop": {"patience": 2}})
    assert "\n" not in str(told.value)
    with pytest.raises(ConfigError, match="belong to its clients"):
        play(tmp_path, PRIVATE | {"stop": {"patience": 2, "public": True}})
    with pytest.raises(ConfigError, match="cut from the same table"):  # nobody's by name, and yet protected
        shoal.run(
            {"algorithm": "dp-sgd", "records.batch": 4, "stop": {"patience": 2, "public": True}},
            data=shoal.from_arrays(np.ones((40, 4), np.float32), np.arange(40) % 2, name="mine"), model=network(),
            runs=tmp_path,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="figures computed with personal layers"):
        stopped(tmp_path, PRIVATE | {"local.personal": "2", "stop": {"patience": 2, "public": True}})
    assert list(tmp_path.iterdir()) == []


def test_without_a_claim_there_is_nothing_to_break(tmp_path):
    assert play(tmp_path, FEDAVG | STILL | {"rounds": 30, "stop": {"patience": 2}}).rounds == 3


@pytest.mark.parametrize("key", ["stop.patience=0", "stop.public=true", "stop.min_improvement=-1"])
def test_settings_that_cannot_be_or_have_no_effect_are_refused(key):
    with pytest.raises(ConfigError, match="stop"):
        configure({"algorithm": "fedavg"}, [key])
