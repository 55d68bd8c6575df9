"""Local training of many clients at once: the inner loop, from `examples` to the client's update.

for each client k:      w_k <- w
    for each step:      g_k <- gradient(w_k; its next batch), clipped and with noise where the method says so
                        w_k <- w_k - lr g_k
    update_k <- w_k - w
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.engine.moment import Moment
from shoal.engine.sanitise import Told, sanitiser
from shoal.engine.stage import Stage
from shoal.engine.steps import LocalSteps, aligned

VELOCITY = "velocity."
"""Begins the names of what clients keep of their momentum, where they keep it."""


@dataclass(frozen=True)
class Plan:
    """The records of every batch, [steps, clients, batch], and each client's number of steps.

    `filled`: the same batches, filled up where they end early with a record of the client's own, which has no weight.
    One of somebody else's could still turn the update into NaN: 0 times Inf. (A client without records has none of
    its own; its update counts as 0 either way.)
    """

    batches: np.ndarray
    steps: np.ndarray
    own: np.ndarray

    @property
    def filled(self) -> np.ndarray:
        return np.where(self.batches >= 0, self.batches, self.own[:, None])


def train(
    stage: Stage, model: Tensor, clients: np.ndarray, moment: Moment, memory: dict[str, Tensor]
) -> tuple[Tensor, Told | None]:
    """The updates [k, P] of these clients. `memory` carries momentum from round to round, if it is kept."""
    local, device = stage.algorithm.local, stage.federation.device
    plan = planned(stage, clients, moment)
    records = torch.from_numpy(plan.filled).to(device)
    real = torch.from_numpy(plan.batches >= 0).to(device, model.dtype)
    moving = torch.from_numpy(np.arange(len(records))[:, None] < plan.steps).to(device, model.dtype)

    weights = real if stage.algorithm.per_example else _mean_weights(real)
    inputs = (records, real, weights, moving)
    with _drawing(stage, clients, moment):
        steps = _first(stage, model, clients, moment, memory)
        steps = stage.graphs.play(steps, inputs) if stage.graphs else steps.play(inputs)
        if steps.sanitised and steps.sanitised.told.spoilt:
            steps = _first(stage, model, clients, moment, memory).play_carefully(inputs)
    if local.remembers and steps.velocity is not None:
        memory.update({f"{VELOCITY}{client}": row.cpu() for client, row in zip(clients, steps.velocity, strict=True)})
    return steps.params.sub_(model), steps.sanitised.told if steps.sanitised else None


def _first(stage: Stage, model: Tensor, clients: np.ndarray, moment: Moment, memory: dict[str, Tensor]) -> LocalSteps:
    """Before the first step: everyone has the model."""
    local = stage.algorithm.local
    params = aligned(model.expand(len(clients), -1))
    velocity = _velocity(params, clients, memory) if local.momentum else None
    sanitised = sanitiser(stage, params, clients, moment, memory)
    lr = local.rate(moment.t, moment.total)
    return LocalSteps(stage.network, stage.federation, model, params, velocity, sanitised, lr, local.momentum)


def planned(stage: Stage, clients: np.ndarray, moment: Moment) -> Plan:
    """Each client's batches come from a stream of its own, so that they are the same in any slice, and at the
    client's own site in a real federation.
    """
    examples, local = stage.algorithm.examples, stage.algorithm.local
    drawn, own = [], []
    for client in clients.tolist():
        records = stage.federation.partition.records(client)
        own.append(records[0] if len(records) else 0)
        steps = local.steps or examples.steps(len(records), local.epochs)
        generator = stage.streams.generator("examples", moment.t, moment.attempt, client)
        positions = examples.draw(generator, len(records), steps)
        drawn.append(np.where(positions >= 0, records[positions], -1) if len(records) else positions)
    steps, width = (max(rows.shape[axis] for rows in drawn) for axis in (0, 1))
    if stage.graphs and examples.varies:
        width = _rounded_up(width)
    batches = np.full((steps, len(clients), width), -1, dtype=np.int64)
    for place, rows in enumerate(drawn):
        batches[: rows.shape[0], place, : rows.shape[1]] = rows
    return Plan(batches, np.array([len(rows) for rows in drawn]), np.array(own))


def _rounded_up(width: int) -> int:
    """To one of few widths, so that a recorded step fits the next round's batches too."""
    stride = max(4, 2 ** (width.bit_length() - 3))
    return -(-width // stride) * stride


def _mean_weights(real: Tensor) -> Tensor:
    """1/n for each of the n real records of a batch, 0 for the filling."""
    return real / real.sum(-1, keepdim=True).clamp(min=1)


@contextmanager
def _drawing(stage: Stage, clients: np.ndarray, moment: Moment) -> Iterator[None]:
    """Layers that draw (Dropout) draw from a seed of this slice; nobody else's random numbers are touched."""
    if stage.network.together:
        yield
        return
    device = stage.federation.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(stage.streams.number("dropout", moment.t, moment.attempt, int(clients[0])))
        yield


def _velocity(params: Tensor, clients: np.ndarray, memory: dict[str, Tensor]) -> Tensor:
    velocity = torch.zeros_like(params)
    for place, client in enumerate(clients):
        if (kept := memory.get(f"{VELOCITY}{client}")) is not None:
            velocity[place] = kept.to(params.device)
    return velocity
