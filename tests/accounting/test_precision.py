"""Where floating-point numbers lose digits, no figure is below what mpmath finds with 50 digits."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest

from shoal.accounting import accountants, curves, pld, rdp
from shoal.accounting.events import Gaussian, Repeat, Sampled


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
