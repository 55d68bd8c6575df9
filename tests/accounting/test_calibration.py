"""Calibration never overspends, and wastes next to nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.accounting import accountants, calibration
from shoal.accounting.calibration import Budget
from shoal.accounting.events import Compose, Event, Gaussian, Repeat, Sampled, TwoLevel, Unbounded
from shoal.errors import ConfigError


def poisson(rate: float, noise: float, count: int) -> Event:
    return Repeat(Sampled("poisson", rate, Gaussian(noise)), count)


def two_level(noise: float) -> Event:
    return Repeat(TwoLevel(0.2, 0.1, 10, noise), 20)


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None, max_examples=6)
@given(
    st.floats(0.2, 12),
    st.floats(-8, -3).map(lambda power: 10**power),
    st.floats(-2.5, 0).map(lambda power: 10**power),
    st.integers(1, 2000),
)
def test_calibrated_noise_keeps_the_budget_and_a_little_less_noise_does_not(
    epsilon: float, delta: float, rate: float, count: int
) -> None:
    budget = Budget(epsilon, delta)
    found = calibration.noise(lambda noise: poisson(rate, noise, count), budget)
    spent = accountants.epsilon(poisson(rate, found.value, count), delta).epsilon
    assert spent is not None
    assert spent <= epsilon
    assert found.answer.epsilon == spent
    less = accountants.epsilon(poisson(rate, found.value * 0.999, count), delta).epsilon
    assert less is not None
    assert less > epsilon


@pytest.mark.parametrize("accountant", list(accountants.REGISTRY.own))
def test_every_accountant_can_be_calibrated(accountant: str) -> None:
    budget = Budget(3.0, 1e-5, accountant)
    found = calibration.noise(lambda noise: Repeat(Gaussian(noise), 10), budget)
    assert budget.cost(Repeat(Gaussian(found.value), 10)).epsilon == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize("event_at", [lambda z: Gaussian(z), two_level])
def test_other_events_can_be_calibrated(event_at: Callable[[float], Event]) -> None:
    found = calibration.noise(event_at, Budget(4.0, 1e-5))
    assert found.answer.epsilon == pytest.approx(4.0, rel=1e-3)
    assert found.answer.epsilon is not None
    assert found.answer.epsilon <= 4.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event_at", "budget"),
    [
        (lambda count: poisson(0.02, 1.5, count), Budget(3.0, 1e-5)),
        (lambda count: poisson(0.5, 4, count), Budget(8.0, 1e-3, "rdp")),
        (lambda count: Repeat(Gaussian(20), count), Budget(2.0, 1e-6)),
        (lambda count: Repeat(TwoLevel(0.1, 0.1, 10, 2), count), Budget(2.0, 1e-5)),
        (
            lambda count: Repeat(Sampled("with-replacement", 0.01, Gaussian(4), draws=3), count),
            Budget(2.0, 1e-5),
        ),
    ],
)
def test_rounds_are_the_most_that_the_budget_pays(event_at: Callable[[int], Event], budget: Budget) -> None:
    found = int(calibration.rounds(event_at, budget).value)
    assert found > 1
    spent, over = (budget.cost(event_at(count)).epsilon for count in (found, found + 1))
    assert spent is not None
    assert over is not None
    assert spent <= budget.epsilon < over


def test_no_round_at_all_where_one_is_too_dear() -> None:
    found = calibration.rounds(lambda count: Repeat(Gaussian(0.5), count), Budget(1.0, 1e-5))
    assert found.value == 0
    assert found.answer.epsilon == 0


def test_no_more_rounds_than_were_planned() -> None:
    found = calibration.rounds(lambda count: Repeat(Gaussian(50), count), Budget(8.0, 1e-5), most=30)
    assert found.value == 30


@pytest.mark.slow
def test_a_schedule_stops_before_the_round_that_passes_the_budget() -> None:
    def event_at(count: int) -> Event:
        return Compose(tuple(Sampled("poisson", 0.1, Gaussian(6 - 4 * t / 100)) for t in range(count)))

    budget = Budget(0.8, 1e-5)
    found = int(calibration.rounds(event_at, budget, most=100).value)
    assert 1 < found < 100
    over = budget.cost(event_at(found + 1)).epsilon
    assert over is not None
    assert over > 0.8


def test_nothing_can_be_calibrated_where_nothing_is_proven() -> None:
    def event_at(noise: float) -> Event:
        return Compose((Gaussian(noise), Unbounded("the clip is a median")))

    with pytest.raises(ConfigError, match="the clip is a median"):
        calibration.noise(event_at, Budget(1.0, 1e-5))


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
def test_a_budget_that_is_none_is_refused(epsilon: float) -> None:
    with pytest.raises(ConfigError, match="the budget's epsilon must be > 0"):
        Budget(epsilon, 1e-5)


def test_a_budget_that_no_noise_meets_is_refused() -> None:
    with pytest.raises(ConfigError, match="no noise between"):
        calibration.noise(lambda noise: Sampled("poisson", 0.0, Gaussian(noise)), Budget(1.0, 1e-5))
