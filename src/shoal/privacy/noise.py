"""Gaussian noise: how much, and where the numbers come from.

The scale is always `noise` x the sensitivity that a clip carries with it (never a bare sigma), so that what
is added and what is accounted cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.privacy.schedules import parse


@dataclass(frozen=True)
class Gaussian:
    """Boundary `per_round`: N(0, (noise x sensitivity)^2) on the sum of the updates, once a round."""

    noise: str | float = 1.0

    def __post_init__(self) -> None:
        if min(parse(self.noise).values(100)) < 0:
            raise ConfigError(f"per_round.noise must be >= 0, got {self.noise}")

    def multiplier(self, t: int, total: int) -> float:
        return multiplier("per_round.noise", self.noise, t, total)


def multiplier(key: str, noise: str | float, t: int, total: int) -> float:
    """The noise of round t in units of the sensitivity; a schedule may not fall below 0."""
    value = parse(noise).value(t, total)
    if value < 0:
        raise ConfigError(f"{key} must be >= 0, got {noise}, which is {value:g} in round {t + 1} of {total}")
    return value


def gaussian_like(vector: Tensor, scale: float, generator: np.random.Generator) -> Tensor:
    """A vector of independent N(0, scale^2), of the shape and on the device of another."""
    numbers = generator.standard_normal(vector.numel(), dtype=np.float32)
    return torch.from_numpy(numbers).to(vector.device).view(vector.shape).mul_(scale)
