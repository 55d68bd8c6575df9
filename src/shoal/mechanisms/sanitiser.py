"""The sanitiser of the steps of a round: the interface between local training and `per_record`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.random.noise_source import Normals, Product

State = MutableMapping[str, Tensor]
"""What is carried from round to round; the bound of an adaptive clip is under `clip`."""
Layers = Mapping[str, slice]
"""Where each layer's numbers lie in a flat vector, by the layer's name: together they are all of it."""
Source = Callable[[str, Tensor], Normals]
"""Independent noise for a purpose (`step noise`, `step count`) and vectors like these, [K, P]."""


@dataclass(frozen=True)
class LocalSteps:
    """The steps of a chunk of clients in one round, for which a sanitiser is made.

    Attributes:
        params: The clients' models, [K, P].
        layers: The layers of the model.
        noise: The noise on the sum of a batch, in units of the sensitivity.
        batch: The public, expected batch size, by which sums are divided.
        state: What is carried from round to round.
        t: The round.
        total: The planned number of rounds.
        draw: Gives independent noise for each purpose.
    """

    params: Tensor
    layers: Layers
    noise: float
    batch: int
    state: State
    t: int
    total: int
    draw: Source


class Step(Protocol):
    """The gradient of each client's batch, not yet written anywhere."""

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""


class Gradients(Protocol):
    """The gradients of each client's records in one batch (`gradients.RecordTape`)."""

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x sum_b factors[layer, k, b] gradient[k, b]; factors [1, K, B] are for all layers."""

    def accumulate_except(
        self, left: Callable[[Product], bool], into: Tensor, scale: float, factors: Tensor
    ) -> list[Product]:
        """The same, but for products that are added together with the noise in one pass."""

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order of `squares` and `factors`."""

    def squares(self) -> Tensor:
        """The squared norm of every record's gradient in each layer, [layers, K, B], in float64."""

    def records(self) -> Tensor:
        """The gradients themselves, [K, B, P]."""


class Sanitiser(Protocol):
    """Clips the gradients of a chunk of clients and adds their noise."""

    metrics: StepMetrics

    @property
    def values(self) -> tuple[object, ...]:
        """The settings that must be equal for another sanitiser to take its place."""

    def begin(self, other: Sanitiser) -> None:
        """Take over another one's values and random streams for a new round, with empty metrics."""

    def non_finite(self, tape: Gradients) -> Tensor:
        """Which gradients [K, B] have no finite norm: they hold NaN or Inf, or overflow."""

    def __call__(self, tape: Gradients, mask: Tensor, active: Tensor) -> Step:
        """The sanitised gradient of the batch; `mask` [K, B] is 0 for padding, `active` [K] is 0 where a client has
        no step left and so draws no noise."""

    def in_pieces(self, pieces: Iterable[tuple[Gradients, Tensor]], total: Tensor, active: Tensor) -> Step:
        """The same for a batch in pieces, each with its mask: every record is clipped, the noise is added once.

        The clipped gradients are added to `total` [K, P], which is 0; one piece at a time is in memory.
        """


class Summed:
    """A gradient that was computed already, [K, P]."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient."""
        into.add_(self.vectors, alpha=scale)

    def accumulate_except(self, left: object, into: Tensor, scale: float, factors: Tensor | None) -> list[Product]:
        """Leaves no products out."""
        self.accumulate(into, scale)
        return []


@dataclass
class StepMetrics:
    """Metrics of a chunk's steps: sums over its records, clients and steps, kept on the device.

    `kept`: how many steps of each client passed their test, where the method has one.
    """

    records: Tensor
    clipped: Tensor
    non_finite: Tensor
    shares: Tensor
    steps: Tensor
    kept: Tensor

    def clear(self) -> None:
        """Set all sums to 0."""
        for tensor in (self.records, self.clipped, self.non_finite, self.shares, self.steps, self.kept):
            tensor.zero_()

    @classmethod
    def joined(cls, parts: Sequence[StepMetrics]) -> StepMetrics | None:
        """The metrics of several chunks as those of one; None of none."""
        if not parts:
            return None
        sums = (sum(getattr(part, name) for part in parts) for name in ("records", "clipped", "non_finite"))
        rows = ("shares", "steps", "kept")
        return cls(*sums, *(torch.cat([getattr(part, name) for part in parts]) for name in rows))

    @classmethod
    def nothing(cls, params: Tensor) -> StepMetrics:
        """Metrics of no step yet, for clients with parameters [K, P]."""
        clients = params.new_zeros(len(params))
        number = params.new_zeros(())
        return cls(number, number.clone(), number.clone(), clients, clients.clone(), clients.clone())
