"""What is audited: a method at a small setting of the audit's own, and the claim that holds there.

At the noise and the sampling that a user runs, a claim of 8 is beyond what any audit could measure. So the same
record is played on a few clients for one round (or a few), with its noise scaled so that the claim is about 1; what
was changed is said. Where a method proves something of a unit, that is the claim. Where it does not but its paper
claims something, the claim is what the noise would be worth if the paper's sensitivity were true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shoal.accounting.calibration import Budget
from shoal.accounting.calibration import noise as least_noise
from shoal.accounting.claims import Observer, Unit
from shoal.accounting.events import Event, Gaussian, Sampled, Unbounded
from shoal.accounting.theorems import Adjacency
from shoal.algorithms.base import Algorithm, Local, Server
from shoal.algorithms.charges import SOMEWHERE, calibrated, somewhere, whole_run
from shoal.algorithms.charges import event as first_event
from shoal.algorithms.published_epsilon import thesis_both
from shoal.audit.bounds import Tradeoff, renyi_tradeoff, tradeoff
from shoal.mechanisms.mechanism import ADJACENCIES
from shoal.mechanisms.sampling import Clients
from shoal.mechanisms.schedules import NO_NOISE, parse
from shoal.mechanisms.setting import Setting

Where = Literal["steps", "sum", "drift"]
Kind = Literal["proven", "published", "none"]
BATCH = 4
MORE = 4  # times as many records as a user may have, of which it has so many
DELTA = 1e-5


@dataclass(frozen=True)
class Claim:
    """The epsilon that is claimed for the audit's setting, and the event from which it follows."""

    epsilon: float
    delta: float
    event: Event
    adjacency: Adjacency
    renyi: bool = False
    """Is it a claim about the event's Renyi divergences, which bound less than the event does?"""

    @property
    def tradeoff(self) -> Tradeoff:
        """The curve that no test may pass if the claim is true."""
        return (renyi_tradeoff if self.renyi else tradeoff)(self.event, self.adjacency)


@dataclass(frozen=True)
class Case:
    """One claim of one method, at the audit's setting."""

    record: Algorithm
    unit: Unit
    kind: Kind
    where: Where
    setting: Setting
    claim: Claim | None
    note: str
    true: float | None = None
    colluding: int = 0
    """Clients, from the first on, whose shares of the noise the observer knows and subtracts."""

    @property
    def observer(self) -> Observer:
        return _observer(self.record, self.where)


def _observer(record: Algorithm, where: Where) -> Observer:
    return "server" if where == "steps" or record.sums_gradients else "release"


def cases(record: Algorithm, level: Unit | None = None, epsilon: float = 1.0, rounds: int = 1) -> Iterator[Case]:
    """What there is to audit of a method: for each unit a claim, or one case without any."""
    found = False
    units: tuple[Unit, ...] = ("client", "record") if record.records.max_per_user is None else get_args(Unit)
    for unit in units:
        if level in (None, unit):
            case = _proven(record, unit, epsilon, rounds) or _published(record, unit, epsilon)
            for each in (case, _kept(record, unit, epsilon)):
                if each is not None:
                    found = True
                    yield each
    if not found:
        unit = level or ("record" if record.per_step is not None else "client")
        yield _unclaimed(record, unit)


def _proven(record: Algorithm, unit: Unit, epsilon: float, rounds: int) -> Case | None:
    where: Where = "steps" if unit != "client" and record.per_step is not None else "sum"
    observer = _observer(record, where)
    scaled, setting = _small(record, unit, where, rounds)
    generic = replace(SOMEWHERE, user_columns=1) if unit == "user" else SOMEWHERE
    for method, place in ((somewhere(record), generic), (scaled, setting)):  # a small one leaves much out
        if isinstance(first_event(method, place, 0, unit, observer), Unbounded):
            return None
    if where == "sum" and record.per_step is not None and record.per_round is None:
        return None  # noise that was made for records bounds a client in name only
    budget = Budget(epsilon, DELTA, adjacency=ADJACENCIES[unit])
    scaled = with_counts(record, calibrated(scaled, setting, budget, unit, observer), setting)
    event = whole_run(scaled, setting, rounds, unit, observer)
    metrics = budget.cost(event).epsilon
    assert metrics is not None
    claim = Claim(metrics, DELTA, event, ADJACENCIES[unit])
    _, colluding = (scaled.per_round.quorum(setting.clients) if scaled.per_round is not None else None) or (0, 0)
    note = _note(scaled, setting, where, epsilon) + (f"; {colluding} of them with the server" if colluding else "")
    return Case(scaled, unit, "proven", where, setting, claim, note, colluding=colluding)


def _published(record: Algorithm, unit: Unit, epsilon: float) -> Case | None:
    """What the paper's noise would be worth if its clip were public, or its theorem true."""
    clip = record.per_record.presumed() if unit == "record" and record.per_record is not None else None
    if clip is not None:
        return _presumed(record, replace(record, per_record=clip), unit, "steps", epsilon)
    bound = record.per_update.presumed() if unit == "client" and record.per_update is not None else None
    if bound is not None:
        return _presumed(record, replace(record, per_update=bound), unit, "sum", epsilon)
    if unit == "client" and record.published is thesis_both:
        return _theorem(record, epsilon)
    return None


def _presumed(record: Algorithm, public: Algorithm, unit: Unit, where: Where, epsilon: float) -> Case:
    public = replace(public, clients=Clients("all"))
    scaled, setting = _small(public, unit, where, 1)
    budget = Budget(epsilon, DELTA)
    observer: Observer = "server" if where == "steps" else "release"
    scaled = calibrated(scaled, setting, budget, unit, observer)
    event = whole_run(scaled, setting, 1, unit, observer)
    metrics = budget.cost(event).epsilon
    assert metrics is not None
    note = _note(scaled, setting, where, epsilon)
    played = replace(scaled, per_record=record.per_record, per_update=record.per_update)
    return Case(played, unit, "published", where, setting, Claim(metrics, DELTA, event, "add-or-remove"), note)


DRIFT_CLIENTS, DRIFT_COHORT, DRIFT_STEPS, DRIFT_BATCH = 8, 4, 2, 50


def _theorem(record: Algorithm, epsilon: float) -> Case:
    """Thesis, Theorem 1: a client's k noisy steps are one Gaussian of sigma/sqrt k. Half of the clients come."""
    rate, steps = DRIFT_COHORT / DRIFT_CLIENTS, DRIFT_STEPS
    found = least_noise(
        lambda sigma: Sampled("poisson", rate, Gaussian(sigma / math.sqrt(steps))), Budget(epsilon, DELTA)
    )
    assert record.per_step is not None
    scaled = replace(
        record,
        clients=Clients("fixed-size", DRIFT_COHORT),
        records=record.records.of_batch(DRIFT_BATCH),
        local=Local(epochs=1, lr=1e-4),  # so small that the second step has the first one's gradients
        per_step=record.per_step.with_noise(parse(found.value)),
        server=Server(),
    )
    setting = Setting(DRIFT_CLIENTS, 1, sizes=(steps * DRIFT_BATCH,))
    claimed = Sampled("poisson", rate, Gaussian(found.value / math.sqrt(steps)))
    metrics = found.answer.epsilon
    assert metrics is not None
    true = Budget(epsilon, DELTA).cost(whole_run(scaled, setting, 1, "client", "release")).epsilon
    note = (
        f"{DRIFT_COHORT} of {DRIFT_CLIENTS} clients with {steps} steps of {DRIFT_BATCH} records each, noise "
        f"{found.value:.3g} a step so that the paper's recipe gives epsilon {epsilon:g}"
    )
    return Case(
        scaled, "client", "published", "drift", setting, Claim(metrics, DELTA, claimed, "add-or-remove"), note, true
    )


TRIED = 150


def _kept(record: Algorithm, unit: Unit, epsilon: float) -> Case | None:
    """Steps are tried until one is kept, which is all that the paper charges; with any threshold, as it says."""
    if unit != "record" or record.per_step is None or record.per_step.until_kept(BATCH) is None:
        return None
    small, setting = _small(record, unit, "steps", 1)
    budget = Budget(epsilon, DELTA, "rdp")
    scaled = calibrated(replace(small, per_step=record.per_step.until_kept(BATCH)), setting, budget, unit, "server")
    event = whole_run(scaled, setting, 1, unit, "server")
    metrics = budget.cost(event).epsilon
    assert metrics is not None
    assert scaled.per_step is not None
    played = replace(scaled, local=Local(steps=TRIED, lr=1.0), per_step=scaled.per_step.until_kept(BATCH))
    note = (
        f"one step on {BATCH} records, tried until it is kept, {TRIED} times at most, noise {noise_of(scaled):.3g} "
        f"so that the paper's recipe gives epsilon {epsilon:g}, and a threshold that few steps pass"
    )
    claim = Claim(metrics, DELTA, event, "add-or-remove", renyi=True)
    return Case(played, unit, "published", "steps", setting, claim, note)


def _unclaimed(record: Algorithm, unit: Unit) -> Case:
    everybody = replace(record, clients=Clients("all"))
    where: Where = "steps" if record.per_step is not None and unit == "record" else "sum"
    scaled, setting = _small(everybody, unit, where, 1)
    return Case(scaled, unit, "none", where, setting, None, f"{setting.clients} clients for a round, nothing scaled")


def _small(record: Algorithm, unit: Unit, where: Where, rounds: int) -> tuple[Algorithm, Setting]:
    """The method with few clients and one local step; what the server does after the noise is left out."""
    clients, cohort = record.clients.audited
    small = replace(record, local=Local(steps=1, lr=1.0), server=Server())
    if small.per_step is not None:
        small = replace(small, per_step=small.per_step.audited())
    most = record.records.max_per_user
    if unit == "user" and most is not None:  # a batch would hold all that the user has, if nothing capped them
        small = replace(small, clients=Clients("all"), records=record.records.of_batch(MORE * most + BATCH - 1))
        return small, Setting(1, rounds, sizes=(most + BATCH - 1,), user_columns=1)
    if where == "steps":
        small = replace(small, clients=Clients("all"), records=record.records.of_batch(BATCH))
        return small, Setting(1, rounds, sizes=(BATCH,))
    small = replace(small, clients=record.clients.of_cohort(cohort), records=record.records.of_batch(1))
    if small.per_step is not None:
        small = replace(small, per_step=small.per_step.with_noise(NO_NOISE))
    if small.per_update is not None:
        small = replace(small, per_update=small.per_update.audited())
    if small.per_round is not None:
        small = replace(small, per_round=small.per_round.for_cohort(math.ceil(cohort)))
    return small, Setting(clients, rounds, sizes=(1,))


def with_counts(record: Algorithm, scaled: Algorithm, setting: Setting) -> Algorithm:
    """Counts get the same share of the noise as in the method's own setting."""
    if scaled.per_update and scaled.per_update.counts and record.per_round and scaled.per_round:
        cohort, here = parse(record.clients.cohort).value(0, 1), scaled.clients.expected(0, *_size(setting))
        noise, less = record.per_round.multiplier(0, 1), scaled.per_round.multiplier(0, setting.rounds)
        counted = scaled.per_update.recounted(lambda count: count * cohort / noise * less / here)
        return replace(scaled, per_update=counted)
    if scaled.per_record and scaled.per_record.counts and record.per_step and scaled.per_step:
        batch, here = record.records.batch, scaled.records.batch
        noise, less = record.per_step.multiplier(0, 1, batch), scaled.per_step.multiplier(0, setting.rounds, here)
        return replace(scaled, per_record=scaled.per_record.recounted(lambda n: n * batch / noise * less / here))
    return scaled


def _size(setting: Setting) -> tuple[int, int]:
    return setting.rounds, setting.clients


def noise_of(record: Algorithm) -> float:
    """The noise multiplier, as it is written, of the boundary that has one."""
    for holder in (record.per_round, record.per_update, record.per_step):
        noise = holder.noise_schedule() if holder is not None else None
        if noise is not None and noise.value(0, 1):
            return noise.value(0, 1)
    return 0.0


def _note(record: Algorithm, setting: Setting, where: Where, epsilon: float) -> str:
    noise = f"noise {noise_of(record):.3g}, so that the claim is epsilon {epsilon:g}"
    if setting.user_columns:
        most = record.records.max_per_user or 0
        return f"one local step; a user has {MORE * most} records, of which {most} may be used, {noise}"
    if where == "steps":
        return f"one local step on {BATCH} records, {noise}"
    cohort = record.clients.expected(0, setting.rounds, setting.clients)
    inside = "; the noise in the steps left out" if record.per_step is not None else ""
    own = " on each update" if record.per_update is not None and record.per_update.noise_schedule() else ""
    return f"{cohort:g} of {setting.clients} clients ({record.clients.sampling}), {noise}{own}{inside}"
