"""One round of federated learning, from top to bottom as the papers write it.

Each step is a boundary that a value crosses; the algorithm's record says what happens there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.engine import server
from shoal.engine.firewall import finite_or_zero
from shoal.engine.local import train
from shoal.engine.moment import Moment
from shoal.engine.sanitise import Told
from shoal.engine.stage import Stage
from shoal.privacy.clip import QuantileClip
from shoal.privacy.example_clip import ExampleClip, QuantileExampleClip
from shoal.privacy.noise import gaussian_like


@dataclass
class State:
    """What goes from one round to the next: the model, and what an algorithm remembers."""

    model: Tensor
    memory: dict[str, Tensor] = field(default_factory=dict)


def play_round(stage: Stage, state: State, moment: Moment) -> tuple[State, dict[str, float]]:
    """Round t: the new state, and what there is to tell of it."""
    algorithm, federation, streams = stage.algorithm, stage.federation, stage.streams
    now = (moment.t, moment.total)
    memory = dict(state.memory)

    # clients: who takes part, and how many are expected to, which is public
    cohort = algorithm.clients.draw(streams.generator("clients", moment.t, moment.attempt), *now, len(federation))
    expected = algorithm.clients.expected(*now, len(federation))

    # examples, local, per_example, per_step: each client trains on its own records
    # per_update: its update is checked, and clipped as it leaves
    bound, parts = _leave_clients(stage, state, memory, cohort, moment)

    # aggregate: the sum, over the public expected cohort (or, without privacy, by the clients' sizes)
    total = Total(torch.zeros_like(state.model), torch.zeros_like(state.model))
    for part in parts:
        total += part
    by_size = algorithm.aggregate.weights == "size" and total.weight > 0
    denominator = total.weight if by_size else expected

    # per_round: noise on the sum, once, scaled by what one client can add to it; an empty cohort gets it too
    noise = signal = 0.0
    if algorithm.per_round is not None:
        z = algorithm.per_round.multiplier(*now)
        if isinstance(algorithm.per_update, QuantileClip):
            z = algorithm.per_update.update_noise(z, expected)
        noise = z * bound
        signal = float(torch.linalg.vector_norm(total.update, dtype=torch.float64))
        generator = streams.generator("noise", moment.t, moment.attempt)
        total.update += gaussian_like(state.model, noise, generator)
    mean = total.update.div_(denominator)

    # the server's step, after which everyone sees the model
    model = server.step(algorithm.server, state.model, mean, memory, moment)

    # adapt: the next round's clip
    if isinstance(algorithm.per_update, QuantileClip):
        drawn = float(streams.generator("count noise", moment.t, moment.attempt).standard_normal())
        algorithm.per_update.adapt(memory, total.below, total.clients, expected, noise, drawn)
    if isinstance(algorithm.per_example, QuantileExampleClip):
        algorithm.per_example.move(memory, total.shares / expected + 0.5)
    told = _metrics(total, bound, noise, expected, signal) | _of_steps(stage, state, total, moment)
    return State(model, memory), told


@dataclass
class Total:
    """The sum of a cohort's updates as they left, and what the metrics need, in one pass."""

    update: Tensor
    raw: Tensor
    weight: float = 0.0
    clients: int = 0
    below: int = 0
    square: float = 0.0
    bad: list[int] = field(default_factory=list)
    records: float = 0.0
    clipped_records: float = 0.0
    shares: float = 0.0

    def __iadd__(self, other: Total) -> Total:
        self.update += other.update
        self.raw += other.raw
        self.weight += other.weight
        self.clients += other.clients
        self.below += other.below
        self.square += other.square
        self.bad += other.bad
        self.records += other.records
        self.clipped_records += other.clipped_records
        self.shares += other.shares
        return self


@dataclass
class Trained:
    """The checked updates of a slice of the cohort."""

    clients: np.ndarray
    updates: Tensor
    norms: Tensor
    bad: list[int]
    told: Told | None


def _leave_clients(
    stage: Stage, state: State, memory: dict[str, Tensor], cohort: np.ndarray, moment: Moment
) -> tuple[float, Iterator[Total]]:
    """This round's bound, and what each slice of the cohort adds to the sum."""
    algorithm, workers = stage.algorithm, stage.workers

    def trained(clients: np.ndarray) -> Trained:
        updates, told = train(stage, state.model, clients, moment, memory)
        updates, norms, bad = finite_or_zero(updates)
        return Trained(clients, updates, norms, clients[bad.cpu().numpy()].tolist(), told)

    slices = stage.slicer.slices(cohort)
    if algorithm.per_update is None:
        return float("inf"), workers.map(lambda clients: _contribution(stage, trained(clients), None, moment), slices)
    norms = None
    ready: list[Trained] | None = None
    if algorithm.per_update.waits_for_cohort:
        ready = list(workers.map(trained, slices))
        norms = torch.cat([part.norms for part in ready]) if ready else None
    bound = algorithm.per_update.bound(memory, moment.t, moment.total, norms)
    if ready is not None:
        return bound, workers.map(lambda part: _contribution(stage, part, bound, moment), ready)
    return bound, workers.map(lambda clients: _contribution(stage, trained(clients), bound, moment), slices)


def _contribution(stage: Stage, part: Trained, bound: float | None, moment: Moment) -> Total:
    """A slice's part of the sum."""

    def draw(row: int) -> np.random.Generator:
        return stage.streams.generator("update noise", moment.t, moment.attempt, int(part.clients[row]))

    per_update = stage.algorithm.per_update
    raw = part.updates.sum(0)
    sizes = np.ones(len(part.clients))
    if stage.algorithm.aggregate.weights == "size":
        sizes = stage.federation.sizes[part.clients]
    if per_update is None and (sizes == sizes[0]).all():
        total = raw * float(sizes[0])
    else:
        leaving = part.updates
        if per_update is not None and bound is not None:
            leaving = per_update.leave(leaving, part.norms, bound, moment.t, moment.total, draw)
        total = torch.as_tensor(sizes, dtype=leaving.dtype, device=leaving.device) @ leaving
    told = part.told
    return Total(
        update=total,
        raw=raw,
        weight=float(sizes.sum()),
        clients=len(part.clients),
        below=int((part.norms <= bound).sum()) if bound is not None else 0,
        square=float(part.norms.double().square().sum()),
        bad=part.bad,
        records=float(told.records) if told else 0.0,
        clipped_records=float(told.clipped) if told else 0.0,
        shares=float((told.shares / told.steps.clamp(min=1) - 0.5).sum()) if told else 0.0,
    )


def _metrics(total: Total, bound: float, noise: float, expected: float, signal: float) -> dict[str, float]:
    """Also V_c, the variance between clients, and U_s, the update's scale, of 001: means over parameters.

    `snr`: the norm of the sum of clipped updates over that of the noise it is hidden in.
    """
    size, clients = len(total.raw), max(total.clients, 1)
    scale = float(torch.linalg.vector_norm(total.raw, dtype=torch.float64)) ** 2 / clients**2 / size
    told: dict[str, float] = {
        "clients": total.clients,
        "expected_clients": expected,
        "bad_updates": len(total.bad),
        "v_c": max(0.0, total.square / clients / size - scale),
        "u_s": scale,
        "bytes_sent": 4 * size * total.clients,
    }
    if np.isfinite(bound):
        told |= {"clip": bound, "clipped": 1 - total.below / clients, "noise": noise}
        if noise > 0:
            told["snr"] = signal / (noise * size**0.5)
    return told


def _of_steps(stage: Stage, state: State, total: Total, moment: Moment) -> dict[str, float]:
    """The clip and the noise of a local step, where there is one; the noise is that on the sum of a batch."""
    per_example, per_step = stage.algorithm.per_example, stage.algorithm.per_step
    told: dict[str, float] = {}
    if per_example is not None:
        told["clipped_records"] = total.clipped_records / max(total.records, 1.0)
    if isinstance(per_example, ExampleClip | QuantileExampleClip):
        told["example_clip"] = per_example.bound(state.memory, moment.t, moment.total)
    if per_step is not None:
        z = per_step.multiplier(moment.t, moment.total, stage.algorithm.examples.batch)
        told["step_noise"] = z * told.get("example_clip", 1.0)
    return told
