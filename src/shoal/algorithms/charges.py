"""What a round of an algorithm is charged, derived from its record: for each unit, against each observer.

The event says what was really done: how clients were sampled, and the noise in units of what one of them can
add. Where the record leaves something unbounded the event is `Unbounded`, with the reason in words.

The choice of clients amplifies (`Sampled`) only against whoever sees released models alone, and only where these do
not show who took part: the noise is on the sum, and as much of it whoever came (`_on_the_sum`). Everywhere else it is
taken to show (`_shown`): accounting/theorems.py has the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from shoal.accounting import calibration
from shoal.accounting.calibration import Budget
from shoal.accounting.claims import Observer, Unit
from shoal.accounting.events import NOTHING, Compose, Event, Gaussian, Sampled, SamplerError, TwoLevel, Unbounded
from shoal.accounting.ledger import Charge
from shoal.accounting.theorems import ADJACENCY, Neighbours
from shoal.algorithms.base import Algorithm, Setting
from shoal.algorithms.charges_examples import HOW_MANY, IN_TURN, ONE_FOR_ANOTHER, WITH_ITS_NOISE, in_steps, uses
from shoal.errors import ConfigError
from shoal.privacy import discrete, noise
from shoal.privacy.clip import NoisyClip, QuantileClip
from shoal.privacy.correlated import Correlated, price
from shoal.privacy.example_clip import QuantileExampleClip
from shoal.privacy.normals import TAIL
from shoal.privacy.schedules import parse
from shoal.privacy.secure import FINE, FINEST, STEPS, charged

ONE_CLIENT = "there is one client, and what is trained on its data alone cannot hide them"

PAIRS: tuple[tuple[Unit, Observer], ...] = (
    ("client", "release"),
    ("client", "server"),
    ("client", "inside"),
    ("example", "release"),
    ("example", "server"),
    ("example", "inside"),
)

NEIGHBOURS: dict[Unit, Neighbours] = {"client": "zero-out", "example": "replace-one"}
"""A client contributes nothing, and its place among K stays. A record of a client is another one."""


def charges(algorithm: Algorithm, setting: Setting, t: int, again: bool = False) -> tuple[Charge, ...]:
    """What round t (from 0) is charged; `again` where it was charged before, and is played once more."""
    return tuple(
        Charge(unit, who, event(algorithm, setting, t, unit, who, again), ADJACENCY[NEIGHBOURS[unit]])
        for unit, who in PAIRS
    )


def event(
    algorithm: Algorithm, setting: Setting, t: int, unit: Unit, observer: Observer, again: bool = False
) -> Event:
    """What round t does to one unit, as one observer sees it."""
    boundary, found = _decided(algorithm, setting, t, unit, observer, again)
    distance = 0.0 if isinstance(found, Unbounded) else _sampler_distance(algorithm, setting, t, boundary)
    return Compose((found, SamplerError(distance))) if distance else found


def _sampler_distance(
    algorithm: Algorithm, setting: Setting, t: int, boundary: Literal["per_step", "updates"]
) -> float:
    """How far from its law, at most, is the noise that protects a unit in round t: the sum over its numbers."""
    each = discrete.distance(FINEST) if setting.secure else TAIL  # of all widths that are drawn the furthest
    counts = isinstance(algorithm.per_example if boundary == "per_step" else algorithm.per_update, QuantileClip)
    if boundary == "per_step":
        draws = setting.multiplicity * max((steps for *_, steps in uses(algorithm, setting)), default=1)
    else:
        by_clients = algorithm.per_round is None or algorithm.per_round.at == "shared"
        draws = math.ceil(algorithm.clients.expected(t, setting.rounds, setting.clients)) if by_clients else 1
    return min(1.0, draws * (setting.parameters + counts) * each) if setting.parameters else 0.0


def _decided(
    algorithm: Algorithm, setting: Setting, t: int, unit: Unit, observer: Observer, again: bool = False
) -> tuple[Literal["per_step", "updates"], Event]:
    """Which noise protects the unit, and its event: that in the steps rather a record, that on updates a client.

    Either alone is a bound, for what comes after it looks at no data again.
    """
    if unit == "client" and setting.clients == 1:
        return "updates", Unbounded(ONE_CLIENT)
    updates = _on_updates(algorithm, setting, t, unit, observer, again)
    if algorithm.per_step is None:
        return "updates", updates
    steps = in_steps(algorithm, setting, t, unit, observer)
    if isinstance(updates, Unbounded) or (unit == "example" and not isinstance(steps, Unbounded)):
        return "per_step", steps
    return "updates", updates


def _on_updates(algorithm: Algorithm, setting: Setting, t: int, unit: Unit, observer: Observer, again: bool) -> Event:
    """What noise on updates, or on their sum, does for one unit."""
    if not algorithm.draws_noise:
        return Unbounded("no noise is added")
    if observer == "inside":
        return Unbounded("inside a client's process its records lie open, and no noise is added there")
    if (reason := _no_bound(algorithm)) is not None:
        return Unbounded(reason)
    if isinstance(algorithm.per_update, NoisyClip):
        return _noisy_updates(algorithm, algorithm.per_update, setting, t, unit, observer)
    if algorithm.per_round is not None and algorithm.per_round.at == "shared":
        return _shared_noise(algorithm, algorithm.per_round, setting, t, unit)
    if observer == "server" or algorithm.per_round is None:
        return Unbounded("each update reaches the server before any noise is added")
    if isinstance(algorithm.per_round, Correlated) or algorithm.clients.sampling == "cyclic":
        return _in_turn(algorithm, algorithm.per_round, setting, t, unit, again)
    return _on_the_sum(algorithm, setting, t, unit, algorithm.per_round.multiplier(t, setting.rounds))


def _in_turn(
    algorithm: Algorithm, per_round: noise.Gaussian, setting: Setting, t: int, unit: Unit, again: bool
) -> Event:
    """Noise on the sum where it is known who comes when, and where rounds may share noise."""
    z = per_round.multiplier(t, setting.rounds)
    if z == 0:
        return Unbounded("the noise is 0")
    rounding = 1.001 * math.sqrt(setting.parameters) / FINEST if setting.secure and _fine(per_round) else 0.0
    cost = price(per_round, t, setting.rounds, algorithm.clients.turns(setting.clients), again, rounding)
    cost *= (z / _discrete(algorithm, setting, t, z)) ** 2
    copies = setting.multiplicity if unit == "example" else 1
    return Gaussian(1 / math.sqrt(cost) / copies) if cost > 0 else NOTHING


def _fine(per_round: noise.Gaussian) -> bool:
    """Is the noise on the finest grid, since each round's sum is rounded with that of others?"""
    return isinstance(per_round, Correlated)


def _discrete(algorithm: Algorithm, setting: Setting, t: int, z: float) -> float:
    """What of noise z counts: all of it, but in secure mode what a discrete Gaussian on a grid leaves.

    A grid has 2^12 steps or more to the clip or to the noise. A count is rounded as a whole, which a client moves by
    1/2: by a step more.
    """
    if not setting.secure or z == 0:
        return z
    if algorithm.per_round is not None and _fine(algorithm.per_round):
        return charged(z, FINEST)
    count = 0.0
    if isinstance(algorithm.per_update, QuantileClip):
        cohort = algorithm.clients.expected(t, setting.rounds, setting.clients)
        count = 2.002 * algorithm.per_update.count_noise * cohort / STEPS
    return charged(z, min(z, 1.0) * 2.0**FINE) / (1 + count)


def _on_the_sum(algorithm: Algorithm, setting: Setting, t: int, unit: Unit, z: float) -> Event:
    """Noise on the sum of clipped updates, in units of the clip.

    Amplified: the sum has the same noise whoever came, so that released models tell of nobody but through it.
    """
    z = _discrete(algorithm, setting, t, z)
    if z == 0:
        return Unbounded("the noise is 0")
    if unit == "example" and setting.multiplicity > 1:
        # Its copies change that many updates of one round, whoever of them was sampled.
        return Gaussian(z / setting.multiplicity)
    sampling, rate = algorithm.clients.sampling, _rate(algorithm, setting, t)
    if sampling == "fixed-size" and rate < 1 and algorithm.local.remembers:
        return Unbounded(ONE_FOR_ANOTHER)
    return Gaussian(z) if sampling == "all" else Sampled(sampling, rate, Gaussian(z))


def _noisy_updates(
    algorithm: Algorithm, clip: NoisyClip, setting: Setting, t: int, unit: Unit, observer: Observer
) -> Event:
    """Noise on each update: m of them add up in the sum, and the server sees one at a time."""
    if algorithm.clients.sampling == "cyclic":
        return Unbounded(IN_TURN)
    own = clip.multiplier(t, setting.rounds)
    if own == 0:
        return Unbounded("the noise is 0")
    sampling = "all" if _rate(algorithm, setting, t) == 1 else algorithm.clients.sampling
    if observer == "release" and (sampling == "poisson" or (sampling == "all" and unit == "client")):
        # Only under fixed-size sampling does somebody else's noise take the place of a client that is not there.
        return Unbounded(HOW_MANY)
    if observer == "release" and not setting.all_answer:
        # A record is in one update, whose own noise is there. Who answered shows in the amount of the noise.
        if unit == "client":
            return Unbounded(WITH_ITS_NOISE)
        return _shown(algorithm, setting, t, unit, own)
    if observer == "release":
        cohort = algorithm.clients.expected(t, setting.rounds, setting.clients)
        return _on_the_sum(algorithm, setting, t, unit, own * math.sqrt(cohort))
    if clip.at == "server":
        return Unbounded("each update reaches the server before any noise is added")
    if unit == "example" and setting.multiplicity > 1:
        return Unbounded("the record lies on several clients, and the server sees each one's update")
    return _shown(algorithm, setting, t, unit, own)


def _shared_noise(algorithm: Algorithm, per_round: noise.Gaussian, setting: Setting, t: int, unit: Unit) -> Event:
    """Noise that clients add together, under secure aggregation: the server sees no more than the sum.

    A sum with fewer clients has less noise, and one with too few is none: who takes part is plain to everybody.
    """
    if isinstance(per_round, Correlated):
        return Unbounded("clients that come and go cannot add noise together that rounds share")
    if algorithm.clients.sampling == "cyclic":
        return Unbounded(IN_TURN)
    z = per_round.multiplier(t, setting.rounds)
    if z == 0:
        return Unbounded("the noise is 0")
    return _shown(algorithm, setting, t, unit, z)


def _shown(algorithm: Algorithm, setting: Setting, t: int, unit: Unit, z: float) -> Event:
    """Noise z where it shows who took part: no sampling amplifies. Hidden is what a client holds: 2 clips either way.

    So a claim for a client is more than zero-out asks for: its data may be any other.
    """
    z = _discrete(algorithm, setting, t, z)
    if z == 0:
        return Unbounded("the noise is 0")
    if unit == "example" and setting.multiplicity > 1:
        return Gaussian(z / setting.multiplicity)
    change = z if NEIGHBOURS[unit] == "replace-one" else z / 2
    return TwoLevel(_rate(algorithm, setting, t), 1.0, 1, change, local="none", participation="visible")


def _rate(algorithm: Algorithm, setting: Setting, t: int) -> float:
    return algorithm.clients.expected(t, setting.rounds, setting.clients) / setting.clients


def _no_bound(algorithm: Algorithm) -> str | None:
    """Why one client could move the sum by any amount, or the noise tell of the data; None where neither is so."""
    if algorithm.per_update is None:
        return "updates are not clipped: one client can move the sum by any amount"
    if algorithm.per_update.unproven is not None:
        return algorithm.per_update.unproven
    if algorithm.aggregate.weights == "size":
        return "updates are weighted by the clients' own sizes, which no clip bounds"
    if isinstance(algorithm.per_example, QuantileExampleClip):
        return "the clip of gradients follows counts, with noise that is made for one record"
    return None


def whole_run(algorithm: Algorithm, setting: Setting, rounds: int, unit: Unit, observer: Observer) -> Event:
    """The first rounds of a run, composed."""
    return Compose(tuple(event(algorithm, setting, t, unit, observer) for t in range(rounds)))


SOMEWHERE = Setting(10**6, 100, sizes=(1000,))
"""A federation that is like none in particular, where a method proves something if it ever does."""


def proves(algorithm: Algorithm) -> str:
    """In a few words, for tables: for whom and against whom the method proves something."""
    found = {pair: _decided(algorithm, SOMEWHERE, 0, *pair) for pair in PAIRS}
    bounded = {pair: source for pair, (source, what) in found.items() if not isinstance(what, Unbounded)}
    if not bounded:
        return f"nothing: {next(what.because for _, what in found.values() if isinstance(what, Unbounded))}"
    # Noise for one record bounds a whole client too, but at an epsilon of thousands.
    in_name = [pair for pair, source in bounded.items() if pair[0] == "client" and source == "per_step"]
    units_of: dict[tuple[Observer, ...], list[Unit]] = {}
    for unit in NEIGHBOURS:
        if observers := tuple(who for whose, who in bounded if whose == unit and (whose, who) not in in_name):
            units_of.setdefault(observers, []).append(unit)
    said = [f"{' and '.join(units)} level, against {_listed(observers)}" for observers, units in units_of.items()]
    if in_name and not any("client" in units for units in units_of.values()):
        said.append("client level in name only")
    return "; ".join(said)


def _listed(observers: Iterable[Observer]) -> str:
    names = {"release": "the release", "server": "the server", "inside": "those inside"}
    *others, last = (names[who] for who in observers)
    return f"{', '.join(others)} and {last}" if others else last


def calibrated(algorithm: Algorithm, setting: Setting, budget: Budget, unit: Unit, observer: Observer) -> Algorithm:
    """The algorithm with its noise (or its schedule of noise) scaled to spend the budget over all rounds."""
    boundary: str = _decided(algorithm, setting, 0, unit, observer)[0]
    if boundary == "updates":
        boundary = "per_round" if algorithm.per_round is not None else "per_update"
    holder = getattr(algorithm, boundary)
    if not isinstance(holder, noise.Gaussian | noise.StepNoise | NoisyClip):
        raise ConfigError(f"budget.calibrate: algorithm {algorithm.name} adds no noise that could be calibrated")
    shape = parse(holder.noise)
    if not max(shape.values(setting.rounds)):
        raise ConfigError(f"budget.calibrate scales {boundary}.noise, which is 0: set it to 1, or to a schedule")
    shape = shape.scaled(1 / max(shape.values(setting.rounds)))

    def with_noise(scale: float) -> Algorithm:
        return replace(algorithm, **{boundary: replace(holder, noise=shape.scaled(scale).written())})

    found = calibration.noise(
        lambda scale: whole_run(with_noise(scale), setting, setting.rounds, unit, observer), budget
    )
    return with_noise(found.value)
