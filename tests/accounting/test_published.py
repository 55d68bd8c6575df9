"""Every published privacy figure of the five papers, recomputed by the recipe that its authors used.

Figures are asserted to the digits that are printed; those that do not recompute are asserted to be what the
recipe really gives, and the test's name says so.
"""

from __future__ import annotations

import pytest

from shoal.accounting import accountants, calibration, published
from shoal.accounting.calibration import Budget
from shoal.accounting.events import Event, Gaussian, Repeat, Sampled

DELTA = 1e-5


def steps(rate: float, noise: float, count: int) -> Event:
    return Repeat(Sampled("poisson", rate, Gaussian(noise)), count)


@pytest.mark.parametrize(
    ("rounds", "printed", "exact"),
    [(100, 0.823, 0.8227), (60, 0.636, 0.6356), (10, 0.276, 0.2760)],
)
def test_wei_table_6_fed_cdp(rounds: int, printed: float, exact: float) -> None:
    found = published.fed_cdp_epsilon(rounds)
    assert found == pytest.approx(exact, abs=5e-5)
    assert round(found, 3) == printed


def test_wei_table_6_fed_cdp_on_cancer_does_not_recompute() -> None:
    found = published.fed_cdp_epsilon(3)
    assert found == pytest.approx(0.1467, abs=5e-5)
    assert round(found, 3) != 0.138


@pytest.mark.parametrize(
    ("rounds", "printed", "exact", "without_the_extra_step"),
    [(100, 0.854, 0.8536, 0.849), (60, 0.668, 0.6677, 0.662), (10, 0.303, 0.3025, 0.292)],
)
def test_wei_table_6_fed_sdp(rounds: int, printed: float, exact: float, without_the_extra_step: float) -> None:
    found = published.fed_sdp_epsilon(rounds)
    assert found == pytest.approx(exact, abs=5e-5)
    assert round(found, 3) == printed
    assert published.moments_epsilon(0.1, 6, rounds, DELTA) == pytest.approx(without_the_extra_step, abs=5e-4)


def test_wei_table_6_fed_sdp_on_cancer_does_not_recompute_but_is_fed_cdp_at_300_steps() -> None:
    assert published.fed_sdp_epsilon(3) == pytest.approx(0.2065, abs=5e-5)
    assert round(published.moments_epsilon(0.01, 6, 300, DELTA), 3) == 0.147


@pytest.mark.parametrize(
    ("rounds", "printed", "exact"),
    [
        (11, 0.285, 0.2850),
        (67, 0.672, 0.6719),
        (34, 0.478, 0.4776),
        (5, 0.184, 0.1841),
        (1, 0.084, 0.0841),
    ],
)
def test_wei_table_7(rounds: int, printed: float, exact: float) -> None:
    found = published.fed_cdp_epsilon(rounds)
    assert found == pytest.approx(exact, abs=5e-5)
    assert round(found, 3) == printed


def test_wei_table_11_base_composition() -> None:
    assert published.basic_epsilon(0.01, 6, 10_000, DELTA) == pytest.approx(123.353, abs=6e-4)
    unrounded = accountants.epsilon(steps(0.01, 6, 10_000), DELTA, "basic")
    assert unrounded.epsilon == pytest.approx(123.457, abs=5e-4)
    assert not unrounded.valid


def test_wei_table_11_advanced_composition_spends_a_hundred_times_the_delta_it_names() -> None:
    assert published.advanced_epsilon(0.01, 6, 10_000, DELTA) == pytest.approx(7.450, abs=5e-4)
    answer = accountants.epsilon(steps(0.01, 6, 10_000), DELTA, "advanced")
    assert not answer.valid
    assert answer.because is not None
    assert "0.00101" in answer.because


def test_wei_table_11_zcdp_is_not_a_bound_under_sampling() -> None:
    assert published.zcdp_epsilon(0.01, 6, 10_000, DELTA) == pytest.approx(1.1588, abs=5e-5)
    answer = accountants.epsilon(steps(0.01, 6, 10_000), DELTA, "zcdp")
    assert answer.epsilon == pytest.approx(1.159, abs=5e-4)
    assert not answer.valid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "moments", "basic", "advanced", "zcdp"),
    [("linear", 95, 97, 95, 95), ("staircase", 95, 97, 95, 95), ("exponential", 96, 97, 94, 96)],
)
def test_wei_tables_8_and_11_rounds_with_a_rising_epsilon(
    policy: str, moments: int, basic: int, advanced: int, zcdp: int
) -> None:
    noises = published.decayed_noise(policy)
    assert published.rounds_until(noises, 0.823, "moments") == moments
    assert published.rounds_until(noises, 123.354, "basic") == basic
    assert published.rounds_until(noises, 7.450, "advanced") == advanced
    assert published.rounds_until(noises, 1.159, "zcdp") == zcdp


@pytest.mark.slow
def test_wei_table_8_cyclic_does_not_recompute_exactly() -> None:
    assert published.rounds_until(published.printed_noise("cyclic"), 0.823, "moments") == 78


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "spent"), [("linear", 0.575), ("staircase", 0.536), ("exponential", 0.637)])
def test_wei_table_8_as_printed_never_reaches_the_target(policy: str, spent: float) -> None:
    assert published.spending(published.printed_noise(policy), "moments")[-1] == pytest.approx(spent, abs=5e-4)


@pytest.mark.parametrize(("noise", "epsilon", "epochs"), [(8, 0.5, 51), (4, 2, 247), (2, 8, 729)])
def test_thesis_table_4_2_epochs(noise: float, epsilon: float, epochs: int) -> None:
    """The last one is printed as 730."""
    assert published.central_epochs(noise, epsilon) == epochs


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(4, 640, 9.21e-6), (3, 288, 8.93e-7), (2, 54, 1.21e-11)])
def test_thesis_table_4_3_delta_per_record(noise: float, rounds: int, delta: float) -> None:
    assert published.end_to_end_record_delta(noise, 0.1, rounds) == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize(
    ("noise", "rounds", "delta", "most"),
    [(4, 640, 1.04e-3, 637), (3, 288, 9.74e-4, 288), (2, 54, 9.84e-4, 54)],
)
def test_thesis_table_4_3_delta_per_client(noise: float, rounds: int, delta: float, most: int) -> None:
    assert published.end_to_end_client_delta(noise, 0.1, rounds) == pytest.approx(delta, rel=4e-3)
    assert published.end_to_end_most_rounds(noise, 0.1, 1e-3) == most


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "per_record", "per_client", "target", "most"),
    [
        (4, 0.1, 635, 8.39e-6, 9.65e-4, 1e-3, 637),
        (4, 0.05, 1740, 2.67e-8, 9.97e-6, 1e-5, 1740),
        (1.85, 0.005, 15_000, 9.46e-14, 9.17e-6, 1e-5, 15_104),
    ],
)
def test_thesis_tables_4_4_to_4_6(
    noise: float, rate: float, rounds: int, per_record: float, per_client: float, target: float, most: int
) -> None:
    assert published.end_to_end_record_delta(noise, rate, rounds) == pytest.approx(per_record, rel=2e-3)
    assert published.end_to_end_client_delta(noise, rate, rounds) == pytest.approx(per_client, rel=1e-3)
    assert published.end_to_end_most_rounds(noise, rate, target) == most


def test_thesis_table_4_6_delta_per_record_is_so_only_because_orders_stop_at_32() -> None:
    finer = accountants.delta(steps(0.005 / 6, 1.85, 90_000), 1.31, "rdp-classic", orders="tf72")
    assert finer.delta is not None
    assert finer.delta < 1e-16


@pytest.mark.parametrize(
    ("rate", "rounds", "delta", "least", "most"),
    [
        (0.5, 11, 1e-3, 1.19, 1.23),
        (0.22, 54, 1e-5, 1.436, 1.444),
        (0.05085, 412, 1e-6, 1.092, 1.093),
    ],
)
def test_geyer_table_1_noise_that_ends_training_at_the_printed_round(
    rate: float, rounds: int, delta: float, least: float, most: float
) -> None:
    """Table 1 does not state sigma: the range of constant ones that end training after just these rounds."""
    budget = Budget(8, delta, "rdp-classic", orders="2-33")
    for count, wanted in ((rounds, least), (rounds + 1, most)):
        found = calibration.noise(lambda noise, count=count: steps(rate, noise, count), budget).value
        assert found == pytest.approx(wanted, rel=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "batches", "prv", "rdp"),
    [
        (2.93, 94, 0.959, 1.007),
        (2.7, 94, 0.998, 1.049),
        (1.2, 94, 1.660, 1.768),
        (7.53, 79, 0.685, 0.716),
        (3.0, 79, 0.997, 1.048),
    ],
)
def test_pfl_noise_as_opacus_calibrates_it(epsilon: float, batches: int, prv: float, rdp: float) -> None:
    """Opacus stops its search within .01 of epsilon, so its PRV noise is up to 1% above the least one."""
    tight = published.pfl_noise(epsilon, batches)
    assert prv * 0.99 < tight < prv * 1.0005
    assert published.pfl_noise(epsilon, batches, "rdp") == pytest.approx(rdp, abs=1e-3)


def test_golden_references_of_other_libraries() -> None:
    event = steps(0.04, 1.5, 2250)
    assert accountants.epsilon(event, DELTA, "rdp").epsilon == pytest.approx(7.32911, rel=5e-5)
    tight = accountants.epsilon(event, DELTA).epsilon
    assert tight == pytest.approx(6.769, abs=5e-4)
    assert tight is not None
    assert 6.759 <= tight <= 6.779
