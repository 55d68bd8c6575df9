"""Conversions between noise on one quantity and noise on another."""

from __future__ import annotations

import math

from shoal.errors import ConfigError


def client_noise_at_server(noise: float, batch: int, local_steps: int) -> float:
    """The noise that protects a whole client whose update is `local_steps` noisy steps, where the update is seen.

    A step's noise on the average gradient is noise x clip/batch; over the steps the client can drift by
    local_steps x clip, the noise only by its square root. (Theorem 1 of the Thesis drops the factor `batch`.)
    """
    return noise / (batch * math.sqrt(local_steps))


def client_noise_in_mean(noise: float, batch: int, local_steps: int, cohort: float) -> float:
    """The same against the mean over a cohort: this at best, if the noise of all clients protected each one."""
    return client_noise_at_server(noise, batch, local_steps) * math.sqrt(cohort)


def client_noise_proven_in_mean(noise: float, batch: int, local_steps: int, cohort: float) -> float:
    """The same as far as it is proven: the other clients' last steps alone hide the drift of all steps."""
    return noise * math.sqrt(max(cohort - 1, 0)) / (batch * local_steps)


def noise_beside_count(noise: float, count_noise: float) -> float:
    """Noise for updates that, with a noisy count of small norms beside them, cost as much as `noise` alone.

    Andrew et al. 2021: a count of +-1/2 with standard deviation `count_noise` is a Gaussian of twice that.
    """
    if noise >= 2 * count_noise:
        raise ConfigError(
            f"the noise of the count must be more than half the noise of the update, {noise / 2:g}, "
            f"got {count_noise:g}"
        )
    return 1 / math.sqrt(noise**-2 - (2 * count_noise) ** -2)
