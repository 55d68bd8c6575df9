"""What the sampler of noise costs: its distance from the law is part of delta; discrete noise is charged as such."""

import json
import math
from dataclasses import replace

import pytest

from shoal.accounting import accountants, claims, events, selection
from shoal.accounting.events import Compose, Gaussian, Repeat, Sampled, SamplerError
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.rdp import Running
from shoal.accounting.sampler_error import epsilon_beside, taken
from shoal.accounting.selection import Trials
from shoal.algorithms import algorithm
from shoal.algorithms.charges import event
from shoal.mechanisms.setting import Setting
from shoal.random import discrete_gaussian
from shoal.random.normals import TAIL
from shoal.random.secure_streams import FINEST
from support.tiny import PRIVATE, play

STEP = Sampled("poisson", 0.01, Gaussian(1.0))
SETTING = Setting(100, 10, sizes=(1000,), parameters=50_000)


@pytest.mark.parametrize("distance", [1e-9, 1e-8, 1e-7])
def test_what_the_sampler_takes_is_missing_from_delta(distance):
    """delta' + (1 + e^epsilon) distance = delta, and both ways of asking agree."""
    perfect, drawn = Repeat(STEP, 100), Repeat(Compose((STEP, SamplerError(distance / 100))), 100)
    found = accountants.epsilon(drawn, 1e-5)
    assert found.sampler_delta == pytest.approx((1 + math.exp(found.epsilon)) * distance)
    ideal = accountants.epsilon(perfect, 1e-5 - found.sampler_delta).epsilon
    assert found.epsilon == pytest.approx(ideal, rel=1e-6)
    assert found.epsilon > accountants.epsilon(perfect, 1e-5).epsilon
    assert accountants.delta(drawn, found.epsilon).delta == pytest.approx(1e-5, rel=1e-4)


def test_a_sampler_that_takes_all_of_delta_proves_nothing():
    drawn = Compose((Gaussian(1.0), SamplerError(1e-5)))
    assert accountants.epsilon(drawn, 1e-5).epsilon is None
    proven = claims.prove("record", "release", drawn, 1e-5, adjacency="add-or-remove")
    assert "sampler" in proven.words()
    running = Running()
    running.add(drawn)
    assert running.epsilon(1e-5) == math.inf
    assert selection.epsilon([drawn], Trials.expecting(3), 1e-5).epsilon is None


def test_a_claim_prints_it():
    drawn = Compose((Gaussian(2.0), SamplerError(1e-20)))
    proven = claims.prove("record", "release", drawn, 1e-5, adjacency="add-or-remove")
    assert "of delta is for the noise sampler" in proven.words()
    assert proven.to_json()["sampler_delta"] == pytest.approx(1e-20 * (1 + math.exp(proven.epsilon)))


def test_the_event_is_written_and_read():
    drawn = Compose((STEP, SamplerError(1e-30)))
    assert events.from_json(json.loads(json.dumps(drawn.to_json()))) == drawn
    assert without_sampler(leaves(Repeat(drawn, 3))) == ({STEP: 3}, pytest.approx(3e-30))


def test_taken_by_hand():
    assert taken(1.0, 0.0) == 0
    assert epsilon_beside(lambda delta: -math.log(delta), 1e-2, 0.0) == pytest.approx(math.log(100))
    found = epsilon_beside(lambda delta: -math.log10(delta), 1e-2, 1e-4)
    assert 10**-found + (1 + math.exp(found)) * 1e-4 <= 1e-2 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "unit", "observer", "numbers"),
    [
        ("dp-sgd", "record", "client-process", 10 * 50_000),  # 10 steps of 100 of 1,000 records
        ("dpsur", "record", "client-process", 60 * 50_001),  # 60 steps, each with its test
        ("trusted-curator", "client", "release", 50_000),
        ("quantile", "client", "release", 50_001),  # and the count
        ("fed-sdp", "client", "release", 10 * 50_000),  # ten clients' noise
    ],
)
@pytest.mark.parametrize("secure", [False, True])
def test_every_number_of_a_round_is_counted(name, unit, observer, numbers, secure):
    record = algorithm(name)
    record = replace(record, clients=replace(record.clients, cohort=10), local=replace(record.local, epochs=1))
    if name == "dp-sgd":
        record = replace(record, records=replace(record.records, batch=100))
    found = event(record, replace(SETTING, secure=secure), 0, unit, observer)
    each = discrete_gaussian.distance(FINEST) if secure else TAIL
    drawn = {"dp-sgd": 10, "dpsur": 2 * 60}.get(name, 0)  # batches, each of which may exceed its public width
    wider = drawn * 1e-30 if secure else 0.0
    assert without_sampler(leaves(found))[1] == pytest.approx(numbers * each + wider, abs=0)
    assert event(record, replace(SETTING, parameters=0), 0, unit, observer) == found.events[0] or secure


@pytest.mark.parametrize("name", ["dp-sgd", "trusted-curator", "quantile", "dp-ftrl", "quantile-record", "adaclip"])
def test_secure_mode_costs_more_than_perfect_noise_and_little_more(name):
    record = algorithm(name)
    unit = "client" if record.per_step is None else "record"
    plain, secure = (
        accountants.epsilon(
            event(record, replace(SETTING, secure=on), 0, unit, "release"), 1e-5, adjacency="zero-out"
        )
        for on in (False, True)
    )
    assert plain.epsilon < secure.epsilon < 1.02 * plain.epsilon


def test_the_graph_of_secure_aggregation_takes_part_of_delta_against_the_server_alone():
    record = algorithm("trusted-curator")
    record = replace(record, per_round=replace(record.per_round, at="shared"))
    risky = replace(SETTING, graph_failure=1e-12)
    for unit in ("client", "record"):
        for observer, more in (("server", 1e-12), ("release", 0.0)):
            safe, found = (without_sampler(leaves(event(record, s, 0, unit, observer)))[1] for s in (SETTING, risky))
            assert found - safe == pytest.approx(more, rel=1e-3, abs=0)
    steps = algorithm("dp-sgd")  # noise in the steps: what a server sees of them needs no graph
    assert event(steps, risky, 0, "record", "server") == event(steps, SETTING, 0, "record", "server")


@pytest.mark.slow
def test_a_run_says_what_its_sampler_takes(tmp_path):
    for mode in ("research", "secure"):
        result = play(tmp_path, PRIVATE | {"random": mode})
        found = [claim for claim in result.proven if claim["epsilon"] is not None]
        assert found
        assert all(0 < claim["sampler_delta"] < 1e-12 for claim in found)
