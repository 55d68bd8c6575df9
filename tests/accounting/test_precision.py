"""Where floating-point numbers lose digits, no figure is below what mpmath finds with 50 digits."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest

from shoal.accounting import accountants, allocation, curves, pld, rdp
from shoal.accounting.events import Allocated, Compose, Gaussian, Repeat, Sampled, SampledUser, TwoLevel


@pytest.fixture(autouse=True)
def digits():
    with mp.workdps(50):
        yield


def normal(x: mp.mpf) -> mp.mpf:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def gaussian_delta(noise: float, count: int, epsilon: float) -> mp.mpf:
    shift, epsilon = mp.sqrt(count) / mp.mpf(noise), mp.mpf(epsilon)
    with mp.workdps(300):  # the difference of two numbers that agree in many digits
        return normal(shift / 2 - epsilon / shift) - mp.exp(epsilon) * normal(-shift / 2 - epsilon / shift)


def poisson_divergence(rate: float, noise: float, order: float) -> mp.mpf:
    q, sigma, alpha = mp.mpf(rate), mp.mpf(noise), mp.mpf(order)
    step = sigma / 4
    terms = (
        ((1 + q * mp.expm1(y / sigma - 1 / (2 * sigma**2))) ** alpha - 1) * mp.exp(-(y**2) / 2)
        for y in (k * step for k in range(int(-14 / step), int((alpha / sigma + 14) / step)))
    )
    return mp.log1p(mp.fsum(terms) * step / mp.sqrt(2 * mp.pi)) / (alpha - 1)


@pytest.mark.parametrize(("rate", "noise", "order"), [(1e-9, 0.1, 1.1), (1e-9, 0.1, 1.0001), (1e-12, 0.1, 1.02)])
def test_the_renyi_divergence_of_rare_samples_is_not_below_the_integral(rate, noise, order) -> None:
    (found,) = rdp.poisson_gaussian(rate, np.array([noise]), (order,))[0]
    assert found >= poisson_divergence(rate, noise, order) * (1 - mp.mpf("1e-12"))


@pytest.mark.parametrize(
    ("noise", "count", "delta"), [(1e6, 1, 1e-20), (1e9, 100, 1e-10), (1e9, 10**9, 1e-100), (1e16, 1, 1e-20)]
)
def test_at_the_epsilon_of_gaussians_the_true_delta_is_not_above_the_one_asked_for(noise, count, delta) -> None:
    found = accountants.epsilon(Repeat(Gaussian(noise), count), delta).epsilon
    assert gaussian_delta(noise, count, found) <= delta


@pytest.mark.parametrize(
    ("noise", "count", "epsilon"),
    [(1e6, 1, 8e-6), (1e9, 1, 0.0), (1e9, 1, 3e-8), (1e16, 1, 1e-16), (1e-3, 10**9, 500000948683298.0)],
)
def test_the_delta_of_gaussians_is_not_below_the_true_one_and_next_to_it(noise, count, epsilon) -> None:
    found, true = (
        accountants.delta(Repeat(Gaussian(noise), count), epsilon).delta,
        gaussian_delta(noise, count, epsilon),
    )
    assert true <= found <= true * (1 + mp.mpf("1e-6"))


@pytest.mark.parametrize("event", [Gaussian(1.0), Sampled("poisson", 0.1, Gaussian(1.0))])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_delta_that_underflows_is_not_0(event, accountant: str) -> None:
    assert accountants.delta(event, 200.0, accountant).delta > 0


@pytest.mark.parametrize(("records", "rate", "at"), [(1000, 1e-3, 0.5), (10**6, 1e-6, 2.0)])
def test_the_curve_of_a_user_with_many_records_is_not_below_the_true_one(
    records: int, rate: float, at: float
) -> None:
    counts, q = range(40), mp.mpf(rate)
    weights = [mp.binomial(records, j) * q**j * (1 - q) ** (records - j) for j in counts]
    ratio = mp.fsum(weights[j] * mp.exp(j * at - mp.mpf(j * j) / 2) for j in counts)
    above = mp.fsum(weights[j] * normal(j - mp.mpf(at)) for j in counts) - ratio * normal(-mp.mpf(at))
    below = normal(mp.mpf(at)) - mp.fsum(weights[j] * normal(mp.mpf(at) - j) for j in counts) / ratio
    pair, loss = curves.user_sampled(1.0, rate, records), float(mp.log(ratio))
    curve, true = (pair.forward, above) if loss > 0 else (pair.backward, below)
    assert curve(np.array([abs(loss)]))[0] >= true - mp.mpf("1e-15")


def test_the_rounding_of_steps_within_a_sampled_event_is_allowed_for() -> None:
    within = Repeat(Sampled("poisson", 0.01, Gaussian(5.0)), 10**6)
    alone = pld.profile({within.event: within.count}, "zero-out").rounding
    assert pld.profile({Sampled("poisson", 0.5, within): 1}, "zero-out").rounding >= 0.5 * alone


@pytest.mark.parametrize(("noise", "least"), [(1e-309, None), (1e-160, None), (1e-152, 5e303)])
def test_next_to_no_noise_does_not_overflow_to_a_small_epsilon(noise: float, least: float | None) -> None:
    found = accountants.epsilon(Gaussian(noise), 1e-5).epsilon
    assert found is None if least is None else found >= least
    assert accountants.delta(Gaussian(noise), 1.0).delta == 1.0


@pytest.mark.parametrize("noise", [0.001, 1.0, 1e4, 1e9])
def test_the_epsilon_of_a_gaussian_holds_at_a_delta_that_has_lost_its_digits(noise: float) -> None:
    assert gaussian_delta(noise, 1, accountants.epsilon(Gaussian(noise), 5e-324).epsilon) <= 5e-324


def test_the_rounding_of_a_sum_of_many_noises_does_not_lower_a_delta() -> None:
    noises = [0.001 + 1e-8 * k for k in range(30_000)]
    shift = mp.sqrt(mp.fsum(1 / mp.mpf(noise) ** 2 for noise in noises))
    event = Compose(tuple(map(Gaussian, noises)))
    epsilon = accountants.epsilon(event, 1e-100).epsilon
    assert gaussian_delta(1 / shift, 1, epsilon) <= accountants.delta(event, epsilon).delta


@pytest.mark.parametrize(
    ("event", "adjacency", "shift"),
    [
        (Sampled("poisson", 0.25, Gaussian(1e12)), "replace-one", 2e-12),
        (Sampled("poisson", 0.25, Gaussian(1e16)), "replace-one", 2e-16),
        (TwoLevel(0.5, 0.5, 1, 1e9), "add-or-remove", 1e-9),
    ],
)
def test_the_delta_at_epsilon_0_of_a_faint_sampled_event_is_not_below_the_true_one(event, adjacency, shift) -> None:
    assert accountants.delta(event, 0.0, adjacency=adjacency).delta >= 0.25 * gaussian_delta(1 / shift, 1, 0.0)


def test_the_moments_of_a_fixed_size_sample_are_not_cut_off() -> None:
    power, shift = 64, mp.mpf("1e-4")
    with mp.workdps(400):
        terms = ((-1) ** k * mp.binomial(power, k) * mp.exp(k * (k - 1) * shift**2 / 2) for k in range(power + 1))
        true = mp.log(4 * mp.fsum(terms))
    assert rdp._log_ternary(1e4, power)[power] >= true - mp.mpf("1e-11")


@pytest.mark.parametrize("order", [64, 256])
def test_the_divergence_of_a_long_block_is_not_below_that_of_its_first_terms(order: int) -> None:
    noise, rounds = 1e3, 10**9
    variance = mp.expm1(1 / mp.mpf(noise) ** 2) / rounds  # of the mean: E M^a >= 1 + a (a - 1) / 2 variance
    (found,) = allocation.divergence(Allocated(((noise, rounds),)), (order,))
    assert found >= mp.log1p(order * (order - 1) * variance / 2) / (order - 1)


@pytest.mark.parametrize(("rate", "noise", "delta"), [(1e-15, 50.0, 1e-14), (0.01, 1.0, 1e-15)])
def test_no_lower_bound_is_known_at_a_delta_that_pld_does_not_resolve(
    rate: float, noise: float, delta: float
) -> None:
    assert accountants.at_least(Sampled("fixed-size", rate, Gaussian(noise)), delta, "replace-one") is None


def test_a_curve_without_a_number_anywhere_is_not_searched_for_ever() -> None:
    """Such as that of a user by next to no noise, whose end is no number either."""
    asked = []

    def curve(epsilon: np.ndarray) -> np.ndarray:
        asked.append(epsilon)
        assert len(asked) < 2000
        return np.full_like(epsilon, np.nan)

    curves.reach(curve, 1e-16, math.nan)
    assert accountants.epsilon(SampledUser(3, 0.01, 1e-309), 1e-5).epsilon is None
