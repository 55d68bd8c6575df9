"""A claim, its epsilon computed anew: for whom a theorem covers its events, and the figure at the claimed delta."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .certificate_file import Line
from .event_costs import Event, Unknown, Unproven, add, field_of, number, whole
from .loss_distributions import Total
from .work_limit import TooMuch, Work, too_much

AGREE = 1e-3  # how far, relative, a claimed figure may be below the recomputed one
UNITS, OBSERVERS = ("client", "record", "user"), ("release", "server", "client-process")


def refuse_uncovered(unit: str, observer: str, adjacency: str, events: Any) -> None:
    """Raise Unknown where no theorem covers such events for this unit, adjacency and observer.

    The rate and the mean depend on the number of clients, so that it is not hidden. Only who sees nothing but
    released models cannot see who takes part. All records of a client change, whichever of them a step draws.
    """
    if unit not in UNITS or observer not in OBSERVERS:
        raise Unknown(f"a claim for unit {unit!r} against {observer!r}")
    if unit == "client" and adjacency == "add-or-remove":
        raise Unknown("clients under add-or-remove: their number is public")
    for event in _all_events(events):
        kind = event.get("event")
        drawn = kind in ("sampled-user", "by-size") or (kind == "two-level" and event["local"] != "none")
        if unit == "client" and drawn:
            raise Unknown("a client of whom a step draws some records")
        if unit == "client" and kind == "sampled" and event["kind"] in ("shuffled", "with-replacement"):
            raise Unknown(f"{event['kind']} sampling of clients")
        if observer == "release":
            continue
        by_chance = kind == "allocated" or (kind == "sampled" and event["rate"] != 1)
        hidden = kind == "two-level" and event["participation"] != "visible" and event["client_rate"] < 1
        if hidden or (unit == "client" and by_chance):
            raise Unknown(f"hidden participation, against the {observer}")


def _all_events(event: Any) -> Iterator[Event]:
    """An event, or a list of events, and all events inside."""
    if isinstance(event, Mapping):
        yield event
        yield from _all_events(event.get("of"))
    elif isinstance(event, list):
        for each in event:
            yield from _all_events(each)


@dataclass(frozen=True)
class Figures:
    """What is found for a claim: epsilon at the claimed delta, and the parts of delta."""

    epsilon: float
    distance: float
    sampler_delta: float


def recompute(
    events: list[tuple[Event, int]], adjacency: str, delta: float, epsilon: float, work: Work | None = None
) -> Figures:
    """The least epsilon at this delta, the largest over the sizes of clients.

    The sampler's error takes (1 + e^epsilon) distance of delta, here at the claimed epsilon.
    """
    if adjacency not in ("zero-out", "add-or-remove", "replace-one"):
        raise Unknown(f"adjacency {adjacency!r}")
    work = work or Work()
    work.take(100, "so many claims")
    key = json.dumps([events, adjacency])
    if key not in work.found:  # several observers may see the same
        work.found[key] = [*_curves(events, adjacency, work)]
    found = []
    for curve, distance in work.found[key]:
        taken = (1 + math.exp(min(epsilon, 700.0))) * distance if distance else 0.0
        found.append(Figures(least_epsilon(curve, delta - taken), distance, taken))
    return max(found, key=lambda each: each.epsilon)


def _curves(
    events: list[tuple[Event, int]], adjacency: str, work: Work
) -> Iterator[tuple[Callable[[float], float], float]]:
    """Delta as a function of epsilon, and the samplers' distance, by the sizes of clients."""
    for records in sorted({0, *_sizes([event for event, _ in events])}):
        total = Total(adjacency, records, work)
        for event, times in events:
            add(event, times, total)
        yield _curve(total), total.distance


def _sizes(events: list[Event]) -> Iterator[int]:
    """The numbers of records at which a client's use of a record changes."""
    for each in _all_events(events):
        yield from (use[0] for use in each.get("uses", [])[1:])


def _curve(total: Total) -> Callable[[float], float]:
    try:
        with np.errstate(all="ignore"):
            return total.curve()
    except (ValueError, OverflowError, FloatingPointError, MemoryError) as error:
        raise Unknown(f"dp-accounting cannot compute this: {error}") from None


def least_epsilon(curve: Callable[[float], float], delta: float) -> float:
    """Where a falling curve reaches delta; infinite where it does not, or is no number."""
    if not delta > 0:
        return math.inf
    if curve(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while not curve(high) <= delta:
        if high > 1e12:
            return math.inf
        low, high = high, 2 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if curve(middle) <= delta else (middle, high)
    return high


def claim_line(claim: Mapping[str, Any], work: Work | None = None) -> Line:
    what = f"{claim.get('unit')}, {claim.get('observer')}"
    if claim.get("epsilon") is None:
        return Line("yes", what, f"nothing is claimed: {claim.get('because')}")
    try:
        epsilon, delta = field_of(claim, "epsilon", number()), field_of(claim, "delta", number(1e-300, 1))
        chain = claim["chain"]
        events = [(each["event"], field_of(each, "times", whole(0))) for each in chain["events"]]
        refuse_uncovered(claim["unit"], claim["observer"], claim["adjacency"], [event for event, _ in events])
        found = recompute(events, claim["adjacency"], delta, epsilon, work)
    except Unknown as error:
        return Line("unknown", what, f"cannot be checked: this checker does not know {error}")
    except TooMuch as error:
        return Line("unknown", what, too_much(error))
    except Unproven as error:
        return Line("no", what, f"epsilon {epsilon} is claimed, but nothing is proven: {error}")
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, RecursionError, ArithmeticError) as error:
        return Line("unknown", what, f"cannot be checked: malformed, {type(error).__name__} {error}")
    said = f"epsilon {epsilon} at delta {delta:g} ({claim['adjacency']}); recomputed {found.epsilon:.6g}"
    if not found.epsilon <= epsilon * (1 + AGREE) + 1e-9:
        return Line("no", what, said)
    for name, claimed, own in (
        ("the samplers' distance", chain["distance"], found.distance),
        ("their part of delta", claim["sampler_delta"] or 0.0, found.sampler_delta),
    ):
        if not math.isclose(claimed, own, rel_tol=AGREE):
            return Line("no", what, f"{name} is {own:.4g}, not {claimed:.4g}")
    looser = epsilon / found.epsilon - 1 if found.epsilon else 0.0
    return Line("yes", what, said + (f", {looser:.1%} less than claimed" if looser > AGREE else ""))
