"""Bounds from guesses about one run: no mechanism does better, and they are the best that the inequalities allow."""

import math
from itertools import chain, combinations, product

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom, norm

from shoal.audit import bounds, one_run_bounds
from shoal.audit.one_run_bounds import Count, epsilon, guesses_of, independent_epsilon, p_value_of, shift


@pytest.mark.parametrize(
    ("count", "mu", "value"),
    [
        (Count(10, 10, 10), 0.678, 2.806),
        (Count(1000, 100, 88), 0.546, 2.200),
        (Count(1000, 200, 142), 0.2645, 0.985),
        (Count(5000, 500, 492), 1.163, 5.219),
    ],
)
def test_bounds_are_those_of_an_independent_implementation(count, mu, value):
    """Computed apart, by the recursion of the PrivacyGuard code, at delta 1e-5 and a confidence of 95%."""
    assert shift((count,), 0.05) == pytest.approx(mu, abs=6e-4)
    assert epsilon([count], 1e-5, 0.05) == pytest.approx(value, abs=3e-3)


def subsets(values):
    return chain.from_iterable(combinations(values, size) for size in range(1, len(values) + 1))


def most_allowed(count, value, delta, sets):
    """max P[V >= v] under the inequalities of these sets, where F is of one (epsilon, delta): a linear program."""
    m, c, v = count.canaries, count.guesses, count.right
    lines = [(math.exp(value), delta), (math.exp(-value), 1 - math.exp(-value) * (1 - delta))]  # F = min of them
    rows, limits = [], []
    for chosen, (slope, start) in product(sets, lines):
        row = np.zeros(c + 1)
        for i in chosen:
            row[i] += i / m
            row[i - 1] -= slope * (c - i + 1) / m
        rows.append(row)
        limits.append(start)
    aim = [-float(i >= v) for i in range(c + 1)]
    return -linprog(aim, A_ub=rows, b_ub=limits, A_eq=[[1.0] * (c + 1)], b_eq=[1.0]).fun


@pytest.mark.parametrize(
    "count", [Count(3, 3, 3), Count(5, 3, 2), Count(6, 4, 4), Count(4, 4, 3)], ids=lambda count: str(vars(count))
)
@pytest.mark.parametrize(("value", "delta"), [(0.5, 0.0), (1.0, 0.05)])
def test_a_p_value_is_the_most_that_the_inequalities_of_upper_sets_allow(count, value, delta):
    """And no less than what all sets allow, which is the theorem."""
    found = p_value_of(bounds.tradeoff_at(value, delta), [count])
    c = count.guesses
    upper = [range(i, c + 1) for i in range(1, c + 1)]
    assert found == pytest.approx(most_allowed(count, value, delta, upper), rel=0.01)
    assert found >= most_allowed(count, value, delta, list(subsets(range(1, c + 1)))) * (1 - 1e-9)


def closest_curve(chances):
    """A symmetric trade-off curve that a mechanism keeps in each coin: P[output | coins], coins first."""
    epsilons, m = np.linspace(0, 12, 200), chances.ndim - 1
    deltas = np.zeros(len(epsilons))
    for j in range(m):
        pair = np.moveaxis(chances, j, 0)
        for one, other in (pair, pair[::-1]):
            beyond = one - np.exp(epsilons).reshape(-1, *(1 for _ in one.shape)) * other
            deltas = np.maximum(deltas, np.maximum(beyond, 0).sum(-1).reshape(len(epsilons), -1).max(1))
    return bounds._envelope(epsilons, deltas)


def best_guesses(chances, c, v):
    """P[V >= v] of the adversary that is best at just this: for each output the best c coins and guesses."""
    m, found = chances.ndim - 1, 0.0
    joint = chances / 2**m
    for output in range(chances.shape[-1]):
        best = 0.0
        for chosen in combinations(range(m), c):
            for said in product((0, 1), repeat=c):
                hit = [
                    joint[(*coins, output)]
                    for coins in product((0, 1), repeat=m)
                    if sum(coins[j] == word for j, word in zip(chosen, said, strict=True)) >= v
                ]
                best = max(best, sum(hit))
        found += best
    return found


@pytest.mark.parametrize("number", range(12))
def test_no_adversary_of_a_small_mechanism_is_right_more_often(number):
    """All outputs, all coins and all guesses of random mechanisms, enumerated."""
    random = np.random.default_rng(number)
    m, outputs = 3, 5
    chances = random.dirichlet(np.full(outputs, random.choice([0.3, 1.0, 5.0])), size=(2,) * m)
    curve = closest_curve(chances)
    for c in (1, 2, 3):
        for v in range(1, c + 1):
            assert best_guesses(chances, c, v) <= p_value_of(curve, [Count(m, c, v)]) * (1 + 1e-9)


@pytest.mark.slow
def test_an_event_that_all_canaries_share_is_within_the_bound_and_beyond_independent_scores():
    """With probability tau a Gaussian mechanism's whole tail comes at once: mechanisms exist that do so."""
    tau, m, mu = 0.05, 10_000, 0.925
    c = guesses_of(m)
    tail = norm.isf(tau * c / m / 2)  # all guesses that this event takes from either end of the scores
    share = norm.sf(tail - mu / 2) / (norm.sf(tail - mu / 2) + norm.sf(tail + mu / 2))
    right = int(share * c)
    assert shift((Count(m, c, right),), tau) < mu * 1.01
    assert p_value_of(lambda x: norm.cdf(norm.isf(x) - mu), [Count(m, c, right)]) > tau
    assert independent_epsilon([Count(c, c, right)], 1e-5, tau) > bounds.epsilon_of_shift(mu, 1e-5)


def test_randomised_response_is_held_to_what_its_binomial_has():
    """Steinke et al. 2023, Theorem 5.2 without delta: the tail of a binomial."""
    for right in (66, 75, 85):
        exact = binom.sf(right - 1, 100, math.e / (1 + math.e)) if right > 73 else 1.0
        found = p_value_of(bounds.tradeoff_at(1.0, 0.0), [Count(100, 100, right)])
        assert exact <= found <= max(2 * exact, 1e-11)
    assert p_value_of(bounds.tradeoff_at(1.0, 1e-3), [Count(100, 100, 85)]) > found


def test_no_better_than_chance_shows_nothing():
    for count in (Count(1000, 100, 0), Count(1000, 100, 50)):
        assert epsilon([count], 1e-5, 0.05) == 0
        assert p_value_of(bounds.tradeoff_at(1.0, 1e-5), [count]) == 1
    assert independent_epsilon([Count(1000, 1000, 500)], 1e-5, 0.05) == 0


@pytest.mark.slow
def test_runs_together_show_more_than_the_best_of_them():
    runs = [Count(1000, 200, right) for right in (160, 165, 170, 165)]
    alone = [epsilon([run], 1e-5, 0.05) for run in runs]
    assert max(alone) < epsilon(runs, 1e-5, 0.05) < 4
    p_values = [p_value_of(bounds.tradeoff_at(0.4, 1e-5), [run]) for run in runs]
    together = p_value_of(bounds.tradeoff_at(0.4, 1e-5), runs)
    assert together < min(p_values)
    assert together == pytest.approx(float(one_run_bounds.fisher([np.array(p) for p in p_values])))


@pytest.mark.parametrize("canaries", [4, 100, 399, 1000, 4000, 10_000])
def test_the_number_of_guesses_is_a_rule_of_the_canaries_alone(canaries):
    assert guesses_of(canaries) % 2 == 0
    assert 2 <= guesses_of(canaries) <= canaries / 2
    assert guesses_of(10_000) == 500
