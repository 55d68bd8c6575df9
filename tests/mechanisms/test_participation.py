"""What clients cost that come when they can: no pattern, and no direction of their updates, costs more."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz

from shoal.mechanisms.participation import Participation, block_price, price, price_of
from shoal.mechanisms.schedules import parse

few = settings(max_examples=80, deadline=None)
ROUNDS = 8
COUNTER = np.array([1, 0.2, 0.2, 0.9, 0.1, 0.1, 0.8])


class Noise:
    """Any coefficients, and any schedule of noise."""

    def __init__(self, coefficients, schedule="1"):
        self.c, self.schedule = np.array(coefficients, dtype=float), parse(schedule)

    def multiplier(self, t, total):
        return self.schedule.value(t, total)

    def coefficients(self, participation, rounds):
        return self.c


def matrix(c, rounds=ROUNDS):
    column = np.zeros(rounds)
    column[: len(c)] = c[:rounds]
    return toeplitz(column, np.zeros(rounds))


def patterns(plan, rounds=ROUNDS):
    """Every set of rounds in which a client may take part."""
    for count in range(1, plan.times + 1):
        for came in combinations(range(rounds), count):
            gaps = [later - earlier for earlier, later in pairwise(came)]
            if all(gap >= plan.separation and not (plan.regular and gap % plan.separation) for gap in gaps):
                yield list(came)


def costs(c, plan, scales, rounds=ROUNDS):
    """What each pattern, with each choice of signs, costs in each round: one a row."""
    scaled = matrix(c, rounds) / scales[:, None]
    found = []
    for came in patterns(plan, rounds):
        signs = np.array(list(product([1.0], *[[1.0, -1.0]] * (len(came) - 1))))
        found.append(np.square(signs @ scaled[:, came].T))
    return np.concatenate(found)


def scales_of(noise, rounds=ROUNDS):
    return np.array([noise.multiplier(t, rounds) for t in range(rounds)])


SERIES = st.lists(st.sampled_from([0.9, -0.7, 0.5, 0.3, -0.2, 0.1, 0.0]), max_size=7).map(lambda rest: [1.0, *rest])
SCHEDULES = st.sampled_from(["1", "linear:4:1", "linear:1:4", "cyclic:4:2"])
PLANS = st.builds(
    lambda separation, most, regular: Participation(ROUNDS, separation, None if regular else most, regular),
    st.integers(1, 5), st.sampled_from([None, 1, 2, 3]), st.booleans(),
)  # fmt: skip


@pytest.mark.slow
@few
@given(SERIES, PLANS, SCHEDULES)
def test_no_pattern_and_no_signs_ever_cost_more_than_is_charged(c, plan, schedule):
    """Brute force over all patterns and all signs, after every round."""
    noise = Noise(c, schedule)
    charged = np.cumsum([price(noise, plan, t) for t in range(ROUNDS)])
    found = np.cumsum(costs(c, plan, scales_of(noise)), axis=1).max(axis=0)
    assert (found <= charged * (1 + 1e-12)).all()


@pytest.mark.slow
@few
@given(SERIES, PLANS, SCHEDULES)
def test_a_round_that_is_run_again_costs_nobody_more_than_its_own_price(c, plan, schedule):
    noise = Noise(c, schedule)
    again = [price(noise, plan, t, again=True) for t in range(ROUNDS)]
    found = costs(c, plan, scales_of(noise)).max(axis=0)
    assert (found <= np.array(again) * (1 + 1e-12)).all()


@pytest.mark.parametrize(
    ("c", "plan", "rounds"),
    [
        ([1, 0.5, 0.375, 0.3125, 0.27, 0.25], Participation(8, 2, 3), 8),
        ([1, 0.9, 0.2, 0.2, 0.1], Participation(8, 3), 8),
        ([1, -0.6, 0.5], Participation(8, 3, 2), 8),
        ([1, 0.2, 0.9, 0.0, 0.5], Participation(8, 2, regular=True), 8),
    ],
)
def test_the_charge_is_exact_where_the_theorem_is(c, plan, rounds):
    """Non-increasing coefficients; no more bands than the separation; and, for a cycle, none that is negative."""
    charged = sum(price(Noise(c), plan, t) for t in range(rounds))
    assert charged == pytest.approx(costs(c, plan, np.ones(rounds)).sum(axis=1).max())


def test_the_square_roots_sensitivity_is_that_of_the_literature():
    j = np.arange(1, 12)
    root = np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])
    plan = Participation(12, 3, 3)
    assert np.linalg.norm(plan.reach(root)) == pytest.approx(3.0705365, abs=1e-7)
    assert costs(root, plan, np.ones(12), 12).sum(axis=1).max() == pytest.approx(3.0705365**2, rel=1e-7)


def test_coefficients_that_rise_again_need_their_majorant():
    """The client that comes every other round costs 3.2388; another that may come so costs 3.9051."""
    plan, bare = Participation(12, 2, 3), matrix(COUNTER, 12)
    assert np.linalg.norm(bare[:, [0, 2, 4]].sum(axis=1)) == pytest.approx(3.2388, abs=1e-4)
    worst = costs(COUNTER, plan, np.ones(12), 12).sum(axis=1).max()
    assert worst**0.5 == pytest.approx(3.9051, abs=1e-4)
    charged = sum(price(Noise(COUNTER), plan, t) for t in range(12))
    assert charged**0.5 == pytest.approx(5.97, abs=1e-2)
    assert worst <= charged
    cycle = Participation(12, 2, regular=True)  # in a cycle it could not come so
    assert sum(price(Noise(COUNTER), cycle, t) for t in range(12)) == pytest.approx(
        costs(COUNTER, cycle, np.ones(12), 12).sum(axis=1).max()
    )


@pytest.mark.slow
@few
@given(SERIES, SCHEDULES, st.lists(st.integers(0, ROUNDS - 1), min_size=1, max_size=5))
def test_one_clients_own_price_is_what_its_rounds_cost_it(c, schedule, came):
    """Each round as it comes, in all rounds to come; with every update the other way round it costs no more."""
    noise, plan = Noise(np.abs(c), schedule), Participation(ROUNDS)
    paid = [price_of(noise, plan, t, tuple(came[:i])) for i, t in enumerate(came)]
    moved = matrix(noise.c)[:, came].sum(axis=1) / scales_of(noise)
    assert sum(paid) == pytest.approx(np.square(moved).sum())
    signed = Noise(c, schedule)
    assert sum(price_of(signed, plan, t, tuple(came[:i])) for i, t in enumerate(came)) == pytest.approx(sum(paid))


def test_rounding_counts_in_every_round_that_is_reached_and_in_no_other():
    plan, noise, e = Participation(8, 4), Noise([1, 0.0, 0.5], "2"), 0.01
    once = ((1 + 2 * e) ** 2 + (2 * e) ** 2 + (0.5 + 2 * e) ** 2) / 4
    assert price_of(noise, plan, 3, (), e) == pytest.approx(once)
    assert sum(price(noise, plan, t, rounding=e) for t in range(8)) == pytest.approx(2 * once)
    assert price(noise, plan, 3, rounding=e) == 0


def test_a_cycle_costs_what_it_costs_the_group_with_the_least_noise():
    noise, plan = Noise([1, 0.5], "linear:4:2"), Participation(8, 4, regular=True)
    scales = scales_of(noise)
    assert block_price(noise, plan, 0) == pytest.approx(
        max(1 / scales[t] ** 2 + 0.25 / scales[t + 1] ** 2 for t in range(4))
    )
    assert block_price(noise, plan, 4) == pytest.approx(
        max(1 / scales[t] ** 2 + (0.25 / scales[t + 1] ** 2 if t < 7 else 0) for t in range(4, 8))
    )


def test_who_may_take_part():
    plan = Participation(20, 5, 3)
    assert plan.refused(7, ()) is None
    assert plan.refused(7, (2,)) is None
    assert plan.refused(7, (2, 7)) is None  # run again
    assert "round 8 is too close to round 4" in plan.refused(7, (3,))
    assert "round 8 is too close to round 10" in plan.refused(7, (9,))
    assert "taken part in 3 rounds, and may in 3" in plan.refused(19, (0, 5, 10))
    assert plan.refused(10, (0, 5, 10)) is None
    assert (plan.times, Participation(20, 5).times, Participation(20, 30, 3).times) == (3, 4, 1)
