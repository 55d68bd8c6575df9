"""The contract that every registered method keeps: the same checks on each, a new file's methods included.

What is charged, and how much noise there is, is measured in test_algorithms_contract_noise.
"""

import math
import re
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

import shoal
import shoal.algorithms
from shoal.accounting.events import Gaussian, Sampled, Unbounded
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.privacy_ledger import Ledger
from shoal.algorithms import algorithm
from shoal.algorithms.charges import PAIRS, event, proves, whole_run
from shoal.bibliography import cited
from shoal.errors import ConfigError
from support.small_federation import (
    ADAPTIVE,
    ALPHA,
    BOUNDED,
    CLIENTS,
    COHORT,
    EQUAL,
    IN_TURN,
    NAMES,
    PER_EXAMPLE,
    ROUNDS,
    SETTING,
    SHARED,
    UNPROVEN,
    WIDE,
    against_release,
    chi_square_fits,
    cohort,
    digits,
    finished,
    keys,
    noise_charged,
    of_one_length,
    one_thread,
    plain_server,
    play,
    restricted,
    silent,
    simulator,
    small,
    stubbed,
    total,
    twin,
    update_noise,
    with_much_to_remember,
)

every = pytest.mark.parametrize("name", NAMES)
bounded = pytest.mark.parametrize("name", BOUNDED)
unproven = pytest.mark.parametrize("name", UNPROVEN)


# --- a seed decides everything


@pytest.mark.slow
@every
def test_a_seed_decides_the_model(name):
    def model(seed):
        sim, memory, models = simulator(small(name), seed=seed), {}, []
        for t in range(3):
            state, _ = play(sim, t, memory=memory)
            memory = state.memory
            models.append(state.model)
        return torch.stack(models)

    first = model(5)
    assert torch.equal(model(5), first)
    assert not torch.allclose(model(6), first)


# --- nobody's data set a denominator


@pytest.mark.parametrize("name", EQUAL)
def test_the_sum_is_divided_by_the_expected_cohort_however_many_came(name, monkeypatch):
    stubbed(monkeypatch, of_one_length)
    record = plain_server(silent(small(name)))
    sim = simulator(record)
    attempt = next(number for number in range(100) if len(cohort(sim, attempt=number)) >= 2)
    came = cohort(sim, attempt=attempt)

    def mean(*kept):
        return play(twin(sim, algorithm=restricted(record, kept)), attempt=attempt)[0].model

    together = mean(*came)
    assert float(together.norm()) > 0
    torch.testing.assert_close(together, sum(mean(client) for client in came), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(together - mean(*came[1:]), mean(came[0]), rtol=1e-4, atol=1e-8)
    assert torch.equal(mean(), torch.zeros_like(together))


@pytest.mark.parametrize("name", [name for name in BOUNDED if algorithm(name).per_round is not None])
@pytest.mark.statistical(false_alarm=ALPHA)
def test_an_empty_cohort_still_releases_noise_and_is_charged(name):
    """The same noise as ever: chi-square on 104,000 numbers, at ALPHA (finds 2%)."""
    record = plain_server(small(name))
    if name not in IN_TURN:
        record = replace(record, clients=replace(record.clients, sampling="poisson"))
    found, told = total(simulator(restricted(record, ()), width=WIDE))
    assert told["clients"] == 0
    assert chi_square_fits(found.numpy() / told["clip"] / update_noise(record))
    assert noise_charged(against_release(record)) == pytest.approx(record.per_round.multiplier(0, ROUNDS))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BOUNDED if algorithm(name).per_round and name not in IN_TURN])
def test_a_run_of_empty_cohorts_costs_as_much_as_any_other(name, tmp_path):
    record = small(name)
    record = replace(record, clients=replace(record.clients, sampling="poisson", cohort=0.001))
    if name in ADAPTIVE:
        record = replace(record, per_update=replace(record.per_update, count_noise_multiplier=1e5, clip_norm_lr=0.0))
    run = finished(record, tmp_path)
    assert [line["clients"] for line in run.metrics] == [0] * ROUNDS
    with Ledger(run.run / "ledger.jsonl") as ledger:
        charged = ledger.charged_event("client", "release")
    assert without_sampler(leaves(charged))[0] == {
        Sampled("poisson", 0.001 / CLIENTS, Gaussian(record.per_round.noise_multiplier)): ROUNDS
    }
    assert all(float(tensor.std()) > 0 for tensor in run.model.values())


# --- one client only, and clients that send rubbish


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SHARED])
def test_one_client_is_enough(name):
    record = small(name)
    record = replace(record, clients=replace(record.clients, cohort=1))
    if name in ADAPTIVE:
        record = replace(record, per_update=replace(record.per_update, count_noise_multiplier=COHORT * 10.0))
    state, told = play(simulator(record, clients=1))
    assert told["clients"] == 1
    assert torch.isfinite(state.model).all()
    assert float(state.model.abs().max()) > 0


RUBBISH = {0: math.nan, 1: math.inf, 2: -math.inf, 3: 1e30}


@every
def test_rubbish_counts_as_zero_is_reported_and_the_round_goes_on(name, monkeypatch):
    record = small(name)
    record = replace(record, clients=replace(record.clients, sampling="all"))
    if name in ADAPTIVE:
        record = replace(record, per_update=replace(record.per_update, count_noise_multiplier=10.0))

    def played(worst):
        def update(client, size):
            sent = of_one_length(client, size)
            if client in RUBBISH:
                sent[0 if worst else slice(None)] = RUBBISH[client] if worst else 0.0
            return sent

        stubbed(monkeypatch, update)
        return play(simulator(record))

    (hit, told), (unhurt, quiet) = played(worst=True), played(worst=False)
    assert torch.isfinite(hit.model).all()
    assert torch.equal(hit.model, unhurt.model)
    assert float(hit.model.abs().max()) > 0
    assert (told["bad_updates"], quiet["bad_updates"]) == (len(RUBBISH), 0)
    assert all(math.isfinite(value) for value in told.values())


@every
def test_a_round_of_rubbish_only_does_no_harm(name, monkeypatch):
    stubbed(monkeypatch, lambda client, size: torch.full((size,), math.nan))
    record = small(name)
    state, told = play(simulator(record))
    assert told["bad_updates"] == told["clients"]
    assert torch.isfinite(state.model).all()
    if name in BOUNDED:
        assert float(state.model.std()) > 0


# --- whole runs: checkpoints, the ledger, what is proven


@pytest.mark.slow
@every
def test_state_survives_a_checkpoint(name, tmp_path):
    """Stopped after two rounds and resumed: the same model, to the last bit, as if nothing had been."""
    record = with_much_to_remember(name)
    whole = finished(record, tmp_path)
    held = []

    def stop_after_two(line):
        if line["round"] == 2:
            held[0].stop()

    with pytest.raises(shoal.ShoalError, match="stopped after round 2 of 4") as stopped:
        finished(record, tmp_path, on_start=lambda config, sim, folder: held.append(sim), on_round=stop_after_two)
    with one_thread():
        rest = shoal.run(resume=stopped.value.run, data=digits(), device="cpu")
    assert rest.rounds == ROUNDS
    for key, tensor in whole.model.items():
        assert torch.equal(rest.model[key], tensor), key
    assert rest.proven == whole.proven
    timeless = [[{k: v for k, v in line.items() if k != "seconds"} for line in run.metrics] for run in (whole, rest)]
    assert timeless[0] == timeless[1]


@pytest.mark.slow
@every
def test_every_round_is_charged_what_its_record_says_and_no_published_figure_is_shown_as_proven(name, tmp_path):
    record = small(name)
    run = finished(record, tmp_path)
    with Ledger(run.run / "ledger.jsonl") as ledger:
        assert [intent.round for intent in ledger.charged] == list(range(1, ROUNDS + 1))
        for unit, observer in PAIRS:
            expected = whole_run(record, SETTING, ROUNDS, unit, observer)
            charged, distance = without_sampler(leaves(ledger.charged_event(unit, observer)))
            assert charged == leaves(expected)
            assert (distance > 0) == (not any(isinstance(leaf, Unbounded) for leaf in charged))
    proven = {(claim["unit"], claim["observer"]): claim for claim in run.proven}
    assert set(proven) == set(PAIRS)
    for pair, claim in proven.items():
        charged = event(record, SETTING, 0, *pair)
        if isinstance(charged, Unbounded):
            assert (claim["epsilon"], claim["because"]) == (None, charged.because)
        else:
            assert name in BOUNDED + PER_EXAMPLE + SHARED
            assert claim["accountant"] == "pld" or "sampler" in claim["because"], "an epsilon in the hundreds is none"
    for figure in run.published:
        assert figure["recipe"]
        assert figure["epsilon"] not in [claim["epsilon"] for claim in run.proven]


@unproven
def test_a_method_that_proves_nothing_says_so_and_starts_only_if_told_to(name, tmp_path):
    record = small(name)
    assert re.fullmatch(r"nothing: .{10,}", proves(algorithm(name)))
    if not record.claims_privacy:
        return
    with pytest.raises(ConfigError, match=rf"{name} claims privacy but proves nothing: .*no_guarantee=True"):
        shoal.run(keys(record) | {"data.clients": CLIENTS}, data=digits(), runs=tmp_path)
    assert list(tmp_path.iterdir()) == []


@bounded
def test_a_method_that_protects_clients_says_so_and_against_whom(name):
    assert re.match(r"(client|client and record) level, against released models", proves(algorithm(name)))
    _, told = play(simulator(small(name)))
    assert math.isfinite(told["clip"]), "a proven bound needs a clip"


@pytest.mark.parametrize("name", PER_EXAMPLE)
def test_a_method_that_protects_records_says_so_and_what_it_does_not_do_for_clients(name):
    said = proves(algorithm(name))
    assert "record level, against released models, the server and the client process" in said
    assert ("client level in name only" in said) == (name not in BOUNDED)


@pytest.mark.parametrize("name", SHARED)
def test_a_method_whose_sites_share_the_noise_says_against_whom(name):
    record = algorithm(name)
    for_three = replace(record, per_round=replace(record.per_round, threshold=3))
    for each in (record, for_three):
        assert proves(each) == "record level, against released models and the server"
    with pytest.raises(ConfigError, match=r"per_round.threshold must be greater than per_round.colluding \(1\)"):
        simulator(small(name), clients=1)


# --- where it comes from


def home(name):
    """The module that defines a method."""
    for info in iter_modules(shoal.algorithms.__path__):
        module = import_module(f"shoal.algorithms.{info.name}")
        if name in [record.name for record in getattr(module, "ALGORITHMS", ())]:
            return module
    raise AssertionError(f"{name} is registered, but no module holds it")


PAPER = re.compile(r"\bThesis\b|\b[A-Z]\w+ (et al\.|& [A-Z]\w+) \((19|20)\d\d\)")


@every
def test_the_paper_is_cited_and_the_method_described(name):
    record = algorithm(name)
    assert PAPER.search(record.paper)
    assert cited(record.paper), "it stands in the bibliography"
    assert PAPER.search(home(name).__doc__)
    assert len(record.summary) > 10
    assert record.claims
    assert record.name == name == name.lower()


def test_no_method_escapes_this_suite():
    """Whatever proves something must be measured: for clients in test_noise, for records in test_records, and in
    test_noise_shares."""
    measured = {*BOUNDED, *PER_EXAMPLE, *SHARED}
    assert {name for name in NAMES if not proves(algorithm(name)).startswith("nothing")} == measured
