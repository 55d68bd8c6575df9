"""Claims: what is proven against which observer and, separately, what a paper published.

A `Proven` comes only from events and an accountant whose figure is a bound. A `Published` is what the
paper's own recipe gives; it is always labelled with that recipe and never turns into a `Proven`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from shoal.accounting import accountants
from shoal.accounting.accountants import Answer
from shoal.accounting.events import Event, TwoLevel
from shoal.accounting.leaves import leaves
from shoal.accounting.rounding import up
from shoal.accounting.theorems import Adjacency, refused
from shoal.accounting.theorems import Observer as Observer
from shoal.accounting.theorems import Unit as Unit
from shoal.errors import ConfigError, nearest
from shoal.html_text import html_table

RESEARCH = (
    "research mode: the seed must be secret, too large to guess (the model shows which guess is right) and used "
    "once, and float32's rounding of the noise is not counted"
)
"""random=secure assumes neither."""

GRAPH = "that part of delta is also for the sparse graph of secure aggregation"
"""Added to claims against a server under it."""

COHORTS = "the server draws who takes part at random, as agreed"
"""Added to claims against a server that are means over who takes part: it could choose one client every time."""

PUBLIC_K = "the number of clients, "
"""How claims for clients begin to say that it is public."""

CLASSES = "the names of the classes, which were read from the labels, are public"
"""Added to all claims of a run for which nobody gave them: the only record of a class shows in them."""

COLUMNS = "ranges and categories of columns, which were read from the data, are public"
"""The same where nobody gave, or confirmed, those: the only record of a category shows in the model's inputs."""

ARRAYS = "what the arrays were scaled or encoded by (means, categories) was not learnt from these data"
"""Added to all claims of a run on arrays, which do not show how they were made."""

INITIAL = (
    "the weights that training began with (init, or those of your own model) were not learnt from these data, and "
    "nothing is claimed for the data that they were learnt from"
)
"""Added to all claims of a run that was given some, or code that may have loaded some: they are charged nothing."""

DEALT = "who holds which records, which their labels decided (data.partition), is public, and stays when one changes"
"""Added to all claims of a run that deals records by label: one changed label gives most clients other records."""

SIMULATED = "simulated clients"
"""Added to every claim for simulated clients: it protects no real one."""


@dataclass(frozen=True, repr=False)
class Proven:
    """For one unit against one observer: an (epsilon, delta), or none, because ...

    Attributes:
        unit: Who is protected.
        observer: Against whom.
        epsilon: The bound; null where nothing is proven.
        delta: The delta at which it holds.
        accountant: How it was computed.
        because: Why nothing is proven or, where something is, what it assumes.
        adjacency: How neighbouring data sets differ; null in claims written before it was recorded.
        simulated: Whether the unit is a simulated client, to which records were assigned.
        sampler_delta: The part of delta that covers the error of the noise sampler, and of a sparse graph of secure
            aggregation; null where the claim does not say.
    """

    unit: Unit
    observer: Observer
    epsilon: float | None
    delta: float | None
    accountant: str | None
    because: str | None
    adjacency: str | None = None
    simulated: bool = False
    sampler_delta: float | None = None

    def __post_init__(self) -> None:
        check_unit(self.unit)
        check_observer(self.observer)
        if self.adjacency is not None and self.adjacency not in get_args(Adjacency):
            names = get_args(Adjacency)
            raise ConfigError(f"no adjacency is called '{self.adjacency}'{nearest(self.adjacency, names)}")
        if self.epsilon is None and not self.because:
            raise ConfigError(f"a claim of nothing ({self.unit}, {self.observer}) must give a reason")
        if self.epsilon is not None and (self.delta is None or self.accountant is None):
            raise ConfigError(f"a proven epsilon ({self.unit}, {self.observer}) needs a delta and an accountant")

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def words(self) -> str:
        """`epsilon 7.9 at delta 1e-5 (pld, zero-out)`, or `none, because ...`."""
        if self.epsilon is None or self.delta is None:
            return f"none, because {self.because}"
        how = self.accountant if self.adjacency is None else f"{self.accountant}, {self.adjacency}"
        said = f"epsilon {up(self.epsilon)} at delta {up(self.delta, 6)} ({how})"
        if self.sampler_delta:
            said = f"{said}; {up(self.sampler_delta, 1)} of delta is for the noise sampler"
        said = f"{said}; {self.because}" if self.because else said
        return f"{said}; {SIMULATED}" if self.simulated else said

    def brief(self) -> str:
        """`simulated client, release: epsilon 7.9 at delta 1e-5`; without what it assumes, or why there is none."""
        unit = f"simulated {self.unit}" if self.simulated else self.unit
        found = "none" if self.epsilon is None else f"epsilon {up(self.epsilon)} at delta {up(self.delta or 0.0, 6)}"
        return f"{unit}, {self.observer}: {found}"

    def __repr__(self) -> str:
        return f"Proven({self.brief()})"

    def _repr_html_(self) -> str:
        return html_table("proven", [(self.unit, self.observer, self.words())], ("unit", "observer", ""))


@dataclass(frozen=True, repr=False)
class Published:
    """What the method's paper claims for one unit, and the recipe that gives the figure.

    Attributes:
        unit: Who is protected.
        epsilon: The figure that the paper's recipe gives. It is not proven.
        delta: Its delta.
        recipe: The paper, and how it computes the figure.
    """

    unit: Unit
    epsilon: float
    delta: float
    recipe: str

    def __post_init__(self) -> None:
        check_unit(self.unit)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def words(self) -> str:
        """`epsilon 8 at delta 1e-5 (published, not proven: ...)`."""
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:g} (published, not proven: {self.recipe})"

    def __repr__(self) -> str:
        return f"Published({self.unit}: epsilon {self.epsilon:.4g} at delta {self.delta:g}, not proven)"

    def _repr_html_(self) -> str:
        return html_table("published, not proven", [(self.unit, self.words())], ("unit", ""))


def prove(
    unit: Unit,
    observer: Observer,
    event: Event,
    delta: float,
    accountant: str = "pld",
    *,
    adjacency: Adjacency,
    clients: int | None = None,
) -> Proven:
    """What is proven for a unit against an observer after these events; `clients`: K, which is public.

    The rate m/K and the mean over K clients depend on K, so it is not hidden.
    """
    because = refused(event, unit, adjacency, observer) if accountants.unbounded(event) is None else None
    if because is not None:
        return nothing(unit, observer, because, adjacency)
    found = claim(unit, observer, accountants.epsilon(event, delta, accountant, adjacency), adjacency, clients)
    drawn = any(isinstance(leaf, TwoLevel) and 0 < leaf.client_rate < 1 for leaf in leaves(event))
    return saying(found, COHORTS) if drawn and observer == "server" else found


def claim(unit: Unit, observer: Observer, answer: Answer, adjacency: Adjacency, clients: int | None = None) -> Proven:
    """An accountant's answer as a claim."""
    if answer.epsilon is None or not answer.valid:
        return nothing(unit, observer, answer.because or "the accountant gives no bound", adjacency)
    public = f"{PUBLIC_K}{clients:,}, is public" if unit == "client" and clients else None
    rests_on = "; ".join(each for each in (answer.because, public) if each) or None
    sampler = answer.sampler_delta or None
    return Proven(
        unit, observer, answer.epsilon, answer.delta, answer.accountant, rests_on, adjacency, sampler_delta=sampler
    )


def stated(found: Proven, facts: Mapping[str, Any]) -> Proven:
    """A claim with all that it assumes of its run, by what the first line of the ledger says of that.

    The claims of a run that ended and of one that was killed both pass through here.
    """
    assumed = [
        RESEARCH if facts.get("random") == "research" else None,
        GRAPH if found.observer == "server" and facts.get("sparse_graph") else None,
        facts.get("users") if found.unit == "user" else None,
        *assumed_public(facts),
    ]
    for words in filter(None, assumed):
        found = saying(found, words)
    return replace(found, simulated=found.unit == "client" and bool(facts.get("simulated")))


def assumed_public(facts: Mapping[str, Any]) -> list[str]:
    """What a claim assumes, by the first line of a ledger: of what was read from the data, of arrays, of weights."""
    assumed = (
        ("read_classes", CLASSES),
        ("read_columns", COLUMNS),
        ("arrays", ARRAYS),
        ("dealt_by_label", DEALT),
        ("init", INITIAL),
    )
    return [words for key, words in assumed if facts.get(key)]


def saying(found: Proven, words: str) -> Proven:
    """A claim, where something is proven, that also says this."""
    if found.epsilon is None:
        return found
    return replace(found, because="; ".join(filter(None, (found.because, words))))


def nothing(unit: Unit, observer: Observer, because: str, adjacency: Adjacency) -> Proven:
    """`none, because ...`."""
    return Proven(unit, observer, None, None, None, because, adjacency)


def large_delta(unit: str, delta: float, units: int) -> str | None:
    """A warning where delta is above 1/(number of units): publishing one of them in full would count as private."""
    if units < 1 or delta * units <= 1:
        return None
    return (
        f"delta {delta:g} is above 1/{units:,}, one over the number of {unit}s: a method that publishes one {unit} "
        f"in full, chosen at random, would pass; take a smaller delta"
    )


def check_unit(unit: str) -> None:
    """Raise a ConfigError where there is no such unit of privacy."""
    if unit not in get_args(Unit):
        raise ConfigError(f"no unit of privacy is called '{unit}'{nearest(unit, get_args(Unit))}")


def check_observer(observer: str) -> None:
    """Raise a ConfigError where there is no such observer."""
    if observer not in get_args(Observer):
        raise ConfigError(f"no observer is called '{observer}'{nearest(observer, get_args(Observer))}")
