"""The papers' own recipes for what a setting costs, as the column `published` shows them. None of them is a proof."""

from __future__ import annotations

import math

from shoal.accounting.claims import Published
from shoal.accounting.published import composed_epsilon, dpsur_epsilon, moments_epsilon, pfl_epsilon
from shoal.algorithms.base import Algorithm, Recipe
from shoal.mechanisms.mechanism import StepMechanism
from shoal.mechanisms.schedules import Schedule, parse
from shoal.mechanisms.setting import Setting


def moments(paper: str, orders: str) -> Recipe:
    """The moments accountant: the first round's m and sigma, one composition per round, as if Poisson sampled."""

    def recipe(algorithm: Algorithm, setting: Setting, rounds: int, delta: float) -> tuple[Published, ...]:
        assert algorithm.per_round is not None
        noise = algorithm.per_round.multiplier(0, max(rounds, 1))
        if noise == 0:
            return ()
        words = f"{paper}: moments accountant, orders {orders.replace('-', '..')}, treated as Poisson sampling"
        epsilon = moments_epsilon(_client_rate(algorithm, setting), noise, rounds, delta, orders)
        return (Published("client", epsilon, delta, words),)

    return recipe


def thesis_examples(algorithm: Algorithm, setting: Setting, rounds: int, delta: float) -> tuple[Published, ...]:
    """Thesis, Algorithm 5, per record: q = C B/|P_k| in each local step, as if all were one Poisson sample."""
    sigma, steps = _sigma(algorithm, setting), _steps(algorithm, setting)
    if sigma == 0 or steps is None or not setting.sizes:
        return ()
    rate = _client_rate(algorithm, setting) * algorithm.records.share(max(setting.sizes))
    words = "Thesis: moments accountant, orders 2..32, q = C B/|P_k| in every local step"
    return (Published("record", moments_epsilon(rate, sigma, rounds * steps, delta, "2-32"), delta, words),)


def thesis_both(algorithm: Algorithm, setting: Setting, rounds: int, delta: float) -> tuple[Published, ...]:
    """Thesis, Algorithm 5: for a client its k noisy steps are treated as one Gaussian of sigma/sqrt k (Theorem 1)."""
    records = thesis_examples(algorithm, setting, rounds, delta)
    steps = _steps(algorithm, setting)
    if not records or steps is None:
        return ()
    recovered = _sigma(algorithm, setting) / math.sqrt(steps)
    epsilon = moments_epsilon(_client_rate(algorithm, setting), recovered, rounds, delta, "2-32")
    return (Published("client", epsilon, delta, "Thesis: moments accountant, orders 2..32, sigma/sqrt k"), *records)


def thesis_naive(algorithm: Algorithm, setting: Setting, rounds: int, delta: float) -> tuple[Published, ...]:
    """Thesis, Algorithm 8: the server's noise for a client, that of the steps for a record."""
    per_client = moments("Thesis", "2-32")(algorithm, setting, rounds, delta)
    return (*per_client, *thesis_examples(algorithm, setting, rounds, delta))


def fed_cdp(algorithm: Algorithm, setting: Setting, rounds: int, delta: float) -> tuple[Published, ...]:
    """Wei et al. (2023), Tables 6 to 8: q = 0.01 whatever the data, and sigma_t in every local step of a round."""
    assert algorithm.per_step is not None
    sigmas = _written(algorithm.per_step).values(setting.rounds)[:rounds]
    steps = _steps(algorithm, setting)
    if steps is None or 0 in sigmas:
        return ()
    words = "Wei et al. (2023), Table 6: moments accountant, q = 0.01 for all data sets, composed over local steps"
    return (Published("record", composed_epsilon(0.01, sigmas, steps, delta), delta, words),)


def pfl(algorithm: Algorithm, setting: Setting, rounds: int, delta: float) -> tuple[Published, ...]:
    """Bhaskar et al. (2025): what Opacus finds for one client's epochs; a record's copies elsewhere are left out."""
    sigma, steps = _sigma(algorithm, setting), _steps(algorithm, setting)
    if sigma == 0 or steps is None or not setting.sizes:
        return ()
    batches = algorithm.records.steps(max(setting.sizes), 1)
    words = "Bhaskar et al. (2025): Poisson batches of one client, add-or-remove; other copies are not counted"
    return (Published("record", pfl_epsilon(sigma, batches, rounds * steps, delta), delta, words),)


def dpsur(algorithm: Algorithm, setting: Setting, rounds: int, delta: float) -> tuple[Published, ...]:
    """Fu et al. (2023), Theorem 5.6: the steps that are kept, with their tests, as if no other had been tried."""
    assert algorithm.per_step is not None
    test, sigma, tried = algorithm.per_step.test, _sigma(algorithm, setting), _steps(algorithm, setting)
    if test is None or sigma * test.noise_multiplier == 0 or tried is None or not setting.sizes:
        return ()
    records, kept = max(setting.sizes), rounds * min(tried, test.updates or tried)
    rates = algorithm.records.share(records), min(1.0, test.batch / max(1, records))
    epsilon = dpsur_epsilon(rates[0], sigma, rates[1], test.noise_multiplier, kept, delta)
    words = f"Fu et al. (2023), Theorem 5.6: RDP of {kept} steps that are kept and of their tests, add-or-remove"
    return (Published("record", epsilon, delta, words),)


def _client_rate(algorithm: Algorithm, setting: Setting) -> float:
    return algorithm.clients.expected(0, setting.rounds, setting.clients) / setting.clients


def _sigma(algorithm: Algorithm, setting: Setting) -> float:
    """The first round's sigma, as configured: a recipe ignores where it is added."""
    assert algorithm.per_step is not None
    return _written(algorithm.per_step).value(0, setting.rounds)


def _written(noise: StepMechanism) -> Schedule:
    return noise.noise_schedule() or parse(0)


def _steps(algorithm: Algorithm, setting: Setting) -> int | None:
    """A client's steps in a round, of the largest client where they differ; None where unknown."""
    if algorithm.local.steps is not None:
        return algorithm.local.steps
    return algorithm.records.steps(max(setting.sizes), algorithm.local.epochs) if setting.sizes else None
