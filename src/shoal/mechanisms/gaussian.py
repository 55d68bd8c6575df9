"""Gaussian noise: its scale, where the numbers come from, and its privacy events.

The scale is always `noise_multiplier` x the sensitivity that the clip states (never a bare sigma), so that the noise
added and the noise accounted cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.accounting import events
from shoal.accounting.events import NOTHING, BySize, Event, OnClients, Repeat, TwoLevel, Unbounded
from shoal.accounting.theorems import Observer, Unit
from shoal.errors import ConfigError
from shoal.mechanisms.mechanism import (
    NO_NOISE,
    RAW,
    GradientClip,
    Round,
    RoundNoise,
    State,
    StepMechanism,
    only_on_sum,
)
from shoal.mechanisms.participation import Participation, block_price, costliest, price, price_of
from shoal.mechanisms.schedules import Schedule, parse
from shoal.random.normals import add_normals
from shoal.random.secure_streams import STEPS, SecureGenerator, charged, discrete_on_grid, grid, on_grid, rounded_sum
from shoal.random.streams import Keystream

HOW_MANY = Unbounded(
    "each update has its own noise, so the noise in the sum reveals the cohort size; clients.sampling=fixed-size "
    "would hide it"
)
UNCAPPED = Unbounded("a user may have any number of records: set records.max_per_user")
PRIVATE_OWNERSHIP = Unbounded(
    "records have several users, so one user decides which records of others are used; something is proven only if "
    "the users of each record are public (data.public_ownership=true)"
)
WHOSE = Unbounded(
    "with records.max_per_user the user of one record decides which others are used; something is proven for records "
    "only if the users are public (data.public_ownership=true)"
)
OVERFLOWED = Unbounded("the cost of its correlated noise is out of range: change per_round.numbers")
WITH_ITS_NOISE = Unbounded("each client adds its own noise, and a client that drops out takes its noise with it")


@dataclass(frozen=True)
class Gaussian(RoundNoise):
    """Boundary `per_round`: N(0, (noise_multiplier x sensitivity)^2) on the sum of the updates, once a round.

    Attributes:
        noise_multiplier: The noise, in units of the sensitivity; a number or a schedule over the rounds.
        at: Who adds it: the `server`, which must then be trusted, or the clients, each a share (`shared`), under
            secure aggregation, where the server sees only the sum. A simulation adds it to the sum either way.
    """

    noise_multiplier: str | float = 1.0
    at: Literal["server", "shared"] = field(default="server", kw_only=True)
    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if min(parse(self.noise_multiplier).values(100)) < 0:
            raise ConfigError(f"per_round.noise_multiplier must be >= 0, got {self.noise_multiplier}")

    def noise_schedule(self) -> Schedule:
        """The schedule of the noise multiplier."""
        return parse(self.noise_multiplier)

    def multiplier(self, t: int, total: int) -> float:
        """The noise multiplier of round t."""
        return multiplier("per_round.noise_multiplier", self.noise_multiplier, t, total)

    def add(self, total: Tensor, z: float, bound: float, state: State, generator: np.random.Generator) -> Tensor:
        """The sum with this round's noise of z x bound; it keeps no state."""
        return add_to_sum(total, z * bound, bound, generator)

    def event(self, round: Round, unit: Unit, observer: Observer) -> Event:
        """What a round costs one unit, as one observer sees it."""
        if self.at == "shared":
            return self._shared(round, unit)
        if observer == "server":
            return RAW
        if self.correlated or round.clients.separated:
            return self._separated(round, unit)
        return round.on_sum(unit, self.multiplier(*round.when))

    def _shared(self, round: Round, unit: Unit) -> Event:
        """Noise that clients add in shares, under secure aggregation: the server sees only the sum.

        A sum over fewer clients has less noise, and one over too few is discarded: participation is public.
        """
        if round.clients.separated:
            return only_on_sum(round.clients)
        return round.shown(unit, self.multiplier(*round.when))

    def _separated(self, round: Round, unit: Unit) -> Event:
        """Noise on the sum where it is public when clients may take part, and where noise may be correlated."""
        z = self.multiplier(*round.when)
        if z == 0:
            return NO_NOISE
        rounding = self.rounding(round.setting.parameters) if round.setting.secure else 0.0
        copies, plan = round.setting.multiplicity if unit == "record" else 1, round.participation
        # who may come in any round, if not too soon, is more likely to come in some round of a cycle than in one
        if round.clients.separated and plan.regular and round.rate < 1 and copies == 1 and not round.again:
            return self._once_a_cycle(round, rounding)
        with np.errstate(all="ignore"):  # numbers that a coordinator sent may overflow
            if round.history is None:
                cost = price(self, plan, round.t, round.again, rounding)
            else:
                cost = price_of(self, plan, round.t, round.history, rounding)
        cost *= (z / round.counted(z)) ** 2
        if not math.isfinite(cost):
            return OVERFLOWED
        return events.Gaussian(1 / math.sqrt(cost) / copies) if cost > 0 else NOTHING

    def _once_a_cycle(self, round: Round, rounding: float) -> Event:
        """Poisson sampling in groups that take turns, where no two rounds of a client meet in a weighted sum.

        Choquette-Choo et al. (2023): each cycle is one sampled Gaussian for every client. All of it is charged in the
        cycle's first round, for the group that it costs most.
        """
        plan = round.participation
        if len(self.coefficients(plan, plan.rounds)) > plan.separation:
            return Unbounded("with more bands than rounds in a cycle, sampling is not known to amplify")
        if round.t % plan.separation:
            return NOTHING
        cycle = range(round.t, min(round.t + 2 * plan.separation, max(plan.rounds, round.t + 1)))
        least = min(self.multiplier(t, plan.rounds) for t in cycle)
        if least == 0:
            return NO_NOISE
        with np.errstate(all="ignore"):
            cost = block_price(self, plan, round.t, rounding) * (least / round.counted(least)) ** 2
        if not math.isfinite(cost):
            return OVERFLOWED
        return round.clients.amplified(events.Gaussian(1 / math.sqrt(cost)), round.rate, round.remembers)

    def costliest(self, participation: Participation) -> int:
        """The round in which taking part once costs a client most, where that depends on later rounds."""
        with np.errstate(all="ignore"):
            return costliest(self, participation)

    def coefficients(self, participation: Participation, rounds: int) -> npt.NDArray[np.float64]:
        """1, c_1, c_2, ...: the weights of earlier rounds in what a round releases."""
        return np.ones(1)

    def rounding(self, parameters: int) -> float:
        """How many clips the rounding of other rounds' sums may move this one, for each unit of noise."""
        return 0.0


@dataclass(frozen=True)
class StepNoise(StepMechanism):
    """Boundary `per_step`: noise in every local step, on the sum of the batch's clipped gradients.

    Wei et al. (2023) give three scales for it, with sigma = `noise_multiplier`, S the sensitivity and B the
    batch: on the mean of the batch N(0, (sigma S)^2) (`algorithm1`), on each record and then averaged
    (`per-record`), or as DP-SGD does it, N(0, (sigma S)^2) on the sum (`dp-sgd`). The sum gets the same noise
    whatever the size of the batch that was drawn.

    Released models are assumed to reveal who took part: client sampling protects a record only where participation is
    hidden, and a client's other records usually reveal it. So the server and the client process see no more than
    that, and all three observers get the same event.

    Attributes:
        noise_multiplier: sigma, in units of the sensitivity; a number or a schedule over the rounds.
        placement: Which of the three scales.
    """

    noise_multiplier: str | float = 1.0
    placement: Literal["dp-sgd", "per-record", "algorithm1"] = "dp-sgd"
    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if min(parse(self.noise_multiplier).values(100)) < 0:
            raise ConfigError(f"per_step.noise_multiplier must be >= 0, got {self.noise_multiplier}")

    def noise_schedule(self) -> Schedule:
        """The schedule of the noise multiplier."""
        return parse(self.noise_multiplier)

    def multiplier(self, t: int, total: int, batch: float) -> float:
        """The noise multiplier of round t."""
        times = {"dp-sgd": 1.0, "per-record": math.sqrt(batch), "algorithm1": batch}[self.placement]
        return times * multiplier("per_step.noise_multiplier", self.noise_multiplier, t, total)

    def event(self, round: Round, unit: Unit, observer: Observer) -> Event:
        """What a round costs one unit, as one observer sees it."""
        clip = round.per_record
        if clip is None:
            return Unbounded("gradients are not clipped: one record can move a step by any amount")
        if clip.unproven is not None:
            return Unbounded(clip.unproven)
        z = self._counted(round, clip) / clip.excess(round.setting.layers)
        if z == 0:
            return NO_NOISE
        if round.clients.separated:
            return only_on_sum(round.clients)
        copies = round.setting.holders(unit)
        rate = round.clients.rate(*round.when, round.setting.clients, copies)
        if unit != "client":
            return self._of_records(round, unit, rate, z)
        return self._of_a_client(round, rate, z, observer)

    def _counted(self, round: Round, clip: GradientClip) -> float:
        """The noise that counts: all of it, but in secure mode what rounding a sum leaves.

        One record changes the rounding of 128 additions in float32, or of the result alone
        (update_clipping.summed_products): 129 or 1 times 2^-24 of the sum, with the record as without it. Then the
        sum is rounded onto the grid of its noise. Where records are counted too, the noise on gradients is larger
        than z, and so are the steps of its grid.
        """
        setting, batch = round.setting, round.records.batch
        z = self.multiplier(*round.when, batch)
        if not setting.secure or z == 0:
            return z
        z /= 1 + 2.0**-9 + max(batch, round.records.most(setting.sizes)) * 2.0**-23
        drawn = clip.update_noise(z, batch)
        share = charged(drawn, STEPS, max(setting.parameters, 1)) / drawn
        return z * min(share, 1 / (1 + clip.count_rounding(batch)))

    def _of_records(self, round: Round, unit: Unit, rate: float, z: float) -> Event:
        """One record is replaced by another, or all of a user's are left out, on each of the clients that hold any.

        Several clients are charged as if each took part independently.
        """
        setting, found, most = round.setting, round.uses, round.records.max_per_user
        if round.records.unproven is not None:
            return Unbounded(round.records.unproven)
        if not found:
            return Unbounded("clients' sizes are not known, so neither is how often a record is used")
        if unit == "record":
            if most is not None and setting.user_columns and not setting.public_ownership:
                return WHOSE
            worst, found = round.records.event(rate, z, found)
        else:
            if most is None:
                return UNCAPPED
            if setting.user_columns > 1 and not setting.public_ownership:
                return PRIVATE_OWNERSHIP
            stated = round.records.user_event(rate, z, found, most)
            if isinstance(stated, Unbounded):
                return stated
            worst, found = stated
        if setting.holders(unit) > 1:
            return OnClients(setting.holders(unit), worst)
        return worst if len(found) == 1 else BySize(worst, tuple(found))

    def _of_a_client(self, round: Round, rate: float, z: float, observer: Observer) -> Event:
        """All records of a client change: every record of a batch may pull one way, then the other way.

        Such noise is scaled for one record. The figure is a valid bound, and far too large to protect anybody.
        """
        records, sizes = round.records, round.setting.sizes
        if not sizes and (records.varies or round.steps is None):
            return Unbounded("clients' sizes are not known, nor how far all records of a client move a step")
        most = records.most(sizes)
        steps = {round.steps or records.steps(size, round.epochs) for size in sizes or (1,)}
        if len(steps) > 1 or (round.by_size and len(sizes) != 1):
            return Unbounded("clients of different sizes add different amounts of noise, which reveal their sizes")
        count = max(1, *steps)  # none where no client has records
        if observer != "release":
            return TwoLevel(rate, 1.0, count, z / most / 2, local="none")
        if round.clients.shows(rate):
            return HOW_MANY
        if not round.setting.all_answer:
            return WITH_ITS_NOISE
        whole = Repeat(events.Gaussian(z / most), count)
        return round.clients.amplified(whole, rate, round.remembers)


def multiplier(key: str, noise: str | float, t: int, total: int) -> float:
    """The noise of round t in units of the sensitivity; a schedule may not fall below 0."""
    value = parse(noise).value(t, total)
    if value < 0:
        raise ConfigError(f"{key} must be >= 0, got {noise}, which is {value:g} in round {t + 1} of {total}")
    return value


def add_to_sum(total: Tensor, scale: float, clip: float, generator: np.random.Generator) -> Tensor:
    """The sum of clipped updates plus N(0, scale^2); in secure mode both are on the grid of the clip."""
    if isinstance(generator, SecureGenerator) and scale > 0:
        return on_grid(total, scale, grid(clip), generator)
    return total.add_(gaussian_like(total, scale, generator))


def add_to_number(value: float, scale: float, generator: np.random.Generator) -> float:
    """A number plus N(0, scale^2); in secure mode it is rounded first, to a grid of 2^-20 of the noise."""
    if isinstance(generator, SecureGenerator) and scale > 0:
        return float(rounded_sum(torch.tensor([value], dtype=torch.float64), scale, generator))
    return value + scale * float(generator.standard_normal())


def add_to_updates(updates: Tensor, scale: float, generators: Sequence[np.random.Generator]) -> Tensor:
    """Updates [k, P] as they leave their clients, each plus N(0, scale^2) of its own generator.

    In secure mode it is a discrete Gaussian on the update's grid. On CUDA all rows get it in one pass.
    """
    if updates.is_cuda and generators and not isinstance(generators[0], SecureGenerator):
        from shoal.random.philox import Philox

        keys = torch.tensor([int(generator.integers(2**63)) for generator in generators], device=updates.device)
        Philox(keys).add(updates, updates.new_full((len(updates),), scale))
        return updates
    for row, generator in enumerate(generators):
        if isinstance(generator, SecureGenerator):
            updates[row] = discrete_on_grid(updates[row], scale, generator)
        else:
            updates[row] += gaussian_like(updates[row], scale, generator)
    return updates


def gaussian_like(vector: Tensor, scale: float, generator: np.random.Generator) -> Tensor:
    """A vector of independent N(0, scale^2), of the shape and on the device of another."""
    numbers = torch.zeros(1, vector.numel(), device=vector.device)
    if vector.is_cuda:
        from shoal.random.philox import Philox

        key = torch.tensor([int(generator.integers(2**63))], device=vector.device)
        Philox(key).add(numbers, torch.tensor([scale], device=vector.device))
        return numbers.view(vector.shape)
    add_normals(numbers, torch.tensor([scale]), [Keystream(generator.bytes(16))])
    return numbers.view(vector.shape)
