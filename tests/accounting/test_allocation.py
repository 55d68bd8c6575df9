"""Random allocation: the bound against closed forms, quadrature, simulation and figures computed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.special import ndtr

from shoal.accounting import accountants, allocation, pld
from shoal.accounting.events import Allocated, Compose, Event, Gaussian, Repeat, Sampled, SamplerError
from shoal.accounting.leaves import leaves
from shoal.accounting.rdp import Running
from shoal.errors import ConfigError

BLOCKS = [  # t, k, sigma, delta, epsilon by PLD, epsilon by RDP
    (10, 1, 1.0, 1e-5, 2.1892, 2.5755),
    (100, 1, 1.0, 1e-5, 0.6211, 1.1660),
    pytest.param(1000, 1, 1.0, 1e-6, 0.1718, 0.8694, marks=pytest.mark.slow),
    (100, 1, 0.5, 1e-6, 6.3964, 7.2511),
    pytest.param(1000, 1, 0.6, 1e-6, 2.0705, 3.0514, marks=pytest.mark.slow),
    (100, 1, 2.0, 1e-6, 0.2050, 0.3160),
    (100, 10, 1.0, 1e-5, 6.1172, 6.7547),
    (1000, 10, 1.0, 1e-6, 1.9645, 2.3082),
    pytest.param(1000, 10, 0.7, 1e-6, 5.0414, 5.8058, marks=pytest.mark.slow),
    pytest.param(2000, 20, 0.8, 1e-6, 4.6276, 5.2264, marks=pytest.mark.slow),
]


def allocated(t: int, k: int, noise: float) -> Event:
    return Repeat(Sampled("random-allocation", k / t, Gaussian(noise)), t)


@pytest.mark.slow
@pytest.mark.parametrize(("t", "k", "noise", "delta", "epsilon", "by_rdp"), BLOCKS)
def test_epsilon_is_that_of_the_reference(
    t: int, k: int, noise: float, delta: float, epsilon: float, by_rdp: float
) -> None:
    """Computed by another program with the same method; RDP's by its own formula."""
    event = allocated(t, k, noise)
    assert accountants.epsilon(event, delta, "pld", "zero-out").epsilon == pytest.approx(epsilon, rel=1e-3)
    assert accountants.epsilon(event, delta, "rdp", "zero-out").epsilon == pytest.approx(by_rdp, rel=1e-3)


def test_moments_of_ten_rounds_are_those_of_the_reference() -> None:
    orders = np.array([2.0, 3.0, 4.0, 5.0])
    forward, backward = allocation._moments([(1.0, 10)], orders), allocation._inverse_moments([(1.0, 10)], orders - 1)
    assert forward == pytest.approx([0.158565, 0.503675, 1.100048, 2.131328], abs=1e-6)
    assert backward == pytest.approx([0.143719, 0.422046, 0.828820, 1.359588], abs=1e-6)


def exact(noises: Sequence[float], epsilon: float) -> tuple[float, float]:
    """H(P||Q) and H(Q||P): a closed form over the last round, and quadrature over all others."""
    *others, last = noises
    t = len(noises)
    step = 0.001 if t == 2 else 0.04
    z = np.arange(-10, 11, step)
    weights, rest = np.ones(1), np.zeros(1)
    for noise in others:
        ratio = np.exp(z / noise - 0.5 / noise**2) / t
        rest = np.add.outer(rest, ratio).ravel()
        weights = np.multiply.outer(weights, np.exp(-(z**2) / 2) * step / math.sqrt(2 * math.pi)).ravel()

    def above(cut: np.ndarray) -> np.ndarray:
        """E (Y - cut)+ of a ratio Y."""
        safe = np.maximum(cut, 1e-300)
        far = last * np.log(safe)
        return np.where(cut > 0, ndtr(0.5 / last - far) - safe * ndtr(-0.5 / last - far), 1 - cut)

    cut_p, cut_q = (t * (math.exp(sign * epsilon) - rest) for sign in (1, -1))
    forward = (weights * above(cut_p)).sum() / t
    below = above(cut_q) - (1 - cut_q)  # E (cut - Y)+
    return float(forward), float((weights * np.where(cut_q > 0, below, 0.0)).sum() * math.exp(epsilon) / t)


def test_the_quadrature_itself_is_right() -> None:
    assert exact([1.0, 1.0], 1.0) == pytest.approx((0.0592065011, 0.0501976624), rel=1e-6)
    assert exact([0.7, 0.7], 2.0) == pytest.approx((0.0572766081, 0.0366881098), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "noises", [[1.0, 1.0], [0.7, 0.7], [0.3, 0.3], [3.0] * 2, [1.0] * 3, [0.5] * 3, [0.6, 1.5], [2.0, 1.0, 0.8]]
)
def test_the_bound_is_above_the_truth_in_both_directions_and_close_to_it(noises: list[float]) -> None:
    """All rounds alike or not: never below, and at most a hundredth above where delta is above 1e-8."""
    pair = allocation.pair(Allocated(tuple((noise, 1) for noise in noises)))
    for epsilon in (0.0, 0.2, 0.5, 1.0, 2.0, 4.0):
        for bound, true in zip((pair.forward, pair.backward), exact(noises, epsilon), strict=True):
            found = float(bound(np.array([epsilon]))[0])
            assert found >= true * (1 - 1e-4) - 1e-13
            assert true < 1e-8 or found <= 1.01 * true


def simulated(noise: float, t: int, k: int, trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """log M of k blocks of t rounds, under P and under Q."""
    random = np.random.Generator(np.random.Philox(key=seed))
    losses = np.zeros((2, trials))
    for _ in range(k):
        x = random.standard_normal((2, trials, t)) / noise
        x[0, :, 0] += 1 / noise**2  # whichever round it is
        losses += np.log(np.exp(x - 0.5 / noise**2).mean(axis=2))
    return losses[0], losses[1]


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=1e-8)
@pytest.mark.parametrize(
    ("noise", "t", "k", "epsilon"), [(1.0, 10, 1, 0.5), (0.6, 20, 1, 0.5), (1.0, 10, 3, 1.0), (2.0, 5, 4, 0.5)]
)
def test_the_bound_agrees_with_simulation(noise: float, t: int, k: int, epsilon: float) -> None:
    """In both directions, over several blocks too: inside 6 standard errors, and these are below a hundredth."""
    trials = 200_000
    under_p, under_q = simulated(noise, t, k, trials, seed=t)
    forward = np.maximum(1 - np.exp(epsilon - under_p), 0)
    backward = np.maximum(1 - np.exp(epsilon + under_q), 0)
    whole = pld.profile({Allocated(((noise, t),)): k}, "zero-out").distribution
    for drawn, pmf in ((forward, whole._pmf_remove), (backward, whole._pmf_add)):
        found, error = pmf.get_delta_for_epsilon(epsilon), drawn.std() / math.sqrt(trials)
        assert error < 0.01 * drawn.mean()
        assert drawn.mean() - 6 * error <= found <= drawn.mean() + 6 * error + 0.005 * drawn.mean()


@pytest.mark.slow
def test_rdp_is_never_below_pld() -> None:
    for rounds in (((1.0, 10),), ((0.4, 3),), ((4.0, 20),), ((0.7, 2), (1.4, 3))):
        event = Repeat(Allocated(rounds), 5)
        for delta in (1e-2, 1e-5, 1e-8):
            exact, quick = (accountants.epsilon(event, delta, who, "zero-out").epsilon for who in ("pld", "rdp"))
            assert exact is not None
            assert quick is not None
            assert exact <= quick * (1 + 1e-9)


def test_renyi_divergences_are_those_of_the_law_by_quadrature() -> None:
    """Two rounds of unequal noise, in both directions; at orders that are not whole the chord is above the curve."""
    z, noises = np.arange(-20, 30, 0.05), (0.9, 2.0)
    density = np.exp(-(z**2) / 2) * 0.05 / math.sqrt(2 * math.pi)
    mean = np.add.outer(*(np.exp(z / noise - 0.5 / noise**2) / 2 for noise in noises))
    weights = np.multiply.outer(density, density)
    orders = (1.5, 2.0, 3.0, 6.5)
    found = allocation.divergence(Allocated(tuple((noise, 1) for noise in noises)), orders)
    for order, bound in zip(orders, found, strict=True):
        true = max(math.log((weights * mean**power).sum()) for power in (order, 1 - order)) / (order - 1)
        assert true * (1 - 1e-9) <= bound <= true * (1.0001 if order == int(order) else 1.6)


def test_orders_that_are_too_high_cost_as_much_as_a_known_round() -> None:
    found = allocation.divergence(Allocated(((3.0, 50),)), (200.0, 1024.0))
    assert found[0] < 200 / 18 * 0.99
    assert found[1] == 1024 / 18


@pytest.mark.slow
def test_more_rounds_cost_less_and_one_round_is_a_gaussian() -> None:
    costs = [accountants.epsilon(allocated(t, 1, 1.0), 1e-5, adjacency="zero-out").epsilon for t in (1, 2, 3, 20)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == pytest.approx(accountants.epsilon(Gaussian(1.0), 1e-5).epsilon)


@pytest.mark.slow
def test_noise_that_is_too_little_for_the_grid_is_not_amplified() -> None:
    tiny = Allocated(((0.02, 5),))
    assert allocation.pair(tiny).forward(np.ones(1))[0] <= 1
    assert np.isfinite(allocation.divergence(tiny, (2.0, 30.0))).all()
    known = allocation.divergence(Allocated(((1e-8, 5),)), (2.0,))  # as if the round were known, in no memory
    assert known == pytest.approx(1e16)


@pytest.mark.slow
def test_many_noises_in_a_block_are_rounded_down() -> None:
    noises = np.linspace(1.0, 2.0, 30)
    many, least, most = (
        accountants.epsilon(event, 1e-5, adjacency="zero-out").epsilon
        for event in (
            Allocated(tuple((float(noise), 1) for noise in noises)),
            Allocated(((1.0, 30),)),
            Allocated(((2.0, 30),)),
        )
    )
    assert most < many < least


def test_a_round_of_a_block_that_is_run_again_is_a_poisson_round_more() -> None:
    """What is drawn anew has nothing to do with the allocation, so both add up."""
    block, again = Allocated(((1.0, 10),)), Sampled("poisson", 0.1, Gaussian(1.0))
    both = accountants.epsilon(Compose((block, again)), 1e-5, adjacency="zero-out").epsilon
    assert both > accountants.epsilon(block, 1e-5, adjacency="zero-out").epsilon


def test_the_running_account_counts_blocks() -> None:
    running = Running("zero-out")
    running.add(Compose((Allocated(((1.0, 10),)), SamplerError(1e-9))))
    assert running.epsilon(1e-5) == pytest.approx(2.5755, rel=1e-2)


def test_replace_one_proves_nothing() -> None:
    for event in (Allocated(((1.0, 10),)), allocated(10, 1, 1.0), Repeat(Allocated(((1.0, 10),)), 3)):
        with pytest.raises(ConfigError, match="random-allocation sampling under replace-one is not accounted"):
            accountants.epsilon(event, 1e-5, adjacency="replace-one")
    assert leaves(allocated(10, 1, 1.0)) == {Allocated(((1.0, 10),)): 1}


def test_a_figure_says_what_it_rests_on() -> None:
    found = accountants.epsilon(allocated(10, 1, 1.0), 1e-5, adjacency="zero-out")
    assert found.valid
    assert found.because == "holds only where it is hidden in which round of a block the unit took part"
