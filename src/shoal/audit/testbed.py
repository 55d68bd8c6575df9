"""Where an audit runs: small synthetic federations, on which the engine's own code runs; what crosses the boundary.

A record is x = s e_j with label 0 or 1, the model is linear and begins at 0: then a record's gradient is of norm
s/sqrt 2 in coordinates of its own, and a label turned round turns the gradient round. So an audit chooses the worst
records, and the method's real gradients, clips, noise and sampling do the rest. Several layers side by side, whose
outputs are added, have an equal share of each gradient: a bound that every layer may use up shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm
from shoal.data import Dataset, ListedPartition, Partition
from shoal.gradients import Network, network
from shoal.gradients.layout import Personal
from shoal.mechanisms.mechanism import altered
from shoal.mechanisms.sampling import Clients
from shoal.mechanisms.schedules import NO_NOISE
from shoal.random.streams import Streams
from shoal.training.context import stand_ins
from shoal.training.engine_settings import Settings
from shoal.training.local_training import train
from shoal.training.round import SimulatedCohort, run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import Trainer, simulate

HALF = 0.5**0.5  # the norm of softmax - label, of two classes at the start
AT_ONCE = 1000  # clients whose local steps are played together


@dataclass(frozen=True)
class Row:
    """A record: its gradient has this `norm` before any clip, along coordinate `place`; `sign` turns it round.

    `user`: the user whose it is, where it is one of several.
    """

    norm: float
    place: int = 0
    sign: int = 1
    user: int | None = None


Holder = Sequence[Row]
"""What one client holds."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What crossed the boundary in each trial: vectors [N, P] in float64, and other released numbers [N, F]."""

    vectors: np.ndarray
    extras: np.ndarray


def federation(
    record: Algorithm, clients: Sequence[Holder], width: int, streams: Streams, *, rounds: int = 1, layers: int = 1
) -> Trainer[SimulatedCohort]:
    """A simulation of these clients with a linear model of two classes that begins at 0, in so many layers."""
    rows = sorted({row for held in clients for row in held}, key=lambda row: (row.place, row.norm, row.sign))
    numbers = {row: number for number, row in enumerate(rows)}
    x = torch.zeros(max(1, len(rows)), width)
    y = torch.zeros(len(x), dtype=torch.int64)
    for row, number in numbers.items():
        x[number, row.place] = row.norm / HALF / layers**0.5
        y[number] = 0 if row.sign > 0 else 1
    indices = np.array([numbers[row] for held in clients for row in held], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(held) for held in clients])])
    parts = ListedPartition(indices, offsets)
    most = record.records.max_per_user
    if most is not None and any(row.user is not None for row in rows):
        users = [len(rows) + number if row.user is None else row.user for row, number in numbers.items()]
        parts = replace(parts, users=np.array(users)[:, None]).capped(most)
    known = _network(width, layers, record.per_record is not None, record.local.personal)
    return simulation(record, SideBySide(width, layers), x, y, parts, streams, rounds, known)


class SideBySide(nn.Module):
    """y = W_1 x + W_2 x + ..., all of which begin at 0."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


@cache
def _network(width: int, layers: int, per_record: bool, personal: Personal) -> Network:
    """Compared with plain gradients once: an audit has many federations with this model."""
    model, y = SideBySide(width, layers), torch.zeros(3, dtype=torch.int64)
    return network(model, stand_ins(torch.zeros(1, width)), y, per_record=per_record, personal=personal)


def simulation(
    record: Algorithm,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    parts: Partition,
    streams: Streams,
    rounds: int = 1,
    known: Network | None = None,
) -> Trainer[SimulatedCohort]:
    dataset = Dataset("audit", x, y, x[:1], y[:1], ("0", "1"))
    settings = Settings(device="cpu", threads=1)
    return simulate(record, model, dataset, parts, rounds=rounds, streams=streams, settings=settings, known=known)


def steps_of(trainer: Trainer[SimulatedCohort], record: Algorithm, clients: Sequence[int] | None = None) -> Seen:
    """Each client is a trial: its update as local training leaves it, and what it counted, if it counts."""
    cohort = replace(trainer.cohort, algorithm=record)
    everybody = np.arange(trainer.setting.clients) if clients is None else np.array(clients)
    vectors, extras = [], []
    with one_thread():
        for start in range(0, len(everybody), AT_ONCE):
            part = everybody[start : start + AT_ONCE]
            updates, metrics = train(cohort, trainer.params, part, RoundIndex(0, trainer.rounds), {})
            vectors.append(updates.double().numpy())
            extras.append(metrics.shares.double().numpy() if metrics is not None else np.zeros(len(part)))
    return Seen(np.concatenate(vectors), np.concatenate(extras)[:, None])


def rounds_of(
    trainer: Trainer[SimulatedCohort], record: Algorithm, trials: int, first: int = 0, colluding: int = 0
) -> Seen:
    """Each trial is a first round of its own: the mean that is released, and the logarithm of the next clip.

    The first clients may be `colluding`: their own shares of the noise are subtracted.
    """
    cohort = replace(trainer.cohort, algorithm=record)
    vectors, extras = np.empty((trials, len(trainer.params))), np.zeros((trials, 1))
    with one_thread():
        for trial in range(trials):
            start = torch.zeros_like(trainer.params)
            index = RoundIndex(0, trainer.rounds, first + trial)
            params, state, _ = run_round(cohort, start, {}, index)
            vectors[trial] = params.double().numpy() - known_noise(cohort, len(start), colluding, index)
            if "clip" in state:
                extras[trial] = float(state["clip"].log())
    return Seen(vectors, extras)


def known_noise(cohort: SimulatedCohort, size: int, colluding: int, index: RoundIndex) -> np.ndarray:
    """What the shares of the first clients are in the mean."""
    shares, when = torch.zeros(colluding, size, dtype=torch.float64), (index.t, index.total)
    if colluding:
        cohort.with_shares(shares, np.arange(colluding), cohort.algorithm.bound({}, *when), index)
    return (shares.sum(0) / cohort.algorithm.clients.expected(*when, cohort.population.clients)).numpy()


def silent(record: Algorithm) -> Algorithm:
    """The method with its noise at 0: what the noise hides."""
    return record.with_mechanisms(
        lambda mechanism: mechanism if mechanism.noise_schedule() is None else mechanism.with_noise(NO_NOISE)
    )


def without(record: Algorithm, *gone: int) -> Algorithm:
    """The method where these clients are not there: sampling as ever, they are drawn, and do not come."""
    asked = "draw" if record.clients.separated else "take_part"  # as cohort_draw does
    drawn_by = getattr(type(record.clients), asked)

    def those_who_come(self: Clients, *given: Any) -> np.ndarray:
        drawn: np.ndarray = drawn_by(self, *given)
        return drawn[~np.isin(drawn, gone)]

    return replace(record, clients=altered(record.clients, **{asked: those_who_come}))


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take five times as long for so little work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
