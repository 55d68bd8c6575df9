"""Who takes part in a round, and which records in a step."""

import re
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, norm

from shoal.errors import ConfigError, RunError
from shoal.mechanisms.sampling import Clients, Records
from shoal.random.streams import Streams


def generator():
    return Streams(0).generator("test")


def test_fixed_size_takes_exactly_m_different_clients():
    drawn = Clients("fixed-size", 7).draw(generator(), 0, 1, 100)
    assert len(set(drawn.tolist())) == 7


def test_all_takes_everyone():
    assert Clients("all").draw(generator(), 0, 1, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.statistical(false_alarm=2.5e-7)
def test_poisson_takes_each_client_by_itself():
    """Mean and variance of the cohort over 5,000 rounds, 1e-7 each; a binomial's kurtosis makes it 1.5e-7."""
    clients, random = Clients("poisson", 10), generator()
    sizes = np.array([len(clients.draw(random, 0, 1, 100)) for _ in range(5000)])
    assert abs(sizes.mean() - 10) < norm.isf(0.5e-7) * np.sqrt(100 * 0.1 * 0.9 / 5000)
    assert chi2.ppf(0.5e-7, 5000) < np.square((sizes - 10) / 3).sum() < chi2.isf(0.5e-7, 5000)


@pytest.mark.statistical(false_alarm=1e-20)
def test_a_poisson_cohort_may_be_empty():
    """Of ten cohorts one is: each is, with a probability of .99."""
    random = generator()
    drawn = [len(Clients("poisson", 0.01).draw(random, 0, 1, 10)) for _ in range(10)]
    assert 0 in drawn


def turns(clients, rounds, again=(), attempt=0, state=None):
    """Who takes part in each round, as a run has it; and the state that is left."""
    state, streams = {} if state is None else state, Streams(3)
    found = []
    for t in rounds:
        random = streams.generator("clients", t, attempt)
        found.append(clients.take_part(random, state, t, 100, 60, t in again).tolist())
    return found, state


def test_random_allocation_gives_everyone_one_round_of_every_block():
    clients = Clients("random-allocation", 12)
    assert clients.expected(0, 100, 60) == 12
    found, state = turns(clients, range(15))
    for start in (0, 5, 10):
        assert sorted(chain(*found[start : start + 5])) == list(range(60))
    assert found[:5] != found[5:10]
    assert not state, "at the end of a block nothing is left of it"


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-7)
def test_random_allocation_draws_each_round_as_often_and_clients_independently():
    """Of 400 blocks of 5 rounds: each round's share of all 60 clients, and the spread of cohorts, by chi-square."""
    clients, random = Clients("random-allocation", 12), generator()
    sizes = np.array([len(clients.take_part(random, {}, 0, 1, 60, False)) for _ in range(4000)])
    assert abs(sizes.mean() - 12) < norm.isf(2.5e-8) * np.sqrt(60 * 0.2 * 0.8 / 4000)
    assert chi2.ppf(2e-8, 4000) < np.square((sizes - 12) / np.sqrt(9.6)).sum() < chi2.isf(2e-8, 4000)


def test_an_interrupted_block_goes_on_as_allocated():
    clients = Clients("random-allocation", 12)
    whole, _ = turns(clients, range(5))
    _, state = turns(clients, range(2))
    rest, _ = turns(clients, range(2, 5), attempt=9, state=state)
    assert whole[2:] == rest


def test_a_round_that_is_run_again_draws_anew_and_the_rest_of_its_block_stays_as_allocated():
    clients = Clients("random-allocation", 12)
    whole, _ = turns(clients, range(5))
    _, state = turns(clients, range(2))
    rest, _ = turns(clients, range(2, 5), again=[2], attempt=1, state=state)
    assert rest[0] != whole[2]
    assert rest[1:] == whole[3:]
    anew, _ = turns(clients, range(5), again=[0], attempt=1)
    assert anew[0] != whole[0]
    assert sorted(chain(*anew)) == list(range(60)), "a block that is begun again is allocated again"


def test_a_block_whose_allocation_is_lost_is_refused():
    with pytest.raises(RunError, match="does not say who was allocated which round"):
        turns(Clients("random-allocation", 12), range(1, 2))


@pytest.mark.slow
@given(st.integers(1, 50), st.integers(1, 12), st.integers(1, 3))
def test_every_record_is_allocated_one_step_of_every_pass(records, batch, epochs):
    sampler = Records("random-allocation", batch)
    steps = sampler.steps(records, epochs)
    drawn = sampler.draw(generator(), records, steps)
    assert len(drawn) == steps
    for epoch in np.split(drawn, epochs):
        assert sorted(epoch[epoch >= 0].tolist()) == list(range(records))
    assert len(sampler.draw(generator(), records, 1)) == 1


@pytest.mark.statistical(false_alarm=6e-8)
def test_a_record_is_allocated_every_step_as_often():
    """3,000 passes over 20 records in five steps; 6 standard deviations of each count."""
    drawn = Records("random-allocation", 4).draw(generator(), 20, 15_000).reshape(3000, 5, -1)
    for step in range(5):
        counts = np.bincount(drawn[:, step][drawn[:, step] >= 0], minlength=20)
        assert np.all(np.abs(counts / 3000 - 0.2) < 6 * np.sqrt(0.2 * 0.8 / 3000))
    assert (drawn >= 0).sum(2).std() > 1, "batches vary: this is not a shuffled pass"


def test_the_cohort_may_follow_a_schedule():
    clients = Clients("fixed-size", "linear:10:50")
    assert [clients.expected(t, 4, 100) for t in range(4)] == [10, 20, 30, 40]


def test_a_cohort_greater_than_the_federation_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"clients\.cohort is 11 in round 1, but there are only 10 clients"):
        Clients("fixed-size", 11).draw(generator(), 0, 1, 10)


@pytest.mark.parametrize("cohort", [0, -3, "linear:5:-5"])
def test_a_cohort_without_clients_is_refused(cohort):
    with pytest.raises(ConfigError, match=r"clients\.cohort must be > 0"):
        Clients("poisson", cohort)


@pytest.mark.slow
@given(st.integers(1, 50), st.integers(1, 12), st.integers(1, 3))
def test_a_shuffled_epoch_uses_every_record_once(records, batch, epochs):
    sampler = Records("shuffled", batch)
    steps = sampler.steps(records, epochs)
    drawn = sampler.draw(generator(), records, steps)
    assert len(drawn) == steps
    for epoch in np.split(drawn, epochs):
        assert sorted(epoch[epoch >= 0].tolist()) == list(range(records))


def test_fixed_order_takes_the_records_as_they_lie():
    drawn = Records("fixed-order", 2).draw(generator(), 5, 4)
    assert drawn.tolist() == [[0, 1], [2, 3], [4, -1], [0, 1]]


@pytest.mark.statistical(false_alarm=7.6e-7)
def test_poisson_batches_hold_each_record_with_probability_batch_over_n():
    """Each of 20 records over 20,000 steps, 5.5 standard deviations of its binomial: 3.8e-8 each."""
    drawn = Records("poisson", 4).draw(generator(), 20, 20_000)
    counts = np.bincount(drawn[drawn >= 0], minlength=20)
    assert np.all(np.abs(counts / 20_000 - 0.2) < 5.5 * np.sqrt(0.2 * 0.8 / 20_000))
    for row in drawn[:100]:
        chosen = row[row >= 0].tolist()
        assert chosen == sorted(set(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("records", [20, 400])
def test_by_rate_each_record_is_drawn_as_often_whatever_its_client_holds(records):
    """Over 20,000 steps; 6 sigma each: false alarms below 10^-6."""
    sampler = Records("poisson", rate=0.05, nominal_records=100)
    drawn = sampler.draw(generator(), records, 20_000)
    counts = np.bincount(drawn[drawn >= 0], minlength=records)
    assert np.all(np.abs(counts / 20_000 - 0.05) < 6 * np.sqrt(0.05 * 0.95 / 20_000))
    assert sampler.steps(records, 3) == 60
    assert sampler.batch == 5, "by which sums are divided: public, and no client's own"


def test_an_epoch_at_a_rate_that_divides_nothing_has_a_step_more():
    assert [Records("poisson", rate=rate, nominal_records=9).steps(7, 1) for rate in (1.0, 0.4, 1 / 3, 1 / 49)] == [
        1,
        3,
        3,
        49,
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rate": 0.1}, "records.rate needs records.nominal_records"),
        ({"nominal_records": 10}, "records.nominal_records needs records.rate"),
        ({"rate": 1.1, "nominal_records": 10}, "records.rate must be from 1e-06 to 1, got 1.1"),
        ({"rate": 0.0, "nominal_records": 10}, "records.rate must be from 1e-06 to 1, got 0.0"),
        ({"rate": 0.1, "nominal_records": 0}, "records.nominal_records must be >= 1, got 0"),
        ({"rate": 0.1, "nominal_records": 9, "sampling": "shuffled"}, "records.rate is for records.sampling"),
    ],
)
def test_a_rate_that_means_nothing_is_refused(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Records(**{"sampling": "poisson"} | given)


def test_with_replacement_may_draw_a_record_twice():
    drawn = Records("with-replacement", 8).draw(generator(), 4, 10)
    assert drawn.shape == (10, 8)
    assert all(len(set(row.tolist())) < 8 for row in drawn)


def test_a_client_without_records_has_empty_batches():
    assert (Records("poisson", 3).draw(generator(), 0, 2) == -1).all()


def test_a_stream_depends_on_its_seed_purpose_and_numbers_only():
    def first(seed, *name):
        return Streams(seed).generator(*name).integers(2**60)

    assert first(1, "noise", 2, 3) == first(1, "noise", 2, 3)
    others = {
        first(1, "noise", 2, 3),
        first(2, "noise", 2, 3),
        first(1, "batch", 2, 3),
        first(1, "noise", 23),
    }
    assert len(others) == 4
