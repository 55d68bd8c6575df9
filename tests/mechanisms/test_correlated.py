"""Noise that rounds share is what its matrix says, and no client costs more than its rounds are charged."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz
from scipy.stats import norm

from shoal.errors import ConfigError
from shoal.mechanisms.correlated import PAST, Correlated
from shoal.mechanisms.gaussian import Gaussian
from shoal.mechanisms.participation import Participation, price
from shoal.random.secure_streams import FINEST, SecureStreams, grid
from shoal.random.streams import Streams
from support.small_federation import ALPHA, chi_square_fits

few = settings(max_examples=60, deadline=None)
BANDS, MOMENTUM, TURNS = st.integers(1, 9), st.sampled_from([0.0, 0.5, 0.9]), st.integers(1, 5)


def coefficients(noise, rounds=500):
    return noise.coefficients(Participation(rounds), rounds)


def matrix(noise, rounds):
    """C: row t is what round t gives away of the sums so far."""
    weights = np.zeros(rounds)
    found = coefficients(noise, rounds)[:rounds]
    weights[: len(found)] = found
    return toeplitz(weights, np.zeros(rounds))


def summing(rounds, momentum=0.0):
    """The matrix that makes models of updates: sums of all rounds, through momentum."""
    ones = np.tril(np.ones((rounds, rounds)))
    return ones @ toeplitz(momentum ** np.arange(rounds), np.zeros(rounds))


def in_turn(start, turns, rounds):
    """When a client comes that begins in round `start`."""
    return (np.arange(rounds) >= start) & ((np.arange(rounds) - start) % turns == 0)


def cyclic(turns, rounds):
    return Participation(rounds, turns, regular=True)


def reach(noise, turns, rounds):
    return cyclic(turns, rounds).reach(coefficients(noise))


def charged(noise, turns, rounds, total=None):
    return sum(price(noise, cyclic(turns, total or rounds), t) for t in range(rounds))


# --- the matrix


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_with_all_bands_the_coefficients_are_the_root_of_summing_up(momentum):
    root = matrix(Correlated(1.0, bands=12, momentum=momentum), 12)
    np.testing.assert_allclose(root @ root, summing(12, momentum), atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_no_coefficient_is_negative_nor_greater_than_the_one_before(momentum):
    found = coefficients(Correlated(1.0, bands=500, momentum=momentum))
    assert found[0] == 1
    assert (found > 0).all()
    assert (np.diff(found) <= 0).all()


def test_one_band_is_independent_noise():
    assert coefficients(Correlated(1.0, bands=1, momentum=0.9)).tolist() == [1.0]
    assert coefficients(Gaussian(1.0)).tolist() == [1.0]
    drawn = [
        each.add(torch.zeros(1000), 3.0, 0.5, memory, Streams(1).generator("noise", t))
        for each, memory in ((Gaussian(3.0), {}), (Correlated(3.0, bands=1), {}))
        for t in range(2)
    ]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])


@pytest.mark.parametrize("turns", [7, 10])
def test_one_pass_with_one_band_costs_one_gaussian(turns):
    prices = [price(Correlated(4.0, bands=1), cyclic(turns, 7), t) for t in range(7)]
    assert prices == [1 / 16, 0, 0, 0, 0, 0, 0]


# --- what a client costs


@pytest.mark.slow
@few
@given(BANDS, MOMENTUM, TURNS, st.integers(1, 9))
def test_the_price_of_rounds_is_the_sensitivity_over_all_ways_to_come(bands, momentum, turns, rounds):
    """Brute force: every set of rounds that are at least `turns` apart; all updates the same unit vector."""
    noise = Correlated(1.0, bands=bands, momentum=momentum)
    root = matrix(noise, rounds)
    greatest = 0.0
    for count in range(1, rounds + 1):
        for came in combinations(range(rounds), count):
            if all(later - earlier >= turns for earlier, later in pairwise(came)):
                greatest = max(greatest, float(np.square(root[:, list(came)].sum(axis=1)).sum()))
    assert charged(noise, turns, rounds) == pytest.approx(greatest, rel=1e-9)


@few
@given(BANDS, MOMENTUM, TURNS, st.integers(1, 9), st.integers(0, 2**32))
def test_no_updates_that_point_elsewhere_cost_more(bands, momentum, turns, rounds, seed):
    noise, random = Correlated(1.0, bands=bands, momentum=momentum), np.random.default_rng(seed)
    updates = random.normal(size=(rounds, 3))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    for start in range(min(turns, rounds)):
        came = updates * in_turn(start, turns, rounds)[:, None]
        assert np.square(matrix(noise, rounds) @ came).sum() <= charged(noise, turns, rounds) * (1 + 1e-9)


@pytest.mark.slow
@few
@given(BANDS, MOMENTUM, TURNS, st.sampled_from(["linear:4:1", "linear:1:4", "cyclic:4:2", "decay:3:0.3:1", "2"]))
def test_at_any_time_what_was_charged_is_what_the_costliest_client_was_charged(bands, momentum, turns, schedule):
    noise, rounds = Correlated(schedule, bands=bands, momentum=momentum), 9
    root = matrix(noise, rounds) / np.array([[noise.multiplier(t, rounds)] for t in range(rounds)])
    for now in range(1, rounds + 1):
        paid = [np.square(root[:now, :now] @ in_turn(start, turns, now)).sum() for start in range(turns)]
        assert charged(noise, turns, now, rounds) == pytest.approx(max(paid), rel=1e-9)


@pytest.mark.slow
@few
@given(BANDS, MOMENTUM, TURNS, st.sampled_from(["1", "linear:4:1", "linear:1:4"]), st.data())
def test_rounds_played_again_are_charged_for_whomever_they_hit(bands, momentum, turns, schedule, data):
    """Any history of kills and old checkpoints, noise remembered or forgotten: nobody pays more than is charged."""
    noise, rounds = Correlated(schedule, bands=bands, momentum=momentum), 7
    weights = np.pad(coefficients(noise), (0, rounds))
    path, paid, spent, furthest = [], np.zeros(turns), 0.0, 0
    since = 0  # the first round whose noise is remembered
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(path)))
        path = path[:begin]
        since = begin if data.draw(st.booleans()) else min(since, begin)
        for t in range(begin, data.draw(st.integers(begin, rounds))):
            spent += price(noise, cyclic(turns, rounds), t, again=t < furthest)
            furthest = max(furthest, t + 1)
            path.append(t)
            for start in range(turns):
                came = np.flatnonzero(in_turn(start, turns, rounds)[: t + 1])
                moved = weights[t - came[came >= since]].sum()
                paid[start] += (moved / noise.multiplier(t, rounds)) ** 2
    assert paid.max() <= spent * (1 + 1e-9)


def test_reach_is_what_a_client_has_in_each_round():
    noise = Correlated(1.0, bands=4)
    assert reach(noise, 2, 5) == pytest.approx([1, 0.5, 1 + 0.375, 0.5 + 0.3125, 1 + 0.375])
    assert reach(noise, 100, 3) == pytest.approx([1, 0.5, 0.375])


def test_a_round_beyond_the_plan_has_a_price_too():
    assert price(Correlated(2.0, bands=3), cyclic(3, 4), 11) == price(Correlated(2.0, bands=3), cyclic(3, 12), 11)


# --- the noise


def drawn(noise, rounds, numbers, streams, bound=1.0):
    """The noise of rounds one after the other, one a row."""
    memory, found = {}, []
    for t in range(rounds):
        total = noise.add(
            torch.zeros(numbers), noise.multiplier(t, rounds), bound, memory, streams.generator("noise", t)
        )
        found.append(total.double().numpy() / bound)
    return np.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [Streams(3), SecureStreams()], ids=["research", "secure"])
@pytest.mark.statistical(false_alarm=2 * ALPHA)
def test_the_covariance_of_what_is_summed_up_is_what_the_matrix_says(streams):
    """Prefix sums of 6 rounds: chi-square on 360,000 whitened numbers and 15 correlations, each at ALPHA in all."""
    noise, rounds, numbers = Correlated("linear:3:2", bands=4, momentum=0.5), 6, 60_000
    found = np.cumsum(drawn(noise, rounds, numbers, streams), axis=0)
    shape = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix(noise, rounds))
    shape = shape @ np.diag([noise.multiplier(t, rounds) for t in range(rounds)])
    white = np.linalg.solve(np.linalg.cholesky(shape @ shape.T), found)
    assert chi_square_fits(white)
    assert not chi_square_fits(1.02 * white)
    between = np.corrcoef(white) - np.eye(rounds)
    assert np.abs(between).max() < float(norm.isf(ALPHA / 2 / 15)) / math.sqrt(numbers)


@pytest.mark.statistical(false_alarm=1e-9)
def test_the_models_noise_is_a_third_of_that_of_independent_noise_at_the_same_price():
    """100 rounds, 10 turns of each client: the last model, and all models on average; 2,000 numbers to 10%."""
    rounds, turns = 100, 10

    def errors(bands):
        noise = Correlated(1.0, bands=bands)
        spread = np.square(summing(rounds) @ np.linalg.inv(matrix(noise, rounds))).sum(axis=1)
        return np.sqrt(np.array([spread[-1], spread.mean()]) * charged(noise, turns, rounds))

    assert (errors(10) < 0.45 * errors(1)).all()
    found = drawn(Correlated(1.0, bands=10), rounds, 2000, Streams(4)).sum(axis=0).std()
    assert found * math.sqrt(charged(Correlated(1.0, bands=10), turns, rounds)) == pytest.approx(
        errors(10)[0], rel=0.1
    )


@pytest.mark.slow
def test_only_the_last_rounds_are_remembered_newest_first():
    noise, memory = Correlated(2.0, bands=4), {}
    totals = [noise.add(torch.zeros(50), 2.0, 0.25, memory, Streams(1).generator("noise", t)) for t in range(6)]
    assert memory[PAST].shape == (3, 50)
    torch.testing.assert_close(memory[PAST] * 0.25, torch.stack(totals[:2:-1]))


def test_a_falling_clip_takes_its_noise_with_it():
    """In units of each round's clip the noise is what it would be at clip 1."""
    memory, found, clips = {}, [], (4.0, 2.0, 1.0)
    for t, clip in enumerate(clips):
        total = Correlated(1.0, bands=3).add(torch.zeros(100), 1.0, clip, memory, Streams(3).generator("noise", t))
        found.append(total.double().numpy() / clip)
    np.testing.assert_allclose(np.stack(found), drawn(Correlated(1.0, bands=3), 3, 100, Streams(3)), atol=1e-5)


@pytest.mark.slow
def test_in_secure_mode_what_is_released_lies_on_a_grid_of_the_noise():
    noise, memory, streams = Correlated(3.0, bands=5, momentum=0.9), {}, SecureStreams()
    step = 2.0 ** math.floor(math.log2(3.0 * 0.7 / FINEST))
    for t in range(4):
        sum_on_grid = torch.arange(-500, 500).double() * grid(0.7)
        released = noise.add(sum_on_grid.clone(), 3.0, 0.7, memory, streams.generator("noise", t)).double() / step
        assert torch.equal(released, released.round())
        assert memory[PAST].dtype == torch.float64
        assert not torch.equal(released, sum_on_grid.double() / step)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bands": 0}, "per_round.bands must be >= 1, got 0"),
        ({"momentum": 1.0}, r"per_round.momentum must be in \[0, 1\), got 1.0"),
        ({"noise_multiplier": -1.0}, "per_round.noise_multiplier must be >= 0, got -1.0"),
    ],
)
def test_bad_parameters_are_refused_by_name(changes, said):
    with pytest.raises(ConfigError, match=said):
        Correlated(**changes)


def test_rounding_is_charged_in_every_round_that_a_client_reaches_however_little():
    """(reach + e)^2 / z^2 a round: where reach is below 1, more than (1 + e) times as much."""
    noise, bands, rounding = 64.0, 1000, 2e-3 / 64.0
    record = Correlated(noise, bands=bands)
    reached = cyclic(bands, bands).reach(coefficients(record))
    assert reached.min() < 0.1
    prices = [price(record, cyclic(bands, bands), t, rounding=rounding) for t in range(bands)]
    assert sum(prices) == pytest.approx(float(((reached + rounding * noise) ** 2).sum()) / noise**2, rel=1e-9)
    assert (
        sum(prices) > sum(price(record, cyclic(bands, bands), t) for t in range(bands)) * (1 + rounding * noise) ** 2
    )
