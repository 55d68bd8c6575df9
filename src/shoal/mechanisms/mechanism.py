"""The interface of a mechanism: the base class of each boundary, and the round that it is asked about.

Training, accounting, audits, attacks and a federation use this interface alone; none of them knows a mechanism's
class. To write your own, derive a frozen dataclass from the base class of its boundary and implement what its
docstring names; everything else has a default. Its fields are keys of the configuration (`per_update.clip_norm`).
One that overrides what another does (`apply`, `add`, ...) must also say anew what that proves (`statements`).

    boundary        base class          ready to derive from
    clients         sampling.Clients
    records         sampling.Records
    per_record      GradientClip        record_clipping.FactorClip: clips that multiply each layer by a factor
    per_step        StepMechanism       gaussian.StepNoise
    per_update      UpdateMechanism     update_clipping.Clipping: clips by a public bound
    per_round       RoundNoise          gaussian.Gaussian
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from torch import Tensor

from shoal.accounting.events import Event, Gaussian, TwoLevel, Unbounded, Use
from shoal.accounting.theorems import Adjacency, Observer, Unit
from shoal.errors import ConfigError
from shoal.mechanisms.participation import Participation
from shoal.mechanisms.sampling import Clients, Records, participation
from shoal.mechanisms.sanitiser import Layers as Layers
from shoal.mechanisms.sanitiser import LocalSteps, Sanitiser
from shoal.mechanisms.sanitiser import State as State
from shoal.mechanisms.schedules import LEAST, MOST, Schedule, is_schedule, parse
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.statements import Stating
from shoal.mechanisms.step_test import StepTest
from shoal.random.secure_streams import FINE, STEPS, charged, grid

Draw = Callable[[int], np.random.Generator]
"""The random numbers of the client in each row, for this round."""
Bound = float | Tensor
"""A clip's bound as a number, or as a tensor on a device."""

ADJACENCIES: dict[Unit, Adjacency] = {"client": "zero-out", "record": "replace-one", "user": "zero-out"}
"""A client or user adds 0 to the sum, and to the count, that gets the noise; the noise stays, and public numbers
still count it and its records. A record is replaced by another one."""
UNCLIPPED = "updates are not clipped: one client can move the sum by any amount"
NO_NOISE = Unbounded("the noise is 0")
RAW = Unbounded("each update reaches the server before any noise is added")
COUNTED = Unbounded("it counts what is within its clip, and the noise does not cover that")
LESS_NOISE = Unbounded("its clip has less noise added to the sum than is charged (update_noise)")


class Mechanism(Stating):
    """The base of the mechanisms of all boundaries."""

    section: ClassVar[str]
    """The boundary, as the configuration names it."""

    def noise_schedule(self) -> Schedule | None:
        """The noise that its event counts, in units of the sensitivity; None where it adds none."""
        return None

    def with_noise(self, noise: Schedule) -> Self:
        """The same with other noise; of mechanisms that have a `noise_schedule`."""
        return replace(self, noise_multiplier=noise.written())  # type: ignore[type-var]

    def schedules(self) -> tuple[Schedule, ...]:
        """All that may change from round to round: its noise, and its fields that are written as schedules."""
        noise = self.noise_schedule()
        values = [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]
        written = tuple(parse(value) for value in values if is_schedule(value))
        return written if noise is None else (noise, *written)

    def scales(self) -> dict[str, str | float]:
        """The settings, by key, that a site's policy on clips bounds."""
        return {f"{self.section}.clip_norm": self.clip_norm} if hasattr(self, "clip_norm") else {}

    def recounted(self, change: Callable[[float], float]) -> Self:
        """The same with other noise on its count, if it counts."""
        return self

    def refuse_unfit(self, t: int, total: int) -> None:
        """Raise a ConfigError where its settings cannot be used in round t of `total`."""

    def limits(self, rounds: int) -> str:
        """The noise, where it adds some."""
        noise = self.noise_schedule()
        return "" if noise is None else f"noise of {_range(noise.values(rounds))} x the sensitivity"


class GradientClip(Mechanism, ABC):
    """Boundary `per_record`: what happens to one record's gradient inside its client.

    To write one that multiplies each layer of a gradient by a factor, derive from `record_clipping.FactorClip` and
    write `bound` (what noise is scaled to: by how much, at most, one record moves a batch's sum) and `factors`. Any
    other writes `sanitiser`, `least`, `sensitivity_at_start`, `unclipped` and `replay`, and sets `unproven` to None.
    """

    section: ClassVar[str] = "per_record"
    states: ClassVar[dict[str, tuple[str, ...]]] = {
        "sanitiser": ("unproven",),
        "sensitivity": ("unproven",),
        "clipped_sum": ("unproven",),
        "factors": ("excess",),
        "count": ("count_scale",),
    }
    unproven: ClassVar[str | None] = "it is not known how far one record can move a step"
    """Why nothing is proven by noise on what it clips; None where its bound holds and does not depend on the data."""
    counts: ClassVar[bool] = False
    """Does each client report, with noise, which share of its gradients is within the bound?"""

    @abstractmethod
    def sanitiser(self, steps: LocalSteps) -> Sanitiser:
        """The sanitiser that clips the gradients of these steps, and adds their noise."""

    def public_bound(self, state: State, t: int, total: int) -> float | None:
        """The bound of round t, the same for all records; None where there is no such number."""
        return None

    @abstractmethod
    def least(self, state: State, t: int, total: int, size: int) -> float:
        """The bound of round t, or the smallest that it may be, for `size` parameters."""

    def excess(self, layers: int) -> float:
        """How far one record can move the sum, in units of what the noise is scaled to."""
        return 1.0

    @abstractmethod
    def sensitivity_at_start(self, size: int, layers: int) -> float:
        """How far one record moves a batch's sum in the first step of a run, at most."""

    def update_noise(self, noise: float, batch: float) -> float:
        """The noise on gradients that, with the noise on counts, costs as much as `noise` alone."""
        return noise

    def count_scale(self, batch: float) -> float:
        """The noise on the count of a batch."""
        return 0.0

    def count_rounding(self, batch: float) -> float:
        """By which share of 1/2 rounding lets one record move a count further (secure mode): a step of its grid."""
        return 2.002 * self.count_scale(batch) / STEPS

    def adapt(self, state: State, share: float) -> None:
        """Set the next round's bound, from the noisy share of gradients within this one, if it `counts`."""

    def most_share(self, widest: float) -> float:
        """How far from 0 an honest client's noisy share, less 1/2, can be.

        Args:
            widest: The most records of a batch, in units of the expected batch.
        """
        return 0.0

    def limits(self, rounds: int) -> str:
        """By how much one record moves the sum of a batch."""
        bounds = [self.public_bound({}, t, rounds) for t in range(rounds)]
        return _limited("one record moves the sum of a batch", bounds, self.unproven, self.counts)

    @abstractmethod
    def unclipped(self) -> Self:
        """The same mechanism without its clip, which an audit must flag."""

    def layers_forgotten(self) -> tuple[GradientClip, GradientClip] | None:
        """What is charged, and what is run, where M layers are clipped but one is counted; None if impossible."""
        return None

    def following_data(self) -> GradientClip | None:
        """The same with noise that depends on the data, which no charge counts; None if impossible."""
        return None

    def presumed(self) -> GradientClip | None:
        """For one that proves nothing: the clip by a public bound that its paper's claim presumes."""
        return None

    @abstractmethod
    def replay(self, vectors: Tensor, layers: Layers, t: int, total: int) -> Tensor:
        """Gradients [N, P] as the first step clips them, differentiable: what an attacker can compute."""


class StepMechanism(Mechanism, ABC):
    """Boundary `per_step`: noise in every local step. Implement `noise_schedule`, `multiplier` and `event`."""

    section: ClassVar[str] = "per_step"
    states: ClassVar[dict[str, tuple[str, ...]]] = {"test": ("event",), "multiplier": ("noise_schedule",)}
    resets: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(("event", "multiplier"), ("alike",))
    alike: ClassVar[bool] = False
    """Do rounds with equal schedules cost the same, so that a site may charge many as the first?"""

    @abstractmethod
    def noise_schedule(self) -> Schedule:
        """The noise that its event counts, in units of the sensitivity."""

    @abstractmethod
    def multiplier(self, t: int, total: int, batch: float) -> float:
        """The noise on a batch's sum in round t, in units of the sensitivity; `batch`: its public, expected size."""

    @abstractmethod
    def event(self, round: Round, unit: Unit, observer: Observer) -> Event:
        """What the local steps of a round cost one unit, as one observer sees them."""

    @property
    def test(self) -> StepTest | None:
        """The test that a step must pass to be kept; None where all are."""
        return None

    def audited(self) -> Self:
        """The same as an audit runs it: every step is kept."""
        return self

    def until_kept(self, batch: int) -> Self | None:
        """For one whose paper charges only the steps that are kept: the same where few are, and one ends the round.

        Tests are on batches of this size, expected. None where there is no such claim.
        """
        return None

    def assumes(self) -> tuple[str, ...]:
        """Who draws the noise."""
        return ("each client draws the noise of its local steps itself, of empty batches too, and tells nobody",)


class UpdateMechanism(Mechanism, ABC):
    """Boundary `per_update`: what happens to a whole update before it leaves its client.

    To write a clip, derive from `update_clipping.Clipping` and implement `bound` (the largest norm of a clipped
    update: the sensitivity) and `clipped`, which gets the layers. A mechanism that bounds nothing derives from this
    class, says why in `unproven` and implements `apply`.
    """

    section: ClassVar[str] = "per_update"
    states: ClassVar[dict[str, tuple[str, ...]]] = {
        "apply": ("unproven", "event"),
        "needs_cohort_norms": ("unproven",),
        "sums_gradients": ("unproven",),
        "multiplier": ("noise_schedule",),
    }
    resets: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(("event", "multiplier"), ("alike",))
    alike: ClassVar[bool] = False
    """Do rounds with equal schedules cost the same, so that a site may charge many as the first?"""
    needs_cohort_norms: ClassVar[bool] = False
    """Does the bound depend on the whole cohort's norms?"""
    unproven: ClassVar[str | None] = UNCLIPPED
    """Why nothing is proven by noise on updates; None where its bound holds and does not depend on the data."""
    counts: ClassVar[bool] = False
    """Does each client report whether its norm is within the bound?"""
    draws_noise: ClassVar[bool] = False
    """Does it draw random numbers, which must never be drawn twice?"""
    sums_gradients: ClassVar[bool] = False
    """Is the update the sum of one step's clipped gradients, whose records the noise protects?"""

    def bound(self, state: State, t: int, total: int, norms: Tensor | None) -> float:
        """The largest norm of an update of round t as it leaves; `norms`: the cohort's, where it needs them."""
        return math.inf

    def public_bound(self, t: int, total: int) -> float | None:
        """The bound of round t, where it is known before the first round; None where it depends on the data."""
        return None if self.needs_cohort_norms else self.bound({}, t, total, None)

    @abstractmethod
    def apply(
        self, updates: Tensor, norms: Tensor, bound: float, t: int, total: int, draw: Draw, layers: Layers
    ) -> Tensor:
        """The updates [k, P] of a chunk of clients as they enter the sum; may overwrite them.

        Args:
            updates: [k, P], finite.
            norms: Their norms, [k].
            bound: The bound of this round.
            t: The round.
            total: The planned number of rounds.
            draw: Gives the random generator of the client in a row.
            layers: The layers of the model.
        """

    def event(self, round: Round, unit: Unit, observer: Observer) -> Event:
        """What a round costs one unit, by noise on updates or on their sum: by default what `per_round` says."""
        return RAW if round.per_round is None else round.per_round.event(round, unit, observer)

    def draws(self, round: Round) -> int:
        """How many noise vectors the event of a round counts."""
        return 1 if round.per_round is None else round.per_round.draws(round)

    def multiplier(self, t: int, total: int) -> float:
        """The noise on each update in round t, in units of the bound."""
        return 0.0

    def update_noise(self, noise: float, cohort: float) -> float:
        """The noise on the sum that, with the noise on counts, costs as much as `noise` alone."""
        return noise

    def count_scale(self, cohort: float) -> float:
        """The noise on the count of a cohort."""
        return 0.0

    def count_rounding(self, cohort: float) -> float:
        """By which share of 1/2 rounding lets one client move a count further (secure mode): a step of its grid."""
        return 2.002 * self.count_scale(cohort) / STEPS

    def adapt(self, state: State, share: float) -> None:
        """Set the next round's bound, from the noisy share of clients within this one, if it `counts`."""

    @property
    def leaves_raw(self) -> bool:
        """Is it applied by the server, which then sees each raw update?"""
        return self.needs_cohort_norms

    def step(self, bound: float) -> float:
        """The step to multiples of which an update is rounded in secure mode, before noise on the sum."""
        return grid(bound)

    def limits(self, rounds: int) -> str:
        """By how much one client moves the sum of a round."""
        bounds = [self.public_bound(t, rounds) for t in range(rounds)]
        return _limited("one client moves the sum of a round", bounds, self.unproven, self.counts)

    def longest(self, bound: float, t: int, total: int, parameters: int) -> float:
        """The largest norm that an honest update of `parameters` parameters can have as it leaves."""
        return math.inf

    def for_cohort(self, before: float, cohort: float) -> Self:
        """The same with as much noise on the sum of `cohort` clients as on that of `before` clients."""
        return self

    def audited(self) -> Self:
        """The same as an audit runs it: an adaptive bound starts at 1."""
        return self

    def unclipped(self) -> Self | None:
        """The same mechanism without its clip, which an audit must flag; None where there is no clip."""
        return None

    def presumed(self) -> UpdateMechanism | None:
        """For one that proves nothing: the clip by a public bound that its paper's claim presumes."""
        return None

    def replay(self, shown: Tensor, seen: Tensor, bound: float, unit: float, layers: Layers) -> Tensor:
        """What an attacker makes of its dummies, from what is public of the mechanism.

        Args:
            shown: The updates of the attacker's dummies, [V, P].
            seen: The updates of its victims, as observed.
            bound: The bound of this round.
            unit: The observed norm of an update of norm 1.
            layers: The layers of the model.
        """
        return shown


class RoundNoise(Mechanism, ABC):
    """Boundary `per_round`: noise on the sum of updates. Implement `noise_schedule`, `multiplier`, `add`, `event`."""

    section: ClassVar[str] = "per_round"
    states: ClassVar[dict[str, tuple[str, ...]]] = {
        "add": ("event",),
        "share": ("event",),
        "fitted": ("event",),
        "for_records": ("event",),
        "coefficients": ("event",),
        "multiplier": ("noise_schedule",),
    }
    resets: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(("event", "multiplier"), ("alike",))
    alike: ClassVar[bool] = False
    """Do rounds with equal schedules cost the same, so that a site may charge many as the first?"""
    at: Literal["server", "shared"]
    """Who adds it: the server, or the clients, each a share, under secure aggregation."""
    correlated: ClassVar[bool] = False
    """Is the noise of different rounds correlated?"""
    for_records: ClassVar[bool] = False
    """Is it in units of what one record adds to the sum, and not one client?"""

    @abstractmethod
    def noise_schedule(self) -> Schedule:
        """The noise that its event counts, in units of the bound."""

    @abstractmethod
    def multiplier(self, t: int, total: int) -> float:
        """The noise of round t, in units of the bound."""

    @property
    def unsettled(self) -> bool:
        """Is some of it still to be computed, so that another platform may find other digits?"""
        return False

    def settled(self, participation: Participation) -> Self:
        """The same with all that it computes at the start written out: a site charges what its coordinator adds."""
        return self

    def costliest(self, participation: Participation) -> int:
        """The round in which taking part once costs a client most, where that depends on later rounds."""
        return 0

    def refuse_growing(self, rounds: int) -> None:
        """Raise a ConfigError where, in this many rounds, old noise would grow until new noise is lost beside it."""

    def fitted(self, participation: Participation) -> Self:
        """The same for clients that take part so: correlated noise may be optimised for that."""
        return self

    @abstractmethod
    def add(self, total: Tensor, z: float, bound: float, state: State, generator: np.random.Generator) -> Tensor:
        """The sum of clipped updates with this round's noise of z x bound."""

    @abstractmethod
    def event(self, round: Round, unit: Unit, observer: Observer) -> Event:
        """What a round costs one unit, as one observer sees it."""

    def draws(self, round: Round) -> int:
        """How many noise vectors the event of a round counts; one client's may be of all rounds to come."""
        if round.history is not None:
            return max(1, round.setting.rounds - round.t)
        return round.many if self.at == "shared" else 1

    def distance(self, round: Round) -> float:
        """The distance of a round's noise from what is charged, besides that of each draw."""
        return 0.0

    def share(self, bound: float, cohort: int, t: int, total: int) -> float | None:
        """The standard deviation of each client's share, where clients add it in a simulation too."""
        return None

    def quorum(self, cohort: int) -> tuple[int, int] | None:
        """The fewest sites in a sum, and how many of them collude, where its shares are made for that."""
        return None

    def for_cohort(self, cohort: int) -> Self:
        """The same for an audit's cohort, all of whom answer."""
        return self

    def assumes(self) -> tuple[str, ...]:
        """Who draws the noise."""
        if self.at == "shared":
            return ("each client draws its share of the noise, and the server sees only sums (secure aggregation)",)
        return ("the server draws the noise: it is trusted to add all of it, and to tell nobody",)

    def counted(self, noise: float, count_rounding: float) -> float:
        """The noise that counts in secure mode, where it is discrete, beside a rounded count."""
        return counted_on_grid(noise, count_rounding)

    def refuse_beside(self, name: str, clients: Clients, per_update: UpdateMechanism) -> None:
        """Raise a ConfigError where it cannot be combined with these, or gains nothing; `name`: the algorithm."""

    def refuse_cohort(self, cohort: int) -> None:
        """Raise a ConfigError where a cohort of this size has no sound sum."""


@dataclass(frozen=True)
class Round:
    """A round of one method, as its mechanisms are asked about it.

    `again`: it was charged before, and is run again. `steps`, `epochs`: how a client trains; `remembers`: clients
    keep state from the rounds in which they took part. `by_size`: updates are weighted by records. `history`: for one
    client, which takes part in this round, the rounds in which it has; None: whoever it costs most.
    """

    setting: Setting
    t: int
    again: bool
    clients: Clients
    records: Records
    steps: int | None
    epochs: int
    remembers: bool
    by_size: bool
    per_record: GradientClip | None
    per_step: StepMechanism | None
    per_update: UpdateMechanism | None
    per_round: RoundNoise | None
    history: tuple[int, ...] | None = None

    @property
    def when(self) -> tuple[int, int]:
        """The round, and the planned number of rounds."""
        return self.t, self.setting.rounds

    @property
    def cohort(self) -> float:
        """The public, expected number of clients."""
        return self.clients.expected(*self.when, self.setting.clients)

    @property
    def participation(self) -> Participation:
        """When a client may take part."""
        return participation(self.clients, self.setting.rounds, self.setting.clients)

    @property
    def many(self) -> int:
        """The cohort, rounded up."""
        return math.ceil(self.cohort)

    @property
    def rate(self) -> float:
        """The probability, at most, that a client takes part."""
        return self.clients.rate(*self.when, self.setting.clients)

    @property
    def uses(self) -> list[Use]:
        """How often a client uses a record, by its size."""
        return self.records.uses(self.setting, self.steps, self.epochs)

    def counted(self, noise: float) -> float:
        """The noise on updates that counts: all of it, but in secure mode what a discrete Gaussian on a grid leaves.

        Sites of a seeded federation draw their shares on a grid too. A count is rounded as a whole: a client moves it
        by 1/2, and rounding by up to a step more.
        """
        shared = self.setting.seeded and self.per_round is not None and self.per_round.at == "shared"
        if not (self.setting.secure or shared) or noise == 0:
            return noise
        clip = self.per_update
        count = clip.count_rounding(self.cohort) if clip is not None and clip.counts else 0.0
        return (counted_on_grid if self.per_round is None else self.per_round.counted)(noise, count)

    def on_sum(self, unit: Unit, noise: float) -> Event:
        """Noise on the sum of clipped updates, in units of the bound, the same amount whichever clients took part.

        Amplified by the sampling: released models depend on the data only through the sum.
        """
        noise = self.counted(noise)
        if noise == 0:
            return NO_NOISE
        if unit == "record" and self.setting.multiplicity > 1:
            # Its copies may change that many updates of one round, whichever clients were sampled.
            return Gaussian(noise / self.setting.multiplicity)
        return self.clients.amplified(Gaussian(noise), self.rate, self.remembers)

    def shown(self, unit: Unit, noise: float) -> Event:
        """Noise where participation is visible: sampling does not amplify.

        Only what a client holds is hidden, which moves the sum by up to 2 bounds. So a claim for a client is stronger
        than zero-out: its data may be replaced by any other.
        """
        noise = self.counted(noise)
        if noise == 0:
            return NO_NOISE
        if unit == "record" and self.setting.multiplicity > 1:
            return Gaussian(noise / self.setting.multiplicity)
        change = noise if ADJACENCIES[unit] == "replace-one" else noise / 2
        return TwoLevel(self.rate, 1.0, 1, change, local="none", participation="visible")


def undercharged(clip: GradientClip | UpdateMechanism, noise: float, units: float) -> bool:
    """Is less noise added than is charged, on what is clipped and on the count, where it counts?

    A unit moves the count by 1/2: update_noise^-2 + (2 count_scale)^-2 must be at most noise^-2.
    """
    if noise == 0:
        return False
    try:
        scale = clip.count_scale(units) if clip.counts else math.inf
        other = clip.update_noise(noise, units)
    except ConfigError:  # no round is run with such settings (Algorithm.refuse_unfit)
        return False
    return not (scale > 0 and other > 0 and other**-2 + (2 * scale) ** -2 <= noise**-2 * (1 + 1e-9))


def only_on_sum(clients: Clients) -> Unbounded:
    """Why nothing is proven beside clients that take part again only after some rounds."""
    return Unbounded(f"{clients.sampling} participation is accounted only where the noise is on the sum")


def counted_on_grid(noise: float, count_rounding: float) -> float:
    """The part of discrete noise that counts, on a grid of 2^12 steps or more to the clip or to the noise."""
    return charged(noise, min(noise, 1.0) * 2.0**FINE) / (1 + count_rounding)


def _limited(what: str, bounds: list[float | None], unproven: str | None, follows: bool) -> str:
    """`one client moves the sum of a round by at most 4`, or why there is no such bound."""
    public = [bound for bound in bounds if bound is not None and bound < math.inf]
    if unproven is not None or len(public) < len(bounds):
        return f"no bound is proven: {unproven}" if unproven else ""
    start = ", at first: it follows a noisy count" if follows else ""
    return f"{what} by at most {_range(public)}{start}" if public else ""


def _range(values: Sequence[float]) -> str:
    """`4`, or `2 to 4` where it changes over the rounds."""
    least, most = min(values), max(values)
    return f"{most:g}" if least == most else f"{least:g} to {most:g}"


def altered(value: Any, **methods: Any) -> Any:
    """A copy of a dataclass instance with other methods, and the same statements: what an audit must flag."""
    kept = vars(type(value)).get("__altered__", {})
    bases = type(value).__bases__ if kept else (type(value),)  # a copy's too, so that no statement is lost
    kind = type(type(value).__name__, bases, {"__altered__": kept | methods})
    for name, method in (kept | methods).items():
        setattr(kind, name, method)
    made: Any = object.__new__(kind)
    made.__dict__.update(value.__dict__)
    return made


def refuse_unheld_noise(key: str, noise: float, t: int, total: int) -> None:
    """Raise a ConfigError where float32 cannot represent so much, or so little, noise."""
    if noise and not LEAST <= noise <= MOST:
        raise ConfigError(
            f"{key} must be 0 or from {LEAST:g} to {MOST:g}, got {noise:g} in round {t + 1} of {total}: "
            f"float32 cannot represent such noise"
        )
