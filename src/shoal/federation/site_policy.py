"""The bounds that a site's owner sets on a federation's terms, checked before the terms are used for anything.

A check takes the same time whatever the terms say: a schedule is evaluated at its minimum and maximum, not in every
round. Bounds on clip norm and learning rate keep away from the limits of float32, where norms and noise underflow;
the others keep a coordinator from demanding more work or memory than a site has.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, time
from itertools import chain

from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.config import MOST_ROUNDS
from shoal.errors import ConfigError, nearest
from shoal.federation.consent import Refused
from shoal.federation.terms import Terms
from shoal.mechanisms.schedules import parse
from shoal.mechanisms.setting import Setting

Range = tuple[float, float]
Period = tuple[time, time]
RENAMED = {"clip": "clip_norm"}


@dataclass(frozen=True)
class Bounds:
    """The smallest and largest value that this site accepts for each term, the methods, and the hours.

    Attributes:
        clip_norm: Clip norms of gradients and updates, including adaptive ones.
        lr: The learning rate.
        steps: Local steps a round.
        rounds: Rounds of the run.
        batch: Records in a batch, each counted as often as it has views.
        clients: Sites in the federation.
        cohort: Sites that are expected to take part in a round.
        parameters: Parameters of the model.
        weight: The largest absolute value of a parameter.
        canaries: Canary clients, whose random updates measure privacy: nobody's data, but they change the model.
        methods: The algorithms that may be used; None accepts any.
        hours: When the site trains, by its own clock; empty: at any time.
        sources: Where the owner set each of these, for refusals.
    """

    clip_norm: Range = (1e-6, 1e6)
    lr: Range = (1e-9, 1e4)
    steps: Range = (1, 10_000)
    rounds: Range = (1, 10_000)
    batch: Range = (1, 100_000)
    clients: Range = (1, 1_000_000)
    cohort: Range = (0, 1_000_000)
    parameters: Range = (1, 500_000_000)
    weight: Range = (0, 1e9)
    canaries: Range = (0, 0)
    methods: tuple[str, ...] | None = None
    hours: tuple[Period, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name, (low, high) in self._ranges.items():
            if not 0 <= low <= high:
                where = self.sources.get(name, f"--bound {name}")
                raise ConfigError(f"{where}: it must be LOW:HIGH with 0 <= LOW <= HIGH, got {low:g}:{high:g}")

    @classmethod
    def read(cls, words: Iterable[str]) -> Bounds:
        """Parse bounds such as `clip_norm=0.1:10` or `rounds=:500`; whatever is omitted keeps its default."""
        found = cls()._ranges
        for word in words:
            name, equals, text = word.partition("=")
            if name in RENAMED:
                warnings.warn(f"--bound {name} is now called {RENAMED[name]}", FutureWarning, 2)
                name = RENAMED[name]
            if name not in found:
                raise ConfigError(f"--bound {word}: there is no bound '{name}'{nearest(name, found)}")
            low, colon, high = text.partition(":")
            if not (equals and colon):
                raise ConfigError(
                    f"--bound {word}: write {name}=LOW:HIGH, for example {name}={':'.join(map(_shown, found[name]))}"
                )
            try:
                found[name] = (float(low or found[name][0]), float(high or found[name][1]))
            except ValueError:
                raise ConfigError(f"--bound {word}: LOW and HIGH must be numbers") from None
        return cls(**found)  # type: ignore[arg-type]

    def refuse(self, terms: Terms) -> None:
        """Raise Refused where a term is out of bounds in any round."""
        for problem in self.problems(terms):
            raise Refused(problem)

    def problems(self, terms: Terms) -> Iterator[str]:
        """Each term that is out of bounds, in words."""
        first: list[tuple[str, str, float]] = [
            ("rounds", "rounds", terms.setting.rounds),
            ("clients", "data.clients", terms.setting.clients),
            ("parameters", "the model's number of parameters", terms.charged.parameters),
        ]
        for name, key, value in first:
            yield from self._outside(name, key, value)
        if terms.setting.rounds > MOST_ROUNDS:  # schedules of so many are not evaluated
            return
        algorithm, setting = terms.settings.algorithm, terms.setting
        yield from self._outside("canaries", "federation.canaries", terms.settings.federation.canaries)
        if self.methods is not None and algorithm.name not in self.methods:
            accepted = ", ".join(self.methods) or "none"
            yield f"the method is {algorithm.name}, this site accepts {accepted} ({self.sources['methods']})"
        asked = _asked(algorithm, setting.rounds), _clips(algorithm, setting.rounds, terms.charged.parameters)
        for name, key, value in chain(*asked, _cohorts(algorithm, setting)):
            yield from self._outside(name, key, value)

    def refuse_model(self, model: Tensor) -> None:
        """Raise Refused where a parameter of the model is too large."""
        self.refuse_value("weight", "the model's largest parameter", float(model.abs().amax()))

    def refuse_value(self, name: str, key: str, value: float) -> None:
        """Raise Refused where the value of `key` is outside bound `name`."""
        for problem in self._outside(name, key, value):
            raise Refused(problem)

    def refuse_hour(self, at: datetime) -> None:
        """Raise Refused outside the hours in which the site trains."""
        moment = at.time()
        if self.hours and not any(_within(period, moment) for period in self.hours):
            accepted = " and ".join(f"{start:%H:%M} to {end:%H:%M}" for start, end in self.hours)
            raise Refused(f"it is {moment:%H:%M} here, this site trains from {accepted} ({self.sources['hours']})")

    def _outside(self, name: str, key: str, value: float) -> Iterator[str]:
        if not self._inside(name, value):
            accepted = " to ".join(map(_shown, self._ranges[name]))
            source = self.sources.get(name, f"its --bound {name}=LOW:HIGH")
            yield f"{key} is {_shown(value)}, this site accepts {accepted} ({source})"

    def _inside(self, name: str, value: float) -> bool:
        low, high = self._ranges[name]
        return low <= value <= high

    @property
    def _ranges(self) -> dict[str, Range]:
        return {name: getattr(self, name) for name in RANGES}


RANGES = tuple(each.name for each in fields(Bounds) if each.name not in ("methods", "hours", "sources"))


def _within(period: Period, moment: time) -> bool:
    start, end = period
    return start <= moment < end if start < end else moment >= start or moment < end


def _asked(algorithm: Algorithm, rounds: int) -> Iterator[tuple[str, str, float]]:
    """The bound, key and value of each term that an algorithm sets; for a schedule, its minimum and maximum."""
    records, local = algorithm.records, algorithm.local
    views = f" x {records.augmentations} records.augmentations" if records.augmentations else ""
    yield "batch", f"records.batch{views}", records.batch * max(1, records.augmentations)
    yield "steps", *(("local.epochs", local.epochs) if local.steps is None else ("local.steps", local.steps))
    clips = [("clip_norm", key, text) for each in algorithm.mechanisms for key, text in each.scales().items()]
    for name, key, text in (*clips, ("lr", "local.lr", local.lr)):
        schedule = parse(text)
        for t in schedule.extremes(rounds):
            where = "" if schedule.shape == "constant" else f" in round {t + 1} of {rounds} ({text})"
            yield name, key + where, schedule.value(t, rounds)


def _clips(algorithm: Algorithm, rounds: int, parameters: int) -> Iterator[tuple[str, str, float]]:
    """The clips that the mechanisms apply, whatever settings they follow from."""
    per_record, per_update = algorithm.per_record, algorithm.per_update
    for t in algorithm.extreme_rounds(rounds):
        where = f" in round {t + 1} of {rounds}"
        if per_record is not None:
            yield "clip_norm", f"the clip of per_record{where}", per_record.least({}, t, rounds, parameters)
        bound = per_update.public_bound(t, rounds) if per_update is not None else None
        if bound is not None and bound < math.inf:
            yield "clip_norm", f"the clip of per_update{where}", bound


def _cohorts(algorithm: Algorithm, setting: Setting) -> Iterator[tuple[str, str, float]]:
    for t in algorithm.extreme_rounds(setting.rounds):
        expected = algorithm.clients.expected(t, setting.rounds, setting.clients)
        yield "cohort", f"the expected cohort in round {t + 1} of {setting.rounds}", expected


def _shown(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) or value < 10**6 else f"{min(value, 10**18):.3g}"
