"""Gaussian noise: how much, and where the numbers come from.

The scale is always `noise` x the sensitivity that a clip carries with it (never a bare sigma), so that what
is added and what is accounted cannot drift apart.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.privacy.normals import add_normals
from shoal.privacy.random import Keystream
from shoal.privacy.schedules import parse
from shoal.privacy.secure import SecureGenerator, discrete_on_grid, grid, on_grid, rounded_sum

Memory = MutableMapping[str, Tensor]
"""What is remembered from round to round."""


@dataclass(frozen=True)
class Gaussian:
    """Boundary `per_round`: N(0, (noise x sensitivity)^2) on the sum of the updates, once a round.

    `at` says who adds it: the `server`, which then has to be trusted, or the clients, each a share (`shared`), under
    secure aggregation, which shows the server nothing but the sum. A simulation adds it to the sum either way.
    """

    noise: str | float = 1.0
    at: Literal["server", "shared"] = field(default="server", kw_only=True)

    def __post_init__(self) -> None:
        if min(parse(self.noise).values(100)) < 0:
            raise ConfigError(f"per_round.noise must be >= 0, got {self.noise}")

    def multiplier(self, t: int, total: int) -> float:
        return multiplier("per_round.noise", self.noise, t, total)

    def add(self, total: Tensor, z: float, bound: float, memory: Memory, generator: np.random.Generator) -> Tensor:
        """The sum with this round's noise of z x bound; this one remembers nothing."""
        return add_to_sum(total, z * bound, bound, generator)


@dataclass(frozen=True)
class StepNoise:
    """Boundary `per_step`: noise in every local step, on the sum of the batch's clipped gradients.

    004 says three things of its scale, with sigma = `noise`, S the sensitivity and B the batch: on the mean of the
    batch N(0, (sigma S)^2) (`algorithm1`), on each record and then averaged (`per-example`), or as DP-SGD does it,
    N(0, (sigma S)^2) on the sum (`dp-sgd`). The sum gets the same noise whatever the batch that was drawn.
    """

    noise: str | float = 1.0
    placement: Literal["dp-sgd", "per-example", "algorithm1"] = "dp-sgd"

    def __post_init__(self) -> None:
        if min(parse(self.noise).values(100)) < 0:
            raise ConfigError(f"per_step.noise must be >= 0, got {self.noise}")

    def multiplier(self, t: int, total: int, batch: float) -> float:
        """The noise on the sum in round t, in units of the sensitivity; `batch` is the public, expected one."""
        times = {"dp-sgd": 1.0, "per-example": math.sqrt(batch), "algorithm1": batch}[self.placement]
        return times * multiplier("per_step.noise", self.noise, t, total)


def multiplier(key: str, noise: str | float, t: int, total: int) -> float:
    """The noise of round t in units of the sensitivity; a schedule may not fall below 0."""
    value = parse(noise).value(t, total)
    if value < 0:
        raise ConfigError(f"{key} must be >= 0, got {noise}, which is {value:g} in round {t + 1} of {total}")
    return value


def add_to_sum(total: Tensor, scale: float, clip: float, generator: np.random.Generator) -> Tensor:
    """The sum of clipped updates plus N(0, scale^2); in secure mode both are on the grid of the clip."""
    if isinstance(generator, SecureGenerator) and scale > 0:
        return on_grid(total, scale, grid(clip), generator)
    return total.add_(gaussian_like(total, scale, generator))


def add_to_number(value: float, scale: float, generator: np.random.Generator) -> float:
    """A number plus N(0, scale^2); in secure mode it is rounded first, to a grid of 2^-20 of the noise."""
    if isinstance(generator, SecureGenerator) and scale > 0:
        return float(rounded_sum(torch.tensor([value], dtype=torch.float64), scale, generator))
    return value + scale * float(generator.standard_normal())


def add_to_updates(updates: Tensor, scale: float, generators: Sequence[np.random.Generator]) -> Tensor:
    """Updates [k, P] as they leave their clients, each plus N(0, scale^2) of its own generator.

    In secure mode it is a discrete Gaussian on the update's grid. On CUDA all get it at once.
    """
    if updates.is_cuda and generators and not isinstance(generators[0], SecureGenerator):
        from shoal.privacy.philox import Philox

        keys = torch.tensor([int(generator.integers(2**63)) for generator in generators], device=updates.device)
        Philox(keys).add(updates, updates.new_full((len(updates),), scale))
        return updates
    for row, generator in enumerate(generators):
        if isinstance(generator, SecureGenerator):
            updates[row] = discrete_on_grid(updates[row], scale, generator)
        else:
            updates[row] += gaussian_like(updates[row], scale, generator)
    return updates


def gaussian_like(vector: Tensor, scale: float, generator: np.random.Generator) -> Tensor:
    """A vector of independent N(0, scale^2), of the shape and on the device of another."""
    numbers = torch.zeros(1, vector.numel(), device=vector.device)
    if vector.is_cuda:
        from shoal.privacy.philox import Philox

        key = torch.tensor([int(generator.integers(2**63))], device=vector.device)
        Philox(key).add(numbers, torch.tensor([scale], device=vector.device))
        return numbers.view(vector.shape)
    add_normals(numbers, torch.tensor([scale]), [Keystream(generator.bytes(16))])
    return numbers.view(vector.shape)
