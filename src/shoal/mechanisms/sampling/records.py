"""Which of a client's records enter each local step (the boundary `records`)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from shoal.accounting.events import TwoLevel, Unbounded, Use
from shoal.accounting.leaves import passes
from shoal.errors import ConfigError
from shoal.mechanisms.sampling.scheme import Indices, Scheme, required
from shoal.mechanisms.setting import Setting

MOST_STEPS = 1_000_000
MOST_VIEWS = 256
LARGEST_BATCH = 2**14
"""The most records of a Poisson batch where clients' sizes are unknown: a site that may draw more refuses."""
SECRET_BATCHES = "which records enter a local step is drawn at random, and nobody learns it"
MANY = 10**9
"""More records than any client has."""
MOST_SIZES = 10_000
"""The most client sizes of which each is asked for its share and steps; of more they count as unknown."""
WIDER = 1e-30
"""The probability, at most, that a Poisson batch is wider than the public width to which secure mode pads it."""
Stated = tuple[TwoLevel, list[Use]]
"""What a unit is charged at worst, and the uses from which that is taken."""


@dataclass(frozen=True)
class Records(Scheme):
    """Boundary `records`: which of a client's records enter each local step, in batches of `batch`.

    With `rate`, each record enters a Poisson batch with that probability, whatever its client's size: a small client
    samples its records no more often than a large one, and so needs no more noise. Every client then divides its sums
    by the same public number, rate x `nominal_records`, and not by its own size; `batch` is that number.

    Attributes:
        sampling: How a batch is drawn.
        batch: Records in a batch, or the expected number; sums are divided by it.
        rate: The public probability with which each record enters a Poisson batch, instead of `batch`.
        nominal_records: With `rate`, sums are divided by rate x nominal_records, which is public.
        augmentations: Views of each picture, cropped and flipped at random, over which its gradient is averaged
            before it is clipped; 0: the picture itself.
        max_per_user: The most records of one user that a client uses in the whole run; it ignores the others.
    """

    sampling: str = "shuffled"
    batch: int = 10
    rate: float | None = None
    nominal_records: int | None = None
    augmentations: int = 0
    max_per_user: int | None = None

    schemes: ClassVar[dict[str, type[Records]]] = {}
    section: ClassVar[str] = "records"
    states: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(("draw", "drawn", "repeats"), ("event",))
    resets: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(
        ("draw", "drawn", "repeats"), ("user_event", "varies")
    ) | dict.fromkeys(("share", "steps"), ("monotone",))
    monotone: ClassVar[bool] = False
    """Do the ends of a range of client sizes cost most, as share and steps only rise, or only fall, with the size?"""
    varies: ClassVar[bool] = True
    """Do batch sizes vary at random?"""
    repeats: ClassVar[bool] = False
    """May a record occur more than once in a batch?"""
    unproven: ClassVar[str | None] = None
    """Why nothing is proven for a record that is replaced by another; None where something is."""

    def __post_init__(self) -> None:
        if (self.rate is None) != (self.nominal_records is None):
            given, missing = ("rate", "nominal_records") if self.rate is not None else ("nominal_records", "rate")
            raise ConfigError(
                f"records.{given} needs records.{missing}: sums are divided by rate x nominal_records, both public"
            )
        if self.rate is not None and self.nominal_records is not None:
            self._refuse_rate(self.rate, self.nominal_records)
            object.__setattr__(self, "batch", max(1, round(self.rate * self.nominal_records)))
        if self.max_per_user is not None and self.max_per_user < 1:
            raise ConfigError(f"records.max_per_user must be >= 1, got {self.max_per_user}")
        if self.batch < 1:
            raise ConfigError(f"records.batch must be >= 1, got {self.batch}")
        if not 0 <= self.augmentations <= MOST_VIEWS:
            raise ConfigError(f"records.augmentations must be from 0 to {MOST_VIEWS}, got {self.augmentations}")

    def _refuse_rate(self, rate: float, records: int) -> None:
        raise ConfigError(f"records.rate is for records.sampling=poisson or random-allocation, got {self.sampling}")

    def of_batch(self, batch: int) -> Self:
        """The same with batches of this size instead of a rate, for records that are no pictures."""
        return replace(self, batch=batch, rate=None, nominal_records=None, augmentations=0)

    def share(self, records: int) -> float:
        """The probability that one of this many records enters a batch."""
        return min(1.0, self.batch / max(1, records))

    def widest(self, records: int) -> int:
        """The most of this many records that a batch holds: a public number."""
        return self.batch

    def wider(self) -> float:
        """The probability, at most, that a batch holds more than its `widest`."""
        return 0.0

    def steps(self, records: int, epochs: int) -> int:
        """Steps that `epochs` passes over this many records take."""
        return epochs * math.ceil(records / self.batch)

    def draw(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """`steps` batches of positions in 0..records-1, one per row, padded with -1."""
        if records == 0:
            return np.full((steps, 1), -1)
        return self.drawn(generator, records, steps)

    @required
    def drawn(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """What `draw` gives where there are records."""
        raise NotImplementedError

    def assumes(self) -> tuple[str, ...]:
        """What is secret; the batches of a fixed or shuffled order need not be."""
        return (SECRET_BATCHES,) if self.varies or self.repeats else ()

    def most(self, sizes: Sequence[int]) -> int:
        """How many records a batch may hold, of clients of these sizes."""
        return self.batch

    def uses(self, setting: Setting, steps: int | None, epochs: int) -> list[Use]:
        """By client size: the share of a client's records that enter a step, and its steps in a round.

        The more records a client has, the smaller the share and the more steps it makes. A range of sizes is
        charged for the greater share, and the more steps, of its ends: exact where the steps are equal. Where the
        scheme is not `monotone`, it is that of all sizes, which count as unknown if there are more than MOST_SIZES.

        Args:
            setting: Its `sizes` may be unknown; the result is then empty unless the steps are known anyway.
            steps: Local steps in a round, where that is given.
            epochs: Passes over a client's records, where it is not.
        """
        if not self._known(setting):
            if self.rate is None or not self.monotone:
                return [] if steps is None else [(0, 1.0, steps)]
            _, share, steps = self._use(1, MANY, steps, epochs)
            return [(0, share, steps)]
        found: list[Use] = []
        for least, most in _sizes(setting, self.batch):
            use = self._use(least, most, steps, epochs)
            if found and found[-1][2] == use[2]:
                found[-1] = _worse(found[-1], use)
            else:
                found.append(use)
        return _few(found, max(setting.sizes))

    def _known(self, setting: Setting) -> bool:
        """Is it known what clients of all sizes do? A coordinator sets their bounds, and may keep a site counting."""
        sizes = setting.sizes
        return bool(sizes) and (self.monotone or not setting.bounds or max(sizes) - min(sizes) < MOST_SIZES)

    def _use(self, least: int, most: int, steps: int | None, epochs: int) -> Use:
        """The greatest share and the most steps of clients of these sizes."""
        sizes = self._decisive(least, most)
        return least, max(map(self.share, sizes)), steps or max(self.steps(size, epochs) for size in sizes)

    def _decisive(self, least: int, most: int) -> Sequence[int]:
        """The sizes of a range that decide what is charged for it."""
        return (least, most) if self.monotone else range(least, most + 1)

    def event(self, rate: float, noise: float, uses: list[Use]) -> Stated:
        """What one record is charged at worst, and the uses from which that is taken.

        Args:
            rate: The probability, at most, that its client takes part.
            noise: The noise on the sum of each step, in units of what one record can move it by.
            uses: How clients use a record, by size.
        """
        times = self.most(()) if self.repeats else 1  # all records of a batch may be the same one
        return TwoLevel(rate, 1.0, max(steps for *_, steps in uses), noise / times, local="none"), uses[:1]

    def user_event(self, rate: float, noise: float, uses: list[Use], most: int) -> Stated | Unbounded:
        """What a user is charged, of whose records a client uses `most`; by default nothing is proven."""
        return Unbounded(f"nothing is proven for users with records.sampling={self.sampling}; poisson is accounted")


@dataclass(frozen=True)
class PoissonRecords(Records):
    """Each record independently with probability batch/n, or `rate`."""

    sampling: str = "poisson"
    monotone: ClassVar[bool] = True

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
        """The most of this many records that a batch holds, except with the probability `wider`."""
        return _widest(records, self.share(records))

    def wider(self) -> float:
        """The probability, at most, that a batch holds more than its `widest`."""
        return WIDER

    def most(self, sizes: Sequence[int]) -> int:
        """The most records that a batch may hold."""
        return max((1, *sizes)) if sizes else LARGEST_BATCH

    def event(self, rate: float, noise: float, uses: list[Use]) -> Stated:
        """What a record is charged, amplified by Poisson sampling."""
        return TwoLevel(rate, *_worst(uses), noise, local="poisson"), uses

    def user_event(self, rate: float, noise: float, uses: list[Use], most: int) -> Stated | Unbounded:
        """Each of a user's records is sampled independently: a mixture of Gaussians."""
        event, uses = self.event(rate, noise, uses)
        return replace(event, records=most), uses


@dataclass(frozen=True)
class AllocatedRecords(PoissonRecords):
    """Random allocation: in each pass every record enters one step, drawn at random for each independently."""

    sampling: str = "random-allocation"
    unproven: ClassVar[str | None] = (
        "no theorem covers a record that is replaced where its steps are allocated at random: use poisson"
    )

    def drawn(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """The steps of pass after pass, each with the records that were allocated to it."""
        in_a_pass = math.ceil(1 / self.share(records) - 1e-9)
        places = generator.integers(in_a_pass, size=(math.ceil(steps / in_a_pass), records))
        chosen = places[:, None, :] == np.arange(in_a_pass)[:, None]
        return _rows(chosen.reshape(-1, records)[:steps])

    def event(self, rate: float, noise: float, uses: list[Use]) -> tuple[TwoLevel, list[Use]]:
        """What a record is charged, where it is left out and not replaced."""
        return TwoLevel(rate, *_worst(uses), noise, local="random-allocation"), uses


@dataclass(frozen=True)
class RecordsWithReplacement(Records):
    """`batch` draws from a client's records."""

    sampling: str = "with-replacement"
    monotone: ClassVar[bool] = True
    varies: ClassVar[bool] = False
    repeats: ClassVar[bool] = True

    def drawn(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """Each place of a batch independently."""
        return generator.integers(records, size=(steps, self.batch))

    def event(self, rate: float, noise: float, uses: list[Use]) -> Stated:
        """What a record is charged, amplified by sampling with replacement."""
        share, steps = _worst(uses)
        if share >= 1:  # all draws of a step may be of one record
            return TwoLevel(rate, 1.0, steps, noise / self.batch, local="none"), uses[:1]
        return TwoLevel(rate, share, steps, noise, local="with-replacement", draws=self.batch), uses


@dataclass(frozen=True)
class ShuffledRecords(Records):
    """A new order every epoch, cut into batches, of which the last may be smaller: nothing is amplified."""

    sampling: str = "shuffled"
    monotone: ClassVar[bool] = True
    varies: ClassVar[bool] = False
    in_order: ClassVar[bool] = False

    def drawn(self, generator: np.random.Generator, records: int, steps: int) -> Indices:
        """Pass after pass over the records, in batches."""
        per_epoch = math.ceil(records / self.batch)
        width = min(self.batch, records)
        epochs = math.ceil(steps / per_epoch)
        table = np.full((epochs, per_epoch * width), -1)
        for epoch in table:
            epoch[:records] = np.arange(records) if self.in_order else generator.permutation(records)
        return table.reshape(epochs * per_epoch, width)[:steps]

    def uses(self, setting: Setting, steps: int | None, epochs: int) -> list[Use]:
        """How often a client uses a record, by the client's size."""
        if not self.monotone and not self._known(setting):
            return super().uses(setting, steps, epochs)
        ranges = _sizes(setting, self.batch) if setting.sizes else ((1, self.batch),)
        sizes = {size for least, most in ranges for size in self._decisive(least, most)}
        in_a_pass = {size: min(math.ceil(size / self.batch), self.steps(size, 1)) for size in sorted(sizes)}
        return [(size, 1 / some, steps or self.steps(size, epochs)) for size, some in in_a_pass.items()]

    def event(self, rate: float, noise: float, uses: list[Use]) -> Stated:
        """Charged as for the client that uses its records most often."""
        worst = [max(uses, key=lambda use: passes(use[1], use[2]))]
        return TwoLevel(rate, *_worst(worst), noise, local="shuffled"), worst

    def user_event(self, rate: float, noise: float, uses: list[Use], most: int) -> Stated | Unbounded:
        """At worst all of a user's records are in one batch, of every pass."""
        return self.event(rate, noise / most, uses)


@dataclass(frozen=True)
class RecordsInOrder(ShuffledRecords):
    """The records in their given order, cut into batches: a known order is no worse than an unknown one."""

    sampling: str = "fixed-order"
    in_order: ClassVar[bool] = True


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


def _few(uses: list[Use], largest: int) -> list[Use]:
    """At most some 24 uses: those of the smallest clients, which cost most, unchanged, larger ones a factor apart."""
    few, rest = uses[:FINE], uses[FINE:]
    if len(rest) <= FINE:
        return uses
    factor = (largest / rest[0][0]) ** (1 / FINE)
    for use in rest:
        if len(few) > FINE and use[0] < few[-1][0] * factor:
            few[-1] = _worse(few[-1], use)
        else:
            few.append(use)
    return few


def _worse(one: Use, other: Use) -> Use:
    """The greater share and the more steps of two, from the smallest client on."""
    return one[0], max(one[1], other[1]), max(one[2], other[2])
