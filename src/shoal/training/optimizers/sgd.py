"""Stochastic gradient descent, with momentum and weight decay as in torch.optim.SGD.

g <- g + weight_decay w
w <- w - lr g;   with momentum:   v <- momentum v + g,   w <- w - lr v
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from shoal.algorithms.base import Local
from shoal.gradients import Layout, Tape
from shoal.training.optimizers.optimizer import Pulled, State


@dataclass(frozen=True)
class SGD:
    """Settings of SGD; only momentum is carried from step to step."""

    lr: float
    momentum: float
    weight_decay: float
    places: tuple[slice, ...]
    names: ClassVar[tuple[str, ...]] = ("velocity",)

    @classmethod
    def of(cls, local: Local, lr: float, layout: Layout) -> Self:
        """With the settings of a configuration."""
        return cls(lr, local.momentum, local.weight_decay, layout.trained)

    def state(self, params: Tensor) -> State:
        """The velocity, where there is momentum."""
        return {"velocity": torch.zeros_like(params)} if self.momentum else {}

    def step(self, params: Tensor, gradient: Tape, active: Tensor, state: State) -> None:
        """One step; without momentum no gradient is in memory."""
        if self.weight_decay:
            gradient = Pulled(gradient, params, None, self.weight_decay, self.places, active)
        if not self.momentum:
            gradient.accumulate(params, -self.lr)
            return
        velocity = state["velocity"]
        velocity.mul_(torch.where(active > 0, self.momentum, 1.0).unsqueeze(1))
        gradient.accumulate(velocity, 1.0)
        params.addcmul_(velocity, active.unsqueeze(1), value=-self.lr)

    @property
    def plain(self) -> bool:
        """Is a step nothing but w <- w - lr g?"""
        return not self.momentum and not self.weight_decay
