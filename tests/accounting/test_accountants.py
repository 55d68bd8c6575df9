"""The accountants against closed forms, against each other, and against two other libraries."""

from __future__ import annotations

import math
import tracemalloc

import dp_accounting
import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from shoal.accounting import accountants, curves, pld, rdp
from shoal.accounting.events import (
    NOTHING,
    Compose,
    Event,
    Gaussian,
    OnClients,
    Repeat,
    Sampled,
    SamplerError,
    TwoLevel,
    Unbounded,
)
from shoal.accounting.leaves import leaves
from shoal.accounting.theorems import Adjacency
from shoal.errors import ConfigError

DELTA = 1e-5
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE

rates = st.floats(-3, -0.3).map(lambda power: 10**power)
noises = st.floats(-0.1, 0.8).map(lambda power: 10**power)
counts = st.floats(0, 3).map(lambda power: int(10**power))
deltas = st.floats(-8, -3).map(lambda power: 10**power)


def records(count: int) -> settings:
    """The same `count` random parameter sets every time."""
    slow = [HealthCheck.too_slow]
    return settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=slow)


divergences = st.one_of(st.just(0.0), st.floats(-20, 6).map(lambda power: 10**power), st.just(math.inf))


@pytest.mark.slow
@records(50)
@given(st.lists(divergences, min_size=len(rdp.DEFAULT), max_size=len(rdp.DEFAULT)), st.floats(-30, -0.01))
def test_rdp_is_turned_into_epsilon_as_dp_accounting_does_it(found: list[float], power: float) -> None:
    for spent in (np.array(found), np.sort(found), np.full(len(found), found[0])):
        for orders in (rdp.DEFAULT, (1.005, *rdp.DEFAULT[1:])):
            ours, theirs = rdp.epsilon(orders, spent, 10**power), compute_epsilon(orders, spent, 10**power)[0]
            assert ours == pytest.approx(theirs, rel=1e-12)


def poisson(rate: float, noise: float, count: int) -> Event:
    return Repeat(Sampled("poisson", rate, Gaussian(noise)), count)


def fixed_size(rate: float, noise: float, count: int) -> Event:
    return Repeat(Sampled("fixed-size", rate, Gaussian(noise)), count)


def epsilon(event: Event, delta: float = DELTA, **options: str) -> float:
    found = accountants.epsilon(event, delta, **options).epsilon  # type: ignore[arg-type]
    assert found is not None
    return found


# Against other libraries


@pytest.mark.slow
@records(10)
@given(rates, noises, counts, deltas)
def test_pld_lies_inside_the_bracket_of_prv_accountant(rate: float, noise: float, count: int, delta: float) -> None:
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    assume(epsilon(poisson(rate, noise, count), delta, accountant="rdp") < 25)  # else it takes minutes
    mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=rate)
    other = PRVAccountant([mechanism], eps_error=0.02, delta_error=delta * 1e-4, max_self_compositions=[count])
    low, _, high = other.compute_epsilon(delta=delta, num_self_compositions=[count])
    assert low <= epsilon(poisson(rate, noise, count), delta) <= high


@pytest.mark.slow
@records(12)
@given(rates, noises, counts, deltas)
def test_pld_is_that_of_dp_accounting_and_never_looser(rate: float, noise: float, count: int, delta: float) -> None:
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    theirs = PLDAccountant(value_discretization_interval=1e-3).compose(event, count).get_epsilon(delta)
    assert epsilon(poisson(rate, noise, count), delta) <= theirs * (1 + 1e-4) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "noise", "count"), [(0.01, 1.0, 500), (0.2, 2.0, 50), (0.5, 1.5, 3)])
def test_poisson_sampling_under_replace_one_is_that_of_dp_accounting(rate: float, noise: float, count: int) -> None:
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    theirs = PLDAccountant(REPLACE_ONE).compose(event, count).get_epsilon(DELTA)
    ours = epsilon(poisson(rate, noise, count), adjacency="replace-one")
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
@records(30)
@given(rates, st.floats(-0.9, 1.5).map(lambda power: 10**power))
def test_renyi_divergence_is_that_of_dp_accounting_at_whole_orders_and_no_more_at_others(
    rate: float, noise: float
) -> None:
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    orders = (1.1, 1.5, 2, 2.5, 3, 4.5, 17, 63, 256)
    theirs = RdpAccountant(list(orders)).compose(event).rdp
    ours = rdp.poisson_gaussian(rate, np.array([noise]), orders)[0]
    whole = np.array([order == int(order) for order in orders])
    np.testing.assert_allclose(ours[whole], theirs[whole], rtol=1e-6, atol=1e-13)
    assert (ours <= theirs * (1 + 1e-6) + 1e-13).all()


def test_each_noise_of_a_schedule_has_its_own_divergence_however_often_it_comes() -> None:
    noises, orders = np.array([2.0, 0.7, 2.0, 5.0, 0.7]), (1.5, 2, 17)
    alone = [rdp.poisson_gaussian(0.1, noises[t : t + 1], orders)[0] for t in range(len(noises))]
    np.testing.assert_array_equal(rdp.poisson_gaussian(0.1, noises, orders), alone)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.7])
@pytest.mark.parametrize("noise", [0.05, 0.3, 2.0, 30.0])
def test_renyi_divergence_without_replacement_is_that_of_dp_accounting(rate: float, noise: float) -> None:
    """To rounding where theirs is exact; never above (they bound what we compute, or lose digits)."""
    units = 10**9
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        units, rate * units, dp_accounting.GaussianDpEvent(noise / 2)
    )
    orders = (1.3, 2, 2.5, 3, 8, 21, 63, 128, 512)
    theirs = RdpAccountant(list(orders), REPLACE_ONE).compose(event).rdp
    step = Sampled("fixed-size", rate, Gaussian(noise))
    ours = rdp.divergence(step, "replace-one", orders)
    np.testing.assert_allclose(ours[:5], theirs[:5], rtol=1e-9)
    assert (ours <= theirs * (1 + 1e-9)).all()


@pytest.mark.parametrize("noise", [15.0, 50.0])
def test_renyi_divergence_of_replaced_records_at_a_rate_near_1_is_that_of_a_gaussian_at_every_order(
    noise: float,
) -> None:
    almost_always = rdp.divergence(Sampled("poisson", 1 - 1e-12, Gaussian(noise)), "replace-one")
    always = rdp.divergence(Gaussian(noise), "replace-one")
    np.testing.assert_allclose(almost_always, always, rtol=1e-3)


def test_renyi_divergence_of_replaced_records_needs_little_memory_at_the_least_noise() -> None:
    """All orders over the longest grid at once took a gigabyte."""
    tracemalloc.start()
    rdp.divergence.__wrapped__(Sampled("poisson", 0.3, Gaussian(0.1)), "replace-one")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


@pytest.mark.parametrize("rate", [1e-6, 1e-12, 1e-18])
def test_a_record_that_is_hardly_ever_sampled_and_replaced_costs_its_rate_times_as_much(rate: float) -> None:
    found = curves.poisson_replaced(1.0, rate).forward(np.zeros(1))[0]
    assert found == pytest.approx(rate * (norm.cdf(1) - norm.cdf(-1)), rel=1e-9, abs=0)


@pytest.mark.slow
def test_dp_accounting_means_the_clip_by_replace_one_in_rdp_but_twice_the_clip_in_pld() -> None:
    """The same event, two meanings: why noise is halved before dp-accounting's RDP sees it, and not for PLD."""
    event = dp_accounting.GaussianDpEvent(2)
    in_rdp = RdpAccountant(neighboring_relation=REPLACE_ONE).compose(event).get_epsilon(DELTA)
    in_pld = PLDAccountant(REPLACE_ONE).compose(event).get_epsilon(DELTA)
    assert in_rdp == pytest.approx(2.166, abs=5e-4)
    assert in_pld == pytest.approx(4.377, abs=5e-4)
    assert epsilon(Gaussian(2), adjacency="replace-one") == pytest.approx(4.377, abs=5e-4)
    ours = epsilon(Gaussian(2), accountant="rdp", adjacency="replace-one")
    assert ours == pytest.approx(RdpAccountant().compose(dp_accounting.GaussianDpEvent(1)).get_epsilon(DELTA))
    assert ours > 4.377


# Against closed forms


@pytest.mark.parametrize(("noise", "count"), [(1.0, 1), (3.0, 40), (0.05, 7), (1000.0, 10**6)])
@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-15])
def test_gaussians_without_sampling_are_exact(noise: float, count: int, delta: float) -> None:
    exact = get_epsilon_gaussian(noise / math.sqrt(count), delta)
    assert epsilon(Repeat(Gaussian(noise), count), delta) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("count", [1, 30, 3000, 10**6])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_discretised_route_is_an_upper_bound_next_to_the_exact_value(count: int, delta: float) -> None:
    """Nearly all are sampled, so the figure is nearly the closed form, but goes through grid and FFT."""
    shift = 1.2
    noise = math.sqrt(count) / shift
    distribution = pld._compose([(curves.gaussian(1 / noise), count)])
    exact = get_epsilon_gaussian(1 / shift, delta)
    found = distribution.get_epsilon_for_delta(delta)
    assert exact * (1 - 1e-6) <= found <= exact * (1 + 2e-4)


def test_shuffled_batches_are_not_amplified() -> None:
    passes = Repeat(Sampled("shuffled", 0.01, Gaussian(6)), 10_000)
    assert leaves(passes) == {Gaussian(6): 100}
    found = epsilon(passes, adjacency="zero-out")
    assert found == pytest.approx(get_epsilon_gaussian(6 / math.sqrt(100), DELTA))
    assert found > 10 * epsilon(poisson(0.01, 6, 10_000))


def test_a_shuffled_run_that_ends_within_a_pass_counts_that_pass() -> None:
    half = Repeat(Sampled("shuffled", 0.1, Gaussian(6)), 5)
    assert leaves(half) == {Gaussian(6): 1}
    assert leaves(Repeat(half, 4)) == {Gaussian(6): 4}
    assert leaves(Repeat(Sampled("shuffled", 0.07, Gaussian(6)), 100)) == {Gaussian(6): 7}


@pytest.mark.parametrize(
    ("rate", "steps", "times"),
    [(1e-12, 1, 1), (1e-9, 1, 1), (5e-324, 1, 1), (1e-9, 10**9, 1), (1e-9, 10**9 + 1, 2), (1e-12, 3 * 10**12 + 1, 4)],
)
def test_a_shuffled_step_of_a_tiny_rate_counts_the_pass_that_it_begins(rate: float, steps: int, times: int) -> None:
    assert leaves(Repeat(Sampled("shuffled", rate, Gaussian(6)), steps)) == {Gaussian(6): times}


def test_passes_that_come_out_even_are_not_rounded_to_one_more() -> None:
    for batches in range(1, 2000):
        assert leaves(Repeat(Sampled("shuffled", 1 / batches, Gaussian(6)), 7 * batches)) == {Gaussian(6): 7}


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "rate", "at"), [(1.0, 0.3, 0.2), (2.5, 0.05, 1.0), (0.3, 0.9, 0.05)])
def test_curves_are_hockey_stick_divergences(shift: float, rate: float, at: float) -> None:
    x = np.linspace(-30, 30, 2_000_001)
    here, there = norm.pdf(x, loc=shift), norm.pdf(x)
    mixed = rate * here + (1 - rate) * there
    opposite = rate * norm.pdf(x, loc=-shift) + (1 - rate) * there

    def divergence(p: np.ndarray, q: np.ndarray) -> float:
        return float(np.trapezoid(np.maximum(p - math.exp(at) * q, 0), x))

    e = np.array([at])
    sampled = curves.amplified(curves.gaussian(shift), rate)
    assert sampled.forward(e)[0] == pytest.approx(divergence(mixed, there), abs=1e-9)
    assert sampled.backward(e)[0] == pytest.approx(divergence(there, mixed), abs=1e-9)
    assert curves.poisson_replaced(shift, rate).forward(e)[0] == pytest.approx(divergence(mixed, opposite), abs=1e-9)
    seen = curves.sometimes(curves.gaussian(shift), rate)
    assert seen.forward(e)[0] == pytest.approx(rate * divergence(here, there), abs=1e-9)
    assert curves.amplified_both_ways(curves.gaussian(shift), rate).backward(e)[0] == pytest.approx(
        divergence(mixed, there), abs=1e-9
    )


# Against each other


@pytest.mark.slow
@records(15)
@given(rates, noises, counts, deltas)
def test_pld_is_never_above_rdp_nor_rdp_above_the_classic_conversion(
    rate: float, noise: float, count: int, delta: float
) -> None:
    for event in (poisson(rate, noise, count), fixed_size(rate, noise, count)):
        tight = epsilon(event, delta)
        assert tight <= epsilon(event, delta, accountant="rdp") + 1e-6
    classic = epsilon(poisson(rate, noise, count), delta, accountant="rdp-classic")
    assert epsilon(poisson(rate, noise, count), delta, accountant="rdp") <= classic * (1 + 1e-9)


@pytest.mark.slow
@records(10)
@given(rates, noises, st.integers(1, 300), deltas)
def test_fixed_size_sampling_under_replace_one_lies_in_its_bracket(
    rate: float, noise: float, count: int, delta: float
) -> None:
    event = fixed_size(rate, noise, count)
    low = accountants.at_least(event, delta, "replace-one")
    high = epsilon(event, delta, adjacency="replace-one")
    assert low is not None
    assert low <= high + 1e-6
    assert high <= epsilon(Repeat(Gaussian(noise), count), delta, adjacency="replace-one") * (1 + 1e-3) + 1e-6
    assert high <= epsilon(event, delta, accountant="rdp", adjacency="replace-one") + 1e-6


@pytest.mark.slow
@records(15)
@given(rates, noises, counts, deltas)
def test_epsilon_is_monotone(rate: float, noise: float, count: int, delta: float) -> None:
    """In the sampling rate, the number of steps, the noise and delta, up to the width of the grid."""
    here = epsilon(poisson(rate, noise, count), delta) * (1 + 2e-4) + 1e-6
    assert epsilon(poisson(rate / 1.2, noise, count), delta) <= here
    assert epsilon(poisson(rate, noise * 1.2, count), delta) <= here
    assert epsilon(poisson(rate, noise, max(1, count // 2)), delta) <= here
    assert epsilon(poisson(rate, noise, count), delta * 2) <= here


@pytest.mark.parametrize(
    ("rate", "noise", "count"), [(0.01, 1.0, 1000), (0.05, 6.2, 300), (0.5, 0.3, 10), (0.5, 0.02, 3)]
)
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.01, 0.9])
def test_epsilon_is_read_from_a_distribution_as_dp_accounting_reads_it(rate, noise, count, delta) -> None:
    """The last noise leaves losses of hundreds, where e^-loss is 0. The library's sums drift from loss to loss."""
    whole = pld.profile({Sampled("poisson", rate, Gaussian(noise)): count}, "zero-out").distribution
    own = [pld._least_epsilon(half, delta) for half in pld._halves(whole)]
    assert max(own) == pytest.approx(whole.get_epsilon_for_delta(delta), rel=1e-7)
    assert pld._least_epsilon(whole._pmf_remove, whole._pmf_remove._infinity_mass / 2) == math.inf


def test_no_distribution_has_a_larger_divergence_at_the_epsilon_read_from_it() -> None:
    """Also with masses below 0 by rounding, without losses above 0, and where delta is all or none of the mass."""
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 50, 400) * 20:
        infinite = float(rng.choice([0.0, 1e-10, 1e-3]))
        mass = 10 ** rng.uniform(-18, 0, size) * (rng.random(size) < 0.7)
        mass = mass / max(mass.sum(), 1e-18) * (1 - infinite) + rng.normal(size=size) * 1e-17
        low, interval = int(rng.integers(-2 * size, size)), float(10 ** rng.uniform(-4, 0.3))
        losses = (np.arange(size) + low) * interval
        for delta in (infinite, 1.0, *10.0 ** rng.uniform(-15, -1, 5)):
            found = pld._least_epsilon(DensePLDPmf(interval, low, mass, infinite, True), delta)
            above = losses > found
            divergence = math.fsum([infinite, *(mass[above] * -np.expm1(found - losses[above]))])
            assert divergence <= delta + 1e-15 if found < math.inf else infinite > delta


def test_no_epsilon_is_read_from_masses_that_are_no_numbers() -> None:
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    assert pld._least_epsilon(DensePLDPmf(0.1, -1, np.array([0.5, 0.4, np.nan]), 0.0, True), 0.1) == math.inf


@pytest.mark.slow
@records(10)
@given(rates, noises, counts, deltas)
def test_delta_and_epsilon_are_inverse(rate: float, noise: float, count: int, delta: float) -> None:
    event = poisson(rate, noise, count)
    for accountant in ("pld", "rdp", "rdp-classic"):
        there = epsilon(event, delta, accountant=accountant)
        if there > 0:
            back = accountants.delta(event, there, accountant).delta
            assert back == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize("accountant", ["zcdp", "basic", "advanced"])
def test_textbook_delta_and_epsilon_are_inverse(accountant: str) -> None:
    event = Repeat(Gaussian(8), 20)
    there = epsilon(event, accountant=accountant)
    assert accountants.delta(event, there, accountant).delta == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.slow
def test_a_schedule_of_noise_is_bounded_from_above_and_closely() -> None:
    """The bins of PLD are rounded down; RDP takes every noise as it is."""
    falling = [8 - 4 * t / 2000 for t in range(2000)]
    event = Compose(tuple(Sampled("poisson", 0.02, Gaussian(noise)) for noise in falling))
    binned = epsilon(event)
    exact_rdp = epsilon(event, accountant="rdp")
    constant = poisson(0.02, (np.mean(np.square(falling) ** -1.0)) ** -0.5, 2000)
    nearly = epsilon(constant)
    assert nearly < binned < 1.012 * nearly
    assert exact_rdp == pytest.approx(epsilon(constant, accountant="rdp"), rel=4e-3)
    few = Compose(tuple(poisson(0.02, noise, 50) for noise in falling[::50]))
    assert epsilon(few) == pytest.approx(nearly, rel=0.01)


@pytest.mark.slow
def test_a_figure_that_is_kept_is_that_of_its_events_adjacency_and_delta() -> None:
    asked = [
        ({Sampled("poisson", 0.1, Gaussian(noise)): count}, adjacency, delta)
        for noise in (2.0, 3.0)
        for count in (5, 6)
        for adjacency in ("add-or-remove", "replace-one")
        for delta in (1e-5, 1e-6)
    ]
    first, again = ([pld.epsilon(*each) for each in asked] for _ in range(2))  # type: ignore[arg-type]
    true = [pld.profile(counts, adjacency).epsilon(delta) for counts, adjacency, delta in asked]  # type: ignore[arg-type]
    assert first == again == true
    assert len(set(true)) == len(asked)


def test_order_does_not_matter_and_repetition_is_composition() -> None:
    one, other = poisson(0.1, 2, 5), Gaussian(9)
    assert epsilon(Compose((one, other, one))) == pytest.approx(epsilon(Compose((other, poisson(0.1, 2, 10)))))
    assert epsilon(OnClients(3, one)) == pytest.approx(epsilon(Repeat(one, 3)))


# Two levels, and sampling that is rarer


@pytest.mark.parametrize("adjacency", ["add-or-remove", "replace-one"])
def test_two_levels_lie_between_one_sample_of_records_and_no_choice_of_clients(adjacency: str) -> None:
    hidden, visible = (
        epsilon(Repeat(TwoLevel(0.1, 0.1, 20, 2, participation=seen), 50), adjacency=adjacency)
        for seen in ("hidden", "visible")
    )
    product = epsilon(poisson(0.01, 2, 1000), adjacency=adjacency)
    always = epsilon(poisson(0.1, 2, 1000), adjacency=adjacency)
    assert product * 0.999 <= hidden < visible < always


def test_two_levels_reduce_to_one_where_a_level_takes_all() -> None:
    everyone = Repeat(TwoLevel(1.0, 0.1, 20, 2), 5)
    assert epsilon(everyone) == pytest.approx(epsilon(poisson(0.1, 2, 100)))
    whole = Repeat(TwoLevel(0.1, 1.0, 1, 2, local="none", participation="hidden"), 5)
    assert epsilon(whole) == pytest.approx(epsilon(poisson(0.1, 2, 5)), rel=1e-6)


def test_client_sampling_that_shows_is_the_mixture_over_participations() -> None:
    """With visible participation delta is the mean over how often the client took part."""
    from scipy.stats import binom

    rounds, rate, noise, at = 30, 0.2, 3.0, 1.0
    event = Repeat(TwoLevel(rate, 1.0, 1, noise, local="none"), rounds)
    mean = sum(
        binom.pmf(k, rounds, rate) * curves.gaussian(math.sqrt(k) / noise).forward(np.array([at]))[0]
        for k in range(1, rounds + 1)
    )
    assert accountants.delta(event, at).delta == pytest.approx(mean, rel=1e-3)


def test_choosing_clients_does_not_amplify_where_it_shows() -> None:
    """A distinguisher for one round: the client's other records give away that it took part.

    The output is two numbers, each with unit noise: the record's sum, and the client's other records, which
    move it by 40. The likelihood ratio then knows when to look at the first, and its divergence is above
    what amplification by client sampling would allow: why `hidden` is a claim of its own.
    """
    rate, shift, at = 0.1, 1.0, 0.5
    e = np.array([at])
    truth = rate * curves.gaussian(shift).forward(e)[0]
    amplified = curves.amplified(curves.gaussian(shift), rate).forward(e)[0]
    assert truth > 1.5 * amplified
    event = TwoLevel(rate, 1.0, 1, 1 / shift, local="none")
    assert accountants.delta(event, at).delta == pytest.approx(truth, rel=1e-4)


@pytest.mark.slow
def test_sampling_with_replacement_costs_more_than_without() -> None:
    for adjacency in ("add-or-remove", "replace-one"):
        with_replacement = Repeat(Sampled("with-replacement", 0.01, Gaussian(3), draws=64), 100)
        dearer = epsilon(with_replacement, adjacency=adjacency)
        assert dearer > epsilon(fixed_size(0.01, 3, 100), adjacency=adjacency)


def test_a_single_draw_with_replacement_is_a_sample_of_one() -> None:
    drawn = Repeat(Sampled("with-replacement", 0.01, Gaussian(3), draws=1), 100)
    assert epsilon(drawn) == pytest.approx(epsilon(fixed_size(0.01, 3, 100)), rel=1e-6)


def test_renyi_accounting_of_two_levels_is_a_bound() -> None:
    for seen in ("visible", "hidden"):
        event = Repeat(TwoLevel(0.05, 0.1, 10, 1.5, participation=seen), 40)
        assert epsilon(event) <= epsilon(event, accountant="rdp")


def test_steps_too_faint_to_matter_cost_nothing_and_break_nothing() -> None:
    faint = Sampled("poisson", 1e-15, Gaussian(50))
    for event in (faint, Repeat(TwoLevel(0.1, 1e-15, 3, 50, participation="hidden"), 10)):
        assert epsilon(event) == 0
        assert accountants.delta(event, 0.0).delta == pytest.approx(0, abs=1e-15)


# What is not proven, and what is refused


@pytest.mark.parametrize("accountant", list(accountants.REGISTRY.own))
def test_an_unbounded_event_gives_none_and_its_reason(accountant: str) -> None:
    event = Compose((Gaussian(3), Sampled("poisson", 0.1, Unbounded("no clip"))))
    answer = accountants.epsilon(event, DELTA, accountant)
    assert (answer.epsilon, answer.valid, answer.because) == (None, False, "no clip")
    assert accountants.delta(event, 1.0, accountant).delta is None


@pytest.mark.parametrize("accountant", list(accountants.REGISTRY.own))
def test_nothing_done_costs_nothing(accountant: str) -> None:
    assert epsilon(NOTHING, accountant=accountant) == 0
    assert epsilon(Repeat(Sampled("poisson", 0.0, Gaussian(1)), 100), accountant=accountant) == 0


@pytest.mark.parametrize(
    ("event", "accountant", "adjacency"),
    [
        (Sampled("with-replacement", 0.1, Gaussian(1), draws=3), "rdp", "add-or-remove"),
        (TwoLevel(0.1, 0.1, 3, 1), "zcdp", "add-or-remove"),
        (TwoLevel(0.1, 0.1, 3, 1), "basic", "add-or-remove"),
        (Sampled("fixed-size", 0.1, poisson(0.1, 1, 2)), "pld", "add-or-remove"),
        (Sampled("poisson", 0.1, poisson(0.1, 1, 2)), "pld", "replace-one"),
    ],
)
def test_an_event_that_an_accountant_does_not_understand_is_refused(
    event: Event, accountant: str, adjacency: str
) -> None:
    with pytest.raises(ConfigError, match="does not understand"):
        accountants.epsilon(event, DELTA, accountant, adjacency)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accountant": "pdl"}, "did you mean 'pld'"),
        ({"adjacency": "replace"}, "did you mean 'replace-one'"),
        ({"accountant": "rdp-classic", "orders": "tf71"}, "did you mean 'tf72'"),
    ],
)
def test_a_wrong_name_gets_the_nearest_right_one(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        accountants.epsilon(Gaussian(1), DELTA, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_that_is_none_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta must be in"):
        accountants.epsilon(Gaussian(1), delta)


def test_a_delta_too_small_for_the_grid_is_answered_by_rdp_and_said_so() -> None:
    answer = accountants.epsilon(poisson(0.01, 1, 10_000), 1e-14)
    assert answer.accountant == "rdp"
    assert answer.because is not None
    tiny = accountants.delta(poisson(0.01, 6, 100), 20.0)
    assert tiny.delta is not None
    assert tiny.delta < 1e-30


def test_the_moments_accountant_on_samples_of_fixed_size_is_not_valid() -> None:
    answer = accountants.epsilon(fixed_size(0.5, 1.2, 11), 1e-3, "rdp-classic", "replace-one", "2-33")
    assert answer.epsilon == pytest.approx(7.93, abs=0.01)
    assert not answer.valid


# The accountant of a running run


@pytest.mark.slow
def test_the_running_accountant_is_rdp_step_by_step() -> None:
    running = rdp.Running()
    sampler = SamplerError(1e-9)  # which counts in `epsilon_with` too
    rounds = [Compose((Sampled("poisson", 0.05, Gaussian(2 - t / 100)), sampler)) for t in range(60)]
    for event in rounds:
        ahead = running.epsilon_with(event, DELTA)
        running.add(event)
        assert running.epsilon(DELTA) == pytest.approx(ahead, rel=1e-12)
    assert running.epsilon(DELTA) == pytest.approx(epsilon(Compose(tuple(rounds)), accountant="rdp"), rel=1e-9)


def test_the_running_accountant_never_proves_anything_again_after_an_unbounded_event() -> None:
    running = rdp.Running()
    running.add(Gaussian(5))
    assert running.epsilon_with(Unbounded("l2-max"), DELTA) is None
    assert running.epsilon(DELTA) is not None
    running.add(Unbounded("l2-max"))
    running.add(Gaussian(5))
    assert running.epsilon(DELTA) is None
    assert running.because == "l2-max"


@pytest.mark.slow
def test_hardly_any_noise_costs_a_huge_epsilon_and_no_crash() -> None:
    for noise in (1e-6, 1e-12, 1e-30):
        assert epsilon(poisson(0.01, noise, 100)) > 1 / noise


FAINT = TwoLevel(0.7, 1.0, 5, 1e-160, local="none", participation="hidden")  # squares of such noise underflow


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp-classic"])
@pytest.mark.parametrize(
    ("event", "adjacency"),
    [
        (FAINT, "zero-out"),
        (TwoLevel(0.7, 1.0, 5, 1e-280, local="none"), "zero-out"),
        (Sampled("poisson", 0.7, Gaussian(1e-160)), "replace-one"),
        (Sampled("fixed-size", 0.7, Gaussian(1e-160)), "zero-out"),
        (Gaussian(1e-200), "add-or-remove"),
    ],
)
def test_what_overflows_is_never_taken_for_nothing(event: Event, adjacency: Adjacency, accountant: str) -> None:
    try:
        epsilon = accountants.epsilon(event, 1e-5, accountant, adjacency).epsilon
        delta = accountants.delta(event, 1.0, accountant, adjacency).delta
    except ConfigError:  # not understood
        return
    assert epsilon is None or 1e12 < epsilon < math.inf
    assert delta is not None
    assert delta >= 0.69


def test_an_order_that_is_no_number_says_nothing() -> None:
    spent = np.full(len(rdp.DEFAULT), np.nan)
    assert rdp.epsilon(rdp.DEFAULT, spent, DELTA) == math.inf
    assert rdp.delta(rdp.DEFAULT, spent, 1.0) == 1.0
    spent[rdp.DEFAULT.index(8)] = 0.5  # a bound, whatever the others are
    assert 0.5 < rdp.epsilon(rdp.DEFAULT, spent, DELTA) < 3
    running = rdp.Running("zero-out")
    with np.errstate(all="ignore"):
        running.add(FAINT)
    assert running.epsilon(DELTA) == math.inf
