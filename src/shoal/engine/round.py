"""One round of federated learning, from top to bottom as the papers write it.

Each step is a boundary that a value crosses; the algorithm's record says what happens there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.engine.federation import Federation
from shoal.engine.firewall import finite_or_zero
from shoal.engine.local import Moment, train
from shoal.engine.slices import Slicer
from shoal.engine.workers import Workers
from shoal.gradients import Network
from shoal.privacy.random import Streams


@dataclass
class State:
    """What goes from one round to the next: the model, and what an algorithm remembers."""

    model: Tensor
    velocities: dict[int, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Stage:
    """Where rounds are played: everything that does not change from round to round."""

    algorithm: Algorithm
    network: Network
    federation: Federation
    slicer: Slicer
    workers: Workers
    streams: Streams


@dataclass
class Total:
    """The weighted sum of a cohort's updates, and what the metrics need, in one pass."""

    update: Tensor | float = 0.0
    weight: float = 0.0
    clients: int = 0
    bad: list[int] = field(default_factory=list)
    square: float = 0.0
    plain: Tensor | float = 0.0

    def __iadd__(self, other: Total) -> Total:
        for name in ("update", "weight", "clients", "bad", "square", "plain"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


def play_round(stage: Stage, state: State, moment: Moment) -> tuple[State, dict[str, float | int]]:
    """Round t: the new state, and what there is to tell of it."""
    algorithm, federation, streams = stage.algorithm, stage.federation, stage.streams

    # clients: who takes part
    generator = streams.generator("clients", moment.t, moment.attempt)
    cohort = algorithm.clients.draw(generator, moment.t, moment.total, len(federation))

    # examples, local: each client trains on its own records
    # per_update: its update leaves it, and is checked
    total = Total(torch.zeros_like(state.model), plain=torch.zeros_like(state.model))
    for part in _contributions(stage, state, cohort, moment):
        total += part

    # aggregate: the mean of the updates
    expected = algorithm.clients.expected(moment.t, moment.total, len(federation))
    denominator = total.weight if algorithm.aggregate.weights == "size" else expected
    mean = total.update / max(denominator, 1e-12)

    # the new model is what everyone sees
    released = State(state.model + mean, state.velocities)
    return released, _metrics(total)


def _contributions(stage: Stage, state: State, cohort: np.ndarray, moment: Moment) -> Iterator[Total]:
    """What each slice of the cohort adds to the sum."""
    by_size = stage.algorithm.aggregate.weights == "size"

    def contribute(clients: np.ndarray) -> Total:
        updates = train(
            stage.algorithm, stage.network, stage.federation, state.model, clients, moment, stage.streams,
            state.velocities,
        )  # fmt: skip
        updates, squares, bad = finite_or_zero(updates)
        sizes = stage.federation.sizes[clients] if by_size else np.ones(len(clients))
        plain = updates.sum(0)
        even = bool((sizes == sizes[0]).all())
        weights = torch.as_tensor(sizes, dtype=updates.dtype, device=updates.device)
        return Total(
            update=plain * float(sizes[0]) if even else weights @ updates,
            weight=float(sizes.sum()),
            clients=len(clients),
            bad=clients[bad.cpu().numpy()].tolist(),
            square=float(squares.double().sum()),
            plain=plain,
        )

    return stage.workers.map(contribute, stage.slicer.slices(cohort))


def _metrics(total: Total) -> dict[str, float | int]:
    """001 section 4: V_c, the variance between clients, and U_s, the update's scale; means over parameters."""
    size = len(total.plain)
    clients = max(total.clients, 1)
    scale = float((total.plain.double() / clients).square().sum()) / size
    return {
        "clients": total.clients,
        "bad_updates": len(total.bad),
        "v_c": max(0.0, total.square / clients / size - scale),
        "u_s": scale,
        "bytes_sent": 4 * size * total.clients,
    }
