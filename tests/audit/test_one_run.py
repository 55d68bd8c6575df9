"""Canaries: right claims pass, half of the noise is found, and who sees only the final model finds less.

At a true claim of 4 a p-value of 0.01 needs 196 of 200 guesses about 1,000 records to be right, at 0.85 each: 5e-10.
"""

from dataclasses import replace

import numpy as np
import pytest
from scipy.linalg import toeplitz

from shoal.algorithms import algorithm
from shoal.audit import one_run
from shoal.audit.broken import VARIANTS, Broken, whole, with_noise
from shoal.audit.cases import cases
from shoal.mechanisms.mechanism import altered
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
@pytest.mark.statistical(false_alarm=1e-8)
def test_noise_of_all_clients_own_hides_what_each_holds_and_a_quarter_of_it_does_not():
    own = next(cases(replace(algorithm("fed-sdp"), clients=Clients("all")), "client", epsilon=4.0))
    right, broken = guessed(own), guessed(own, 0.25)
    assert broken.p_value < one_run.FLAG < right.p_value
    assert 0.5 < right.epsilon < 4 < broken.epsilon


@pytest.mark.slow
def test_where_all_come_in_every_round_of_independent_noise_the_final_model_shows_the_same(independent):
    scores, final = one_run._of_clients(whole(independent, Streams(0)), COINS)
    assert separation(scores) == pytest.approx(separation(final), rel=0.01)


FTRL = algorithm("dp-ftrl")
COINS = np.random.default_rng(0).integers(2, size=2 * FEW) * 2 - 1


@pytest.fixture(scope="module")
def correlated():
    return next(cases(FTRL, "client", epsilon=4.0, rounds=5))


@pytest.fixture(scope="module")
def independent():
    return next(cases(replace(FTRL, per_round=replace(FTRL.per_round, bands=1)), "client", epsilon=4.0, rounds=5))


def separation(scores, coins=COINS):
    """How far scores of canaries that are there lie from those of the others, in standard deviations."""
    there, gone = scores[coins > 0], scores[coins < 0]
    return (there.mean() - gone.mean()) / np.sqrt((there.var() + gone.var()) / 2)


@pytest.mark.parametrize("turns", [[1, 1, 1, 1], [1, 0, 1, 0]])
def test_noise_is_decorrelated_to_the_charged_separation(turns):
    """z has mean 0 and covariance 1 exactly: nothing is estimated."""
    c = toeplitz([1, 0.5, 0.25, 0.1], np.zeros(4))
    columns = np.column_stack([np.ones(100), np.random.default_rng(0).normal(size=(100, 4))])
    noise = 3 * np.linalg.solve(c, np.linalg.qr(columns)[0][:, 1:].T * np.sqrt(99))
    weights = one_run.decorrelated(np.array(turns, dtype=float), noise)
    found = weights @ turns / np.sqrt(weights @ np.cov(noise) @ weights)
    assert found == pytest.approx(np.linalg.norm(c @ turns) / 3, rel=1e-6)


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-6)
def test_canaries_of_correlated_noise_are_as_far_apart_as_is_charged(correlated):
    """The standard error is 2/sqrt(2000) = 0.045; the final model alone, or a plain sum of rounds, shows 0.69."""
    charged = np.sqrt(sum(event.noise**-2 for event in correlated.claim.event.events))
    assert charged == pytest.approx(0.925, abs=1e-3)
    found = np.mean(
        [separation(one_run._of_clients(whole(correlated, Streams(seed)), COINS)[0]) for seed in range(3)]
    )
    assert found == pytest.approx(charged, abs=5 * 0.045 / np.sqrt(3))


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-6)
def test_correlated_noise_as_charged_is_not_doubted_and_half_of_it_is(correlated):
    assert guessed(correlated, canaries=2 * FEW).p_value > one_run.FLAG
    assert guessed(correlated, 0.5, canaries=4 * FEW).p_value < one_run.FLAG


@pytest.mark.slow
def test_another_factorisation_than_the_charged_one_is_found(independent):
    """Independent noise is charged, correlated noise is played, in which a client moves three times as much."""
    played = replace(independent.record, per_round=replace(independent.record.per_round, bands=10))
    assert one_run.guess(Broken(independent, played, Streams(0)), 2 * FEW).p_value < one_run.FLAG


def test_canaries_come_as_often_as_they_may(correlated):
    rare = replace(FTRL, clients=Clients("min-separation", 10, separation=2))
    assert one_run._turns(rare, 5, 10).tolist() == [1, 0, 1, 0, 1]
    assert one_run._turns(correlated.record, 3, 3).tolist() == [1, 1, 1]
    uncounted = replace(rare, clients=altered(rare.clients, separated=False))
    assert one_run._turns(uncounted, 5, 10).tolist() == [1, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def shared():
    """Three sites share the noise, and one of them is with the server."""
    return next(cases(algorithm("distributed-dp-sgd"), "record", epsilon=4.0, rounds=2))


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-6)
@pytest.mark.parametrize(("colluding", "honest"), [(0, 3), (1, 2), (2, 1)])
def test_the_server_subtracts_the_noise_of_colluding_sites_from_what_canaries_move(shared, colluding, honest):
    """With all shares subtracted each canary's own pull is left; the standard error of the noise is 2.2%."""
    coins = COINS[:FEW]

    def seen(known):
        return one_run._of_clients(whole(replace(shared, colluding=known), Streams(0)), coins)

    scores, final = seen(colluding)
    pull = seen(3)[1] * coins
    assert pull == pytest.approx(pull.mean(), rel=1e-3), "in every round all are clipped"
    charged = 2 * np.sqrt(sum(event.noise**-2 for event in shared.claim.event.events))
    found = 2 * pull.mean() / (final - pull.mean() * coins).std()
    assert found == pytest.approx(charged * np.sqrt(2 / honest), rel=5 / np.sqrt(2 * FEW))
    assert separation(scores, coins) == pytest.approx(separation(final, coins), rel=0.02)


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-7)
def test_shares_of_noise_as_charged_are_not_doubted_and_one_more_colluding_or_half_the_noise_is(shared):
    """A p-value of 0.01 needs 197 of 200 guesses to be right, at 0.88 each: 5e-8."""
    assert guessed(shared, canaries=2 * FEW).p_value > one_run.FLAG
    assert guessed(shared, 0.5, canaries=2 * FEW).p_value < one_run.FLAG
    more = VARIANTS["one more site colludes"](shared, Streams(0))
    assert one_run.guess(more, 2 * FEW, runs=4).p_value < one_run.FLAG
