"""What a clip of gradients makes for the steps of a round: the interface between local training and `per_record`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.random.normals import Normals, Product

Source = Callable[[str, Tensor], Normals]
"""Independent noise for a purpose (`step noise`, `step count`) and vectors like these, [K, P]."""


class Step(Protocol):
    """The gradient of each client's batch, not yet written anywhere."""

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""


class Gradients(Protocol):
    """The gradients of each client's records in one batch (`gradients.ExampleTape`)."""

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x sum_b factors[layer, k, b] gradient[k, b]; factors [1, K, B] are for all layers."""

    def accumulate_except(
        self, left: Callable[[Product], bool], into: Tensor, scale: float, factors: Tensor
    ) -> list[Product]:
        """The same, but for products that are left to whoever adds noise to the same places in one go."""

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order of `squares` and `factors`."""

    def squares(self) -> Tensor:
        """The squared norm of every record's gradient in each layer, [layers, K, B], in float64."""

    def records(self) -> Tensor:
        """The gradients themselves, [K, B, P]."""


class Sanitiser(Protocol):
    """What happens to the gradients of a slice of clients."""

    metrics: StepMetrics

    @property
    def values(self) -> tuple[object, ...]:
        """All that must be the same for one to take another's place."""

    def begin(self, other: Sanitiser) -> None:
        """Take the place of another one for a new round: its numbers, its streams, and nothing told yet."""

    def non_finite(self, tape: Gradients) -> Tensor:
        """Which gradients [K, B] have no norm: they hold NaN or Inf, or are too great for a float."""

    def __call__(self, tape: Gradients, mask: Tensor, active: Tensor) -> Step:
        """The batch's gradient as it may move the model; `real` [K, B] is 0 where a batch is filled up, `moving` [K]
        where a client has no step left, and so draws no noise."""


@dataclass
class StepMetrics:
    """What there is to tell of a slice's steps: sums over its records, clients and steps, kept on the device."""

    records: Tensor
    clipped: Tensor
    non_finite: Tensor
    shares: Tensor
    steps: Tensor

    def clear(self) -> None:
        """Set all sums to 0."""
        for tensor in (self.records, self.clipped, self.non_finite, self.shares, self.steps):
            tensor.zero_()

    @classmethod
    def nothing(cls, params: Tensor) -> StepMetrics:
        """Metrics of no step yet, for clients with parameters [K, P]."""
        clients = params.new_zeros(len(params))
        number = params.new_zeros(())
        return cls(number, number.clone(), number.clone(), clients, clients.clone())
