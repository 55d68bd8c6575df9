"""What a round of an algorithm is charged, for each unit and each observer.

Each mechanism states its event, or the reason why there is none (`Unbounded`). The event says what was actually done:
how clients were sampled, and the noise in units of what one of them can add.

Client sampling amplifies (`Sampled`) only against an observer of released models, and only where these do not reveal
participation: the noise is on the sum, in the same amount whichever clients took part (`Round.on_sum`). Everywhere
else participation is taken as visible (`Round.shown`): accounting/theorems.py has the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from shoal.accounting import calibration
from shoal.accounting.calibration import Budget
from shoal.accounting.claims import Observer, Unit
from shoal.accounting.events import Compose, Event, SamplerError, Unbounded
from shoal.accounting.privacy_ledger import Charge
from shoal.accounting.theorems import refused
from shoal.algorithms.base import Algorithm
from shoal.errors import ConfigError
from shoal.mechanisms.mechanism import (
    ADJACENCIES,
    COUNTED,
    LESS_NOISE,
    RAW,
    UNCLIPPED,
    GradientClip,
    Round,
    UpdateMechanism,
    undercharged,
)
from shoal.mechanisms.sampling.records import WIDER
from shoal.mechanisms.setting import Setting
from shoal.random import discrete_gaussian
from shoal.random.normals import TAIL
from shoal.random.secure_streams import FINEST

NO_USERS = Unbounded("records name no users: schema.user_column says which column does")
USERS_IN_STEPS = Unbounded(
    "users are accounted for only if noise is added in local steps; a claim for clients covers users whose records "
    "are all at one client"
)
COUNTS_RECORDS = "the clip of gradients follows counts whose noise is scaled for one record"
OTHER_UNIT = "the noise is not in units of what is clipped: one is for a record, the other for a client"
AS_ONE_RECORD = "the noise of a step is charged as for one record, and several may change with a"
KNOWN_SEED = "the noise follows from a seed that this observer knows (federation.seeded)"
ONE_CLIENT = "there is only one client, and a model trained on its data alone cannot hide them"

PAIRS: tuple[tuple[Unit, Observer], ...] = (
    ("client", "release"),
    ("client", "server"),
    ("client", "client-process"),
    ("record", "release"),
    ("record", "server"),
    ("record", "client-process"),
)


USER_PAIRS: tuple[tuple[Unit, Observer], ...] = (("user", "release"), ("user", "server"), ("user", "client-process"))


def pairs(setting: Setting) -> tuple[tuple[Unit, Observer], ...]:
    """The units and observers for which a round is charged; users where records name them."""
    return PAIRS + USER_PAIRS if setting.user_columns else PAIRS


def charges(algorithm: Algorithm, setting: Setting, t: int, again: bool = False) -> tuple[Charge, ...]:
    """What round t (from 0) is charged; `again`: it was charged before, and is run again."""
    return tuple(
        Charge(unit, who, event(algorithm, setting, t, unit, who, again), ADJACENCIES[unit])
        for unit, who in pairs(setting)
    )


def event(
    algorithm: Algorithm,
    setting: Setting,
    t: int,
    unit: Unit,
    observer: Observer,
    again: bool = False,
    history: tuple[int, ...] | None = None,
) -> Event:
    """What round t costs one unit, as one observer sees it.

    With the `history` of one client it is what that client's part in round t costs it, in all rounds to come.
    """
    boundary, found = _decided(algorithm, setting, t, unit, observer, again, history)
    if isinstance(found, Unbounded):
        return found
    distance = _sampler_distance(algorithm.round(setting, t, again, history), boundary, unit)
    if boundary == "updates" and observer == "server":
        distance = min(1.0, distance + setting.graph_failure)
    return Compose((found, SamplerError(distance))) if distance else found


def _sampler_distance(round: Round, boundary: Literal["per_step", "updates"], unit: Unit) -> float:
    """The largest distance of a round's noise from its distribution: the sum over its coordinates.

    In secure mode a batch that is wider than its public width counts too, of a test as well: its shape shows in the
    last digits.
    """
    setting, wider = round.setting, 0.0
    each = discrete_gaussian.distance(FINEST) if setting.secure else TAIL  # the largest of all widths that are drawn
    if boundary == "per_step":
        tested = round.per_step is not None and round.per_step.test is not None
        counts = tested + (round.per_record is not None and round.per_record.counts)
        draws = max(setting.multiplicity, setting.holders(unit)) * max((steps for *_, steps in round.uses), default=1)
        wider = draws * (round.records.wider() + tested * WIDER) if setting.secure else 0.0
    else:
        assert round.per_update is not None
        counts, draws = round.per_update.counts, round.per_update.draws(round)
        wider = round.per_round.distance(round) if round.per_round is not None else 0.0
    return min(1.0, draws * (setting.parameters + counts) * each + wider) if setting.parameters else 0.0


def _decided(
    algorithm: Algorithm,
    setting: Setting,
    t: int,
    unit: Unit,
    observer: Observer,
    again: bool = False,
    history: tuple[int, ...] | None = None,
) -> tuple[Literal["per_step", "updates"], Event]:
    """Which noise protects the unit, and what is charged for it before round t, which may be more than this round."""

    def event_at(other: int) -> Event:
        return _of_round(algorithm.round(setting, other, again, history), algorithm, unit, observer)[1]

    round = algorithm.round(setting, t, again, history)
    boundary = _of_round(round, algorithm, unit, observer)[0]
    found = algorithm.clients.charged(event_at, t, setting.rounds, setting.clients, unit, again)
    # noise on updates is amplified by the sampling of clients, for a record too
    sampled: Unit = "client" if boundary == "updates" and not algorithm.sums_gradients else unit
    because = refused(found, sampled, ADJACENCIES[unit], observer)
    if because is None and setting.seeded and observer != "release":
        because = KNOWN_SEED
    if because is None and boundary == "per_step" and _as_one_record(round, found, unit, observer):
        because = f"{AS_ONE_RECORD} {unit}"
    return boundary, found if because is None or isinstance(found, Unbounded) else Unbounded(because)


def _of_round(
    round: Round, algorithm: Algorithm, unit: Unit, observer: Observer
) -> tuple[Literal["per_step", "updates"], Event]:
    """The event of a round by itself: noise in the steps for a record, on updates for a client.

    Either alone is a bound: everything after it is post-processing.
    """
    if unit == "client" and round.setting.clients == 1:
        return "updates", Unbounded(ONE_CLIENT)
    if unit == "user" and (not round.setting.user_columns or algorithm.per_step is None):
        return "updates", USERS_IN_STEPS if round.setting.user_columns else NO_USERS
    if unit == "user":
        return "per_step", _on_steps(round, unit, observer)
    updates = _on_updates(algorithm, round, unit, observer)
    if algorithm.per_step is None:
        return "updates", updates
    steps = _on_steps(round, unit, observer)
    if isinstance(updates, Unbounded) or (unit == "record" and not isinstance(steps, Unbounded)):
        return "per_step", steps
    return "updates", updates


def _on_updates(algorithm: Algorithm, round: Round, unit: Unit, observer: Observer) -> Event:
    """The event of noise on updates, or on their sum, for one unit."""
    if not algorithm.draws_noise:
        return Unbounded("no noise is added")
    if observer == "client-process":
        return Unbounded("the client process holds the raw records, and no noise is added there")
    if algorithm.per_update is None:
        return Unbounded(UNCLIPPED)
    if algorithm.sums_gradients != (algorithm.per_round is not None and algorithm.per_round.for_records):
        return Unbounded(OTHER_UNIT)
    inside = COUNTS_RECORDS if algorithm.per_record is not None and algorithm.per_record.counts else None
    for reason in (algorithm.per_update.unproven, algorithm.aggregate.unproven, inside):
        if reason is not None:
            return Unbounded(reason)
    noise = algorithm.per_round.multiplier(*round.when) if algorithm.per_round is not None else math.inf
    found = _paid(algorithm.per_update.event(round, unit, observer), algorithm.per_update, noise, round.cohort)
    states_own = type(algorithm.per_update).event is not UpdateMechanism.event  # else it says what per_round does
    by_clients = (algorithm.per_update.draws_noise and states_own) or (
        algorithm.per_round is not None and algorithm.per_round.at == "shared"
    )
    seen = observer == "server" and (algorithm.per_update.leaves_raw or not by_clients)
    return RAW if seen and not isinstance(found, Unbounded) else found


def _on_steps(round: Round, unit: Unit, observer: Observer) -> Event:
    """The event of noise in the local steps, for one unit."""
    assert round.per_step is not None
    found, batch = round.per_step.event(round, unit, observer), round.records.batch
    return _paid(found, round.per_record, round.per_step.multiplier(*round.when, batch), batch)


def _as_one_record(round: Round, found: Event, unit: Unit, observer: Observer) -> bool:
    """Is the same charged for a unit of several records as for one of them?"""
    several = unit == "client" or (unit == "user" and round.records.max_per_user != 1)
    if not several or isinstance(found, Unbounded):
        return False
    setting = replace(round.setting, multiplicity=round.setting.holders(unit), public_ownership=True)
    return found == _on_steps(replace(round, setting=setting), "record", observer)


def _paid(event: Event, clip: GradientClip | UpdateMechanism | None, noise: float, units: float) -> Event:
    """The event, unless the clip also counts, at no cost, or has less noise added."""
    if clip is None or not undercharged(clip, noise, units):
        return event
    return COUNTED if clip.counts else LESS_NOISE


def whole_run(algorithm: Algorithm, setting: Setting, rounds: int, unit: Unit, observer: Observer) -> Event:
    """The first rounds of a run, composed."""
    found = [event(algorithm, setting, t, unit, observer) for t in algorithm.different_rounds(rounds)]
    return Compose(tuple(found * (rounds // max(1, len(found)))))


SOMEWHERE = Setting(10**6, 100, sizes=(1000,))
"""A generic federation, in which a method proves something if it ever does."""


def somewhere(algorithm: Algorithm) -> Algorithm:
    """The method as it is in the generic federation, whatever number of sites it was configured for."""
    if algorithm.per_round is None:
        return algorithm
    return replace(algorithm, per_round=algorithm.per_round.for_cohort(SOMEWHERE.clients))


def proves(algorithm: Algorithm) -> str:
    """In a few words, for tables: for which units and observers the method proves something."""
    found = {pair: _decided(somewhere(algorithm), SOMEWHERE, 0, *pair) for pair in PAIRS}
    bounded = {pair: source for pair, (source, what) in found.items() if not isinstance(what, Unbounded)}
    if not bounded:
        return f"nothing: {next(what.because for _, what in found.values() if isinstance(what, Unbounded))}"
    # Noise for one record bounds a whole client too, but at an epsilon of thousands.
    in_name = [pair for pair, source in bounded.items() if pair[0] == "client" and source == "per_step"]
    units_of: dict[tuple[Observer, ...], list[Unit]] = {}
    for unit in ADJACENCIES:
        if observers := tuple(who for whose, who in bounded if whose == unit and (whose, who) not in in_name):
            units_of.setdefault(observers, []).append(unit)
    said = [f"{' and '.join(units)} level, against {_listed(observers)}" for observers, units in units_of.items()]
    if in_name and not any("client" in units for units in units_of.values()):
        said.append("client level in name only")
    return "; ".join(said)


def _listed(observers: Iterable[Observer]) -> str:
    names = {"release": "released models", "server": "the server", "client-process": "the client process"}
    *others, last = (names[who] for who in observers)
    return f"{', '.join(others)} and {last}" if others else last


def calibrated(algorithm: Algorithm, setting: Setting, budget: Budget, unit: Unit, observer: Observer) -> Algorithm:
    """The algorithm with its noise (or its schedule of noise) scaled to spend the budget over all rounds."""
    boundary: str = _decided(algorithm, setting, 0, unit, observer)[0]
    if boundary == "updates":
        boundary = "per_round" if algorithm.per_round is not None else "per_update"
    holder = getattr(algorithm, boundary)
    shape = holder.noise_schedule() if holder is not None else None
    if shape is None:
        raise ConfigError(f"budget.calibrate: algorithm {algorithm.name} adds no noise that could be calibrated")
    if not max(shape.values(setting.rounds)):
        raise ConfigError(
            f"budget.calibrate scales {boundary}.noise_multiplier, which is 0: set it to 1, or to a schedule"
        )
    unit_noise = shape.scaled(1 / max(shape.values(setting.rounds)))

    def with_noise(scale: float) -> Algorithm:
        return replace(algorithm, **{boundary: holder.with_noise(unit_noise.scaled(scale))})

    found = calibration.noise(
        lambda scale: whole_run(with_noise(scale), setting, setting.rounds, unit, observer), budget
    )
    return with_noise(found.value)
