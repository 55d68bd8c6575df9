"""Sampling of clients in a round and of records in a local step (the boundaries `clients` and `records`).

The sampling scheme decides what an accountant may claim: Poisson sampling amplifies, shuffled batches do not,
fixed-size sampling only under replace-one. So each scheme is one class, which draws and states its events.

The word in `sampling` picks the class: `Clients("poisson", cohort=10)` is a `PoissonClients`, and so is
`replace(clients, sampling="poisson")`. A scheme of your own is a frozen dataclass derived from `Clients` or
`Records` whose field `sampling` has a new word for its default; it must implement `draw` (of records: `drawn`). By
default it is charged as if nothing were sampled, which is never too little.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.accounting.events import Event, Sampled, TwoLevel, Unbounded, Use, passes
from shoal.accounting.theorems import Unit
from shoal.errors import ConfigError, PluginError, nearest
from shoal.mechanisms.schedules import parse
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.statements import Stating

MOST_STEPS = 1_000_000
MOST_VIEWS = 256
LARGEST_BATCH = 2**14
"""The most records of a Poisson batch where clients' sizes are unknown: a site that may draw more refuses."""
ONE_FOR_ANOTHER = (
    "clients keep state (momentum or personal layers): who is in a fixed-size sample shows in later updates of others"
)
WIDER = 1e-30
"""The probability, at most, that a Poisson batch is wider than the public width to which secure mode pads it."""
Indices = npt.NDArray[np.int64]


Method = TypeVar("Method", bound=Callable[..., Any])


def _required(method: Method) -> Method:
    """An abstract method; mypy must not see that, as it would refuse `Clients("poisson")`, which is a subclass."""
    return abstractmethod(method)


class _Scheme(Stating, ABC):
    """A dataclass whose class is the one registered for the word in its field `sampling`."""

    sampling: str
    schemes: ClassVar[dict[str, type[Any]]]
    section: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "schemes" in vars(cls) or not (word := vars(cls).get("sampling")):
            return
        taken = cls.schemes.get(word)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.section}.sampling '{word}' is {taken.__name__}: {cls.__name__} needs another word")
        cls.schemes[word] = cls

    def __new__(cls, sampling: str | None = None, *args: Any, **settings: Any) -> Self:
        word = cls.sampling if sampling is None else sampling
        if word == cls.sampling and "schemes" not in cls.__dict__:
            return super().__new__(cls)
        if word not in cls.schemes:
            raise ConfigError(
                f"{cls.section}.sampling cannot be {word!r}: it is one of {', '.join(cls.schemes)}"
                f"{nearest(str(word), cls.schemes)}"
            )
        scheme = cls.schemes[word]
        if issubclass(scheme, cls):  # Python calls its __init__ next
            return super().__new__(scheme)
        made: Self = scheme(word, *args, **settings)
        return made


@dataclass(frozen=True)
class Clients(_Scheme):
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

    @_required
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


@dataclass(frozen=True)
class Records(_Scheme):
    """Boundary `records`: which of a client's records enter each local step, in batches of `batch`.

    With `rate`, each record enters a Poisson batch with that probability, whatever its client's size: a small client
    samples its records no more often than a large one, and so needs no more noise. Every client then divides its sums
    by the same public number, rate x `nominal_records`, and not by its own size; `batch` is that number.

    `augmentations`: views of each picture, cropped and flipped at random, over which its gradient is averaged before
    it is clipped; 0: the picture itself.
    """

    sampling: str = "shuffled"
    batch: int = 10
    rate: float | None = None
    nominal_records: int | None = None
    augmentations: int = 0

    schemes: ClassVar[dict[str, type[Records]]] = {}
    section: ClassVar[str] = "records"
    states: ClassVar[dict[str, tuple[str, ...]]] = {"draw": ("event",), "drawn": ("event",)}
    varies: ClassVar[bool] = False
    """Do batch sizes vary at random?"""
    repeats: ClassVar[bool] = False
    """May a record occur more than once in a batch?"""

    def __post_init__(self) -> None:
        if (self.rate is None) != (self.nominal_records is None):
            given, missing = ("rate", "nominal_records") if self.rate is not None else ("nominal_records", "rate")
            raise ConfigError(
                f"records.{given} needs records.{missing}: sums are divided by rate x nominal_records, both public"
            )
        if self.rate is not None and self.nominal_records is not None:
            self._refuse_rate(self.rate, self.nominal_records)
            object.__setattr__(self, "batch", max(1, round(self.rate * self.nominal_records)))
        if self.batch < 1:
            raise ConfigError(f"records.batch must be >= 1, got {self.batch}")
        if not 0 <= self.augmentations <= MOST_VIEWS:
            raise ConfigError(f"records.augmentations must be from 0 to {MOST_VIEWS}, got {self.augmentations}")

    def _refuse_rate(self, rate: float, records: int) -> None:
        raise ConfigError(f"records.rate is for records.sampling=poisson, got {self.sampling}")

    def of_batch(self, batch: int) -> Self:
        """The same with batches of this size instead of a rate, for records that are no pictures."""
        return replace(self, batch=batch, rate=None, nominal_records=None, augmentations=0)

    def share(self, records: int) -> float:
        """The probability that one of so many records enters a batch."""
        return min(1.0, self.batch / max(1, records))

    def widest(self, records: int) -> int:
        """How many of so many records a batch holds at most: a public number."""
        return self.batch

    def wider(self) -> float:
        """The probability, at most, that a batch holds more than its `widest`."""
        return 0.0

    def steps(self, records: int, epochs: int) -> int:
        """Steps that `epochs` passes over so many records take."""
        return epochs * math.ceil(records / self.batch)

    def draw(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """`steps` batches of positions in 0..records-1, one per row, padded with -1."""
        if records == 0:
            return np.full((steps, 1), -1)
        rows = self.drawn(generator, records, steps)
        if len(rows) > steps:
            raise PluginError(f"records.sampling {self.sampling} drew more steps than are charged")
        return rows

    def refuse_repeats(self, batches: Indices) -> None:
        """Raise a PluginError where a batch [..., B] holds a record more often than is charged; -1 is padding."""
        if self.repeats:
            return
        ordered = np.sort(batches, axis=-1)
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
            raise PluginError(f"records.sampling {self.sampling} drew a record more often than is charged")

    @_required
    def drawn(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """What `draw` gives where there are records."""
        raise NotImplementedError

    def most(self, sizes: Sequence[int]) -> int:
        """How many records a batch may hold, of clients of these sizes."""
        return self.batch

    def uses(self, setting: Setting, steps: int | None, epochs: int) -> list[Use]:
        """By client size: the share of a client's records that enter a step, and its steps in a round.

        The more records a client has, the smaller the share and the more steps it makes. So a range of sizes is
        charged for the share of its smallest and the steps of its largest, which is exact where the steps are equal.

        Args:
            setting: Its `sizes` may be unknown; the result is then empty unless the steps are known anyway.
            steps: Local steps in a round, where that is given.
            epochs: Passes over a client's records, where it is not.
        """
        if not setting.sizes:
            return [(0, self.rate or 1.0, steps or self.steps(1, epochs))] if steps or self.rate is not None else []
        ranges: list[tuple[int, int]] = []
        for least, most in _sizes(setting, self.batch):
            if ranges and (steps or self.steps(ranges[-1][0], epochs) == self.steps(most, epochs)):
                ranges[-1] = ranges[-1][0], most
            else:
                ranges.append((least, most))
        return [(least, self.share(least), steps or self.steps(most, epochs)) for least, most in _few(ranges)]

    def event(self, rate: float, noise: float, uses: list[Use]) -> tuple[TwoLevel, list[Use]]:
        """What one record is charged at worst, and the uses from which that is taken.

        Args:
            rate: The probability, at most, that its client takes part.
            noise: The noise on the sum of each step, in units of what one record can move it by.
            uses: How clients use a record, by size.
        """
        return TwoLevel(rate, 1.0, max(steps for *_, steps in uses), noise, local="none"), uses[:1]


@dataclass(frozen=True)
class PoissonRecords(Records):
    """Each record independently with probability batch/n, or `rate`."""

    sampling: str = "poisson"
    varies: ClassVar[bool] = True

    def _refuse_rate(self, rate: float, records: int) -> None:
        if not 1 / MOST_STEPS <= rate <= 1:
            raise ConfigError(f"records.rate must be from {1 / MOST_STEPS:g} to 1, got {rate}")
        if records < 1:
            raise ConfigError(f"records.nominal_records must be >= 1, got {records}")

    def share(self, records: int) -> float:
        """The probability that a record enters a batch."""
        return super().share(records) if self.rate is None else self.rate

    def steps(self, records: int, epochs: int) -> int:
        """How many local steps the epochs take."""
        return super().steps(records, epochs) if self.rate is None else epochs * math.ceil(1 / self.rate - 1e-9)

    def drawn(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """Each record independently, in each step."""
        return _rows(generator.random((steps, records)) < self.share(records))

    def widest(self, records: int) -> int:
        """How many of so many records a batch holds at most, but for the probability `wider`."""
        return _widest(records, self.share(records))

    def wider(self) -> float:
        """The probability, at most, that a batch holds more than its `widest`."""
        return WIDER

    def most(self, sizes: Sequence[int]) -> int:
        """The most records that a batch may hold."""
        return max((1, *sizes)) if sizes else LARGEST_BATCH

    def event(self, rate: float, noise: float, uses: list[Use]) -> tuple[TwoLevel, list[Use]]:
        """What a record is charged, amplified by Poisson sampling."""
        return TwoLevel(rate, *_worst(uses), noise, local="poisson"), uses


@dataclass(frozen=True)
class RecordsWithReplacement(Records):
    """`batch` draws from a client's records."""

    sampling: str = "with-replacement"
    repeats: ClassVar[bool] = True

    def drawn(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """Each place of a batch independently."""
        return generator.integers(records, size=(steps, self.batch))

    def event(self, rate: float, noise: float, uses: list[Use]) -> tuple[TwoLevel, list[Use]]:
        """What a record is charged, amplified by sampling with replacement."""
        share, steps = _worst(uses)
        if share >= 1:  # all draws of a step may be of one record
            return TwoLevel(rate, 1.0, steps, noise / self.batch, local="none"), uses[:1]
        return TwoLevel(rate, share, steps, noise, local="with-replacement", draws=self.batch), uses


@dataclass(frozen=True)
class ShuffledRecords(Records):
    """A new order every epoch, cut into batches, of which the last may be smaller: nothing is amplified."""

    sampling: str = "shuffled"

    def drawn(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """Pass after pass over the records, in batches."""
        per_epoch = math.ceil(records / self.batch)
        width = min(self.batch, records)
        epochs = math.ceil(steps / per_epoch)
        table = np.full((epochs, per_epoch * width), -1)
        for epoch in table:
            epoch[:records] = self._order(generator, records)
        return table.reshape(epochs * per_epoch, width)[:steps]

    def _order(self, generator: np.random.Generator, records: int) -> Indices:
        return generator.permutation(records)

    def uses(self, setting: Setting, steps: int | None, epochs: int) -> list[Use]:
        """How often a client uses a record, by the client's size."""
        if not setting.sizes:
            return [(0, 1.0, steps or epochs)]
        ranges = _sizes(setting, self.batch)
        return [(least, 1 / self.steps(least, 1), steps or self.steps(least, epochs)) for least, _ in ranges]

    def event(self, rate: float, noise: float, uses: list[Use]) -> tuple[TwoLevel, list[Use]]:
        """Charged as for the client that uses its records most often."""
        worst = [max(uses, key=lambda use: passes(use[1], use[2]))]
        return TwoLevel(rate, *_worst(worst), noise, local="shuffled"), worst


@dataclass(frozen=True)
class RecordsInOrder(ShuffledRecords):
    """The records as they lie, cut into batches: a known order is no worse than an unknown one."""

    sampling: str = "fixed-order"

    def _order(self, generator: np.random.Generator, records: int) -> Indices:
        return np.arange(records)


@lru_cache(maxsize=1024)
def _widest(records: int, share: float) -> int:
    from scipy.stats import binom

    return bisect_left(range(records), True, key=lambda most: bool(binom.sf(most, records, share) <= WIDER))


def _rows(chosen: npt.NDArray[np.bool_]) -> Indices:
    """The positions of the true values of each row, left-aligned, padded with -1."""
    width = max(1, int(chosen.sum(axis=1).max(initial=0)))
    order = np.argsort(~chosen, axis=1, kind="stable")[:, :width]
    kept: Indices = np.where(np.take_along_axis(chosen, order, axis=1), order, -1)
    return kept


def _worst(uses: list[Use]) -> tuple[float, int]:
    """The greatest share, and the most steps."""
    return max(share for _, share, _ in uses), max(steps for *_, steps in uses)


FINE = 12
"""Ranges of client sizes that are charged separately; larger ones are merged into as many ranges again."""


def _sizes(setting: Setting, batch: int) -> Iterator[tuple[int, int]]:
    """The sizes of clients, in ascending order; where only bounds are known, all between, in ranges (from, to)."""
    sizes = sorted({max(1, size) for size in setting.sizes})
    if not setting.bounds:
        yield from ((size, size) for size in sizes)
        return
    least, last = sizes[0], sizes[-1]
    while least <= last:
        batches = max(math.ceil(least / batch), math.floor(1.01 * least / batch))  # wider ranges for larger clients
        most = min(batches * batch, last)
        yield least, most
        least = most + 1


def _few(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most some 24 ranges: the smallest sizes, which cost most, unchanged, larger ones a factor apart."""
    few, rest = ranges[:FINE], ranges[FINE:]
    if len(rest) <= FINE:
        return ranges
    factor = (rest[-1][1] / rest[0][0]) ** (1 / FINE)
    for least, most in rest:
        if len(few) > FINE and least < few[-1][0] * factor:
            few[-1] = few[-1][0], most
        else:
            few.append((least, most))
    return few
