"""Schemes in which clients take turns: rounds between two participations, or one round of each block."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from shoal.accounting.events import NOTHING, Event, Sampled, Unbounded
from shoal.accounting.leaves import block, gaussian_noise
from shoal.accounting.theorems import Unit
from shoal.errors import ConfigError, RunError
from shoal.mechanisms.participation import Participation
from shoal.mechanisms.sampling.clients import Clients
from shoal.mechanisms.sampling.scheme import Indices
from shoal.mechanisms.sanitiser import State
from shoal.mechanisms.schedules import parse

ALLOCATION = "server.allocation"
"""The key of the state under which the rounds that clients were allocated are kept until their block ends."""
KEPT_STATE = Unbounded("clients keep state from one of the rounds they are allocated to the next")
SEEN = Unbounded("random allocation protects only where it is hidden who takes part in which round")
REPLACED = Unbounded("no theorem covers a record that is replaced where its client is allocated rounds at random")


@dataclass(frozen=True)
class CyclicClients(Clients):
    """Cyclic participation: clients take part in a public order, at most m at a time.

    The place of an absent client stays empty.
    """

    sampling: str = "cyclic"
    alike: ClassVar[bool] = True
    secret: ClassVar[bool] = False
    separated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if parse(self.cohort).shape != "constant":
            raise ConfigError(f"clients.cohort must be a constant for {self.sampling} sampling, got {self.cohort}")

    def participation(self, total: int, clients: int) -> Participation:
        """Once in a cycle, or less often."""
        return Participation(total, self.cycle_length(clients), regular=True)

    def expected(self, t: int, total: int, clients: int) -> float:
        """The mean size of a cohort over one cycle."""
        super().expected(t, total, clients)
        return clients / self.cycle_length(clients)

    def cycle_length(self, clients: int) -> int:
        """How many rounds one cycle over all clients takes."""
        return math.ceil(clients / max(1, int(parse(self.cohort).value(0, 1))))

    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """Every n-th client, from the round's place in the cycle on."""
        cycle = self.cycle_length(clients)
        return np.arange(t % cycle, clients, cycle)


@dataclass(frozen=True)
class MinSeparationClients(Clients):
    """Clients take part when they can: at least `separation` rounds apart, and at most `participations` times.

    m of those that are there and may take part, at random; all of them if they are fewer. Who takes part is public:
    nothing is amplified. It must not depend on what clients hold.
    """

    sampling: str = "min-separation"
    alike: ClassVar[bool] = True
    secret: ClassVar[bool] = False
    separated: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("separation",)
    takes: ClassVar[tuple[str, ...]] = ("participations",)

    def participation(self, total: int, clients: int) -> Participation:
        """At least `separation` rounds apart, at most `participations` times."""
        return Participation(total, self.separation or 1, self.participations)

    def draw(
        self, generator: np.random.Generator, t: int, total: int, clients: int, able: Indices | None = None
    ) -> Indices:
        """m clients of those who are able, without replacement."""
        able = np.arange(clients) if able is None else able
        size = min(len(able), max(1, round(self.expected(t, total, clients))))
        return np.sort(generator.choice(able, size=size, replace=False))


@dataclass(frozen=True)
class CyclicPoissonClients(Clients):
    """As many groups of clients as `separation` take turns; in its turn each client comes with the same probability.

    Client i is in group i mod `separation`, whatever it holds. Participation is secret, and m expected.
    """

    sampling: str = "cyclic-poisson"
    alike: ClassVar[bool] = True
    separated: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("separation",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if parse(self.cohort).shape != "constant":
            raise ConfigError(f"clients.cohort must be a constant for cyclic-poisson sampling, got {self.cohort}")

    def participation(self, total: int, clients: int) -> Participation:
        """In the turns of its group alone."""
        return Participation(total, self.separation or 1, regular=True)

    def expected(self, t: int, total: int, clients: int) -> float:
        """The mean size of a cohort over one cycle."""
        if (size := super().expected(t, total, clients)) * (self.separation or 1) > clients:
            raise ConfigError(
                f"clients.cohort is {size:g}, but each of {self.separation} groups (clients.separation) of {clients} "
                f"clients has fewer: lower one of them"
            )
        return size

    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """Each client of the group whose turn it is, independently."""
        group = np.arange(t % (self.separation or 1), clients, self.separation or 1)
        return group[generator.random(len(group)) < self.rate(t, total, clients)]

    def rate(self, t: int, total: int, clients: int, copies: int = 1) -> float:
        """The expected cohort size over the size of a group."""
        return min(1.0, self.expected(t, total, clients) * (self.separation or 1) / clients)

    def amplified(self, event: Event, rate: float, remembers: bool) -> Event:
        """The event of a cycle, amplified by the sampling."""
        return Sampled("poisson", rate, event)

    @property
    def audited(self) -> tuple[int, float]:
        """The last client, whom an audit looks for, is in the first group; each comes with probability 1/2."""
        clients = (self.separation or 1) + 1
        return clients, clients / 2 / (self.separation or 1)

    def for_canaries(self) -> Clients:
        """All clients: the audit game itself runs the sampling."""
        return replace(self, sampling="all", separation=None)


@dataclass(frozen=True)
class RandomAllocation(CyclicClients):
    """Random allocation: rounds come in blocks of K/m, and in each block every client takes part in one of them.

    Which one is drawn at random when the block begins, for each client independently, and stays secret. A client that
    misses its round does not come later. A round that is run again draws its clients anew, by Poisson sampling at the
    rate m/K, whatever was allocated; the rest of its block goes on as allocated.
    """

    sampling: str = "random-allocation"
    secret: ClassVar[bool] = True
    separated: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    audited: ClassVar[tuple[int, int]] = (8, 1)

    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """Each client independently: a round by itself."""
        return np.flatnonzero(generator.integers(self.cycle_length(clients), size=clients) == 0)

    def take_part(
        self, generator: np.random.Generator, state: State, t: int, total: int, clients: int, again: bool
    ) -> Indices:
        """The clients that were allocated round t; the first round of a block allocates all of it."""
        length = self.cycle_length(clients)
        if t % length == 0:
            drawn = generator.integers(length, size=clients)
            state[ALLOCATION] = torch.from_numpy(np.asarray(drawn, dtype=np.int32))
        if ALLOCATION not in state:
            raise RunError(
                f"the state before round {t + 1} does not say who was allocated which round: put the checkpoint of "
                f"the run back, or start a new one"
            )
        allocated = state[ALLOCATION].cpu().numpy()
        if t % length == length - 1:
            del state[ALLOCATION]
        if again and t % length:
            return self.draw(generator, t, total, clients)
        return np.flatnonzero(allocated == t % length)

    def rate(self, t: int, total: int, clients: int, copies: int = 1) -> float:
        """One over the length of a block."""
        return 1 / self.cycle_length(clients)

    def amplified(self, event: Event, rate: float, remembers: bool) -> Event:
        """The event of a round by itself, where nothing is known of the others."""
        return KEPT_STATE if remembers else Sampled("poisson", rate, event)

    def charged_from(self, t: int, clients: int) -> int:
        """The first round of the block."""
        return t - t % self.cycle_length(clients)

    def charged(
        self, event_at: Callable[[int], Event], t: int, total: int, clients: int, unit: Unit, again: bool
    ) -> Event:
        """The whole block before its first round, so that no prefix of a ledger says too little, then nothing.

        A block that is begun again is charged again. Any other round that is run again is a Poisson round more.
        """
        length = self.cycle_length(clients)
        places = 1 if t % length else max(1, min(length, total - t))
        rounds = [event_at(t + place) for place in range(places)]
        if (reason := next((each for each in rounds if isinstance(each, Unbounded)), None)) is not None:
            return reason
        if unit == "record":
            return REPLACED
        hidden = [each.event for each in rounds if isinstance(each, Sampled) and each.kind == "poisson"]
        noises = [noise for noise in map(gaussian_noise, hidden) if noise is not None]
        if len(noises) < places:
            return SEEN
        if t % length:
            return rounds[0] if again else NOTHING
        return block(noises, length)

    def for_canaries(self) -> Clients:
        """All clients: the audit game itself runs the sampling."""
        return replace(self, sampling="all")
