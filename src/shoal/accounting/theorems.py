"""One table of what a sampling scheme costs, by adjacency and observer: a theorem, or why there is none.

Every accountant reads events through `counted`, which refuses what the table refuses; the documentation shows the
same table. Shifts are in units of the clip: N(2) is a Gaussian whose mean moved by two clips.

Adjacency. `zero-out`: the unit adds 0 to what gets the noise but still counts; that noise and the sampling of all
others are unchanged (Kairouz et al. 2021). `add-or-remove`: there is one unit more or fewer. `replace-one`: one unit
is replaced by another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from shoal.accounting.events import (
    Allocated,
    BySize,
    Compose,
    Event,
    Leaf,
    OnClients,
    Repeat,
    Sampled,
    SampledUser,
    TwoLevel,
)
from shoal.accounting.leaves import by_size
from shoal.errors import ConfigError, nearest

Unit: TypeAlias = Literal["record", "user", "client"]
Observer: TypeAlias = Literal["release", "server", "client-process"]
Adjacency: TypeAlias = Literal["add-or-remove", "zero-out", "replace-one"]
Level: TypeAlias = Literal["clients", "records", "users"]

BALLE = "Balle, Barthe, Gaboardi 2018"
GAUSS = "Balle, Wang 2018, Theorem 8"
CHARLES = "Charles et al. 2024; Choquette-Choo et al. 2024, mixtures of Gaussians"
MEAN = "the hockey-stick divergence of a mixture with a visible component is the mean over components"


@dataclass(frozen=True)
class Cell:
    """A theorem with its reference, or a refusal; `amplified`: secret sampling lowers the cost."""

    theorem: str = ""
    reference: str = ""
    refused: str = ""
    amplified: bool = False

    def words(self) -> str:
        """The cell as the table shows it."""
        return f"refused: {self.refused}" if self.refused else f"{self.theorem} ({self.reference})"


_MIXTURE = "sum_j Bin(K, q)(j) N(j) against N(0), in both directions, with K records of a user"
_TWICE = "at two clips, in both directions"
_SECRET: dict[tuple[str, Adjacency], Cell] = {
    ("none", "add-or-remove"): Cell("N(1) against N(0)", GAUSS),
    ("none", "zero-out"): Cell("N(1) against N(0)", GAUSS),
    ("none", "replace-one"): Cell("N(2) against N(0)", GAUSS),
    ("poisson", "add-or-remove"): Cell(
        "q N(1) + (1 - q) N(0) against N(0)", f"{BALLE}, Theorem 8; Zhu, Dong, Wang 2022, Theorem 11", amplified=True
    ),
    ("poisson", "zero-out"): Cell(
        "q N(1) + (1 - q) N(0) against N(0)", f"{BALLE}, Theorem 8; Zhu, Dong, Wang 2022, Theorem 11", amplified=True
    ),
    ("poisson", "replace-one"): Cell(
        "q N(1) + (1 - q) N(0) against q N(-1) + (1 - q) N(0)",
        "Koskela, Jälkö, Honkela 2020, substitute relation",
        amplified=True,
    ),
    ("fixed-size", "add-or-remove"): Cell(
        "q N(2) + (1 - q) N(0) against N(0): the unit that enters displaces another",
        f"{BALLE}, Theorem 2",
        amplified=True,
    ),
    ("fixed-size", "zero-out"): Cell(f"amplified {_TWICE}", f"{BALLE}, Theorem 2", amplified=True),
    ("fixed-size", "replace-one"): Cell(f"amplified {_TWICE}", f"{BALLE}, Theorem 9", amplified=True),
    ("with-replacement", "add-or-remove"): Cell(
        "drawn k times: N(2k) against N(0), amplified", f"{BALLE}, Theorem 2", amplified=True
    ),
    ("with-replacement", "zero-out"): Cell(
        "drawn k times: N(2k) against N(0), amplified in both directions", f"{BALLE}, Theorem 2", amplified=True
    ),
    ("with-replacement", "replace-one"): Cell(
        "drawn k times: N(2k) against N(0), amplified in both directions", f"{BALLE}, Theorem 10", amplified=True
    ),
    ("shuffled", "add-or-remove"): Cell(
        refused="in batches of a fixed size an added record displaces others, so more than one step changes"
    ),
    ("shuffled", "zero-out"): Cell("N(1) against N(0), once a pass", "joint convexity; Chua et al. 2024"),
    ("shuffled", "replace-one"): Cell("N(2) against N(0), once a pass", "joint convexity; Chua et al. 2024"),
    ("by-user", "add-or-remove"): Cell(_MIXTURE, CHARLES, amplified=True),
    ("by-user", "zero-out"): Cell(_MIXTURE, CHARLES, amplified=True),
    ("by-user", "replace-one"): Cell(refused="no worst pair of neighbours is known"),
    ("random-allocation", "add-or-remove"): Cell(
        "(1/t) sum_i N(e_i) against N(0), once a block of t", "Chua et al. 2025; convex order", amplified=True
    ),
    ("random-allocation", "zero-out"): Cell(
        "(1/t) sum_i N(e_i) against N(0), once a block of t", "Chua et al. 2025; convex order", amplified=True
    ),
    ("random-allocation", "replace-one"): Cell(
        refused="no pair is known that dominates two units in turn, in the same secret round"
    ),
    ("cyclic", "add-or-remove"): Cell(
        refused="with one client more or fewer, every client's place in the cycle may change"
    ),
    ("cyclic", "zero-out"): Cell("one Gaussian per cycle, or the cost of correlated noise", "Denisov et al. 2022"),
    ("cyclic", "replace-one"): Cell("the same at two clips", "Denisov et al. 2022"),
    ("min-separation", "add-or-remove"): Cell(
        refused="with one client more or fewer, others take part in other rounds"
    ),
    ("min-separation", "zero-out"): Cell(
        "one Gaussian for the run, of the participation that costs most", "Kalinin, Lampert 2024"
    ),
    ("min-separation", "replace-one"): Cell("the same at two clips", "Kalinin, Lampert 2024"),
    ("cyclic-poisson", "add-or-remove"): Cell(
        refused="with one client more or fewer, every client's group may change"
    ),
    ("cyclic-poisson", "zero-out"): Cell(
        "q N(1) + (1 - q) N(0) against N(0), once a cycle of as many rounds as bands or more",
        "Choquette-Choo et al. 2023",
        amplified=True,
    ),
    ("cyclic-poisson", "replace-one"): Cell(
        "q N(1) + (1 - q) N(0) against q N(-1) + (1 - q) N(0), once a cycle of as many rounds as bands or more",
        "Choquette-Choo et al. 2023",
        amplified=True,
    ),
}
_USES_K = "the mean, or the rate m/K, depends on the number of clients K: claim zero-out, with K public"
_PLAIN = "this observer sees who takes part: claim zero-out or replace-one"
IN_SIGHT = "sampling of clients amplifies only where it is hidden who takes part, and this observer sees that"
DRAWN = "which of its records a step draws hides no client: all of them change"
_SEPARATED = ("cyclic", "min-separation", "cyclic-poisson")
_CLIENTS = ("none", "poisson", "fixed-size", *_SEPARATED, "random-allocation")
_RECORDS = ("none", "poisson", "fixed-size", "with-replacement", "shuffled", "random-allocation")


def _clients(scheme: str, adjacency: Adjacency, observer: Observer) -> Cell:
    """Noise on the sum hides participation from released models; the server and the client process see it."""
    if observer == "release":
        uses_k = adjacency == "add-or-remove" and scheme in ("none", "poisson", "random-allocation")
        return Cell(refused=_USES_K) if uses_k else _SECRET[scheme, adjacency]
    if adjacency == "add-or-remove":
        return Cell(refused=_PLAIN)
    if scheme in _SEPARATED:
        return Cell(refused=f"{scheme} participation is accounted only where the noise is on the sum")
    if scheme == "random-allocation":
        return Cell(refused="this observer sees who takes part, and so in which round")
    rate = "" if scheme == "none" else "with probability q "
    return Cell(f"{rate}N(2) against N(0), by the client's own noise", MEAN if rate else GAUSS)


TABLE: dict[tuple[Level, str, Adjacency, Observer], Cell] = (
    {
        ("clients", scheme, adjacency, observer): _clients(scheme, adjacency, observer)
        for scheme in _CLIENTS
        for adjacency in ("zero-out", "add-or-remove", "replace-one")
        for observer in ("release", "server", "client-process")
    }
    | {  # no observer sees which records a step drew, only the noisy steps
        ("records", scheme, adjacency, observer): _SECRET[scheme, adjacency]
        for scheme in _RECORDS
        for adjacency in ("zero-out", "add-or-remove", "replace-one")
        for observer in ("release", "server", "client-process")
    }
    | {  # of a user's records, K at most at a client
        ("users", "poisson", adjacency, observer): _SECRET["by-user", adjacency]
        for adjacency in ("zero-out", "add-or-remove", "replace-one")
        for observer in ("release", "server", "client-process")
    }
)


def of_scheme(scheme: str, adjacency: Adjacency) -> Cell:
    """The theorem for a unit that a scheme samples in secret; an empty one for a scheme that is not in the table."""
    return _SECRET.get((scheme, adjacency), Cell())


def counted(event: Event, adjacency: Adjacency) -> dict[int, dict[Leaf, int]]:
    """The event as the leaves that accountants add up, for clients of each size (leaves.by_size).

    Raises:
        ConfigError: The table refuses one of them.
    """
    if adjacency not in get_args(Adjacency):
        raise ConfigError(f"no adjacency is called '{adjacency}'{nearest(adjacency, get_args(Adjacency))}")
    for scheme, why in _unaccounted(event, adjacency):
        others = [each for each in ("replace-one", "zero-out") if not _SECRET[scheme, each].refused]
        raise ConfigError(
            f"{scheme} sampling under {adjacency} is not accounted: {why}; "
            f"take {' or '.join(others)} as the adjacency (--adjacency)"
        )
    return by_size(event)


def refused(event: Event, unit: Unit, adjacency: Adjacency, observer: Observer) -> str | None:
    """Why no theorem covers what happened to this unit, for this observer; None where one does."""
    if unit == "client":
        because = refused_for_clients(event, adjacency, observer)
    else:
        because = next((why for _, why in _unaccounted(event, adjacency)), None)
    return because or amplified_in_sight(event, unit, observer)


def _unaccounted(event: Event, adjacency: Adjacency) -> Iterator[tuple[str, str]]:
    """The schemes in an event that have no theorem under this adjacency, and why."""
    for scheme in _schemes(event):
        if refused := _SECRET[scheme, adjacency].refused:
            yield scheme, refused


def refused_for_clients(event: Event, adjacency: Adjacency, observer: Observer) -> str | None:
    """Why the table has no theorem for a client to whom this happened; None where it has one for all of it.

    All records of a client change, whichever of them a step draws.
    """
    for part in _parts(event):
        if isinstance(part, SampledUser) or (isinstance(part, TwoLevel) and part.local != "none"):
            return DRAWN
    schemes = dict.fromkeys(_schemes(event)) or ("none",)
    for scheme in schemes:
        unknown = Cell(refused=f"no theorem covers {scheme} sampling of clients")
        if refused := TABLE.get(("clients", scheme, adjacency, observer), unknown).refused:
            return refused
    return None


def amplified_in_sight(event: Event, unit: Unit, observer: Observer) -> str | None:
    """Why an event that rests on hidden participation proves nothing: this observer sees who takes part.

    Of a client's records, and of a user's, nobody sees which ones a step drew.
    """
    hidden = (
        (isinstance(leaf, TwoLevel) and leaf.participation == "hidden" and 0 < leaf.client_rate < 1)
        or (unit == "client" and isinstance(leaf, Sampled | Allocated))
        for counts in by_size(event).values()
        for leaf in counts
    )
    return IN_SIGHT if observer != "release" and any(hidden) else None


def _schemes(event: Event) -> Iterator[str]:
    """The sampling schemes anywhere in the event; a unit that always takes part was not sampled."""
    for part in _parts(event):
        match part:
            case Sampled(kind, rate) if 0 < rate < 1 or (rate and kind == "with-replacement"):
                yield kind
            case SampledUser():
                yield "by-user"
            case Allocated():
                yield "random-allocation"
            case TwoLevel():
                yield from _schemes(part.local_event)


def _parts(event: Event) -> Iterator[Event]:
    """The event and all inside it."""
    yield event
    match event:
        case Sampled(_, _, inner) | Repeat(inner) | OnClients(_, inner) | BySize(inner):
            yield from _parts(inner)
        case Compose(events):
            for inner in dict.fromkeys(events):
                yield from _parts(inner)


def markdown() -> str:
    """The table as the documentation has it."""
    lines = ["| sampled | scheme | adjacency | released models | server, client process |", "|---|---|---|---|---|"]
    for level, scheme, adjacency, observer in TABLE:
        if observer != "release":
            continue
        name = {"none": "all"}.get(scheme, scheme)
        seen, server = (TABLE[level, scheme, adjacency, who] for who in ("release", "server"))
        other = "the same" if server == seen else server.words()
        lines.append(f"| {level} | {name} | {adjacency} | {seen.words()} | {other} |")
    return "\n".join(lines) + "\n"
