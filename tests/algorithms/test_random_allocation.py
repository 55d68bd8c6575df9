"""What random allocation is charged: blocks, before their first round, and only where it is hidden who takes part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.accounting import accountants
from shoal.accounting.calibration import Budget
from shoal.accounting.events import NOTHING, Allocated, Compose, Gaussian, Sampled, Unbounded
from shoal.accounting.leaves import leaves
from shoal.accounting.rdp import Running
from shoal.algorithms import algorithm
from shoal.algorithms.charges import PAIRS, calibrated, event, proves, whole_run
from shoal.config import configure
from shoal.errors import ConfigError
from shoal.mechanisms import gaussian
from shoal.mechanisms.sampling import Clients
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.update_clipping import Clip, NoisyClip
from support.paths import ROOT

SETTING = Setting(clients=100, rounds=20)


def curator(noise=2.0, cohort=20, **changes):
    """Clip 1 and noise on the sum; every client in one of five rounds, unless `cohort` says otherwise."""
    wanted = {"clients": Clients("random-allocation", cohort), "per_update": Clip(1.0)}
    wanted["per_round"] = gaussian.Gaussian(noise)
    return replace(algorithm("trusted-curator"), **(wanted | changes))


def charged(record, t, unit="client", observer="release", again=False, setting=SETTING):
    return event(record, setting, t, unit, observer, again)


def test_a_block_is_charged_before_its_first_round_and_then_nothing():
    found = [charged(curator(), t) for t in range(11)]
    block = Allocated(((2.0, 5),))
    assert found == [block, *[NOTHING] * 4] * 2 + [block]


def test_a_round_that_is_run_again_is_a_poisson_round_more_and_a_block_begun_again_a_block():
    assert charged(curator(), 3, again=True) == Sampled("poisson", 0.2, Gaussian(2.0))
    assert charged(curator(), 5, again=True) == Allocated(((2.0, 5),))


@pytest.mark.slow
def test_no_prefix_of_a_ledger_says_less_than_the_rounds_that_were_run_cost():
    """The first r of five rounds are a block cut short: no more than the block, which is charged from the first.

    Brute force: r rounds of which the client enters one with probability 1/5 each are the block with the others left
    out, that is (1/5) (sum_i N(e_i) + (5 - r) N(0)) against N(0), here by simulation of its likelihood ratio.
    """
    random, noise = np.random.Generator(np.random.Philox(key=1)), 1.0
    ratios = np.exp(random.standard_normal((400_000, 5)) / noise - 0.5 / noise**2)
    for rounds in range(1, 6):
        told = leaves(whole_run(curator(noise), SETTING, rounds, "client", "release"))
        mean = (ratios[:, :rounds].sum(1) + 5 - rounds) / 5
        for epsilon in (0.2, 1.0):
            true = max(np.maximum(mean - np.exp(epsilon), 0).mean(), np.maximum(1 - np.exp(epsilon) * mean, 0).mean())
            bound = accountants.delta(Compose(tuple(told)), epsilon, adjacency="zero-out").delta
            assert bound >= true * 0.98


def test_the_running_account_is_never_below_that_of_the_ledger_so_far():
    running, rounds = Running("zero-out"), []
    for t in range(12):
        rounds.append(charged(curator(), t))
        running.add(rounds[-1])
        exact = accountants.epsilon(Compose(tuple(rounds)), 1e-5, adjacency="zero-out").epsilon
        assert running.epsilon(1e-5) >= exact > 0


def test_noise_may_change_within_a_block_and_one_without_any_proves_nothing():
    found = charged(curator("linear:2:1"), 5)
    assert found.length == 5
    assert found.rounds == tuple((pytest.approx(2 - t / 20), 1) for t in range(5, 10))
    late = charged(curator("linear:1:0", cohort=6), 17, setting=replace(SETTING, rounds=18))
    assert late.rounds == ((pytest.approx(1 / 18), 17),), "a block cut short keeps the noise of its last round"
    assert all(isinstance(charged(curator(0.0), t), Unbounded) for t in (0, 1))


def test_only_released_models_and_only_clients_that_leave_something_out():
    reasons = {pair: charged(curator(), 0, *pair) for pair in PAIRS}
    assert isinstance(reasons.pop(("client", "release")), Allocated)
    assert all(isinstance(each, Unbounded) for each in reasons.values())
    assert "a record that is replaced" in reasons["record", "release"].because
    assert "reaches the server before any noise" in reasons["client", "server"].because
    assert proves(curator()) == "client level, against released models"


@pytest.mark.parametrize(
    ("changes", "unit", "observer", "words"),
    [
        ({"local": replace(algorithm("fedavg").local, personal=1)}, "client", "release", "keep state"),
        (
            {"local": replace(algorithm("fedavg").local, momentum=0.9, keep_momentum=True)},
            "client",
            "release",
            "keep state",
        ),
        ({"per_round": gaussian.Gaussian(2.0, at="shared")}, "client", "release", "hidden who takes part"),
        ({"per_round": gaussian.Gaussian(2.0, at="shared")}, "client", "server", "hidden who takes part"),
        ({"per_round": None, "per_update": NoisyClip(1.0, 3.0, at="client")}, "client", "release", "cohort size"),
        ({"per_round": None, "per_update": NoisyClip(1.0, 3.0, at="client")}, "client", "server", "hidden who takes"),
    ],
)
def test_nothing_is_proven_where_the_theorem_fails(changes, unit, observer, words):
    for t in (0, 1):
        found = charged(curator(**changes), t, unit, observer)
        assert isinstance(found, Unbounded)
        assert words in found.because


def test_noise_in_steps_is_not_charged_as_if_rounds_were_sampled_independently():
    record = replace(algorithm("fed-cdp-private"), clients=Clients("random-allocation", 20))
    setting = Setting(100, 20, sizes=(50,))
    for observer in ("release", "server", "client-process"):
        assert isinstance(event(record, setting, 0, "record", observer), Unbounded)


def test_records_that_are_allocated_steps_prove_nothing_for_one_that_is_replaced():
    record = algorithm("fed-cdp-private")
    record = replace(record, records=replace(record.records, sampling="random-allocation"))
    found = event(record, Setting(100, 20, sizes=(50,)), 0, "record", "release")
    assert "no theorem covers a record that is replaced" in found.because


def test_blocks_of_one_round_are_rounds_in_which_all_take_part():
    assert charged(curator(cohort=100), 7) == Gaussian(2.0)


def test_a_cohort_that_changes_is_refused():
    with pytest.raises(ConfigError, match="constant for random-allocation sampling, got linear:5:10"):
        Clients("random-allocation", "linear:5:10")


@pytest.mark.slow
def test_the_example_needs_5_percent_less_noise_than_poisson_sampling_at_the_same_epsilon():
    config = configure(ROOT / "examples" / "random-allocation-1000.toml")
    setting = Setting(config.data.clients, config.rounds)
    budget = Budget(config.budget.epsilon, config.budget.delta, adjacency="zero-out")
    noises = []
    for sampling in ("random-allocation", "poisson"):
        record = replace(config.algorithm, clients=replace(config.algorithm.clients, sampling=sampling))
        scaled = calibrated(record, setting, budget, "client", "release")
        noises.append(scaled.per_round.multiplier(0, setting.rounds))
    assert noises[0] < 0.95 * noises[1]
