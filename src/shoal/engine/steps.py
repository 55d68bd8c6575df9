"""The local steps of a slice of clients: what changes while they train, and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.engine.federation import Federation
from shoal.engine.sanitise import Sanitiser
from shoal.gradients import ExampleTape, Network, Tape
from shoal.privacy.normals import Product

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""For every step: records [K, B], which of them are real, their weights in the loss, which clients [K] move."""

ALIGNED = 16
"""Numbers in 64 bytes."""


@dataclass
class LocalSteps:
    """SGD of K clients from one model [P], each with parameters (and a velocity) of its own, [K, P]."""

    network: Network
    federation: Federation
    model: Tensor
    params: Tensor
    velocity: Tensor | None
    sanitised: Sanitiser | None
    lr: float
    momentum: float

    def play(self, inputs: Inputs) -> LocalSteps:
        plain = self.velocity is None and self.sanitised is None
        with self.network.owing(self.model, self.params, inputs[0].shape[2]) if plain else nullcontext():
            for step in zip(*inputs, strict=True):
                self.step(*step)
        return self

    def play_carefully(self, inputs: Inputs) -> LocalSteps:
        """The same, where some record's gradient has no norm: it is left out, and its client's noise is not.

        One such record would turn its client's update into NaN, and the firewall that into 0: it would show. It is
        taken from the very tape on which it has no norm: in another pass Dropout would draw anew.
        """
        assert self.sanitised is not None
        for records, real, weights, moving in zip(*inputs, strict=True):
            tape = self.network.backward(self.params, *self.federation.rows(records), weights)
            without = Without(tape, self.sanitised.spoilt(tape))
            self._move(without, real * ~without.dropped, moving)
        return self

    def step(self, records: Tensor, real: Tensor, weights: Tensor, moving: Tensor) -> None:
        self._move(self.network.backward(self.params, *self.federation.rows(records), weights), real, moving)

    def _move(self, tape: Tape, real: Tensor, moving: Tensor) -> None:
        """w <- w - lr g; with momentum v <- momentum v + g, w <- w - lr v, for the clients that have a step left."""
        if self.sanitised is not None:
            tape = self.sanitised(tape, real, moving)
        if self.velocity is None:
            tape.accumulate(self.params, -self.lr)
            return
        self.velocity.mul_(torch.where(moving > 0, self.momentum, 1.0).unsqueeze(1))
        tape.accumulate(self.velocity, 1.0)
        self.params.addcmul_(self.velocity, moving.unsqueeze(1), value=-self.lr)

    def copied(self) -> LocalSteps:
        """The same steps in memory of their own."""
        velocity = None if self.velocity is None else self.velocity.clone()
        return replace(self, params=aligned(self.params), velocity=velocity, sanitised=deepcopy(self.sanitised))

    def begin(self, other: LocalSteps) -> None:
        """Take the place of another one, in the same memory."""
        self.params.copy_(other.params)
        if self.velocity is not None and other.velocity is not None:
            self.velocity.copy_(other.velocity)
        if self.sanitised is not None and other.sanitised is not None:
            self.sanitised.begin(other.sanitised)


class Without:
    """A tape without some of its records: to have no norm is to be clipped to nothing."""

    def __init__(self, tape: ExampleTape, dropped: Tensor) -> None:
        self._tape, self.dropped, self.layers = tape, dropped, tape.layers
        self._squares = tape.squares().masked_fill(dropped, float("inf"))
        tape.make_finite()

    def squares(self) -> Tensor:
        return self._squares

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        self._tape.accumulate(into, scale, factors)

    def accumulate_but(
        self, left: Callable[[Product], bool], into: Tensor, scale: float, factors: Tensor
    ) -> list[Product]:
        return self._tape.accumulate_but(left, into, scale, factors)

    def examples(self) -> Tensor:
        return self._tape.examples().masked_fill(self.dropped.unsqueeze(2), 0.0)

    def make_finite(self) -> None:
        """It is already."""


def aligned(vectors: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 64 bytes, so that a kernel may read several numbers at once."""
    size = vectors.shape[1]
    rows = vectors.new_empty(len(vectors), -(-size // ALIGNED) * ALIGNED)[:, :size]
    return rows.copy_(vectors)
