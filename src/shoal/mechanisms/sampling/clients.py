"""Which clients take part in a round (the boundary `clients`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from shoal.accounting.events import Event, Sampled, Unbounded
from shoal.accounting.theorems import Unit
from shoal.errors import ConfigError
from shoal.mechanisms.sampling.scheme import Indices, Scheme, required
from shoal.mechanisms.schedules import parse

ONE_FOR_ANOTHER = (
    "clients keep state (momentum or personal layers): who is in a fixed-size sample shows in later updates of others"
)


@dataclass(frozen=True)
class Clients(Scheme):
    """Boundary `clients`: which clients take part in a round.

    `cohort` is the public, expected number m_t of clients; it may be a schedule (Geyer et al. (2017) raise
    it over the rounds).
    """

    sampling: str = "fixed-size"
    cohort: str | float = 10

    schemes: ClassVar[dict[str, type[Clients]]] = {}
    section: ClassVar[str] = "clients"
    states: ClassVar[dict[str, tuple[str, ...]]] = {"draw": ("amplified",)}
    secret: ClassVar[bool] = True
    """Is participation sampled in secret? Otherwise it is public."""
    cyclic: ClassVar[bool] = False
    """Do clients take part again only after a public number of rounds?"""
    known_size: ClassVar[bool] = False
    """Is the size of every cohort public?"""
    replaces: ClassVar[bool] = False
    """Does another client take the place of one that is absent?"""
    audited: ClassVar[tuple[int, int]] = (3, 3)
    """The number of clients, and the cohort size, of an audit."""

    def __post_init__(self) -> None:
        if min(parse(self.cohort).values(100)) <= 0:
            raise ConfigError(f"clients.cohort must be > 0, got {self.cohort}")

    def expected(self, t: int, total: int, clients: int) -> float:
        """The public cohort size of round t: the only denominator that is used."""
        size = parse(self.cohort).value(t, total)
        if size > clients:
            raise ConfigError(
                f"clients.cohort is {size:g} in round {t + 1}, but there are only {clients} clients; "
                f"lower it, or raise data.clients"
            )
        return size

    def greatest(self, total: int) -> float:
        """The largest cohort size; 0 where all clients take part, however many there are."""
        return max(parse(self.cohort).values(total))

    @required
    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """The clients of round t, in ascending order; there may be none."""
        raise NotImplementedError

    def cycle_length(self, clients: int) -> int:
        """The least number of rounds after which a client takes part again."""
        return 1

    def rate(self, t: int, total: int, clients: int, copies: int = 1) -> float:
        """The probability, at most, that a client takes part in round t, whichever of `copies` - 1 others did."""
        return 1.0

    def amplified(self, event: Event, rate: float, remembers: bool) -> Event:
        """What is charged for noise on the sum of a round, the same amount whichever clients take part.

        Args:
            event: What is charged where all clients take part.
            rate: The probability that a client takes part.
            remembers: Do clients keep state from the rounds in which they took part?
        """
        return event

    def shows(self, rate: float, unit: Unit) -> bool:
        """Where each client adds its own noise: does the amount of noise in the sum reveal who took part?

        By default yes: the noise is then not taken as that of `expected` clients either.
        """
        return True

    def assumes(self) -> tuple[str, ...]:
        """Whether participation is secret."""
        if not self.secret:
            return ("who takes part in a round is public",)
        return ("who takes part in a round is drawn at random, and hidden from those who see only released models",)

    def of_cohort(self, cohort: float) -> Clients:
        """The same with cohorts of this size."""
        return replace(self, cohort=cohort)

    def for_canaries(self) -> Clients:
        """The sampling for canaries: where the audit game itself runs the sampling, all clients reveal more."""
        return self


@dataclass(frozen=True)
class FixedSizeClients(Clients):
    """Exactly m_t clients take part."""

    sampling: str = "fixed-size"
    known_size: ClassVar[bool] = True
    replaces: ClassVar[bool] = True
    audited: ClassVar[tuple[int, int]] = (4, 2)

    def expected(self, t: int, total: int, clients: int) -> float:
        """The public cohort size of round t."""
        return max(1, round(super().expected(t, total, clients)))

    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """Exactly m_t clients, without replacement."""
        size = int(self.expected(t, total, clients))
        return np.sort(generator.choice(clients, size=size, replace=False))

    def rate(self, t: int, total: int, clients: int, copies: int = 1) -> float:
        """The cohort size over the number of clients."""
        return min(1.0, self.expected(t, total, clients) / max(1, clients - (copies - 1)))

    def amplified(self, event: Event, rate: float, remembers: bool) -> Event:
        """The event of a round, amplified by the sampling."""
        return Unbounded(ONE_FOR_ANOTHER) if remembers and rate < 1 else Sampled("fixed-size", rate, event)

    def shows(self, rate: float, unit: Unit) -> bool:
        """The noise of another client takes the place of an absent one's."""
        return rate == 1 and unit == "client"


@dataclass(frozen=True)
class PoissonClients(Clients):
    """Each client takes part independently with probability m_t/K; a cohort may be empty."""

    sampling: str = "poisson"
    audited: ClassVar[tuple[int, int]] = (2, 1)

    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """Each client independently."""
        return np.flatnonzero(generator.random(clients) < self.expected(t, total, clients) / clients)

    def rate(self, t: int, total: int, clients: int, copies: int = 1) -> float:
        """The expected cohort size over the number of clients."""
        return self.expected(t, total, clients) / clients

    def amplified(self, event: Event, rate: float, remembers: bool) -> Event:
        """The event of a round, amplified by the sampling."""
        return Sampled("poisson", rate, event)

    def shows(self, rate: float, unit: Unit) -> bool:
        """The size of a cohort is random, unless all take part."""
        return rate < 1 or unit == "client"

    def for_canaries(self) -> Clients:
        """All clients: the audit game itself runs the sampling."""
        return replace(self, sampling="all")


@dataclass(frozen=True)
class AllClients(Clients):
    """All clients take part; `cohort` is ignored."""

    sampling: str = "all"
    secret: ClassVar[bool] = False
    known_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        pass

    def expected(self, t: int, total: int, clients: int) -> float:
        """The number of clients."""
        return clients

    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """All clients."""
        return np.arange(clients)

    def shows(self, rate: float, unit: Unit) -> bool:
        """All take part, and one that contributes nothing adds no noise."""
        return unit == "client"

    def greatest(self, total: int) -> float:
        """0: all clients take part, however many there are."""
        return 0.0

    def of_cohort(self, cohort: float) -> Clients:
        """The same: there is no cohort size."""
        return self


@dataclass(frozen=True)
class CyclicClients(Clients):
    """Cyclic participation: clients take part in a public order, at most m at a time.

    The place of an absent client stays empty.
    """

    sampling: str = "cyclic"
    secret: ClassVar[bool] = False
    cyclic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if parse(self.cohort).shape != "constant":
            raise ConfigError(f"clients.cohort must be a constant for cyclic sampling, got {self.cohort}")

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
