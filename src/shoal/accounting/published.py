"""The papers' own recipes, which reproduce their published figures. None of them is a proof.

OLD is the conversion of Mironov 2017; TF72, 2-32 and 2-33 are grids of orders (rdp.py). Where no recipe
reproduces a published figure, the docstring says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from shoal.accounting import accountants, calibration, composition, rdp
from shoal.accounting.calibration import Budget
from shoal.accounting.composition import Step
from shoal.accounting.curves import Array
from shoal.accounting.events import Compose, Event, Gaussian, Repeat, Sampled
from shoal.errors import ConfigError, nearest

Policy: TypeAlias = Callable[[Array], Array]


def moments_epsilon(rate: float, noise: float, steps: int, delta: float, orders: str = "tf72") -> float:
    """The moments accountant (Abadi et al. 2016): Poisson RDP with the OLD conversion."""
    return _figure(accountants.epsilon(_steps(rate, noise, steps), delta, "rdp-classic", orders=orders).epsilon)


def composed_epsilon(rate: float, noises: Sequence[float], steps: int, delta: float) -> float:
    """The moments accountant where each of these noises was used in so many steps."""
    event = Compose(tuple(_steps(rate, noise, steps) for noise in noises))
    return _figure(accountants.epsilon(event, delta, "rdp-classic", orders="tf72").epsilon)


def moments_delta(rate: float, noise: float, steps: int, epsilon: float) -> float:
    """The moments accountant, read the other way."""
    return _figure(accountants.delta(_steps(rate, noise, steps), epsilon, "rdp-classic", orders="2-32").delta)


# Wei et al. (2023): Fed-SDP, Fed-CDP, Fed-alphaCDP


def fed_cdp_epsilon(rounds: int, noise: float = 6, delta: float = 1e-5, rate: float = 0.01) -> float:
    """Fed-CDP and Fed-alphaCDP, Tables 6, 7: 100 steps a round. Cancer's 0.138 is not reproduced (0.1467)."""
    return moments_epsilon(rate, noise, 100 * rounds, delta)


def fed_sdp_epsilon(rounds: int, noise: float = 6, delta: float = 1e-5, rate: float = 0.1) -> float:
    """Fed-SDP, Table 6: a step a round and, off by one, one more. Cancer's 0.147 is not reproduced (0.2065)."""
    return moments_epsilon(rate, noise, rounds + 1, delta)


def basic_epsilon(rate: float, noise: float, steps: int, delta: float, digits: int = 3) -> float:
    """Table 11, base composition: a step's epsilon is rounded to `digits` before it is amplified."""
    return composition.basic_epsilon([_rounded(rate, noise, steps, delta, digits)], delta)


def advanced_epsilon(rate: float, noise: float, steps: int, delta: float, digits: int = 3) -> float:
    """Table 11, advanced composition (Dwork, Rothblum, Vadhan); the total delta is really about 1e-3."""
    return composition.advanced_epsilon([_rounded(rate, noise, steps, delta, digits)], delta)


def zcdp_epsilon(rate: float, noise: float, steps: int, delta: float) -> float:
    """Table 11, zCDP with rho = steps rate^2/noise^2: not a bound under sampling."""
    return composition.zcdp_epsilon([Step(rate, noise, steps, "poisson")], delta)


EPSILON_POLICIES: dict[str, Policy] = {
    "linear": lambda u: 0.30747 + u,
    "staircase": lambda u: 0.35747 + 0.1 * np.floor(10 * u),
    "exponential": lambda u: np.exp(1.664 * u - 1.1809),
}
"""In Tables 8 and 11 epsilon_t rises with u = t/T; sigma_t does not fall as printed."""

NOISE_POLICIES: dict[str, Policy] = {
    "linear": lambda u: 15 - 10.15 * u,
    "staircase": lambda u: 15 - 1.015 * np.floor(10 * u),
    "exponential": lambda u: np.exp(1.58 + 1.13 * (1 - u)),
    "cyclic": lambda u: 7.5 * (np.cos(np.pi * u) + 1),
}
"""Section 5.3 as printed, from sigma_0 = 15 to 4.85; the cosine goes to 0."""


def decayed_noise(policy: str, iterations: int = 10_000, delta: float = 1e-5) -> Array:
    """The sigma_t that Tables 8 and 11 actually used: sqrt(2 ln(1.25/delta)) / epsilon_t."""
    if policy not in EPSILON_POLICIES:
        raise ConfigError(f"Wei et al. (2023) have no decay called '{policy}'{nearest(policy, EPSILON_POLICIES)}")
    u = np.arange(iterations) / iterations
    return math.sqrt(2 * math.log(1.25 / delta)) / EPSILON_POLICIES[policy](u)


def printed_noise(policy: str, iterations: int = 10_000) -> Array:
    """sigma_t as printed in Wei et al. (2023), which never reaches the target of Table 8 (cyclic: it does)."""
    if policy not in NOISE_POLICIES:
        raise ConfigError(f"Wei et al. (2023) have no decay called '{policy}'{nearest(policy, NOISE_POLICIES)}")
    return NOISE_POLICIES[policy](np.arange(iterations) / iterations)


def rounds_until(noises: Array, target: float, accountant: str, rate: float = 0.01, delta: float = 1e-5) -> int:
    """Tables 8 and 11: the round of 100 iterations in which the target epsilon is reached."""
    within = int((spending(noises, accountant, rate, delta) <= target).sum())
    return math.ceil(min(within + 1, len(noises)) / 100)


def spending(noises: Array, accountant: str, rate: float = 0.01, delta: float = 1e-5) -> Array:
    """Epsilon after each iteration of a schedule, by one of the four accountants of Table 11."""
    log_delta = math.log(1 / delta)
    found: Array
    if accountant == "moments":
        orders = rdp.grid("tf72")
        spent = np.cumsum(rdp.poisson_gaussian(rate, noises, orders), axis=0)
        found = (spent + log_delta / (np.array(orders) - 1)).min(axis=1)
        return found
    if accountant == "zcdp":
        rho = np.cumsum(rate**2 / noises**2)
        found = rho + 2 * np.sqrt(rho * log_delta)
        return found
    one = np.log1p(rate * np.expm1(math.sqrt(2 * math.log(1.25 / delta)) / noises))
    if accountant == "basic":
        return np.cumsum(one)
    if accountant == "advanced":
        # Kairouz, Oh, Viswanath 2015, which the schedules of Table 11 follow, unlike its 7.450.
        found = np.sqrt(2 * log_delta * np.cumsum(one**2)) + np.cumsum(one * np.tanh(one / 2))
        return found
    known = ("moments", "zcdp", "basic", "advanced")
    raise ConfigError(f"Wei et al. (2023) have no accountant called '{accountant}'{nearest(accountant, known)}")


# Thesis


def central_epochs(noise: float, epsilon: float, delta: float = 1e-5, rate: float = 0.01) -> int:
    """Table 4.2: the first epoch of 100 steps after which delta is passed. The last, 730, gives 729."""
    budget = Budget(epsilon, delta, "rdp-classic", orders="2-32")
    kept = calibration.rounds(lambda epochs: _steps(rate, noise, 100 * epochs), budget)
    return int(kept.value) + 1


def end_to_end_record_delta(
    noise: float, client_rate: float, rounds: int, epsilon: float = 1.31, local_steps: int = 6
) -> float:
    """Tables 4.3 to 4.6, per record: clients and batches treated as one Poisson sample of records per step."""
    return moments_delta(client_rate / local_steps, noise, local_steps * rounds, epsilon)


def end_to_end_client_delta(
    noise: float, client_rate: float, rounds: int, epsilon: float = 8, local_steps: int = 6
) -> float:
    """Tables 4.3 to 4.6, per client: the noise "recovered" from the local steps is sigma/sqrt(steps)."""
    return moments_delta(client_rate, noise / math.sqrt(local_steps), rounds, epsilon)


def end_to_end_most_rounds(
    noise: float, client_rate: float, delta: float, epsilon: float = 8, local_steps: int = 6
) -> int:
    """Algorithm 5 stops here: the last round within the per-client delta."""
    recovered = noise / math.sqrt(local_steps)
    budget = Budget(epsilon, delta, "rdp-classic", orders="2-32")
    return int(calibration.rounds(lambda rounds: _steps(client_rate, recovered, rounds), budget).value)


# Bhaskar et al. (2025): PFL


def pfl_noise(epsilon: float, batches: int, accountant: str = "pld", epochs: int = 20, delta: float = 1e-5) -> float:
    """The noise for E x R = 20 epochs of Poisson batches, as Opacus' make_private_with_epsilon finds it."""
    budget = Budget(epsilon, delta, accountant)
    return calibration.noise(lambda noise: _steps(1 / batches, noise, epochs * batches), budget).value


def pfl_epsilon(noise: float, batches: int, steps: int, delta: float = 1e-5) -> float:
    """What Opacus reports for so many Poisson batches of 1/batches of a client's records each."""
    return _figure(accountants.epsilon(_steps(1 / batches, noise, steps), delta).epsilon)


# Fu et al. (2023): DPSUR


def dpsur_epsilon(
    rate: float, noise: float, test_rate: float, test_noise: float, updates: int, delta: float = 1e-5
) -> float:
    """What Fu et al. (2023), Theorem 5.6, count: steps that were kept, and their tests; none that was thrown away."""
    event = Compose((_steps(rate, noise, updates), _steps(test_rate, test_noise, updates)))
    return _figure(accountants.epsilon(event, delta, "rdp").epsilon)


def _steps(rate: float, noise: float, count: int) -> Event:
    return Repeat(Sampled("poisson", rate, Gaussian(noise)), count)


def _rounded(rate: float, noise: float, steps: int, delta: float, digits: int) -> Step:
    """The step whose epsilon is the rounded one."""
    epsilon = round(math.sqrt(2 * math.log(1.25 / delta)) / noise, digits)
    return Step(rate, math.sqrt(2 * math.log(1.25 / delta)) / epsilon, steps, "poisson")


def _figure(found: float | None) -> float:
    assert found is not None
    return found
