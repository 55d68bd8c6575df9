"""Canaries: right claims pass, half of the noise is found, and who sees only the final model finds less.

At a true claim of 4 a p-value of 0.01 needs 196 of 200 guesses about 1,000 records to be right, at 0.85 each: 5e-10.
"""

from dataclasses import replace

import pytest

from shoal.algorithms import algorithm
from shoal.audit import one_run
from shoal.audit.broken import Broken, whole, with_noise
from shoal.audit.cases import cases
from shoal.mechanisms.sampling import Clients
from shoal.random.streams import Streams

FEW = 1000


@pytest.fixture(scope="module")
def records():
    return next(cases(algorithm("dp-sgd"), "record", epsilon=4.0))


@pytest.fixture(scope="module")
def clients():
    """Each of them comes once in eight rounds, and nobody knows when."""
    method = replace(algorithm("trusted-curator"), clients=Clients("random-allocation", 2))
    return next(cases(method, "client", epsilon=4.0, rounds=8))


def guessed(case, share=1.0, seed=0, canaries=FEW, runs=1):
    return one_run.guess(Broken(case, with_noise(case.record, share), Streams(seed)), canaries, runs)


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-8)
def test_a_claim_that_is_true_is_not_doubted_and_the_bound_stays_below_it(records):
    for seed in range(3):
        found = guessed(records, seed=seed)
        assert found.p_value > one_run.FLAG
        assert 0.5 < found.epsilon < 4
        assert found.epsilon < found.independent


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.25])
def test_less_noise_is_found(records, share):
    found = guessed(records, share, canaries=4 * FEW)
    assert found.p_value < one_run.FLAG
    assert found.epsilon > 4


@pytest.mark.slow
def test_runs_are_pooled_with_other_coins(records):
    one, three = guessed(records), guessed(records, runs=3)
    assert (one.runs, three.runs, three.guesses) == (1, 3, 3 * one.guesses)
    assert three.right != 3 * one.right
    assert one.epsilon < three.epsilon < 4


def test_many_records_are_canaries_of_several_clients_as_few_are_of_one(records):
    run = one_run.play(whole(records, Streams(0)), 2 * one_run.OF_A_CLIENT + 1)
    assert run.every_round.canaries == 3 * 667
    assert run.everyone.right / run.everyone.guesses == pytest.approx(0.678, abs=0.05), "Phi(mu/2)"


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-8)
def test_the_final_model_shows_less_than_every_round_of_clients_that_come_rarely(clients):
    found = guessed(clients)
    assert 0.2 < found.final < found.epsilon < 4
    assert min(found.p_value, found.final_p_value) > one_run.FLAG


@pytest.mark.slow
def test_the_final_model_shows_a_quarter_of_the_noise_too(clients):
    found = guessed(clients, 0.25)
    assert found.p_value < found.final_p_value < one_run.FLAG


@pytest.mark.slow
def test_where_all_come_in_every_round_the_final_model_shows_the_same():
    case = next(cases(algorithm("dp-ftrl"), "client", epsilon=4.0, rounds=3))
    found = guessed(case, canaries=200)
    assert (found.final, found.final_p_value) == (found.epsilon, found.p_value)
