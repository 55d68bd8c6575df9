"""Which clients take part in a round (the boundary `clients`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from shoal.accounting.events import Event, Sampled, Unbounded
from shoal.accounting.theorems import Unit
from shoal.errors import ConfigError
from shoal.mechanisms.participation import Participation
from shoal.mechanisms.sampling.scheme import Indices, Scheme, required
from shoal.mechanisms.sanitiser import State
from shoal.mechanisms.schedules import parse

ONE_FOR_ANOTHER = (
    "clients keep state (momentum or personal layers): who is in a fixed-size sample shows in later updates of others"
)


@dataclass(frozen=True)
class Clients(Scheme):
    """Boundary `clients`: which clients take part in a round.

    Attributes:
        sampling: How they are chosen.
        cohort: The public, expected number m_t of clients. It may be a schedule: Geyer et al. (2017) raise it.
        separation: The fewest rounds from one participation of a client to its next (min-separation, cyclic-poisson).
        participations: The most rounds in which one client takes part (min-separation).
    """

    sampling: str = "fixed-size"
    cohort: str | float = 10
    separation: int | None = None
    participations: int | None = None

    schemes: ClassVar[dict[str, type[Clients]]] = {}
    section: ClassVar[str] = "clients"
    states: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(
        ("draw", "take_part", "secret"), ("charged", "amplified")
    )
    resets: ClassVar[dict[str, tuple[str, ...]]] = {
        "draw": ("shows", "rate", "known_size", "alike"),
        "take_part": ("shows", "rate", "known_size", "alike"),
        "secret": ("rate",),
        "expected": ("shows", "known_size", "alike"),
        "rate": ("alike",),
        "amplified": ("alike",),
        "charged": ("alike", "charged_from"),
    }
    secret: ClassVar[bool] = True
    """Is participation sampled in secret? Otherwise it is public."""
    separated: ClassVar[bool] = False
    """Do clients take part again only after a public number of rounds?"""
    chooses: ClassVar[bool] = False
    """Does `draw` take one argument more: the clients that are there, and may take part now?"""
    needs: ClassVar[tuple[str, ...]] = ()
    """Which of the settings of single schemes it must have."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Which of them it may have."""
    alike: ClassVar[bool] = False
    """Does every round cost the same, where its noise is the same?"""
    known_size: ClassVar[bool] = False
    """Is the size of every cohort public?"""
    replaces: ClassVar[bool] = False
    """Does another client take the place of one that is absent?"""

    def __post_init__(self) -> None:
        if min(parse(self.cohort).values(100)) <= 0:
            raise ConfigError(f"clients.cohort must be > 0, got {self.cohort}")
        self._refuse_ineffective()

    def _refuse_ineffective(self) -> None:
        for name in ("separation", "participations"):
            value = getattr(self, name)
            if value is None and name in self.needs:
                raise ConfigError(f"clients.sampling={self.sampling} needs clients.{name}, a number of rounds")
            if value is not None and name not in (*self.needs, *self.takes):
                use = [word for word, scheme in self.schemes.items() if name in (*scheme.needs, *scheme.takes)]
                raise ConfigError(f"clients.{name} is for clients.sampling={' or '.join(use)}, got {self.sampling}")
            if value is not None and value < 1:
                raise ConfigError(f"clients.{name} must be >= 1, got {value}")

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

    def participation(self, total: int, clients: int) -> Participation:
        """When a client may take part in this many rounds; checked, and counted on, only if it is `separated`."""
        return Participation(total)

    def take_part(
        self, generator: np.random.Generator, state: State, t: int, total: int, clients: int, again: bool
    ) -> Indices:
        """The clients of round t as it is run; a scheme that draws several rounds at once keeps the draw in `state`.

        Args:
            generator: The generator of this attempt at the round.
            state: What is carried from round to round, and saved with the run.
            t: The round.
            total: The planned number of rounds.
            clients: The number of clients.
            again: Was the round charged before, and is it run again?
        """
        return self.draw(generator, t, total, clients)

    def cycle_length(self, clients: int) -> int:
        """The least number of rounds after which a client takes part again."""
        return 1

    def charged_from(self, t: int, clients: int) -> int:
        """The first round that someone is charged who was there from round t on (see `joined_from`)."""
        return t

    def charged(
        self, event_at: Callable[[int], Event], t: int, total: int, clients: int, unit: Unit, again: bool
    ) -> Event:
        """What the ledger is charged before round t; `event_at`: what each round would be charged by itself.

        Several rounds may be charged as one, but no later than the first of them, which `charged_from` gives.
        """
        return event_at(t)

    def rate(self, t: int, total: int, clients: int, copies: int = 1) -> float:
        """The probability, at most, that a client takes part in round t, whichever of `copies` - 1 others did.

        A scheme that overrides `draw` or `take_part` and does not define it has 1.
        """
        return 1.0

    def amplified(self, event: Event, rate: float, remembers: bool) -> Event:
        """What is charged for noise on the sum of a round, the same amount whichever clients take part.

        Args:
            event: What is charged where all clients take part.
            rate: The probability that a client takes part.
            remembers: Do clients keep state from the rounds in which they took part?
        """
        return event

    @property
    def audited(self) -> tuple[int, float]:
        """The number of clients, and the cohort size, of an audit."""
        return 3, 3

    def shows(self, rate: float) -> bool:
        """Where each client adds its own noise: does the amount of noise in the sum reveal who took part?

        One that contributes nothing adds its noise all the same (zero-out). By default yes: the noise is then not
        taken as that of `expected` clients either.
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
    alike: ClassVar[bool] = True
    known_size: ClassVar[bool] = True
    replaces: ClassVar[bool] = True

    @property
    def audited(self) -> tuple[int, float]:
        """Half of four clients."""
        return 4, 2

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

    def shows(self, rate: float) -> bool:
        """Every cohort is of the same size."""
        return False


@dataclass(frozen=True)
class PoissonClients(Clients):
    """Each client takes part independently with probability m_t/K; a cohort may be empty."""

    sampling: str = "poisson"
    alike: ClassVar[bool] = True

    @property
    def audited(self) -> tuple[int, float]:
        """Each of two clients with probability 1/2."""
        return 2, 1

    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """Each client independently."""
        return np.flatnonzero(generator.random(clients) < self.rate(t, total, clients))

    def rate(self, t: int, total: int, clients: int, copies: int = 1) -> float:
        """The expected cohort size over the number of clients."""
        return self.expected(t, total, clients) / clients

    def amplified(self, event: Event, rate: float, remembers: bool) -> Event:
        """The event of a round, amplified by the sampling."""
        return Sampled("poisson", rate, event)

    def shows(self, rate: float) -> bool:
        """The size of a cohort is random, unless all take part."""
        return rate < 1

    def for_canaries(self) -> Clients:
        """All clients: the audit game itself runs the sampling."""
        return replace(self, sampling="all")


@dataclass(frozen=True)
class AllClients(Clients):
    """All clients take part; `cohort` is ignored."""

    sampling: str = "all"
    alike: ClassVar[bool] = True
    secret: ClassVar[bool] = False
    known_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._refuse_ineffective()

    def expected(self, t: int, total: int, clients: int) -> float:
        """The number of clients."""
        return clients

    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """All clients."""
        return np.arange(clients)

    def shows(self, rate: float) -> bool:
        """All take part."""
        return False

    def greatest(self, total: int) -> float:
        """0: all clients take part, however many there are."""
        return 0.0

    def of_cohort(self, cohort: float) -> Clients:
        """The same: there is no cohort size."""
        return self


def participation(scheme: Clients, total: int, clients: int) -> Participation:
    """When a client may take part, as training checks it: in any round, where turns are not counted."""
    return scheme.participation(total, clients) if scheme.separated else Participation(total)


def joined_from(scheme: Clients, t: int, clients: int) -> int:
    """The first round that someone is charged who joins in round t: of all, where `charged` does not say by which."""
    kind = type(scheme)
    own = "charged" in vars(scheme) or kind.charged is not Clients.charged
    return 0 if own and kind.charged_from is Clients.charged_from else scheme.charged_from(t, clients)
