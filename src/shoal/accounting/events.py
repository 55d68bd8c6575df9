"""Events: small frozen records of what was done to one unit's data. They state facts and are never re-interpreted.

An algorithm states events, the ledger stores them, accountants read them. A unit is what is protected: a
record, a user with several records, or a client. `noise` is always sigma / sensitivity, where sensitivity
is what one unit can add to or take from the sum (the clip); accountants double it under replace-one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from shoal.errors import ConfigError, nearest

SamplingKind: TypeAlias = Literal[
    "poisson", "fixed-size", "shuffled", "with-replacement", "random-allocation", "none"
]
Participation: TypeAlias = Literal["visible", "hidden"]

_DEEPEST = 20  # a foreign ledger line must not exhaust the stack


class _Fact:
    """The base of all events: they write themselves as JSON."""

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON; `from_json` reads it back."""
        written: dict[str, Any] = {"event": _NAMES[type(self)]}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, _Fact):
                value = value.to_json()
            elif isinstance(value, tuple):
                value = [item.to_json() if isinstance(item, _Fact) else list(item) for item in value]
            written["of" if field.name in ("event", "events") else field.name] = value
        return written


@dataclass(frozen=True)
class Gaussian(_Fact):
    """Gaussian noise of `noise` x sensitivity was added to a sum, once."""

    noise: float

    def __post_init__(self) -> None:
        require(_is_number(self.noise) and 0 < self.noise < math.inf, "noise", self.noise, "> 0 and finite")


@dataclass(frozen=True)
class Sampled(_Fact):
    """The unit entered `event` only where it was sampled, in this one step.

    `poisson`: independently with probability `rate`. `fixed-size`: the step took a public share `rate` of all
    units, without replacement. `with-replacement`: the step made `draws` draws, the share is draws / units.
    `shuffled`: the step took one of 1/rate batches of a shuffled pass; a `Repeat` right around it is an
    unbroken run of such steps, so the unit was used once in every 1/rate of them. `random-allocation`: the step is
    one of a block of 1/rate, of which the unit entered one, drawn at random in advance (see Allocated); again a
    `Repeat` right around it is an unbroken run of such steps. `none`: always taken.
    """

    kind: SamplingKind
    rate: float
    event: Event
    draws: int | None = None

    def __post_init__(self) -> None:
        _require_one_of(SamplingKind, "kind", self.kind)
        require(_is_rate(self.rate), "rate", self.rate, "in [0, 1]")
        if self.kind == "none":
            require(self.rate == 1, "rate", self.rate, "1 where nothing is sampled")
        if self.kind == "with-replacement":
            require(_is_count(self.draws, 1), "draws", self.draws, "a whole number >= 1")
        else:
            require(self.draws is None, "draws", self.draws, f"left out for {self.kind} sampling")
        _require_events("sampled", self.event)


@dataclass(frozen=True)
class SampledUser(_Fact):
    """A step that took each of a user's records, `records` at most, independently with probability `rate`.

    `noise` is in units of what one record can add.
    """

    records: int
    rate: float
    noise: float

    def __post_init__(self) -> None:
        require(_is_count(self.records, 1), "records", self.records, "a whole number >= 1")
        require(_is_rate(self.rate), "rate", self.rate, "in [0, 1]")
        Gaussian(self.noise)  # validates it


@dataclass(frozen=True)
class Allocated(_Fact):
    """A block of rounds with Gaussian noise, of which the unit entered one, drawn uniformly at random in advance.

    `rounds` lists them as (noise, rounds with that noise), in any order. Nobody who sees what the block releases
    knows which round it was, units are allocated independently of each other, and none that missed its round comes
    later. A block that was cut short is written in full, which is never too little.
    """

    rounds: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        listed = isinstance(self.rounds, tuple) and len(self.rounds) > 0 and all(map(_is_noise, self.rounds))
        require(listed, "rounds", self.rounds, "a list of [noise, rounds]")

    @property
    def length(self) -> int:
        """How many rounds the block has."""
        return sum(rounds for _, rounds in self.rounds)


@dataclass(frozen=True)
class TwoLevel(_Fact):
    """A round in which the record's client took part with probability `client_rate`, then trained locally.

    It made `local_steps` steps; in each the record was sampled as `local`, `sampling_rate` and `draws` say
    (see Sampled), and Gaussian noise was added. `participation` says whether the observer can learn that the
    client took part at all: `visible` (from the updates, or because a client's other records move the model
    more than the noise hides) or `hidden` (its absence looks like its presence without the record). Only
    where it is hidden does the choice of clients amplify the privacy of a record. With `records` > 1 the unit is a
    user, and the client holds so many of its records at most (see SampledUser).
    """

    client_rate: float
    sampling_rate: float
    local_steps: int
    noise: float
    local: SamplingKind = "poisson"
    participation: Participation = "visible"
    draws: int | None = None
    records: int = 1

    def __post_init__(self) -> None:
        require(_is_rate(self.client_rate), "client_rate", self.client_rate, "in [0, 1]")
        require(_is_count(self.local_steps, 1), "local_steps", self.local_steps, "a whole number >= 1")
        _require_one_of(Participation, "participation", self.participation)
        require(_is_count(self.records, 1), "records", self.records, "a whole number >= 1")
        require(self.records == 1 or self.local == "poisson", "local", self.local, "poisson for several records")
        self.local_event  # noqa: B018  (its parts validate themselves)

    @property
    def step(self) -> Sampled:
        """What happens to the record in one local step."""
        return Sampled(self.local, self.sampling_rate, Gaussian(self.noise), self.draws)

    @property
    def local_event(self) -> Event:
        """What happens to the record in a round in which its client takes part."""
        step = SampledUser(self.records, self.sampling_rate, self.noise) if self.records > 1 else self.step
        return Repeat(step, self.local_steps)


Use: TypeAlias = tuple[int, float, int]
"""(least, sampling_rate, local_steps): a client with `least` records or more, but fewer than the next use's."""


@dataclass(frozen=True)
class BySize(_Fact):
    """A round of clients of several sizes: each has its own sampling rate and number of steps.

    `uses` lists them by a client's number of records, in ascending order. `event` bounds the worst of them: the
    largest rate with the most steps. A record stays with one client throughout a run, so an accountant composes the
    rounds of each client and takes the largest cost. Where a record may move between clients, `event` holds.
    """

    event: TwoLevel
    uses: tuple[Use, ...]

    def __post_init__(self) -> None:
        require(isinstance(self.event, TwoLevel), "of", self.event, "a two-level event inside 'by-size'")
        listed = isinstance(self.uses, tuple) and len(self.uses) > 0 and all(map(_is_use, self.uses))
        require(listed, "uses", self.uses, "a list of [least records, sampling rate, local steps]")
        sizes = [least for least, _, _ in self.uses]
        require(sizes == sorted(set(sizes)), "uses", self.uses, "in ascending order of records")
        for each in map(self.of, sizes):
            worst = each.sampling_rate <= self.event.sampling_rate and each.local_steps <= self.event.local_steps
            require(worst, "uses", self.uses, "no worse than the event around them")

    def of(self, records: int) -> TwoLevel:
        """What happened to a record of a client with so many records."""
        _, rate, steps = next((use for use in reversed(self.uses) if use[0] <= records), self.uses[0])
        return replace(self.event, sampling_rate=rate, local_steps=steps)


@dataclass(frozen=True)
class OnClients(_Fact):
    """Up to `clients` clients hold the record, or records of the user; each did `event`, with its own noise."""

    clients: int
    event: Event

    def __post_init__(self) -> None:
        require(_is_count(self.clients, 1), "clients", self.clients, "a whole number >= 1")
        _require_events("on-clients", self.event)


@dataclass(frozen=True)
class Repeat(_Fact):
    """`event` happened `count` times, each time with fresh noise and fresh sampling."""

    event: Event
    count: int

    def __post_init__(self) -> None:
        require(_is_count(self.count, 0), "count", self.count, "a whole number >= 0")
        _require_events("repeat", self.event)


@dataclass(frozen=True)
class Compose(_Fact):
    """All these events happened, one after the other, each adaptive to those before."""

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        require(isinstance(self.events, tuple), "of", self.events, "a tuple of events")
        _require_events("compose", *self.events)


@dataclass(frozen=True)
class Unbounded(_Fact):
    """Something was released that has no bounded sensitivity, or no noise: nothing is proven, because ..."""

    because: str

    def __post_init__(self) -> None:
        require(isinstance(self.because, str) and self.because != "", "because", self.because, "a reason")


@dataclass(frozen=True)
class SamplerError(_Fact):
    """What was released is within this total-variation distance of the event beside this one.

    The distance is that of the noise sampler and, against the server, of a sparse graph of secure aggregation.
    """

    distance: float

    def __post_init__(self) -> None:
        require(_is_number(self.distance) and 0 <= self.distance <= 1, "distance", self.distance, "in [0, 1]")


Event: TypeAlias = (
    Gaussian
    | Sampled
    | SampledUser
    | Allocated
    | TwoLevel
    | BySize
    | OnClients
    | Repeat
    | Compose
    | Unbounded
    | SamplerError
)
Leaf: TypeAlias = Gaussian | Sampled | SampledUser | Allocated | TwoLevel | Unbounded | SamplerError

_KINDS: dict[str, type[Any]] = {
    "gaussian": Gaussian,
    "sampled": Sampled,
    "sampled-user": SampledUser,
    "allocated": Allocated,
    "two-level": TwoLevel,
    "by-size": BySize,
    "on-clients": OnClients,
    "repeat": Repeat,
    "compose": Compose,
    "unbounded": Unbounded,
    "sampler-error": SamplerError,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def from_json(written: object, depth: int = 0) -> Event:
    """The event that `to_json` wrote; anything unknown in it is refused."""
    if depth > _DEEPEST:
        raise ConfigError(f"an event is nested more than {_DEEPEST} deep; no algorithm writes such an event")
    if not isinstance(written, Mapping) or not isinstance(written.get("event"), str):
        raise ConfigError(f"an event must be an object with the key 'event', got {_short(written)}")
    name = written["event"]
    if name not in _KINDS:
        raise ConfigError(f"no event is called {_short(name)}{nearest(name[:40], _KINDS)}")
    values = _values(written, depth)
    known = {field.name for field in fields(_KINDS[name])}
    if unknown := sorted(map(str, set(values) - known)):
        raise ConfigError(f"event '{name}' has no key {_short(unknown[0])}{nearest(unknown[0][:40], known)}")
    try:
        event: Event = _KINDS[name](**values)
    except TypeError as error:
        raise ConfigError(f"event '{name}' cannot be read: {error}") from error
    return event


def _values(written: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The fields of an event, with the events and lists inside it as they are in Python."""
    values = {key: value for key, value in written.items() if key not in ("event", "of")}
    if "of" in written and written["event"] == "compose":
        require(isinstance(written["of"], list), "of", written["of"], "a list of events")
        values["events"] = tuple(from_json(item, depth + 1) for item in written["of"])
    elif "of" in written:
        values["event"] = from_json(written["of"], depth + 1)
    for key in ("uses", "rounds"):
        if isinstance(values.get(key), list):
            values[key] = tuple(tuple(item) if isinstance(item, list) else item for item in values[key])
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= 10**15


def _is_use(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and _is_count(value[0], 0) and _is_rate(value[1])


def _is_noise(value: object) -> bool:
    listed = isinstance(value, tuple) and len(value) == 2 and _is_number(value[0]) and _is_count(value[1], 1)
    return listed and 0 < value[0] < math.inf  # type: ignore[index]


def require(holds: bool, name: str, value: object, what: str) -> None:
    """Raise a ConfigError where a field of an event cannot be so."""
    if not holds:
        raise ConfigError(f"{name} must be {what}, got {_short(value)} (in an event for the accountant)")


def _require_one_of(choices: Any, name: str, value: object) -> None:
    names = get_args(choices)
    if value not in names:
        require(False, name, value, f"one of {', '.join(names)}{nearest(str(value)[:40], names)}")


def _require_events(name: str, *events: object) -> None:
    for event in events:
        require(isinstance(event, _Fact), "of", event, f"an event inside '{name}'")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


NOTHING = Compose(())
"""The event of a unit whose data were never used."""
