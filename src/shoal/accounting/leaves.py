"""Events as what accountants add up: how often each leaf happened, whatever it was nested in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from shoal.accounting.events import (
    Allocated,
    BySize,
    Compose,
    Event,
    Gaussian,
    Leaf,
    OnClients,
    Repeat,
    Sampled,
    SampledUser,
    SamplerError,
    TwoLevel,
    Unbounded,
    require,
)
from shoal.errors import ConfigError


def leaves(event: Event) -> dict[Leaf, int]:
    """The event as a multiset of leaves, which accountants add up."""
    return _settled(_counted(event), None)


def by_size(event: Event) -> dict[int, dict[Leaf, int]]:
    """The leaves by client size: for clients with at least this many records, up to the next key; the first is 0."""
    counts = _counted(event)
    sizes = {least for leaf in counts if isinstance(leaf, BySize) for least, _, _ in leaf.uses[1:]}
    return {records: _settled(counts, records) for records in sorted({0, *sizes})}


def _counted(event: Event) -> Counter[Leaf | BySize]:
    counts: Counter[Leaf | BySize] = Counter()
    _walk(event, 1, counts)
    return counts


def _settled(counts: Mapping[Leaf | BySize, int], records: int | None) -> dict[Leaf, int]:
    """The leaves for clients with so many records; without a number, for the worst client."""
    settled: Counter[Leaf] = Counter()
    for leaf, times in counts.items():
        if isinstance(leaf, BySize):
            for inner, more in leaves(leaf.event if records is None else leaf.of(records)).items():
                settled[inner] += times * more
        else:
            settled[leaf] += times
    return dict(settled)


def without_sampler(counts: Mapping[Leaf, int]) -> tuple[dict[Leaf, int], float]:
    """The events as if their noise were sampled perfectly, and the total distance from that."""
    ideal: dict[Leaf, int] = {leaf: n for leaf, n in counts.items() if not isinstance(leaf, SamplerError)}
    return ideal, sum((leaf.distance * n for leaf, n in counts.items() if isinstance(leaf, SamplerError)), 0.0)


def for_worst_client(event: Event) -> Event:
    """The event where a record may move between clients: as for the worst of them."""
    match event:
        case BySize(worst, _):
            return worst
        case Compose(events):
            return Compose(tuple(for_worst_client(item) for item in events))
        case Repeat(inner, count):
            return Repeat(for_worst_client(inner), count)
    return event


def passes(rate: float, steps: int) -> int:
    """Passes over the data that so many shuffled steps begin: a unit enters one step of each.

    Rounding must not turn 7.000000000000001 passes into 8, nor any passes at all into none.
    """
    return math.ceil(rate * steps * (1 - 2**-51))


def blocks(noises: Sequence[float], length: int) -> Event:
    """Rounds with these noises in blocks of random allocation."""
    return Compose(tuple(block(noises[start : start + length], length) for start in range(0, len(noises), length)))


def block(noises: Sequence[float], length: int) -> Event:
    """A block of random allocation: cut short, it keeps its last noise; of a single round, it is that round."""
    if length == 1:
        return Gaussian(noises[0])
    runs = [(noise, len(list(same))) for noise, same in groupby(noises)]
    return Allocated((*runs[:-1], (runs[-1][0], runs[-1][1] + length - len(noises))))


def block_length(rate: float) -> int:
    """The rounds of a block, of which a unit enters one, where it enters this share of all rounds.

    Rounded down: where a unit enters k of t rounds, any k of them, that costs no more than k blocks of t/k, rounded
    down (Feldman & Shenfeld 2025). Rounding must not turn 100 rounds into 99.
    """
    return max(1, math.floor(1 / rate * (1 + 2**-50)))


def _walk(event: Event, times: int, counts: Counter[Leaf | BySize]) -> None:
    match event:
        case _ if times == 0:
            pass
        case Compose(events):
            for item in events:
                _walk(item, times, counts)
        case Repeat():
            _walk_repeated(event, times, counts)
        case OnClients(clients, inner):  # whose sizes may differ
            _walk(for_worst_client(inner), times * clients, counts)
        case SampledUser(records, rate, noise) if records == 1 or rate in (0, 1):
            _walk(Sampled("poisson", rate, Gaussian(noise / records)), times, counts)
        case Sampled() | TwoLevel():
            _walk_sampled(event, times, counts)
        case Gaussian() | SampledUser() | Allocated() | Unbounded() | BySize() | SamplerError():
            counts[event] += times
        case _:  # of another package: it must not cost nothing
            raise ConfigError(f"no accountant knows the event {event!r}")


def _walk_repeated(event: Repeat, times: int, counts: Counter[Leaf | BySize]) -> None:
    match event:
        case Repeat(Sampled("shuffled", rate, inner), count):
            _walk(inner, times * passes(rate, count), counts)
        case Repeat(Sampled("random-allocation", rate), count) if rate > 0:
            _walk(event.event, times * math.ceil(count / block_length(rate)), counts)
        case Repeat(inner, count):
            _walk(inner, times * count, counts)


def _walk_sampled(event: Sampled | TwoLevel, times: int, counts: Counter[Leaf | BySize]) -> None:
    rate = event.rate if isinstance(event, Sampled) else event.client_rate
    inner = event.event if isinstance(event, Sampled) else event.local_event
    always = rate == 1 or (isinstance(event, Sampled) and event.kind in ("none", "shuffled"))
    found = {inner: 1} if isinstance(inner, Gaussian) else leaves(inner)
    if rate == 0 or not found:
        return
    if always and not (isinstance(event, Sampled) and event.kind == "with-replacement"):
        _walk(inner, times, counts)
    elif isinstance(event, Sampled) and event.kind == "random-allocation":
        _walk(_allocated(inner, rate), times, counts)
    elif isinstance(event, TwoLevel) or isinstance(inner, Gaussian):
        counts[event] += times
    elif unbounded := [leaf for leaf in found if isinstance(leaf, Unbounded)]:
        counts[unbounded[0]] += times
    else:
        noise = gaussian_noise(inner)
        simple = inner if noise is None else Gaussian(noise)
        counts[Sampled(event.kind, rate, simple, event.draws)] += times


def _allocated(inner: Event, rate: float) -> Event:
    """A block of 1/rate equal rounds, of which the unit enters one."""
    if (reason := next((leaf for leaf in leaves(inner) if isinstance(leaf, Unbounded)), None)) is not None:
        return reason
    noise = gaussian_noise(inner)
    require(noise is not None, "of", inner, "Gaussian noise inside random-allocation")
    length = block_length(rate)
    return Gaussian(noise or 0.0) if length == 1 else Allocated(((noise or 0.0, length),))


def gaussian_noise(event: Event) -> float | None:
    """The noise of the one Gaussian equivalent to several on the same data; None where there is none."""
    found = leaves(event)
    if not found or not all(isinstance(leaf, Gaussian) for leaf in found):
        return None
    weights = [count / leaf.noise**2 for leaf, count in found.items() if isinstance(leaf, Gaussian)]
    return 1 / math.sqrt(sum(weights))
