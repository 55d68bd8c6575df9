"""Local training of many clients at once: the inner loop, from `examples` to the client's update.

for each client k:      w_k <- w
    for each step:      g_k <- gradient(w_k; its next batch), clipped and with noise where the method says so
                        w_k <- w_k - lr g_k
    update_k <- w_k - w
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shoal.gradients import Network, RecordTape, Tape
from shoal.random.normals import Product
from shoal.training.client_data import ClientData
from shoal.training.context import TrainingContext
from shoal.training.round_index import RoundIndex
from shoal.training.sanitise import Sanitiser, StepMetrics, sanitiser

VELOCITY = "velocity."
"""Begins the names of what clients keep of their momentum, where they keep it."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""For every step: records [K, B], their mask, their weights in the loss, which clients [K] are active."""

ALIGNED = 16
"""Numbers in 64 bytes."""


def train(
    context: TrainingContext, params: Tensor, clients: np.ndarray, index: RoundIndex, state: dict[str, Tensor]
) -> tuple[Tensor, StepMetrics | None]:
    """The updates of these clients after their local steps.

    Args:
        stage: What they train with.
        params: The model [P] from which all of them start.
        clients: Their numbers [K].
        moment: Which round this is.
        state: What is carried between rounds; momentum is written into it where clients keep theirs.

    Returns:
        The updates [K, P], and what there is to report of their steps where records are clipped.
    """
    plan = planned(context, clients, index)
    inputs = _inputs(context, plan, params)
    with _drawing(context, clients, index):
        steps = _first(context, params, clients, index, state)
        steps = context.graphs.play(steps, inputs) if context.graphs else steps.play(inputs)
        if steps.sanitiser and steps.sanitiser.metrics.non_finite:
            steps = _first(context, params, clients, index, state).play_carefully(inputs)
    if context.algorithm.local.remembers and steps.velocity is not None:
        state.update({f"{VELOCITY}{client}": row.cpu() for client, row in zip(clients, steps.velocity, strict=True)})
    return steps.client_params.sub_(params), steps.sanitiser.metrics if steps.sanitiser else None


@dataclass(frozen=True)
class Plan:
    """The records of every batch, [steps, clients, batch], and each client's number of steps.

    `padded`: the same batches, filled up where they end early with a record of the client's own, which has no weight.
    One of somebody else's could still turn the update into NaN: 0 times Inf. (A client without records has none of
    its own; its update counts as 0 either way.)
    """

    batches: np.ndarray
    steps: np.ndarray
    own: np.ndarray

    @property
    def padded(self) -> np.ndarray:
        """The batches, padded."""
        return np.where(self.batches >= 0, self.batches, self.own[:, None])


def planned(context: TrainingContext, clients: np.ndarray, index: RoundIndex) -> Plan:
    """Each client's batches come from a stream of its own, so that they are the same in any slice, and at the
    client's own site in a real federation.
    """
    sampler, local = context.algorithm.records, context.algorithm.local
    drawn, own = [], []
    for client in clients.tolist():
        records = context.federation.records(client)
        own.append(records[0] if len(records) else 0)
        steps = local.steps or sampler.steps(len(records), local.epochs)
        generator = context.streams.generator("examples", index.t, index.attempt, client)
        positions = sampler.draw(generator, len(records), steps)
        drawn.append(np.where(positions >= 0, records[positions], -1) if len(records) else positions)
    steps, width = (max(rows.shape[axis] for rows in drawn) for axis in (0, 1))
    if context.streams.mode == "secure" and sampler.varies:
        # Matrices of another shape may be multiplied in another order: one record more would change the last digits
        # of everybody's gradient, and with them which way a ReLU goes.
        width = max(width, *(sampler.widest(len(context.federation.records(k))) for k in clients.tolist()))
    elif context.graphs and sampler.varies:
        width = _rounded_up(width)
    batches = np.full((steps, len(clients), width), -1, dtype=np.int64)
    for place, rows in enumerate(drawn):
        batches[: rows.shape[0], place, : rows.shape[1]] = rows
    return Plan(batches, np.array([len(rows) for rows in drawn]), np.array(own))


def _rounded_up(width: int) -> int:
    """To one of few widths, so that a recorded step fits the next round's batches too."""
    stride = max(4, 1 << max(width.bit_length() - 3, 0))
    return -(-width // stride) * stride


def _inputs(context: TrainingContext, plan: Plan, params: Tensor) -> Inputs:
    """The plan on the device; without clips a batch's n records weigh 1/n each, and padding nothing."""
    device = params.device
    records = torch.from_numpy(plan.padded).to(device)
    mask = torch.from_numpy(plan.batches >= 0).to(device, params.dtype)
    active = torch.from_numpy(np.arange(len(records))[:, None] < plan.steps).to(device, params.dtype)
    weights = mask if context.algorithm.per_record else mask / mask.sum(-1, keepdim=True).clamp(min=1)
    return records, mask, weights, active


@contextmanager
def _drawing(context: TrainingContext, clients: np.ndarray, index: RoundIndex) -> Iterator[None]:
    """Layers that draw (Dropout) draw from a seed of this slice; nobody else's random numbers are touched."""
    if context.network.batched:
        yield
        return
    device = context.federation.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(context.streams.number("dropout", index.t, index.attempt, int(clients[0])))
        yield


def _first(
    context: TrainingContext, params: Tensor, clients: np.ndarray, index: RoundIndex, state: dict[str, Tensor]
) -> LocalSteps:
    """Before the first step: everyone has the model."""
    local = context.algorithm.local
    client_params = aligned(params.expand(len(clients), -1))
    velocity = _velocity(client_params, clients, state) if local.momentum else None
    clipping = sanitiser(context, client_params, clients, index, state)
    lr = local.rate(index.t, index.total)
    return LocalSteps(
        context.network, context.federation, params, client_params, velocity, clipping, lr, local.momentum
    )


def _velocity(client_params: Tensor, clients: np.ndarray, state: dict[str, Tensor]) -> Tensor:
    velocity = torch.zeros_like(client_params)
    for place, client in enumerate(clients):
        if (kept := state.get(f"{VELOCITY}{client}")) is not None:
            velocity[place] = kept.to(client_params.device)
    return velocity


@dataclass
class LocalSteps:
    """SGD of K clients from one model [P], each with parameters (and a velocity) of its own, [K, P]."""

    network: Network
    federation: ClientData
    params: Tensor
    client_params: Tensor
    velocity: Tensor | None
    sanitiser: Sanitiser | None
    lr: float
    momentum: float

    def play(self, inputs: Inputs) -> LocalSteps:
        """Run one step for each row of the inputs."""
        plain, batch = self.velocity is None and self.sanitiser is None, inputs[0].shape[2]
        with self.network.deferred_updates(self.params, self.client_params, batch) if plain else nullcontext():
            for step in zip(*inputs, strict=True):
                self.step(*step)
        return self

    def play_carefully(self, inputs: Inputs) -> LocalSteps:
        """The same, where some record's gradient has no norm: it is left out, and its client's noise is not.

        One such record would turn its client's update into NaN, and the firewall that into 0: it would show. It is
        taken from the very tape on which it has no norm: in another pass Dropout would draw anew.
        """
        assert self.sanitiser is not None
        for records, mask, weights, active in zip(*inputs, strict=True):
            tape = self.network.backward(self.client_params, *self.federation.rows(records), weights)
            without = Without(tape, self.sanitiser.non_finite(tape))  # type: ignore[arg-type]
            self._move(without, mask * ~without.dropped, active)
        return self

    def step(self, records: Tensor, mask: Tensor, weights: Tensor, active: Tensor) -> None:
        """One step of SGD for every client."""
        self._move(self.network.backward(self.client_params, *self.federation.rows(records), weights), mask, active)

    def _move(self, tape: Tape, mask: Tensor, active: Tensor) -> None:
        """w <- w - lr g; with momentum v <- momentum v + g, w <- w - lr v, for the clients that have a step left."""
        if self.sanitiser is not None:
            tape = self.sanitiser(tape, mask, active)  # type: ignore[arg-type]  # such networks give ExampleTapes
        if self.velocity is None:
            tape.accumulate(self.client_params, -self.lr)
            return
        self.velocity.mul_(torch.where(active > 0, self.momentum, 1.0).unsqueeze(1))
        tape.accumulate(self.velocity, 1.0)
        self.client_params.addcmul_(self.velocity, active.unsqueeze(1), value=-self.lr)

    @property
    def constants(self) -> object:
        """What a recording of a step keeps as it was."""
        return self.lr, self.momentum, None if self.sanitiser is None else self.sanitiser.values

    def copied(self) -> LocalSteps:
        """The same steps in memory of their own."""
        velocity = None if self.velocity is None else self.velocity.clone()
        client_params, clipping = aligned(self.client_params), deepcopy(self.sanitiser)
        return replace(self, client_params=client_params, velocity=velocity, sanitiser=clipping)

    def begin(self, other: LocalSteps) -> None:
        """Take the place of another one, in the same memory."""
        self.client_params.copy_(other.client_params)
        if self.velocity is not None and other.velocity is not None:
            self.velocity.copy_(other.velocity)
        if self.sanitiser is not None and other.sanitiser is not None:
            self.sanitiser.begin(other.sanitiser)


class Without:
    """A tape without some of its records: to have no norm is to be clipped to nothing."""

    def __init__(self, tape: RecordTape, dropped: Tensor) -> None:
        self._tape, self.dropped, self.layers = tape, dropped, tape.layers
        self._squares = tape.squares().masked_fill(dropped, float("inf"))
        tape.make_finite()

    def squares(self) -> Tensor:
        """The squared norm of every gradient, in float64."""
        return self._squares

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient."""
        self._tape.accumulate(into, scale, factors)

    def accumulate_except(
        self, left: Callable[[Product], bool], into: Tensor, scale: float, factors: Tensor
    ) -> list[Product]:
        """The same, but for products that are added together with the noise."""
        return self._tape.accumulate_except(left, into, scale, factors)

    def records(self) -> Tensor:
        """The gradients of single records, [K, B, P]."""
        return self._tape.records().masked_fill(self.dropped.unsqueeze(2), 0.0)

    def make_finite(self) -> None:
        """It is already."""


def aligned(vectors: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 64 bytes, so that a kernel may read several numbers at once."""
    size = vectors.shape[1]
    rows = vectors.new_empty(len(vectors), -(-size // ALIGNED) * ALIGNED)[:, :size]
    return rows.copy_(vectors)
