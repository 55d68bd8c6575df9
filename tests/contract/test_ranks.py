"""On one rank and on two a method gives the same model, ledger and metrics; a rank that differs is refused."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

import shoal
from support.deploy_children import said_by
from support.small_federation import NAMES, ROUNDS, digits, finished, one_thread, small, with_much_to_remember
from support.two_ranks import REFUSED, SECURE, STOPPED, known_entropy, main, stopped_after_two

pytestmark = pytest.mark.slow

OWN = {"at", "before", "hash", "run", "config", "data", "rows", "model"}
"""What is a run's own in a line of its ledger: times, names, keyed digests, and the hash of the last digits."""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of what two ranks have run, and what was said."""
    folder = tmp_path_factory.mktemp("ranks")
    stopped_after_two(folder / "one")
    return folder, json.loads(said_by(main, folder, folder).splitlines()[-1])


def ledger(run):
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in OWN} for line in lines]


def metrics(run):
    """By name, every round's; times aside."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = [name for name, value in lines[0].items() if isinstance(value, int | float) and name != "seconds"]
    return {name: [line[name] for line in lines] for name in names}


def agree(one, other, exactly=False):
    """To 1e-6 of the model's largest number."""
    ours, theirs = (load_file(run / "model.safetensors") for run in (one, other))
    most = max(1.0, *(float(tensor.abs().max()) for tensor in ours.values()))
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0.0, atol=0.0 if exactly else 1e-6 * most)
    assert ledger(one) == ledger(other)
    found = metrics(other)
    for name, values in metrics(one).items():
        assert values == pytest.approx(found.pop(name), rel=1e-4, abs=1e-6), name
    assert not found


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_the_model_of_one_and_charge_the_same(name, two, tmp_path):
    """With every kind of state that may go from round to round."""
    (run,) = (two[0] / name).iterdir()  # and no other rank has written a run
    agree(finished(with_much_to_remember(name), tmp_path).run, run)


@pytest.mark.parametrize("name", SECURE)
def test_in_secure_mode_the_sum_is_the_same_to_the_last_bit(name, two, tmp_path, monkeypatch):
    """Clients are trained one by one, and their updates lie on a grid."""
    monkeypatch.setattr("os.urandom", None)  # put back at the end
    known_entropy()
    (run,) = (two[0] / f"secure-{name}").iterdir()
    one = finished(small(name), tmp_path, change={"random": "secure"}).run
    agree(one, run, exactly=small(name).per_round is not None)


def test_a_run_goes_on_with_another_number_of_ranks(two, tmp_path):
    whole = finished(with_much_to_remember(STOPPED), tmp_path).run
    (one,) = (two[0] / "one").iterdir()
    agree(whole, one)
    with one_thread():
        rest = shoal.run(resume=two[1]["stopped"], data=digits(), device="cpu")
    assert rest.rounds == ROUNDS
    agree(whole, rest.run)


SAID = {
    "other_rounds": r"rank 1 \(.*\) differs from rank 0 in configuration key rounds: 4, not 3; .* the same",
    "other_data": r"rank 1 \(.*\) differs from rank 0 in training data; .*",
    "other_code": r"rank 1 \(.*\) differs from rank 0 in code, Shoal's or yours; .*",
    "other_model": r"rank 1 \(.*\) differs from rank 0 in initial model; .*",
}


@pytest.mark.parametrize("name", SAID)
def test_a_rank_that_differs_is_refused_before_the_first_round(name, two):
    folder, said = two
    assert re.fullmatch(SAID[name], said[name])
    assert not list((folder / name).glob("*/ledger.jsonl"))


def test_a_rank_that_fails_ends_the_run_in_one_line_and_releases_nothing(two):
    folder, said = two
    (run,) = (folder / "rank_1_fails").iterdir()
    assert said["rank_1_fails"] == (
        f"rank 1 of 2 failed: IndexError: list index out of range; resume with: shoal run --resume {run}"
    )
    assert [line["kind"] for line in ledger(run)] == ["open", "intent"]
    assert not (run / "model.safetensors").exists()
    assert {job.__name__ for job in REFUSED} == {*SAID, "rank_1_fails"}
