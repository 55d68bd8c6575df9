"""An event that costs no less than each of several, however often and beside whatever else they happened.

Which of two events costs more may depend on how often they happen: 0.7 of noise at a rate of 0.01 costs more than 1.6
at a rate of 0.2 once, and less 20 times. So no single one of them is chosen: the result has the least noise and the
largest rates and numbers of all.

This holds under zero-out and replace-one, by joint convexity. Under add-or-remove a unit that enters a sample of
fixed size displaces another, unless all enter: there a rate of 0.9 costs more than one of 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from shoal.accounting.events import NOTHING, Allocated, Compose, Event, Gaussian, Sampled, Unbounded

_LEAST = ("noise",)
_MOST = ("rate", "client_rate", "sampling_rate", "local_steps", "count", "records", "clients", "distance")


def dominating(events: Iterable[Event]) -> Event:
    """One event of the same kind as all of these; of events of several kinds, one after the other."""
    kept: list[Event] = []
    for event in dict.fromkeys(events):
        for place, other in enumerate(kept):
            if (both := _joined(event, other)) is not None:
                kept[place] = both
                break
        else:
            kept.append(event)
    return kept[0] if len(kept) == 1 else Compose(tuple(kept))


def _joined(one: Event, other: Event) -> Event | None:
    """Both as one event, or None where they are of different kinds."""
    if one == other or other == NOTHING or isinstance(one, Unbounded):
        return one
    if one == NOTHING or isinstance(other, Unbounded):
        return other
    if isinstance(one, Allocated):
        return _block(one, other)
    if isinstance(other, Allocated):
        return _block(other, one)
    if type(one) is not type(other):
        return None
    changed: dict[str, Any] = {}
    for name in (each.name for each in fields(one)):
        values = getattr(one, name), getattr(other, name)
        if values[0] != values[1] and (both := _field(name, *values)) is None:
            return None
        changed |= {} if values[0] == values[1] else {name: both}
    return replace(one, **changed)


def _field(name: str, one: Any, other: Any) -> Any:
    """The costlier of two values of a field, or None where neither is."""
    if name in _LEAST:
        return min(one, other)
    if name in _MOST:
        return max(one, other)
    if name == "event":
        return _joined(one, other)
    if name == "events" and len(one) == len(other):
        inside = [_joined(*pair) for pair in zip(one, other, strict=True)]
        return None if None in inside else tuple(inside)
    if name == "uses" and [use[0] for use in one] == [use[0] for use in other]:
        return tuple(tuple(map(max, *pair)) for pair in zip(one, other, strict=True))
    return None


def _block(one: Allocated, other: Event) -> Event | None:
    """Two blocks of one length; or a block, and one round at its rate, which is what some round of it shows."""
    least = min(noise for noise, _ in one.rounds)
    if isinstance(other, Allocated) and other.length == one.length:
        return Allocated(((min(least, *(noise for noise, _ in other.rounds)), one.length),))
    match other:
        case Sampled("poisson", rate, Gaussian(noise)) if noise >= least and rate * one.length <= 1 + 2**-50:
            return one
    return None
