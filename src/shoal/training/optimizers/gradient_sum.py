"""No local model: the update is -lr times the sum of one step's clipped gradients, over the public batch.

    u <- -(lr/B) sum_i clip(g_i)

It is summed in float64 and never added to the model, where it would lose digits: sites' noise is added later, to the
sum of their updates. Where these are on a grid every record is rounded first (`OnGrid`), so that this sum is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.gradients import RecordTape, Tape
from shoal.mechanisms.update_clipping import row_norms
from shoal.training.optimizers.optimizer import State

SUM = "sum"
IN_CACHE = 2**17
"""Numbers that a CPU rounds at a time, in float64: those of a whole batch would go through memory several times."""


@dataclass(frozen=True)
class GradientSum:
    """The learning rate; pieces of a batch add up."""

    lr: float
    names: ClassVar[tuple[str, ...]] = (SUM,)

    def state(self, params: Tensor) -> State:
        """The sum, which is 0."""
        return {SUM: torch.zeros_like(params, dtype=torch.float64)}

    def step(self, params: Tensor, gradient: Tape, active: Tensor, state: State) -> None:
        """Add the gradients of a batch, or of a piece of it."""
        gradient.accumulate(state[SUM], -self.lr)

    @property
    def plain(self) -> bool:
        """Never: the parameters stay."""
        return False


class OnGrid:
    """A tape whose records are rounded one by one, towards 0, to multiples of a power of two.

    After its factor, so that no record is longer than its clip. Sums of such numbers are exact in float64.

    What is measured is what is rounded: a norm by other products than the gradient's may be smaller than that is,
    by a thousandth where these are in TF32 (precision.py).
    """

    def __init__(self, tape: RecordTape, step: float, layers: Mapping[str, slice]) -> None:
        self._records, self._step, self.layers = tape.records(), step, tape.layers
        self._places = [layers[name] for name in tape.layers]

    def squares(self) -> Tensor:
        """The squared norm of every gradient, in float64."""
        rows = self._records.flatten(0, 1)
        squares = torch.stack([row_norms(rows[:, place]).square() for place in self._places])
        return squares.view(-1, *self._records.shape[:2])

    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0."""
        self._records = torch.nan_to_num(self._records, nan=0.0, posinf=0.0, neginf=0.0)

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient, rounded."""
        assert factors is not None
        steps = (factors.double() * (scale / self._step)).unsqueeze(3).expand(len(self._places), -1, -1, -1)
        width = into.shape[1] if into.is_cuda else max(1, IN_CACHE // max(1, steps[0].numel()))
        for place, factor in zip(self._places, steps, strict=True):
            columns = torch.split(self._records[..., place], width, 2), torch.split(into[:, place], width, 1)
            for few, sums in zip(*columns, strict=True):
                sums += few.double().mul_(factor).trunc_().sum(1).mul_(self._step)
