"""Local training of many clients at once: the inner loop, from `examples` to the client's update.

for each client k:      w_k <- w
    for each step:      w_k <- w_k - lr grad(w_k; its next batch)
    update_k <- w_k - w
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.engine.federation import Federation
from shoal.gradients import Network, Tape
from shoal.privacy.random import Streams
from shoal.privacy.schedules import parse


@dataclass(frozen=True)
class Moment:
    """When a round is played: round t of `total`, and the how-manieth attempt at it this is."""

    t: int
    total: int
    attempt: int = 0


def train(
    algorithm: Algorithm,
    network: Network,
    federation: Federation,
    model: Tensor,
    clients: np.ndarray,
    moment: Moment,
    streams: Streams,
    memory: dict[str, Tensor],
) -> Tensor:
    """The updates [k, P] of these clients. `memory` carries momentum from round to round, if it is kept."""
    local = algorithm.local
    lr = parse(local.lr).value(moment.t, moment.total)
    batches = plan(algorithm, federation, clients, moment, streams)
    active = (batches >= 0).any(axis=2)
    records = torch.from_numpy(batches).to(federation.device)
    weights = mean_weights(records)
    records = records.clamp(min=0)

    params = model.repeat(len(clients), 1)
    velocity = _velocity(params, clients, memory) if local.momentum else None
    with _drawing(network, streams.number("dropout", moment.t, moment.attempt, int(clients[0])), params.device):
        for step in range(len(records)):
            tape = network.backward(params, *federation.rows(records[step]), weights[step])
            if velocity is None:
                tape.accumulate(params, -lr)
            else:
                _momentum_step(tape, params, velocity, lr, local.momentum, active[step])
    if local.keep_momentum and velocity is not None:
        memory.update({f"velocity.{client}": row.cpu() for client, row in zip(clients, velocity, strict=True)})
    return params.sub_(model)


def plan(
    algorithm: Algorithm, federation: Federation, clients: np.ndarray, moment: Moment, streams: Streams
) -> np.ndarray:
    """The records of every batch, [steps, clients, batch], filled up with -1.

    Each client's batches come from a stream of its own, so that they are the same in any slice, and at the
    client's own site in a real federation.
    """
    examples, local = algorithm.examples, algorithm.local
    drawn = []
    for client in clients.tolist():
        records = federation.partition.records(client)
        steps = local.steps or examples.steps(len(records), local.epochs)
        generator = streams.generator("examples", moment.t, moment.attempt, client)
        positions = examples.draw(generator, len(records), steps)
        drawn.append(np.where(positions >= 0, records[positions], -1) if len(records) else positions)
    steps, width = (max(rows.shape[axis] for rows in drawn) for axis in (0, 1))
    batches = np.full((steps, len(clients), width), -1, dtype=np.int64)
    for place, rows in enumerate(drawn):
        batches[: rows.shape[0], place, : rows.shape[1]] = rows
    return batches


def mean_weights(records: Tensor) -> Tensor:
    """1/n for each of the n real records of a batch, 0 for the filling."""
    real = records >= 0
    return real / real.sum(-1, keepdim=True).clamp(min=1)


@contextmanager
def _drawing(network: Network, seed: int, device: torch.device) -> Iterator[None]:
    """Layers that draw (Dropout) draw from this seed; nobody else's random numbers are touched."""
    if network.together:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _velocity(params: Tensor, clients: np.ndarray, memory: dict[str, Tensor]) -> Tensor:
    velocity = torch.zeros_like(params)
    for place, client in enumerate(clients):
        if (kept := memory.get(f"velocity.{client}")) is not None:
            velocity[place] = kept.to(params.device)
    return velocity


def _momentum_step(
    tape: Tape, params: Tensor, velocity: Tensor, lr: float, momentum: float, active: np.ndarray
) -> None:
    """v <- momentum v + grad; w <- w - lr v, for the clients that still have a batch."""
    if active.all():
        velocity.mul_(momentum)
        tape.accumulate(velocity, 1.0)
        params.sub_(velocity, alpha=lr)
        return
    moving = torch.from_numpy(active).to(params.device).unsqueeze(1)
    velocity.mul_(torch.where(moving, momentum, 1.0))
    tape.accumulate(velocity, 1.0)
    params.sub_(velocity * moving, alpha=lr)
