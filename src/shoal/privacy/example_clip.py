"""What happens to one record's gradient inside its client (boundary `per_example`).

A batch's gradient is sum_b factor_b g_b, so that one record moves it by at most the `sensitivity`, in whose units
the step's noise is drawn. Norms come squared, [layers, K, B] for K clients with batches of B, in float64, where no
square of a float32 is too small or too great; factors are [layers, K, B], or [1, K, B] where all layers share one.
AdaClip, which clips in coordinates of its own, is in `adaclip`. As with whole updates, a bound that was computed from
the data without noise proves nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from shoal.privacy.clip import QuantileClip, shrinking
from shoal.privacy.noise import Memory
from shoal.privacy.schedules import require_scales, scale_in

Layers = Literal["flat", "split", "each"]
Bound = float | Tensor
"""C as a number, or as one that lies on a device."""


class ExampleClipping:
    """What all clips of gradients share: a bound C, on the whole gradient or on its layers.

    `flat`: the whole gradient has norm C at most. `split`: each of M layers C/sqrt(M), so that the whole has C too.
    `each`: each layer C, as 004 does, so that the whole may have C sqrt(M), while noise is scaled to C.
    """

    layers: Layers
    unproven: ClassVar[str | None] = None

    def factors(self, squares: Tensor, bound: Bound) -> Tensor:
        """min(1, bound/norm) of every record, of the whole gradient or of each layer."""
        norms = squares.sum(0, keepdim=True).sqrt() if self.layers == "flat" else squares.sqrt()
        if self.layers == "split":
            bound = bound / math.sqrt(len(squares))
        return shrinking(norms, bound)

    def sensitivity(self, squares: Tensor, factors: Tensor, bound: Bound) -> Tensor:
        """What the noise is scaled to, for each client: [K]."""
        return squares.new_ones(squares.shape[1]) * bound

    def excess(self, layers: int) -> float:
        """By how much one record can move the sum, in units of what the noise is scaled to."""
        return math.sqrt(layers) if self.layers == "each" else 1.0

    def bound(self, memory: Memory, t: int, total: int) -> float:
        """This round's C."""
        raise NotImplementedError

    def update_noise(self, noise: float, batch: float) -> float:
        """The noise on the sum of a batch, of `noise` that a step has in all."""
        return noise

    def adapt(self, memory: Memory, share: float) -> None:
        """Set the next round's bound from the noisy share of gradients below this one's."""

    def metrics(self, memory: Memory, t: int, total: int, noise: float | None, batch: float) -> dict[str, float]:
        """The clip, and the noise on the sum of a batch, where they are the same for every step of a round."""
        clip = self.bound(memory, t, total)
        told = {"example_clip": clip}
        return told if noise is None else told | {"step_noise": self.update_noise(noise, batch) * clip}


@dataclass(frozen=True)
class ExampleClip(ExampleClipping):
    """A public bound, constant or on a schedule over the rounds."""

    clip: str | float = 1.0
    layers: Layers = "flat"

    def __post_init__(self) -> None:
        require_scales("per_example.clip", self.clip)

    def bound(self, memory: Memory, t: int, total: int) -> float:
        return scale_in("per_example.clip", self.clip, t, total)


@dataclass(frozen=True)
class MaxClip(ExampleClip):
    """Fed-alphaCDP (004): noise is scaled to the greatest clipped norm in the batch, over records and layers."""

    layers: Layers = "each"
    unproven: ClassVar[str | None] = (
        "the noise is scaled to the greatest norm in the batch (l2-max), which depends on the data: its amount tells"
    )

    def sensitivity(self, squares: Tensor, factors: Tensor, bound: Bound) -> Tensor:
        if self.layers == "flat":
            squares = squares.sum(0, keepdim=True)
        clipped = (squares.sqrt() * factors).nan_to_num(nan=0.0)  # one without a norm is left out
        return clipped.amax((0, 2)) if squares.shape[2] else squares.new_zeros(squares.shape[1])

    def metrics(self, memory: Memory, t: int, total: int, noise: float | None, batch: float) -> dict[str, float]:
        return super().metrics(memory, t, total, None, batch)  # its noise is each batch's own


@dataclass(frozen=True)
class QuantileExampleClip(ExampleClipping, QuantileClip):
    """The bound follows a quantile of the gradients' norms, found with noise (Andrew et al. 2021, in each step).

    In every step each client counts, with noise, the records whose norm is below the bound; the mean of these
    noisy shares leaves with its update, and sets the next round's bound. Gradient and count are one Gaussian.
    """

    layers: Layers = "flat"
    section: ClassVar[str] = "per_example"

    def bound(self, memory: Memory, t: int, total: int, norms: Tensor | None = None) -> float:
        return QuantileClip.bound(self, memory, t, total, norms)

    def update_noise(self, noise: float, batch: float) -> float:
        return QuantileClip.update_noise(self, noise, batch)

    def adapt(self, memory: Memory, share: float) -> None:  # type: ignore[override]
        self.move(memory, share)

    def counts(self, squares: Tensor, real: Tensor, bound: Bound) -> Tensor:
        """Of each client [K], how many more records than half of its batch are below the bound.

        `real` [K, B] is 0 where a batch is only filled up.
        """
        below = (squares.sum(0).sqrt() <= bound).to(squares.dtype) - 0.5
        return (below * real).sum(1)
