"""The canary clients of a federation: the right noise agrees with the claim, a quarter of it is flagged."""

import math

import numpy as np
import pytest

from shoal.accounting.accountants import epsilon
from shoal.accounting.events import Gaussian, Repeat, Sampled
from shoal.audit.bounds import epsilon_of_shift
from shoal.audit.federated_canaries import measured, ratios
from shoal.errors import RunError
from shoal.training.canaries import Canaries, Noted

SIZE, COUNT, ROUNDS, DELTA = 2_000, 400, 20, 1e-5


def played(seed, noise, rate=1.0, share=1.0, drift=0.0, size=SIZE):
    """Rounds of the Gaussian mechanism with canaries of norm 1, and this share of the noise that is noted."""
    canaries = Canaries(seed, COUNT, size)
    directions = np.stack([each.numpy() for each in canaries.directions()]).astype(np.float64)
    draw = np.random.default_rng(seed)
    model = draw.normal(size=size)
    trend = drift * draw.normal(size=size)
    along = [directions @ model]
    for t in range(ROUNDS):
        came = canaries.drawn(t, 0, rate)
        model = model + directions[came].sum(0) + trend + share * noise * draw.normal(size=size)
        along.append(directions @ model)
    return Noted(canaries, np.array(along), np.full(ROUNDS, rate), np.full(ROUNDS, noise))


def proven(noise, rate=1.0):
    one = Gaussian(noise) if rate == 1 else Sampled("poisson", rate, Gaussian(noise))
    return epsilon(Repeat(one, ROUNDS), DELTA, adjacency="zero-out").epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "rate"), [(16.0, 1.0), (4.0, 1.0), (1.0, 0.1)])
@pytest.mark.statistical(false_alarm=4e-9)
def test_the_right_noise_is_consistent_with_the_claim(noise, rate):
    """By chance a seed is flagged once in 1,000 times."""
    claimed = proven(noise, rate)
    found = [measured(played(seed, noise, rate), claimed, DELTA) for seed in range(4)]
    assert sum(each.verdict != "consistent" for each in found) < 3
    assert all(0 <= seen.least <= claimed for each in found for seen in each.seen)


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=4e-9)
def test_where_the_mechanism_is_gaussian_the_estimate_is_near_the_claim():
    """The other canaries add to the noise: in so many dimensions by a fourteenth of its scale."""
    noise, size = 2.0, 8_000
    noted = played(0, noise, size=size)
    others = noted.canaries.included.sum() * ROUNDS**2 / size
    wanted = ROUNDS / math.sqrt(ROUNDS * noise**2 + others)
    for seen in measured(noted, proven(noise), DELTA).seen:
        assert abs(seen.shift - wanted) < 6 * math.sqrt(4 / COUNT + wanted**2 / (2 * COUNT))
        assert seen.estimate == pytest.approx(epsilon_of_shift(seen.shift, DELTA))
        assert seen.least < seen.estimate_least < seen.estimate
    assert epsilon_of_shift(math.sqrt(ROUNDS) / noise, DELTA) == pytest.approx(proven(noise), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [16.0, 8.0])
def test_a_quarter_of_the_noise_is_flagged(noise):
    assert {measured(played(seed, noise, share=0.25), proven(noise), DELTA).verdict for seed in range(3)} <= {
        "VIOLATED",
        "above the claim, if scores are normal",
    }


@pytest.mark.slow
def test_much_less_noise_refutes_a_small_claim_without_assumptions():
    for seed in range(3):
        assert measured(played(seed, 48.0, share=0.05), proven(48.0), DELTA).verdict == "VIOLATED"


def test_the_rounds_show_more_than_the_final_model_where_clients_are_sampled():
    found = measured(played(1, 0.5, rate=0.05), None, DELTA)
    final, every = found.seen
    assert every.shift > 1.5 * final.shift
    assert found.verdict == "no claim"


def test_scores_do_not_use_the_coins():
    noted = played(0, 4.0, 0.5)
    before = ratios(noted)
    noted.canaries.__dict__["included"] = ~noted.canaries.included
    assert (ratios(noted) == before).all()


def test_learning_the_data_beside_the_noise_flags_nothing():
    assert measured(played(2, 8.0, drift=3.0), proven(8.0), DELTA).verdict == "consistent"


def test_too_few_canaries_are_refused():
    with pytest.raises(RunError, match="too few"):
        measured(Noted(Canaries(0, 2, 3), np.zeros((2, 2)), np.ones(1), np.ones(1)), 1.0, DELTA)
