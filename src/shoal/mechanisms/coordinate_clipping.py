"""AdaClip (Pichapati et al. 2019; a comparator in Wei et al. 2023): clips in coordinates that follow the gradients.

    a   <- sqrt(s) sqrt(sum s);   w_b <- (g_b - m)/a;   w_b <- w_b / max(1, |w_b|)
    g~  <- a (sum_b w_b + N(0, sigma^2))/B + m
    v   <- clamp((g~ - m)^2 - a^2 sigma^2/B^2, h1, h2)
    m   <- beta1 m + (1 - beta1) g~;   s <- beta2 s + (1 - beta2) v

m and s depend on g~ alone, which is released, so they cost no privacy. Both restart in every round, at each client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.mechanisms.mechanism import GradientClip, Layers, State, altered
from shoal.mechanisms.sanitiser import Gradients, LocalSteps, Sanitiser, Step, StepMetrics, Summed
from shoal.mechanisms.schedules import require_scale
from shoal.mechanisms.update_clipping import into_ball, row_norms, shrinking, weighed_sum
from shoal.precision import all_digits
from shoal.random.noise_source import Normals


@dataclass(frozen=True)
class AdaClip(GradientClip):
    """One record moves the sum of the w_b by at most 1, so the noise is `per_step.noise_multiplier` itself.

    Attributes:
        h1: The smallest estimated variance of a coordinate.
        h2: The largest estimated variance of a coordinate.
        beta1: How slowly the mean m of the gradients is forgotten.
        beta2: How slowly their variance s is forgotten.
    """

    h1: float = 1e-5
    h2: float = 1e-3
    beta1: float = 0.99
    beta2: float = 0.9
    unproven: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for name in ("h1", "h2"):
            require_scale(f"per_record.{name}", getattr(self, name))
        if self.h1 > self.h2:
            raise ConfigError(f"per_record.h1 must be at most h2, got {self.h1} and {self.h2}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"per_record.{name} must be in [0, 1), got {getattr(self, name)}")

    def scales(self) -> dict[str, str | float]:
        """The settings, by key, that are bounds on clips."""
        return {"per_record.h1": self.h1, "per_record.h2": self.h2}

    def sanitiser(self, steps: LocalSteps) -> Sanitiser:
        """The sanitiser of a chunk of clients for the steps of a round."""
        source = steps.draw("step noise", steps.params)
        return AdaptiveCoordinates(self, steps.noise, steps.batch, source, steps.params)

    def limits(self, rounds: int) -> str:
        """In its own coordinates every record's gradient has a norm of at most 1."""
        return "one record moves the sum of a batch by at most 1, in coordinates that follow noisy gradients alone"

    def least(self, state: State, t: int, total: int, size: int) -> float:
        """The smallest bound that round t may have."""
        return float(self.h1 * size**0.5)

    def sensitivity_at_start(self, size: int, layers: int) -> float:
        """The sensitivity of a batch sum in the first step of a run."""
        return float(self.start(torch.zeros(1, size)).spread()[0, 0])

    def unclipped(self) -> Self:
        """The same mechanism without its clip, which an audit must flag."""

        def unclipped_sum(self: Self, at: Coordinates, gradients: Tensor, mask: Tensor) -> Tensor:
            moved = (gradients - at.mean.unsqueeze(1)) / at.spread().unsqueeze(1)
            return (moved * mask.unsqueeze(2)).sum(1)

        found: Self = altered(self, clipped_sum=unclipped_sum)
        return found

    def replay(self, vectors: Tensor, layers: Layers, t: int, total: int) -> Tensor:
        """In the first step all coordinates have the same scale: the clip is one ball."""
        return into_ball(vectors, (self.h1 * self.h2) ** 0.5 * vectors.shape[1] ** 0.5)

    def start(self, params: Tensor) -> Coordinates:
        """The coordinates with which K clients, of parameters [K, P], start a round."""
        return Coordinates(torch.zeros_like(params), torch.full_like(params, math.sqrt(self.h1 * self.h2)))

    def clipped_sum(self, at: Coordinates, gradients: Tensor, mask: Tensor) -> Tensor:
        """sum_b w_b for every client, of gradients [K, B, P]; `mask` [K, B] is 0 for padding.

        A coordinate that overflows after the division counts as 0. A mask in float64 has them summed in float64.
        """
        spread = at.spread()
        moved = (gradients - at.mean.unsqueeze(1)).div_(spread.unsqueeze(1))
        moved.nan_to_num_(nan=math.nan, posinf=0.0, neginf=0.0)
        factors = shrinking(row_norms(moved.flatten(0, 1)), 1.0).to(moved.dtype).view(mask.shape) * mask
        with all_digits(moved):
            return weighed_sum(moved, factors).to(mask.dtype)

    def gradient(self, at: Coordinates, noisy_sum: Tensor, noise: float, batch: float) -> Tensor:
        """g~ [K, P] from the noisy sum; also updates the coordinates from it."""
        spread = at.spread()
        gradient = noisy_sum.mul_(spread).div_(batch).add_(at.mean)
        seen = (gradient - at.mean).square_() - (spread * (noise / batch)).square_()
        at.mean.lerp_(gradient, 1 - self.beta1)
        at.scale.lerp_(seen.clamp_(self.h1, self.h2), 1 - self.beta2)
        return gradient


@dataclass
class Coordinates:
    """m and s of each client, [K, P]."""

    mean: Tensor
    scale: Tensor

    def spread(self) -> Tensor:
        """a, the scale of every coordinate, [K, P]."""
        return self.scale.sqrt() * self.scale.sum(1, keepdim=True).sqrt()


class AdaptiveCoordinates:
    """AdaClip's sanitiser: it needs the gradients of single records, each in its own coordinates."""

    def __init__(self, clip: AdaClip, noise: float, batch: float, source: Normals, params: Tensor) -> None:
        self.clip, self.noise, self.batch, self.source = clip, noise, batch, source
        self.at = clip.start(params)
        self.metrics = StepMetrics.nothing(params)

    @property
    def values(self) -> tuple[object, ...]:
        """The settings that must be equal for another sanitiser to take its place."""
        return self.clip, self.noise, self.batch

    def begin(self, other: Sanitiser) -> None:
        """Take over another one's values and random streams."""
        assert isinstance(other, AdaptiveCoordinates)
        self.source.begin(other.source)
        self.at.mean.copy_(other.at.mean)
        self.at.scale.copy_(other.at.scale)
        self.metrics.clear()

    def non_finite(self, tape: Gradients) -> Tensor:
        """Which gradients [K, B] have no finite norm."""
        return ~tape.squares().sum(0).isfinite()

    def __call__(self, tape: Gradients, mask: Tensor, active: Tensor) -> Step:
        return self._noisy(self._clipped(tape, mask), active)

    def in_pieces(self, pieces: Iterable[tuple[Gradients, Tensor]], total: Tensor, active: Tensor) -> Step:
        """The same for a batch in pieces; the noise is added once."""
        for tape, mask in pieces:
            total += self._clipped(tape, mask.to(total.dtype))
            del tape  # before the next one is made
        return self._noisy(total.to(self.at.mean.dtype), active)

    def _clipped(self, tape: Gradients, mask: Tensor) -> Tensor:
        self.metrics.non_finite += self.non_finite(tape).sum()
        return self.clip.clipped_sum(self.at, tape.records(), mask)

    def _noisy(self, total: Tensor, active: Tensor) -> Step:
        noisy = total
        if self.noise:
            noisy = torch.zeros_like(total)
            self.source.add(noisy, self.noise * active, total)
        gradient = self.clip.gradient(self.at, noisy, self.noise, self.batch)
        return Summed(gradient * active.unsqueeze(1))
