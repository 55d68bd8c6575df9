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
from shoal.privacy.clip import weighed_sum
from shoal.privacy.secure import grid, toward_zero


@dataclass
class State:
    """What goes from one round to the next: the model, and what an algorithm remembers."""

    model: Tensor
    memory: dict[str, Tensor] = field(default_factory=dict)


def play_round(stage: Stage, state: State, moment: Moment) -> tuple[State, dict[str, float]]:
    """Round t: the new state, and what there is to tell of it."""
    memory = dict(state.memory)

    # clients: who takes part, and how many are expected to, which is public
    cohort, expected = invited(stage, moment)

    # examples, local, per_example, per_step: each client trains on its own records
    # per_update: its update is checked, and clipped as it leaves
    bound, parts = _leave_clients(stage, state, memory, cohort, moment)
    exact = torch.float64 if stage.streams.mode == "secure" else state.model.dtype  # of sums on a grid
    total = Total(torch.zeros_like(state.model, dtype=torch.float64), raw=torch.zeros_like(state.model))
    for part in parts:
        total += part
    total.update = total.update.to(exact)

    # aggregate, per_round, server, adapt: what the server does with the sum
    model, noise, signal = release(stage, state.model, memory, total, bound, expected, moment)
    told = _metrics(total, bound, noise, expected, signal) | _of_steps(stage, state, total, moment)
    return State(model, memory), told


def invited(stage: Stage, moment: Moment) -> tuple[np.ndarray, float]:
    """The clients that are asked in a round, and the public number of those expected."""
    clients, count = stage.algorithm.clients, len(stage.federation)
    generator = stage.streams.generator("clients", moment.t, moment.attempt)
    cohort = clients.draw(generator, moment.t, moment.total, count)
    return cohort, clients.expected(moment.t, moment.total, count)


def release(
    stage: Stage, model: Tensor, memory: dict[str, Tensor], total: Sum, bound: float, expected: float, moment: Moment
) -> tuple[Tensor, float, float]:
    """The server's half of a round: the next model, the noise in it, and the norm of the sum before any noise.

    It sees the sum, wherever that comes from: the simulator's slices, or the sites of a real federation.
    """
    algorithm, streams = stage.algorithm, stage.streams

    # aggregate: the sum, over the public expected cohort (or, without privacy, by the clients' sizes)
    by_size = algorithm.aggregate.weights == "size" and total.weight > 0
    denominator = total.weight if by_size else expected

    # per_round: noise on the sum, once, scaled by what one client can add to it; an empty cohort gets it too
    noise = signal = 0.0
    if algorithm.per_round is not None:
        z = algorithm.per_round.multiplier(moment.t, moment.total)
        if algorithm.per_update is not None:
            z = algorithm.per_update.update_noise(z, expected)
        noise = z * bound
        signal = float(torch.linalg.vector_norm(total.update, dtype=torch.float64))
        generator = streams.generator("noise", moment.t, moment.attempt)
        total.update = algorithm.per_round.add(total.update, z, bound, memory, generator)
    mean = total.update.div_(denominator).to(model.dtype)

    # the server's step, after which everyone sees the model
    model = server.step(algorithm.server, model, mean, memory, moment)

    # adapt: the next round's clip
    if algorithm.per_update is not None:
        generator = streams.generator("count noise", moment.t, moment.attempt)
        algorithm.per_update.adapt(memory, total.below, total.clients, expected, noise, generator)
    if algorithm.per_example is not None:
        algorithm.per_example.adapt(memory, total.shares / expected + 0.5)
    return model, noise, signal


@dataclass
class Sum:
    """The sum of a cohort's updates as they left, and what else crosses: all that the server needs."""

    update: Tensor
    weight: float = 0.0
    clients: int = 0
    below: int = 0
    shares: float = 0.0


@dataclass
class Total(Sum):
    """A sum, and what the simulator's metrics tell of it, in one pass."""

    raw: Tensor = field(kw_only=True)
    square: float = 0.0
    bad: list[int] = field(default_factory=list)
    records: float = 0.0
    clipped_records: float = 0.0

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

    @property
    def shares(self) -> Tensor:
        """Each client's noisy share of gradients below the clip, less 1/2, of methods that count them."""
        if self.told is None:
            return torch.zeros(len(self.clients))
        return self.told.shares / self.told.steps.clamp(min=1) - 0.5


def trained(stage: Stage, model: Tensor, memory: dict[str, Tensor], clients: np.ndarray, moment: Moment) -> Trained:
    """The client's half of a round: local training, and the firewall on what comes of it."""
    updates, told = train(stage, model, clients, moment, memory)
    updates, norms, bad = finite_or_zero(updates)
    return Trained(clients, updates, norms, clients[bad.cpu().numpy()].tolist(), told)


def leaving(stage: Stage, part: Trained, bound: float, moment: Moment) -> Tensor:
    """Boundary `per_update`: the updates [k, P] as they enter the sum; those trained may be overwritten."""

    def draw(row: int) -> np.random.Generator:
        return stage.streams.generator("update noise", moment.t, moment.attempt, int(part.clients[row]))

    per_update = stage.algorithm.per_update
    if per_update is None:
        return part.updates
    layers = stage.network.layout.named_layers
    left = per_update.leave(part.updates, part.norms, bound, moment.t, moment.total, draw, layers)
    if stage.streams.mode != "secure":
        return left
    return (toward_zero(left, grid(bound)) if stage.algorithm.per_round is not None else left).double()


def _leave_clients(
    stage: Stage, state: State, memory: dict[str, Tensor], cohort: np.ndarray, moment: Moment
) -> tuple[float, Iterator[Total]]:
    """This round's bound, and what each slice of the cohort adds to the sum."""
    per_update, workers = stage.algorithm.per_update, stage.workers

    def learnt(clients: np.ndarray) -> Trained:
        return trained(stage, state.model, memory, clients, moment)

    slices = stage.slicer.slices(cohort)
    if per_update is None:
        unbounded = float("inf")
        return unbounded, workers.map(lambda clients: _sum(stage, learnt(clients), unbounded, moment), slices)
    norms = None
    ready: list[Trained] | None = None
    if per_update.waits_for_cohort:
        ready = list(workers.map(learnt, slices))
        norms = torch.cat([part.norms for part in ready]) if ready else None
    bound = per_update.bound(memory, moment.t, moment.total, norms)
    if ready is not None:
        return bound, workers.map(lambda part: _sum(stage, part, bound, moment), ready)
    return bound, workers.map(lambda clients: _sum(stage, learnt(clients), bound, moment), slices)


def _sum(stage: Stage, part: Trained, bound: float, moment: Moment) -> Total:
    """A slice's part of the sum."""
    raw = part.updates.sum(0)
    sizes = np.ones(len(part.clients))
    if stage.algorithm.aggregate.weights == "size":
        sizes = stage.federation.sizes[part.clients]
    if stage.algorithm.per_update is None and (sizes == sizes[0]).all():
        total = raw * float(sizes[0])
    else:
        left = leaving(stage, part, bound, moment)
        total = weighed_sum(left[None], torch.as_tensor(sizes, dtype=left.dtype, device=left.device)[None])[0]
    return Total(
        update=total,
        raw=raw,
        weight=float(sizes.sum()),
        clients=len(part.clients),
        below=int((part.norms <= bound).sum()),
        square=float(part.norms.double().square().sum()),
        bad=part.bad,
        records=float(part.told.records) if part.told else 0.0,
        clipped_records=float(part.told.clipped) if part.told else 0.0,
        shares=float(part.shares.sum()),
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
    """The clip of a local step and the noise on the sum of a batch, where they are the same for every step."""
    method = stage.algorithm
    per_example, per_step, batch = method.per_example, method.per_step, method.examples.batch
    told: dict[str, float] = {}
    if per_example is None:
        return told
    told["clipped_records"] = total.clipped_records / max(total.records, 1.0)
    if (bound := per_example.public_bound(state.memory, moment.t, moment.total)) is not None:
        told["example_clip"] = bound
        if per_step is not None and per_example.unproven is None:
            z = per_example.update_noise(per_step.multiplier(moment.t, moment.total, batch), batch)
            told["step_noise"] = z * bound
    return told
