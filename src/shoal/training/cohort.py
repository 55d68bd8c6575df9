"""A cohort answers one question: train these clients from this model, and give me the sum of their updates.

The clients may be simulated in this process (`round.SimulatedCohort`) or be sites of a real federation
(`deploy.coordinator.RemoteCohort`). The server's half of a round and the trainer's loop are the same for all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.data.partitions import Partition
from shoal.gradients import Layout
from shoal.mechanisms.setting import Setting
from shoal.random.streams import Streams
from shoal.training.round_index import RoundIndex

State = dict[str, Tensor]
"""What the method, the server's optimiser and the clients carry from one round to the next, by name."""


@dataclass(frozen=True)
class Population:
    """The public facts about the clients of a federation.

    Attributes:
        clients: How many there are.
        sizes: The different numbers of records that clients have; empty if unknown.
        multiplicity: On how many clients one record may lie.
        all_answer: Whoever is asked answers, which no real federation can promise.
        bounds: `sizes` are only the least and the greatest.
        simulated: Records were dealt to clients that do not exist.
    """

    clients: int
    sizes: tuple[int, ...] = ()
    multiplicity: int = 1
    all_answer: bool = True
    bounds: bool = False
    simulated: bool = False

    @classmethod
    def of(cls, partition: Partition) -> Population:
        """The clients among whom a partition divides the records."""
        sizes = tuple(np.unique(partition.sizes).tolist())
        return cls(len(partition), sizes, partition.multiplicity, simulated=partition.simulated)

    def setting(self, rounds: int, layout: Layout, secure: bool) -> Setting:
        """What accounting needs to know: the clients, the planned rounds, the model, the source of the noise."""
        layers, parameters = len(layout.layers), layout.size
        return Setting(rounds=rounds, layers=layers, parameters=parameters, secure=secure, **asdict(self))


@dataclass
class Sum:
    """The sum of a cohort's updates as they left the clients, and what else crosses: all that the server needs.

    Attributes:
        update: The sum, [P].
        clip_norm: The bound on one client's part in it.
        weight: The sum of the clients' weights.
        clients: How many are in it.
        below: How many of their norms were within the bound, where the method counts them.
        shares: The sum of their noisy shares of gradients within the record's bound, less 1/2 each.
        noise: The standard deviation of noise that the clients have added already; None where the server adds it.
        metrics: What else there is to report of the round.
    """

    update: Tensor
    clip_norm: float = math.inf
    weight: float = 0.0
    clients: int = 0
    below: float = 0
    shares: float = 0.0
    noise: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


class Cohort(ABC):
    """The clients of a federation, wherever they are, and the record and random streams by which they train."""

    algorithm: Algorithm
    streams: Streams

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Where each layer lies in the model's flat parameters."""

    @property
    @abstractmethod
    def population(self) -> Population:
        """What is public of the clients."""

    @abstractmethod
    def train(self, clients: np.ndarray, params: Tensor, state: State, index: RoundIndex) -> Sum:
        """Train these clients and sum their updates.

        Args:
            clients: The numbers of those who were drawn.
            params: The model [P] from which they start.
            state: What is carried between rounds; momentum that clients keep is written into it.
            moment: Which round this is.

        Returns:
            The sum of the updates, each as it may leave its client. Whoever does not answer counts as zero.
        """

    @property
    def partition(self) -> Partition | None:
        """Who holds which records, where the records are here."""
        return None

    def begin(self, run: Path, done: int) -> None:  # noqa: B027
        """A run begins in this folder, or goes on after `done` rounds."""

    def ready(self, state: State, index: RoundIndex, stopped: Callable[[], bool]) -> bool:
        """Is there somebody to train? Asked before a round is charged; may wait until `stopped`."""
        return True

    def end(self, why: str, done: int) -> None:  # noqa: B027
        """The run is over."""

    def close(self) -> None:  # noqa: B027
        """Give back threads and connections."""
