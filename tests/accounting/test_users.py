"""A user with several records, each sampled on its own: the mixture of Gaussians, in both directions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from shoal.accounting import accountants, curves, rdp
from shoal.accounting.events import Gaussian, Repeat, Sampled, SampledUser, TwoLevel, from_json
from shoal.accounting.leaves import leaves
from shoal.errors import ConfigError

SETTINGS = [(2, 0.01, 1.0), (3, 0.3, 0.5), (8, 0.05, 2.0), (40, 0.2, 6.0), (5, 0.9, 1.5)]


@pytest.mark.parametrize(("records", "known"), [(1, 2.1245), (2, 4.5541), (4, 10.0153), (8, 23.082)])
def test_a_thousand_steps_cost_what_dp_accounting_finds(records: int, known: float) -> None:
    event = Repeat(SampledUser(records, 0.01, 1.0), 1000)
    found = accountants.epsilon(event, 1e-6)
    assert found.valid
    assert found.epsilon == pytest.approx(known, abs=1e-3)
    assert accountants.epsilon(event, 1e-6, "rdp").epsilon >= found.epsilon


@pytest.mark.slow
def test_the_pair_is_that_of_dp_accounting() -> None:
    from dp_accounting.pld.privacy_loss_distribution import from_mixture_gaussian_mechanism

    records, rate, noise = 2, 0.2, 4.0
    weights = binom.pmf(range(3), records, rate)
    once = from_mixture_gaussian_mechanism(noise, [0, 1, 2], weights, value_discretization_interval=3e-3)
    theirs = once.self_compose(20)
    event = Repeat(SampledUser(records, rate, noise), 20)
    for epsilon in (0.5, 1.0, 2.0):
        ours = accountants.delta(event, epsilon).delta
        assert ours == pytest.approx(theirs.get_delta_for_epsilon(epsilon), rel=0.05, abs=1e-8)


def densities(records: int, rate: float, noise: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Those of the mixture and of the noise alone, on a fine grid, and its step."""
    step = noise / 2000
    x = np.arange(-9 * noise, records + 9 * noise, step)
    mixture = sum(binom.pmf(j, records, rate) * norm.pdf(x, j, noise) for j in range(records + 1))
    return mixture, norm.pdf(x, 0, noise), step


@pytest.mark.parametrize(("records", "rate", "noise"), SETTINGS)
def test_both_directions_are_what_quadrature_finds(records: int, rate: float, noise: float) -> None:
    pair = curves.user_sampled(1 / noise, rate, records)
    mixture, alone, step = densities(records, rate, noise)
    for epsilon in (0.0, 0.01, 0.1, 0.5, 2.0):
        at, times = np.array([epsilon]), math.exp(epsilon)
        for curve, one, other in ((pair.forward, mixture, alone), (pair.backward, alone, mixture)):
            true = np.maximum(one - times * other, 0).sum() * step
            assert float(curve(at)[0]) == pytest.approx(true, rel=1e-4, abs=1e-12)
            assert float(curve(at)[0]) >= true * (1 - 1e-5) - 1e-15


@pytest.mark.parametrize(("records", "rate", "noise"), SETTINGS)
def test_the_renyi_divergence_is_the_larger_of_both_directions(records: int, rate: float, noise: float) -> None:
    orders = (1.5, 2.0, 3.7, 8.0)
    mixture, alone, step = densities(records, rate, noise)
    found = rdp.divergence(SampledUser(records, rate, noise), "zero-out", orders)
    for order, ours in zip(orders, found, strict=True):
        both = [
            math.log(np.sum(one * np.exp((order - 1) * (np.log(one) - np.log(other)))) * step) / (order - 1)
            for one, other in ((mixture, alone), (alone, mixture))
            if order * records / noise < 9 or one is alone  # beyond that the grid is too short
        ]
        assert ours >= max(both) * (1 - 1e-9)
        if len(both) == 2:
            assert ours == pytest.approx(max(both), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("angle", [0.0, 0.5, math.pi / 2, 2.0, math.pi])
def test_records_that_pull_different_ways_cost_no_more(angle: float) -> None:
    """Two records at any angle beside another user's, which is sampled too, in the plane."""
    rate, noise, step = 0.3, 0.8, 0.03
    rows = np.array([[1.0, 0.0], [math.cos(angle), math.sin(angle)], [-0.6, 0.8]])
    x = np.arange(-6, 6, step)

    def density(own: int) -> np.ndarray:
        total = np.zeros((x.size, x.size))
        for taken in np.ndindex(2, 2, 2):
            weight = math.prod(rate if one else 1 - rate for one in taken)
            mean = np.array(taken) * [own, own, 1] @ rows
            total += weight * np.outer(norm.pdf(x, mean[0], noise), norm.pdf(x, mean[1], noise))
        return total

    with_user, without = density(1), density(0)
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        bound = accountants.delta(SampledUser(2, rate, noise), epsilon).delta
        for one, other in ((with_user, without), (without, with_user)):
            assert np.maximum(one - math.exp(epsilon) * other, 0).sum() * step**2 <= bound + 1e-6


@pytest.mark.slow
def test_more_records_cost_more_and_one_is_a_sampled_gaussian() -> None:
    costs = [accountants.epsilon(SampledUser(records, 0.1, 1.0), 1e-5).epsilon for records in (1, 2, 3, 5, 9)]
    assert costs == sorted(costs)
    assert leaves(SampledUser(1, 0.1, 1.0)) == {Sampled("poisson", 0.1, Gaussian(1.0)): 1}
    assert leaves(SampledUser(4, 1.0, 2.0)) == {Gaussian(0.5): 1}
    assert not leaves(SampledUser(4, 0.0, 2.0))


def test_a_user_at_a_client_that_comes_sometimes_costs_less_than_at_one_that_always_does() -> None:
    always, sometimes = (TwoLevel(rate, 0.1, 5, 2.0, records=3) for rate in (1.0, 0.2))
    assert leaves(always) == {SampledUser(3, 0.1, 2.0): 5}
    for accountant in ("pld", "rdp"):
        cost = [accountants.epsilon(each, 1e-5, accountant, "zero-out").epsilon for each in (sometimes, always)]
        assert cost[0] < cost[1]
    assert from_json(sometimes.to_json()) == sometimes


def test_nothing_is_claimed_under_replace_one() -> None:
    with pytest.raises(ConfigError, match="not accounted: no worst pair of neighbours is known; take zero-out"):
        accountants.epsilon(SampledUser(2, 0.1, 1.0), 1e-5, adjacency="replace-one")


@pytest.mark.parametrize("accountant", ["zcdp", "basic", "advanced"])
def test_accountants_that_know_no_users_refuse_them(accountant: str) -> None:
    with pytest.raises(ConfigError, match="does not understand"):
        accountants.epsilon(SampledUser(2, 0.1, 1.0), 1e-5, accountant)


@pytest.mark.slow
def test_steps_with_next_to_no_noise_have_a_figure_and_not_a_crash() -> None:
    """The losses of neighbouring thresholds are more than 709 apart, and e^709 is the largest float."""
    records, rate, noise = 10, 0.5, 0.001
    at = np.array([0.0, 1.0, 1e6, 2e7, 1e12])
    assert np.isfinite(curves.user_sampled(1 / noise, rate, records).forward(at)).all()
    found = accountants.epsilon(Repeat(SampledUser(records, rate, noise), 3), 1e-5, adjacency="zero-out").epsilon
    # All but seen: j records are a loss of j^2 / 2 noise^2. In 3 steps 230 or more has a chance of 1.2e-5.
    assert found == pytest.approx(230 / (2 * noise**2), rel=1e-3)


def test_the_counts_that_all_but_never_occur_do_not_stretch_the_losses() -> None:
    pair = curves.user_sampled(1.0, 1e-4, 8)
    assert curves.reach(pair.forward, 1e-24, pair.end_forward) < 1000
