"""From an event to a claim, in words: what was done, line by line, and the theorem that bounds each line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import singledispatch

from shoal.accounting.events import (
    Allocated,
    BySize,
    Compose,
    Event,
    Gaussian,
    OnClients,
    Repeat,
    Sampled,
    SampledUser,
    SamplerError,
    TwoLevel,
)
from shoal.accounting.rounding import up
from shoal.accounting.theorems import BALLE, MEAN, Adjacency, Cell, of_scheme

COMPOSED = "adaptive composition of dominating pairs: their privacy losses add up (Zhu, Dong, Wang 2022, Theorem 10)"
_DRAWN = {
    "poisson": "it enters independently with probability {rate:g}",
    "fixed-size": "a share of {rate:g} of all units enters, drawn without replacement",
    "with-replacement": "{draws} draws with replacement are made, the share of all units is {rate:g}",
    "shuffled": "it enters one of {batches:g} batches of a shuffled pass",
    "none": "it always enters",
}


@dataclass(frozen=True)
class Line:
    """What was done, the theorem that bounds it, and where that is proven."""

    says: str
    theorem: str = ""
    reference: str = ""

    def to_json(self) -> dict[str, str]:
        """The fields as JSON values."""
        return asdict(self)


@singledispatch
def explained(event: Event, adjacency: Adjacency) -> Iterator[Line]:
    """The lines of an event, the outermost first; one that this module has no words for is named."""
    yield Line(f"event {event.to_json()['event']}")


@explained.register
def _(event: Gaussian, adjacency: Adjacency) -> Iterator[Line]:
    yield _of(f"Gaussian noise of {event.noise:g} x the sensitivity", of_scheme("none", adjacency))


@explained.register
def _(event: Sampled, adjacency: Adjacency) -> Iterator[Line]:
    kind, rate, inner = event.kind, event.rate, event.event
    if isinstance(inner, Gaussian):
        said = f"{_drawn(kind, rate, event.draws)}; Gaussian noise of {inner.noise:g} x the sensitivity"
        yield _of(said, of_scheme("none" if rate == 1 else kind, adjacency))
    else:
        yield _of(_drawn(kind, rate, event.draws), of_scheme(kind, adjacency))
        yield from explained(inner, adjacency)


@explained.register
def _(event: SampledUser, adjacency: Adjacency) -> Iterator[Line]:
    said = (
        f"each of a user's records, {event.records:,} at most, enters independently with probability {event.rate:g}"
    )
    yield _of(f"{said}; Gaussian noise of {event.noise:g} x what one record moves", of_scheme("by-user", adjacency))


@explained.register
def _(event: Allocated, adjacency: Adjacency) -> Iterator[Line]:
    noises = ", ".join(f"{noise:g} in {count:,}" for noise, count in event.rounds)
    said = f"it enters one of {event.length:,} rounds, drawn in secret before the first of them"
    said += f"; Gaussian noise, in units of the sensitivity: {noises}"
    yield _of(said, of_scheme("random-allocation", adjacency))


@explained.register
def _(event: TwoLevel, adjacency: Adjacency) -> Iterator[Line]:
    visible, rate = event.participation == "visible", event.client_rate
    seen = "which can be seen" if visible else "which stays hidden"
    why = Cell(MEAN, "") if visible else Cell("amplified by secret sampling", BALLE)
    yield _of(f"the client takes part with probability {rate:g}, {seen}", Cell() if rate == 1 else why)
    yield Line(f"it then makes {event.local_steps:,} local steps, with fresh noise in each", COMPOSED)
    (step,) = (inner.event for inner in [event.local_event] if isinstance(inner, Repeat))
    yield from explained(step, adjacency)


@explained.register
def _(event: BySize, adjacency: Adjacency) -> Iterator[Line]:
    said = f"clients of {len(event.uses)} ranges of sizes, each with its own rate and steps; the costliest counts"
    yield Line(f"{said}; at worst:", "a record stays with one client, so the largest cost over clients holds")
    yield from explained(event.event, adjacency)


@explained.register
def _(event: OnClients, adjacency: Adjacency) -> Iterator[Line]:
    yield Line(f"up to {event.clients:,} clients hold the record, each with noise of its own", COMPOSED)
    yield from explained(event.event, adjacency)


@explained.register
def _(event: Repeat, adjacency: Adjacency) -> Iterator[Line]:
    yield Line(f"{event.count:,} times, with fresh noise:", COMPOSED)
    yield from explained(event.event, adjacency)


@explained.register
def _(event: Compose, adjacency: Adjacency) -> Iterator[Line]:
    for inner in event.events:
        yield from explained(inner, adjacency)


@explained.register
def _(event: SamplerError, adjacency: Adjacency) -> Iterator[Line]:
    yield Line(
        f"the noise that is drawn is within {up(event.distance, 2)} of its distribution (total variation)",
        "(epsilon, delta) becomes (epsilon, delta + (1 + e^epsilon) distance)",
        "triangle inequality, on both neighbours",
    )


def _drawn(kind: str, rate: float, draws: int | None) -> str:
    return _DRAWN.get(kind, kind).format(rate=rate, draws=draws, batches=1 / rate if rate else 0)


def _of(said: str, cell: Cell) -> Line:
    return Line(said, cell.theorem, cell.reference)
