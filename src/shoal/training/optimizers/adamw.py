"""AdamW: Loshchilov & Hutter (2019), Algorithm 2, as in torch.optim.AdamW.

    m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
    w <- w - lr weight_decay w - lr (m/(1 - beta1^t)) / (sqrt(v/(1 - beta2^t)) + 1e-8)

Where steps have noise it is in g, so that all of this is post-processing.

I. Loshchilov, F. Hutter (2019), Decoupled Weight Decay Regularization. https://arxiv.org/abs/1711.05101
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from shoal.algorithms.base import Local
from shoal.gradients import Layout, Tape
from shoal.training.optimizers.optimizer import State

EPSILON = 1e-8


@dataclass(frozen=True)
class AdamW:
    """Settings of AdamW."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    places: tuple[slice, ...]
    names: ClassVar[tuple[str, ...]] = ("mean", "square", "count")

    @classmethod
    def of(cls, local: Local, lr: float, layout: Layout) -> Self:
        """With the settings of a configuration."""
        return cls(lr, local.betas, local.weight_decay, layout.trained)

    def state(self, params: Tensor) -> State:
        """Mean and mean square of the gradients, and each client's number of steps."""
        count = params.new_zeros(len(params), 1, dtype=torch.float64)
        return {"mean": torch.zeros_like(params), "square": torch.zeros_like(params), "count": count}

    def step(self, params: Tensor, gradient: Tape, active: Tensor, state: State) -> None:
        """One step of the active clients."""
        active, (first, second) = active.unsqueeze(1), self.betas
        mean, square, count = (state[name] for name in self.names)
        grads = torch.zeros_like(params)
        gradient.accumulate(grads, 1.0)
        count += active
        mean.lerp_(grads, active * (1 - first))
        square.lerp_(grads.square_(), active * (1 - second))
        taken = count.clamp(min=1)  # a client without records takes none
        scale = active * (self.lr / (1 - first**taken)).to(params)
        for place in self.places if self.weight_decay else ():
            params[:, place].mul_(1 - self.lr * self.weight_decay * active)
        params.sub_(mean / (square / (1 - second**taken).to(params)).sqrt_().add_(EPSILON) * scale)

    @property
    def plain(self) -> bool:
        """Never: steps are scaled."""
        return False
