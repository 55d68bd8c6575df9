"""The interface of a cohort: train these clients from this model, and return the sum of their updates.

The clients may be simulated in this process (`round.SimulatedCohort`) or be sites of a real federation
(`federation.coordinator.RemoteCohort`). The server's half of a round and the trainer's loop are the same for all of
them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
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
        sizes: The distinct numbers of records of clients; empty if unknown.
        multiplicity: The most clients that may hold one record.
        all_answer: No client drops out, which no real federation can promise.
        bounds: `sizes` are only the smallest and the largest.
        simulated: Records were assigned to clients that do not exist.
        graph_failure: The probability, for each round, that a sparse graph of secure aggregation hides too little.
        user_columns: How many users a record may have; 0 where records name none.
        clients_per_user: The most clients that hold records of one user.
        public_ownership: It is public which users each record has.
    """

    clients: int
    sizes: tuple[int, ...] = ()
    multiplicity: int = 1
    all_answer: bool = True
    bounds: bool = False
    simulated: bool = False
    graph_failure: float = 0.0
    user_columns: int = 0
    clients_per_user: int = 1
    public_ownership: bool = False

    @classmethod
    def of(cls, partition: Partition) -> Population:
        """The clients among whom a partition divides the records."""
        sizes = tuple(np.unique(partition.sizes).tolist())
        users = {} if partition.users is None else {"user_columns": partition.users.shape[1]}
        return cls(
            len(partition), sizes, partition.multiplicity, simulated=partition.simulated, **users,
            clients_per_user=partition.clients_per_user, public_ownership=partition.public_ownership,
        )  # fmt: skip

    def setting(self, rounds: int, layout: Layout, secure: bool) -> Setting:
        """What accounting needs to know: the clients, the planned rounds, the model, the source of the noise."""
        layers, parameters = len(layout.layers), layout.size
        return Setting(rounds=rounds, layers=layers, parameters=parameters, secure=secure, **asdict(self))


@dataclass
class Sum:
    """The sum of a cohort's updates as they left the clients, and all else that the server needs.

    Attributes:
        update: The sum, [P].
        clip_norm: The bound on one client's part in it.
        weight: The sum of the clients' weights.
        clients: How many are in it.
        below: How many of their norms were within the bound, where the method counts them.
        shares: The sum of their noisy shares of gradients within the record's bound, less 1/2 each.
        noise: The standard deviation of the noise that the clients have added; None where the server adds it.
        metrics: Other metrics of the round.
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
    """The clients of a federation, wherever they are, with their algorithm and random streams."""

    algorithm: Algorithm
    streams: Streams

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Where each layer lies in the model's flat parameters."""

    @property
    @abstractmethod
    def population(self) -> Population:
        """The public facts about the clients."""

    def present(self) -> npt.NDArray[np.int64]:
        """The numbers of the clients that are there now."""
        return np.arange(self.population.clients)

    @abstractmethod
    def train(self, clients: np.ndarray, params: Tensor, state: State, index: RoundIndex) -> Sum:
        """Train these clients and sum their updates.

        Args:
            clients: The numbers of the sampled clients.
            params: The model [P] from which they start.
            state: What is carried between rounds; momentum that clients keep is written into it.
            index: Which round this is.

        Returns:
            The sum of the updates, each protected before it leaves its client. A client that drops out counts as
            zero.
        """

    @property
    def gradients(self) -> dict[str, str]:
        """The `way` in which gradients are computed, and `because`: why not by rules. Empty for sites."""
        return {}

    @property
    def partition(self) -> Partition | None:
        """Who holds which records, where the records are here."""
        return None

    def begin(self, run: Path, done: int) -> None:  # noqa: B027
        """Called when a run starts in this folder, or continues after `done` rounds."""

    def ready(self, state: State, index: RoundIndex, stopped: Callable[[], bool]) -> bool:
        """Are there clients to train? Called before a round is charged; may wait until `stopped`."""
        return True

    @property
    def ledger_heads(self) -> list[tuple[str, str]]:
        """The names of clients that keep ledgers of their own, and the heads they sent at the end of the run."""
        return []

    @property
    def over(self) -> str:
        """Why no further round can be run, though more are planned; empty where that is not so."""
        return ""

    def end(self, why: str, done: int) -> None:  # noqa: B027
        """Called when the run has ended."""

    def close(self) -> None:  # noqa: B027
        """Close threads and connections."""
