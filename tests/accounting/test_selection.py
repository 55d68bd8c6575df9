"""Private selection costs what Papernot & Steinke 2022 prove, and never less than what is really lost."""

import math
from itertools import islice

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

from shoal.accounting import rdp, selection
from shoal.accounting.events import Gaussian, Repeat, Sampled, Unbounded
from shoal.accounting.rdp import DEFAULT
from shoal.accounting.selection import Trials
from shoal.errors import ConfigError
from shoal.random.streams import Streams

SHAPES = (-0.5, 0.0, 0.5, 1.0, 3.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.0, 1.5, 10.0, 30.0])
def test_the_number_of_trials_has_the_mean_that_was_asked_for(shape, mean):
    trials = Trials.expecting(mean, shape)
    assert trials.mean == pytest.approx(mean, rel=1e-6)
    chances = np.fromiter(islice(trials.probabilities(), 100_000), float)
    assert chances.sum() == pytest.approx(1, rel=1e-6)
    assert chances @ np.arange(1, len(chances) + 1) == pytest.approx(mean, rel=1e-3)


def test_shape_1_is_geometric_and_shape_0_logarithmic():
    geometric = list(islice(Trials(1.0, 0.2).probabilities(), 5))
    assert geometric == pytest.approx([0.2 * 0.8 ** (k - 1) for k in range(1, 6)])
    logarithmic = list(islice(Trials(0.0, 0.2).probabilities(), 5))
    assert logarithmic == pytest.approx([0.8**k / k / math.log(5) for k in range(1, 6)])


@pytest.mark.statistical(false_alarm=1e-7)
def test_draws_follow_the_distribution():
    """Chi-squared against the first ten values, at 1e-7; the least expected count is 181."""
    from scipy.stats import chisquare

    trials, generator = Trials.expecting(4.0, 0.5), Streams(3).generator("test")
    drawn = np.array([trials.draw(generator) for _ in range(10_000)])
    chances = np.fromiter(islice(trials.probabilities(), 10), float)
    expected = np.append(chances, 1 - chances.sum()) * len(drawn)
    counted = np.append([(drawn == k).sum() for k in range(1, 11)], (drawn > 10).sum())
    assert chisquare(counted, expected).pvalue > 1e-7


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mean", [2.0, 10.0, 300.0])
def test_it_agrees_with_dp_accounting(shape, mean):
    event = Repeat(Gaussian(6.0), 40)
    ours = selection.epsilon([event], Trials.expecting(mean, shape), 1e-5)
    inner = ComposedDpEvent([SelfComposedDpEvent(GaussianDpEvent(6.0), 40)])
    theirs = RdpAccountant(DEFAULT).compose(RepeatAndSelectDpEvent(inner, mean, shape)).get_epsilon(1e-5)
    assert ours.epsilon == pytest.approx(theirs, rel=1e-5)
    assert ours.valid


@pytest.mark.parametrize("shape", SHAPES)
def test_of_pure_privacy_epsilon_it_makes_two_plus_shape_epsilon(shape):
    """Corollary 3 of the paper: the limit of great orders, whatever the expected number of trials."""
    pure, orders = 0.7, (1e9, 1e10)
    best = selection.divergence(np.full(2, pure), Trials.expecting(50.0, shape), orders)
    assert best[-1] == pytest.approx((2 + shape) * pure, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gamma", [0.02, 0.3, 0.9])
def test_no_pair_of_neighbours_loses_more_than_the_bound(shape, gamma):
    """Exactly: P(best <= y) = E[F(y)^K], for thirty random pairs of mechanisms with six ordered outputs."""
    trials, generator = Trials(shape, gamma), Streams(11).generator("test")

    def best_of(mass):
        below = np.append(0.0, np.minimum(np.cumsum(mass), 1.0))
        if shape == 0:
            power = np.log1p(-(1 - gamma) * below) / math.log(gamma)
        else:
            power = np.expm1(-shape * np.log1p(-(1 - gamma) * below)) / np.expm1(-shape * math.log(gamma))
        return np.diff(power)

    def renyi(p, q, order):
        return math.log(np.sum(p**order * q ** (1 - order))) / (order - 1)

    orders = (1.25, 1.5, 2.0, 3.0, 5.0, 8.0, 16.0)
    for _ in range(30):
        p = generator.dirichlet(np.full(6, 2.0))
        q = p * np.exp(generator.uniform(-0.4, 0.4, 6))
        q /= q.sum()
        for one, other in ((p, q), (q, p)):
            single = np.array([renyi(one, other, order) for order in orders])
            both = np.maximum(single, [renyi(other, one, order) for order in orders])
            bound = selection.divergence(both, trials, orders)
            real = [renyi(best_of(one), best_of(other), order) for order in orders]
            assert np.all(np.array(real) <= bound + 1e-9)


def test_one_trial_costs_what_a_run_costs_and_more_trials_cost_more():
    event = Repeat(Sampled("poisson", 0.1, Gaussian(1.5)), 100)
    alone = rdp.epsilon(DEFAULT, rdp.total({event.event: 100}, "add-or-remove"), 1e-5)
    costs = [selection.epsilon([event], Trials.expecting(mean), 1e-5).epsilon for mean in (1, 2, 10, 100)]
    assert costs[0] == pytest.approx(alone)
    assert costs == sorted(costs)
    assert costs[1] > costs[0]


def test_the_costliest_cell_counts_and_one_that_proves_nothing_spoils_all():
    cheap, dear = Repeat(Gaussian(20.0), 10), Repeat(Gaussian(5.0), 10)
    trials = Trials.expecting(5.0)
    together = selection.epsilon([cheap, dear], trials, 1e-5)
    assert together == selection.epsilon([dear], trials, 1e-5)
    spoiled = selection.epsilon([cheap, Unbounded("no noise is added")], trials, 1e-5)
    assert (spoiled.epsilon, spoiled.because) == (None, "no noise is added")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Trials(-1.0, 0.5), "shape"),
        (lambda: Trials(1.0, 0.0), "gamma"),
        (lambda: Trials.expecting(0.5), "0.5"),
        (lambda: Trials.expecting(1000.0, -0.999), "shape"),
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
