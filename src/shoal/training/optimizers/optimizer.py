"""The interface of a local optimiser, and what may be added to its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shoal.gradients import Tape

State = dict[str, Tensor]
"""What an optimiser carries from step to step, by name, with a row for each client: [K, ...]."""


class Optimizer(Protocol):
    """Settings of an optimiser; `names` are those of the state that it may carry."""

    names: ClassVar[tuple[str, ...]]

    def state(self, params: Tensor) -> State:
        """The state before the first step of clients with parameters [K, P]."""

    def step(self, params: Tensor, gradient: Tape, active: Tensor, state: State) -> None:
        """One step of the active clients."""

    @property
    def plain(self) -> bool:
        """Is a step nothing but w <- w - lr g?"""


@dataclass(frozen=True, eq=False)
class Pulled:
    """A gradient with that of (strength/2) |w - centre|^2: a proximal term, or, around 0, weight decay.

    Attributes:
        gradient: The gradient of the loss.
        params: The clients' parameters w, [K, P].
        centre: [P], or a shorter vector of the first parameters; None: 0.
        strength: How strong the pull is.
        places: Where parameters are trained: running statistics are not pulled.
        active: Which clients take this step, [K].
    """

    gradient: Tape
    params: Tensor
    centre: Tensor | None
    strength: float
    places: Sequence[slice]
    active: Tensor

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        for place in self.places:
            held = self.params[:, place]
            away = held if self.centre is None else held - self.centre[place]
            into[:, place].addcmul_(away, self.active.unsqueeze(1), value=scale * self.strength)
        self.gradient.accumulate(into, scale)


@dataclass(frozen=True, eq=False)
class Shortened:
    """A gradient of norm `bound` at most, for each client: torch.nn.utils.clip_grad_norm_. It protects nobody."""

    gradient: Tape
    bound: float

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        whole = torch.zeros_like(into)
        self.gradient.accumulate(whole, 1.0)
        norms = torch.linalg.vector_norm(whole, dim=1, keepdim=True)
        into.add_(whole.mul_((self.bound / (norms + 1e-6)).clamp(max=1.0)), alpha=scale)
