"""Defences of Wei et al. (2023), section 4, that change an update without a bound on what it reveals.

They are baselines: nothing is proven for any of them, and each says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.mechanisms.gaussian import add_to_updates, gaussian_like
from shoal.mechanisms.mechanism import Draw, Layers, UpdateMechanism
from shoal.mechanisms.schedules import require_scale


@dataclass(frozen=True)
class Prune(UpdateMechanism):
    """Gradient compression: the smallest `share` of all coordinates of an update become 0.

    Attributes:
        share: The share of coordinates that are dropped.
    """

    share: float = 0.3

    alike: ClassVar[bool] = True
    unproven: ClassVar[str | None] = "pruning adds no noise: what is left of an update is exact"

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigError(f"per_update.share must be in [0, 1), got {self.share}")

    def apply(
        self, updates: Tensor, norms: Tensor, bound: float, t: int, total: int, draw: Draw, layers: Layers
    ) -> Tensor:
        """The updates with their smallest coordinates set to 0."""
        dropped = int(self.share * updates.shape[1])
        if dropped:
            least = updates.abs().topk(dropped, dim=1, largest=False, sorted=False).indices
            updates.scatter_(1, least, 0.0)
        return updates

    def replay(self, shown: Tensor, seen: Tensor, bound: float, unit: float, layers: Layers) -> Tensor:
        """An attacker sees which coordinates were sent."""
        return shown * (seen != 0)


@dataclass(frozen=True)
class RandomNoise(UpdateMechanism):
    """Additive Gaussian noise of a fixed `scale` on an unclipped update.

    Attributes:
        scale: The standard deviation of the noise.
    """

    scale: float = 0.01

    alike: ClassVar[bool] = True
    draws_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.scale < 0:
            raise ConfigError(f"per_update.scale must be >= 0, got {self.scale}")

    def apply(
        self, updates: Tensor, norms: Tensor, bound: float, t: int, total: int, draw: Draw, layers: Layers
    ) -> Tensor:
        """The updates, each with its own noise."""
        return add_to_updates(updates, self.scale, [draw(row) for row in range(len(updates))])


@dataclass(frozen=True)
class Select(UpdateMechanism):
    """DSSGD (Shokri & Shmatikov 2015): a client sends a random `fraction` of its coordinates, of those over a
    `threshold`; each is clipped to +-`cap` and, with `noise_multiplier` > 0, gets Gaussian noise of noise_multiplier
    x cap.

    Attributes:
        fraction: The share of coordinates that are sent.
        threshold: Only coordinates above this, in absolute value, are sent.
        cap: Each coordinate is clipped to this, in absolute value.
        noise_multiplier: The noise on each coordinate, in units of the cap.
    """

    fraction: float = 0.1
    threshold: float = 0.0
    cap: float = 0.001
    noise_multiplier: float = 0.0

    draws_noise: ClassVar[bool] = True
    alike: ClassVar[bool] = True
    unproven: ClassVar[str | None] = "which coordinates are sent depends on the data, without noise"

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"per_update.fraction must be in (0, 1], got {self.fraction}")
        if self.threshold < 0 or self.noise_multiplier < 0:
            raise ConfigError(
                f"per_update.threshold and noise_multiplier must be >= 0, got {self.threshold} and "
                f"{self.noise_multiplier}"
            )
        require_scale("per_update.cap", self.cap)
        for name in ("threshold", "noise_multiplier"):
            if getattr(self, name):
                require_scale(f"per_update.{name}", getattr(self, name))

    def apply(
        self, updates: Tensor, norms: Tensor, bound: float, t: int, total: int, draw: Draw, layers: Layers
    ) -> Tensor:
        """The chosen coordinates, capped and with noise; all others are 0."""
        sent = torch.zeros_like(updates)
        wanted = math.ceil(self.fraction * updates.shape[1])
        cap = _at_most(self.cap)
        for row, update in enumerate(updates):
            generator = draw(row)
            over = (update.abs() > self.threshold).nonzero().squeeze(1).cpu().numpy()
            chosen = generator.choice(over, size=min(wanted, len(over)), replace=False)
            places = torch.from_numpy(chosen).to(update.device)
            values = update[places].clamp(-cap, cap)
            sent[row, places] = values + gaussian_like(values, self.noise_multiplier * self.cap, generator)
        return sent

    def replay(self, shown: Tensor, seen: Tensor, bound: float, unit: float, layers: Layers) -> Tensor:
        """A capped value only says "at least this much": a dummy beyond the cap matches as well."""
        side, cap = seen.sign(), self.cap * unit
        capped = torch.where(seen.abs() > cap * (1 - 1e-5), side * (side * shown).clamp(max=cap), shown)
        return capped * (seen != 0)


def _at_most(cap: float) -> float:
    """The largest float32 that is not above the cap."""
    nearest = np.float32(cap)
    return float(nearest if float(nearest) <= cap else np.nextafter(nearest, np.float32(0)))
