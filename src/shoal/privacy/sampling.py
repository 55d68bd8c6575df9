"""Who takes part: clients in a round, records in a local step (the boundaries `clients` and `examples`).

What is sampled, and how, decides what an accountant may claim: Poisson sampling is amplified, shuffled
batches are not, fixed-size sampling only under replace-one. So the records here hold the one truth of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError
from shoal.privacy.schedules import parse

MOST_STEPS = 1_000_000
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Clients:
    """Boundary `clients`: which clients take part in a round.

    `cohort` is the public, expected number m_t of clients; it may be a schedule (001 raises m_t over the
    rounds). Under `poisson` each client comes by itself with probability m_t/K, under `fixed-size` exactly
    m_t come, under `all` everyone does. Under `cyclic` nothing is drawn: clients come in turn, in a public order, no
    more than m at a time; one that is gone leaves its place empty.
    """

    sampling: Literal["fixed-size", "poisson", "all", "cyclic"] = "fixed-size"
    cohort: str | float = 10

    def __post_init__(self) -> None:
        if self.sampling != "all" and min(parse(self.cohort).values(100)) <= 0:
            raise ConfigError(f"clients.cohort must be > 0, got {self.cohort}")
        if self.sampling == "cyclic" and parse(self.cohort).shape != "constant":
            raise ConfigError(f"clients.cohort must be a constant where clients come in turn, got {self.cohort}")

    def expected(self, t: int, total: int, clients: int) -> float:
        """The public cohort size of round t: the only denominator there is."""
        if self.sampling == "all":
            return clients
        size = parse(self.cohort).value(t, total)
        if size > clients:
            raise ConfigError(
                f"clients.cohort is {size:g} in round {t + 1}, but there are only {clients} clients; "
                f"lower it, or raise data.clients"
            )
        if self.sampling == "cyclic":
            return clients / self.turns(clients)
        return size if self.sampling == "poisson" else max(1, round(size))

    def turns(self, clients: int) -> int:
        """After how many rounds, at the least, the same client may come again."""
        if self.sampling != "cyclic":
            return 1
        return math.ceil(clients / max(1, int(parse(self.cohort).value(0, 1))))

    def draw(self, generator: np.random.Generator, t: int, total: int, clients: int) -> Indices:
        """The clients of round t, in ascending order; under Poisson sampling there may be none."""
        size = self.expected(t, total, clients)
        if self.sampling == "all":
            return np.arange(clients)
        if self.sampling == "cyclic":
            turns = self.turns(clients)
            return np.arange(t % turns, clients, turns)
        if self.sampling == "poisson":
            return np.flatnonzero(generator.random(clients) < size / clients)
        return np.sort(generator.choice(clients, size=int(size), replace=False))


@dataclass(frozen=True)
class Examples:
    """Boundary `examples`: which of a client's records enter each local step.

    `shuffled`: a new order every epoch, cut into batches (no amplification); `fixed-order`: the records as
    they lie, cut into batches; `poisson`: each record by itself with probability batch/n; `with-replacement`:
    `batch` draws. Under the first two the last batch of an epoch may be smaller.

    With `rate` each record enters a Poisson batch with that probability, whatever its client's size: a small client
    samples its records no more often than a large one, and so costs no more noise. Every client then divides its sums
    by the same public number, rate x `nominal_records`, and not by what it has; `batch` is that number.
    """

    sampling: Literal["shuffled", "fixed-order", "poisson", "with-replacement"] = "shuffled"
    batch: int = 10
    rate: float | None = None
    nominal_records: int | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) != (self.nominal_records is None):
            given, missing = ("rate", "nominal_records") if self.rate is not None else ("nominal_records", "rate")
            raise ConfigError(
                f"examples.{given} needs examples.{missing}: sums are divided by rate x nominal_records, both public"
            )
        if self.rate is not None and self.nominal_records is not None:
            if self.sampling != "poisson":
                raise ConfigError(f"examples.rate is for examples.sampling=poisson, got {self.sampling}")
            if not 1 / MOST_STEPS <= self.rate <= 1:
                raise ConfigError(f"examples.rate must be from {1 / MOST_STEPS:g} to 1, got {self.rate}")
            if self.nominal_records < 1:
                raise ConfigError(f"examples.nominal_records must be >= 1, got {self.nominal_records}")
            object.__setattr__(self, "batch", max(1, round(self.rate * self.nominal_records)))
        if self.batch < 1:
            raise ConfigError(f"examples.batch must be >= 1, got {self.batch}")

    def of_batch(self, batch: int) -> Examples:
        """The same by batches of this size, and by no rate."""
        return replace(self, batch=batch, rate=None, nominal_records=None)

    def share(self, records: int) -> float:
        """The probability with which one of so many records enters a Poisson batch: `rate`, if that is given."""
        return min(1.0, self.batch / max(1, records)) if self.rate is None else self.rate

    def widest(self, records: int) -> int:
        """How many of so many records a Poisson batch holds at most, but for a chance of 1e-30: a public number."""
        return _widest(records, self.share(records))

    def steps(self, records: int, epochs: int) -> int:
        """Steps that `epochs` passes over so many records take."""
        if self.rate is not None:
            return epochs * math.ceil(1 / self.rate - 1e-9)
        return epochs * math.ceil(records / self.batch)

    def draw(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """`steps` batches of positions in 0..records-1, one a row, filled up with -1."""
        if records == 0:
            return np.full((steps, 1), -1)
        if self.sampling == "poisson":
            return _rows(generator.random((steps, records)) < self.share(records))
        if self.sampling == "with-replacement":
            return generator.integers(records, size=(steps, self.batch))
        per_epoch = math.ceil(records / self.batch)
        width = min(self.batch, records)
        epochs = math.ceil(steps / per_epoch)
        table = np.full((epochs, per_epoch * width), -1)
        for epoch in table:
            epoch[:records] = np.arange(records) if self.sampling == "fixed-order" else generator.permutation(records)
        return table.reshape(epochs * per_epoch, width)[:steps]


@lru_cache(maxsize=1024)
def _widest(records: int, share: float) -> int:
    from scipy.stats import binom

    return int(np.argmax(binom.sf(np.arange(records + 1), records, share) <= 1e-30))


def _rows(chosen: npt.NDArray[np.bool_]) -> Indices:
    """The positions of the true values of each row, to the left, filled up with -1."""
    width = max(1, int(chosen.sum(axis=1).max(initial=0)))
    order = np.argsort(~chosen, axis=1, kind="stable")[:, :width]
    kept: Indices = np.where(np.take_along_axis(chosen, order, axis=1), order, -1)
    return kept
