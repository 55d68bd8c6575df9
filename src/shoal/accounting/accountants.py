"""What events cost: (epsilon, delta) by a chosen accountant, and whether that is a bound.

`pld` is what Shoal reports; `rdp` is fast; `rdp-classic` is the moments accountant as the papers used it; `zcdp`,
`advanced` and `basic` recompute a table of Wei et al. (2023). An event that an accountant does not understand is
refused; an unbounded one gives a reason instead of a figure.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.accounting import composition, pld, rdp
from shoal.accounting.events import Allocated, Event, Gaussian, Leaf, Sampled, SampledUser, TwoLevel, Unbounded
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.rounding import IN_NAME_ONLY, up
from shoal.accounting.sampler_error import epsilon_beside, taken
from shoal.accounting.theorems import Adjacency, counted
from shoal.errors import ConfigError
from shoal.registry import Registry


@dataclass(frozen=True)
class Answer:
    """A figure, its accountant, and whether it is a bound (`because` says why not, or what it assumes)."""

    epsilon: float | None
    delta: float | None
    accountant: str
    valid: bool
    because: str | None = None
    sampler_delta: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "accountant": self.accountant,
            "valid": self.valid,
            "because": self.because,
            "sampler_delta": self.sampler_delta,
        }


@dataclass(frozen=True)
class Figures:
    """The figures of an accountant for some events.

    Attributes:
        epsilon: Epsilon as a function of delta.
        delta: Delta as a function of epsilon.
        flaw: Why the figure at a delta is no bound; None where it is one.
    """

    epsilon: Callable[[float], float]
    delta: Callable[[float], float]
    flaw: Callable[[float], str | None]


@runtime_checkable
class Accountant(Protocol):
    """Figures for events, each with how often it happened; a ConfigError for an event that is not understood.

    Packages add theirs by entry points of the group `shoal.accountants`. `orders` names a grid of RDP orders, which
    only `rdp-classic` uses.
    """

    def __call__(self, counts: Mapping[Leaf, int], adjacency: Adjacency, orders: str, /) -> Figures:
        """The figures for these events."""
        ...


def epsilon(
    event: Event, delta: float, accountant: str = "pld", adjacency: Adjacency = "add-or-remove", orders: str = "tf72"
) -> Answer:
    """The epsilon that these events cost at this delta."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be in (0, 1), got {delta:g}")
    worst: Answer | None = None
    for counts in _costliest_first(event, delta, accountant, adjacency):
        if worst is not None and accountant == "pld" and _rdp_says(counts, delta, adjacency) <= (worst.epsilon or 0):
            continue  # PLD never exceeds RDP
        found = _epsilon(counts, delta, accountant, adjacency, orders)
        if found.epsilon is None or not found.valid:
            return found
        if worst is None or found.epsilon > (worst.epsilon or 0):
            worst = found
    assert worst is not None
    return worst


def _epsilon(counts: Mapping[Leaf, int], delta: float, accountant: str, adjacency: Adjacency, orders: str) -> Answer:
    if (reason := _unbounded(counts)) is not None:
        return Answer(None, delta, _known(accountant), False, reason)
    counts, distance = without_sampler(counts)
    figures = _figures(counts, accountant, adjacency, orders)
    if not counts:
        return Answer(0.0, delta, accountant, True)
    used, flaw, said = accountant, figures.flaw(delta), _rests_on(counts)
    too_faint = accountant == "pld" and math.isinf(figures.epsilon(delta))
    if too_faint and (by_rdp := _rdp_or_none(counts, adjacency)) is not None:
        figures, used, said = by_rdp, "rdp", "this delta is below what PLD resolves here, so RDP answers"
    found = epsilon_beside(figures.epsilon, delta, distance)
    if math.isinf(found):
        ideal = figures.epsilon(delta)
        if math.isfinite(ideal):
            bound = f"epsilon would be {up(ideal, 2)}{', in name only' if ideal > IN_NAME_ONLY else ''}"
            error = f"at that epsilon the noise sampler's error, {distance:.1e} times e^epsilon, exceeds delta"
            return Answer(None, delta, used, False, f"{bound}; {error}")
        return Answer(None, delta, accountant, False, f"no finite epsilon is known at delta {delta:g}")
    return Answer(found, delta, used, flaw is None, flaw or said, taken(found, distance))


def delta(
    event: Event,
    epsilon: float,
    accountant: str = "pld",
    adjacency: Adjacency = "add-or-remove",
    orders: str = "tf72",
) -> Answer:
    """The delta that these events cost at this epsilon."""
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon must be >= 0, got {epsilon:g}")
    answers = [
        _delta(counts, epsilon, accountant, adjacency, orders) for counts in counted(event, adjacency).values()
    ]
    return max(answers, key=lambda answer: (not answer.valid, math.inf if answer.delta is None else answer.delta))


def _delta(counts: Mapping[Leaf, int], epsilon: float, accountant: str, adjacency: Adjacency, orders: str) -> Answer:
    if (reason := _unbounded(counts)) is not None:
        return Answer(epsilon, None, _known(accountant), False, reason)
    counts, distance = without_sampler(counts)
    sampler = taken(epsilon, distance)
    figures = _figures(counts, accountant, adjacency, orders)
    least = sys.float_info.min if counts else 0.0  # an underflow is no proof of delta 0
    found = max(figures.delta(epsilon), least)
    if accountant == "pld" and found < _FAINT and (spent := _rdp_or_none(counts, adjacency)) is not None:
        said = "so small a delta is below what PLD resolves here, so RDP answers"
        by_rdp = max(spent.delta(epsilon), least)
        if by_rdp < found:
            return Answer(epsilon, min(1.0, by_rdp + sampler), "rdp", True, said, sampler)
    flaw = figures.flaw(found) if 0 < found < 1 else None
    total = min(1.0, found + sampler)
    return Answer(epsilon, total, accountant, flaw is None, flaw or _rests_on(counts), sampler)


def _costliest_first(event: Event, delta: float, accountant: str, adjacency: Adjacency) -> list[dict[Leaf, int]]:
    """The events of clients of each size, the most expensive by RDP first, so that PLD computes few of them."""
    found = list(counted(event, adjacency).values())
    if len(found) == 1 or accountant != "pld":
        return found
    return sorted(found, key=lambda counts: -_rdp_says(counts, delta, adjacency))


def _rdp_says(counts: Mapping[Leaf, int], delta: float, adjacency: Adjacency) -> float:
    """The epsilon by RDP, which is never less than that of PLD; infinite where RDP does not apply."""
    ideal, distance = without_sampler(counts)
    spent = None if _unbounded(ideal) else _rdp_or_none(ideal, adjacency)
    return math.inf if spent is None else epsilon_beside(spent.epsilon, delta, distance)


def unbounded(event: Event) -> str | None:
    """Why nothing is proven about this event, whatever the accountant; None where something is."""
    return _unbounded(leaves(event))


def at_least(event: Event, delta: float, adjacency: Adjacency = "add-or-remove") -> float | None:
    """A lower bound on epsilon, attained by some data, where `epsilon` is only an upper bound; else None.

    Fixed-size sampling under replace-one: if all other units pull one way and the changed one the other
    way, the output is that of Poisson sampling at half the noise, up to a known shift.
    """
    counts, _ = without_sampler(leaves(event))
    if adjacency != "replace-one" or not any(_is_fixed_size(leaf) for leaf in counts):
        return None
    if not all(_is_fixed_size(leaf) or isinstance(leaf, Gaussian) for leaf in counts):
        return None
    attained: dict[Leaf, int] = {}
    for leaf, n in counts.items():
        noise = leaf.event.noise if isinstance(leaf, Sampled) and isinstance(leaf.event, Gaussian) else 0.0
        if isinstance(leaf, Sampled):
            attained[Sampled("poisson", leaf.rate, Gaussian(noise / 2))] = n
        elif isinstance(leaf, Gaussian):
            attained[Gaussian(leaf.noise / 2)] = n
    found = pld.profile(attained, "add-or-remove").epsilon(delta)
    return None if math.isinf(found) else found  # too small a delta for this computation


def _pld(counts: Mapping[Leaf, int], adjacency: Adjacency, orders: str) -> Figures:
    return Figures(
        lambda delta: pld.epsilon(counts, adjacency, delta),
        lambda epsilon: pld.profile(counts, adjacency).delta(epsilon),
        lambda _: None,
    )


def _rdp(counts: Mapping[Leaf, int], adjacency: Adjacency, orders: str) -> Figures:
    spent = rdp.total(counts, adjacency)
    return Figures(
        lambda delta: rdp.epsilon(rdp.DEFAULT, spent, delta),
        lambda epsilon: rdp.delta(rdp.DEFAULT, spent, epsilon),
        lambda _: None,
    )


def _rdp_classic(counts: Mapping[Leaf, int], adjacency: Adjacency, orders: str) -> Figures:
    chosen = rdp.grid(orders)
    taken: dict[Leaf, int] = {}
    for leaf, n in counts.items():
        as_taken = replace(leaf, kind="poisson") if isinstance(leaf, Sampled) and _is_fixed_size(leaf) else leaf
        taken[as_taken] = taken.get(as_taken, 0) + n
    mistaken = any(_is_fixed_size(leaf) for leaf in counts)
    flaw = "the moments accountant treats fixed-size samples as Poisson samples" if mistaken else None
    spent = rdp.total(taken, "add-or-remove" if mistaken else adjacency, chosen)
    return Figures(
        lambda delta: rdp.classic_epsilon(chosen, spent, delta),
        lambda epsilon: rdp.classic_delta(chosen, spent, epsilon),
        lambda _: flaw,
    )


def _zcdp(counts: Mapping[Leaf, int], adjacency: Adjacency, orders: str) -> Figures:
    done = composition.steps(counts, adjacency, "zcdp")
    return Figures(
        lambda delta: composition.zcdp_epsilon(done, delta),
        lambda epsilon: composition.zcdp_delta(done, epsilon),
        lambda _: composition.zcdp_flaw(done),
    )


def _textbook(
    name: str, epsilon_of: Callable[[list[composition.Step], float], float], slack: int
) -> Callable[[Mapping[Leaf, int], Adjacency, str], Figures]:
    def figures(counts: Mapping[Leaf, int], adjacency: Adjacency, orders: str) -> Figures:
        done = composition.steps(counts, adjacency, name)
        return Figures(
            lambda delta: epsilon_of(done, delta),
            lambda epsilon: _inverse(lambda delta: epsilon_of(done, delta), epsilon),
            lambda delta: composition.composition_flaw(done, delta, slack),
        )

    return figures


_OWN: dict[str, Accountant] = {
    "pld": _pld,
    "rdp": _rdp,
    "rdp-classic": _rdp_classic,
    "zcdp": _zcdp,
    "advanced": _textbook("advanced", composition.advanced_epsilon, slack=1),
    "basic": _textbook("basic", composition.basic_epsilon, slack=0),
}
REGISTRY = Registry("accountant", Accountant, lambda: _OWN, "shoal.accountants")
_FAINT = 1e-8  # deltas below this may be smaller than the rounding that pld allows for


def _figures(counts: Mapping[Leaf, int], accountant: str, adjacency: Adjacency, orders: str) -> Figures:
    """An accountant's figures; where its arithmetic fails, or gives no number, nothing is known."""
    accounts = REGISTRY.find(accountant)
    try:
        with np.errstate(all="ignore"):
            found = accounts(counts, adjacency, orders)
    except ArithmeticError:
        return Figures(lambda _: math.inf, lambda _: 1.0, lambda _: None)
    return Figures(_or_else(found.epsilon, math.inf), _or_else(found.delta, 1.0), found.flaw)


def _or_else(figure: Callable[[float], float], otherwise: float) -> Callable[[float], float]:
    """The figure, or something else where it is no number: max() and min() would drop a NaN, comparisons pass it."""

    def found(at: float) -> float:
        try:
            with np.errstate(all="ignore"):
                value = figure(at)
        except (ArithmeticError, ValueError):
            return otherwise
        return otherwise if math.isnan(value) else value

    return found


def _known(accountant: str) -> str:
    REGISTRY.find(accountant)
    return accountant


def _inverse(epsilon_at: Callable[[float], float], epsilon: float) -> float:
    """The delta at which a falling epsilon(delta) meets epsilon, by bisection of its logarithm."""
    low, high = -300.0, 0.0
    if epsilon_at(10**low) <= epsilon:
        return 10**low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon_at(10**middle) <= epsilon else (middle, high)
    return float(10**high)


def _rdp_or_none(counts: Mapping[Leaf, int], adjacency: Adjacency) -> Figures | None:
    """RDP's figures, where it understands all events."""
    try:
        return _figures(counts, "rdp", adjacency, "")
    except ConfigError:
        return None


def _unbounded(counts: Mapping[Leaf, int]) -> str | None:
    return next((leaf.because for leaf in counts if isinstance(leaf, Unbounded)), None)


def _is_fixed_size(leaf: Leaf) -> bool:
    return isinstance(leaf, Sampled) and leaf.kind == "fixed-size"


def _rests_on(counts: Mapping[Leaf, int]) -> str | None:
    if any(isinstance(leaf, TwoLevel) and leaf.participation == "hidden" for leaf in counts):
        return "holds only where it is hidden whether the record's client took part in a round"
    most = max((leaf.records for leaf in counts if isinstance(leaf, SampledUser | TwoLevel)), default=1)
    if most > 1:
        return f"at most {most} records of a user are used"
    if any(isinstance(leaf, Allocated) for leaf in counts):
        return "holds only where it is hidden in which round of a block the unit took part"
    return None
