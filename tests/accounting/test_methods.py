"""What the papers' methods really guarantee, composed from events as the algorithms would state them."""

from __future__ import annotations

import math

import pytest
from scipy.stats import binom

from shoal.accounting import accountants, claims
from shoal.accounting.events import Compose, Event, Gaussian, OnClients, Repeat, Sampled, TwoLevel, Unbounded
from shoal.accounting.published import pfl_noise

DELTA = 1e-5
GEYER = [(0.5, 1.20, 11, 1e-3), (0.22, 1.44, 54, 1e-5), (0.05085, 1.0925, 412, 1e-6)]
CURATOR = [(0.1, 4.0, 635, 1e-3), (0.05, 4.0, 1740, 1e-5), (0.005, 1.85, 15_000, 1e-5)]
COHORTS = [10, 50, 50]


def client_noise_at_server(noise: float, batch: int, local_steps: int) -> float:
    """The noise that protects a whole client whose update is `local_steps` noisy steps, where the update is seen.

    A step's noise on the average gradient is noise x clip/batch; over the steps the client can drift by
    local_steps x clip, the noise only by its square root. (Theorem 1 of the Thesis drops the factor `batch`.)
    """
    return noise / (batch * math.sqrt(local_steps))


def poisson(rate: float, noise: float, count: int) -> Event:
    return Repeat(Sampled("poisson", rate, Gaussian(noise)), count)


def epsilon(event: Event, delta: float = DELTA, adjacency: str = "add-or-remove") -> float:
    answer = accountants.epsilon(event, delta, adjacency=adjacency)  # type: ignore[arg-type]
    assert answer.valid, answer.because
    assert answer.epsilon is not None
    return answer.epsilon


def bracket(event: Event, delta: float) -> tuple[float, float]:
    low = accountants.at_least(event, delta, "replace-one")
    assert low is not None
    return low, epsilon(event, delta, "replace-one")


@pytest.mark.parametrize(
    ("setting", "claimed_as", "really"),
    list(zip(GEYER, [5.89, 6.44, 6.64], [(18.1, 18.7), (21.0, 22.7), (32.0, 36.3)], strict=True)),
)
def test_geyer_client_level(
    setting: tuple[float, float, int, float], claimed_as: float, really: tuple[float, float]
) -> None:
    rate, noise, rounds, delta = setting
    assert epsilon(poisson(rate, noise, rounds), delta) == pytest.approx(claimed_as, abs=0.006)
    sampled = Repeat(Sampled("fixed-size", rate, Gaussian(noise)), rounds)
    assert bracket(sampled, delta) == pytest.approx(really, abs=0.06)


def test_geyer_as_printed_proves_nothing() -> None:
    event = Compose((poisson(0.5, 1.2, 11), Unbounded("the clip is the median of the participants' norms")))
    proven = claims.prove("client", "release", event, 1e-3, adjacency="zero-out")
    assert proven.epsilon is None
    assert proven.words() == "none, because the clip is the median of the participants' norms"


@pytest.mark.parametrize(
    ("noise", "cohort", "dearer"), [(1.20, 50, 1.236), (1.44, 220, 1.443), (1.0925, 508.5, 1.0928)]
)
def test_a_private_quantile_costs_little_noise(noise: float, cohort: float, dearer: float) -> None:
    update = 1 / math.sqrt(noise**-2 - (2 * cohort / 20) ** -2)  # Andrew et al. (2021)
    assert update == pytest.approx(dearer, abs=5e-4)
    together = Sampled("poisson", 0.1, Compose((Gaussian(update), Gaussian(2 * cohort / 20))))
    assert epsilon(Repeat(together, 10)) == pytest.approx(epsilon(poisson(0.1, noise, 10)), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "cohort", "true_epsilon", "needed"),
    list(zip(CURATOR, COHORTS, [16263, 4398, 19455], [126, 57, 26], strict=True)),
)
def test_end_to_end_per_client(
    setting: tuple[float, float, int, float], cohort: int, true_epsilon: float, needed: float
) -> None:
    rate, noise, rounds, delta = setting
    in_mean = client_noise_at_server(noise, batch=100, local_steps=6) * math.sqrt(cohort)
    assert epsilon(poisson(rate, in_mean, rounds), delta) == pytest.approx(true_epsilon, rel=5e-3)
    wanted = noise / math.sqrt(6)
    assert wanted / in_mean * noise == pytest.approx(needed, rel=0.01)
    proven = noise * math.sqrt(cohort - 1) / (100 * 6)  # the other clients' last steps hide the drift of all steps
    assert client_noise_at_server(noise, 100, 6) < proven < in_mean


@pytest.mark.parametrize(
    ("setting", "release", "server_on_average", "unluckiest"),
    list(zip(CURATOR, [2.67, 2.15, 1.38], [9.95, 12.1, 30.2], [13.4, 15.8, 41.8], strict=True)),
)
def test_end_to_end_per_example(
    setting: tuple[float, float, int, float], release: float, server_on_average: float, unluckiest: float
) -> None:
    """A record is used once a round in which its client takes part: six shuffled batches, six steps."""
    rate, noise, rounds, _ = setting
    hidden = TwoLevel(rate, 1 / 6, 6, noise, local="shuffled", participation="hidden")
    assert epsilon(Repeat(hidden, rounds), adjacency="zero-out") == pytest.approx(release, abs=0.006)

    def took_part(times: float) -> float:
        return epsilon(Gaussian(noise / math.sqrt(times)))

    assert took_part(rate * rounds) == pytest.approx(server_on_average, rel=4e-3)
    most = binom.isf(1e-6, rounds, rate)
    assert took_part(most) == pytest.approx(unluckiest, rel=4e-3)
    seen = epsilon(Repeat(TwoLevel(rate, 1 / 6, 6, noise, local="shuffled"), rounds), adjacency="zero-out")
    assert took_part(rate * rounds) < seen < took_part(most)


@pytest.mark.parametrize(
    ("setting", "as_poisson", "really"),
    list(zip(CURATOR, [6.22, 6.70, 6.54], [(22, 28), (23, 30), (80, 97)], strict=True)),
)
def test_trusted_curator(
    setting: tuple[float, float, int, float], as_poisson: float, really: tuple[float, float]
) -> None:
    rate, noise, rounds, delta = setting
    recovered = noise / math.sqrt(6)
    assert epsilon(poisson(rate, recovered, rounds), delta) == pytest.approx(as_poisson, abs=0.006)
    sampled = Repeat(Sampled("fixed-size", rate, Gaussian(recovered)), rounds)
    assert bracket(sampled, delta) == pytest.approx(really, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clients", "noted", "found"),
    [(2, 4.25, 4.21), (7, 8.69, 8.50), (12, 12.0, 11.73), (16, 14.4, 13.99), (25, 19.1, 18.55)],
)
def test_pfl_records_on_several_clients(clients: int, noted: float, found: float) -> None:
    """`noted` are earlier figures, whose noise is not known; the noise that spends 2.93 gives `found`."""
    event = OnClients(clients, poisson(1 / 94, pfl_noise(2.93, 94), 1880))
    assert epsilon(event) == pytest.approx(found, abs=0.006)
    assert found == pytest.approx(noted, rel=0.03)


@pytest.mark.parametrize(("batch", "records", "rounds", "true_epsilon"), [(3, 2267, 60, 8.3), (4, 426, 3, 14.7)])
def test_fed_cdp_with_the_sampling_rate_of_its_own_formula(
    batch: int, records: int, rounds: int, true_epsilon: float
) -> None:
    rate = batch * 100 / records
    assert epsilon(poisson(rate, 6, 100 * rounds)) == pytest.approx(true_epsilon, rel=0.006)


@pytest.mark.parametrize(("scale", "true_epsilon"), [(1, 75), (5, 2543)])
def test_fed_cdp_per_client(scale: int, true_epsilon: float) -> None:
    """100 local steps, the clip per layer over three layers; noise as printed, or DP-SGD's, smaller by B = 5."""
    noise = client_noise_at_server(6, batch=scale, local_steps=100) / math.sqrt(3)
    assert epsilon(poisson(0.1, noise, 100)) == pytest.approx(true_epsilon, rel=0.005)


@pytest.mark.slow
def test_fed_cdp_by_observer() -> None:
    """Clients' choice hides a record only from those who cannot tell who took part; l2-max hides nothing."""
    release, server = (
        epsilon(Repeat(TwoLevel(0.1, 0.1, 100, 6, participation=seen), 100)) for seen in ("hidden", "visible")
    )
    one_sample = epsilon(poisson(0.01, 6, 10_000))
    assert one_sample < release < 1.05 * one_sample
    assert server > 3 * release
    depends = Unbounded("the l2-max sensitivity depends on the data")
    faithful = claims.prove("record", "server", depends, DELTA, adjacency="replace-one")
    assert faithful.epsilon is None


@pytest.mark.parametrize(
    ("rate", "noise", "steps"), [(1 / 94, 0.959, 1880), (0.01, 6.0, 10_000), (0.01, 4.0, 24_700), (0.5, 3, 20)]
)
def test_rdp_of_poisson_samples_with_one_unit_changed_is_a_bound_and_not_a_loose_one(rate, noise, steps):
    """It counts while a run goes on; it once said 42.7 where PLD says 4.6."""
    event = Repeat(Sampled("poisson", rate, Gaussian(noise)), steps)
    exact = accountants.epsilon(event, 1e-5, "pld", "replace-one").epsilon
    quick = accountants.epsilon(event, 1e-5, "rdp", "replace-one").epsilon
    assert exact <= quick <= 1.2 * exact
