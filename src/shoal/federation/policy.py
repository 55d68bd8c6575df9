"""The bounds that a site's owner sets on a federation's terms, checked before the terms are used for anything.

A check takes the same time whatever the terms say: a schedule is evaluated at its minimum and maximum, not in every
round. Bounds on clip norm and learning rate keep away from the limits of float32, where norms and noise underflow;
the others keep a coordinator from demanding more work or memory than a site has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain

from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.errors import ConfigError, nearest
from shoal.federation.consent import Refused
from shoal.federation.terms import Terms
from shoal.mechanisms.schedules import parse

Range = tuple[float, float]


@dataclass(frozen=True)
class Bounds:
    """The smallest and largest value that this site accepts for each term.

    Attributes:
        clip: Clip norms of gradients and updates, including adaptive ones.
        lr: The learning rate.
        steps: Local steps a round.
        rounds: Rounds of the run.
        batch: Records in a batch, each counted as often as it has views.
        clients: Sites in the federation.
        parameters: Parameters of the model.
        weight: The largest absolute value of a parameter.
    """

    clip: Range = (1e-6, 1e6)
    lr: Range = (1e-9, 1e4)
    steps: Range = (1, 10_000)
    rounds: Range = (1, 10_000)
    batch: Range = (1, 100_000)
    clients: Range = (1, 1_000_000)
    parameters: Range = (1, 500_000_000)
    weight: Range = (0, 1e9)

    def __post_init__(self) -> None:
        for name, (low, high) in self._ranges.items():
            if not 0 <= low <= high:
                raise ConfigError(f"--bound {name} must be LOW:HIGH with 0 <= LOW <= HIGH, got {low:g}:{high:g}")

    @classmethod
    def read(cls, words: Iterable[str]) -> Bounds:
        """Parse bounds such as `clip=0.1:10` or `rounds=:500`; whatever is omitted keeps its default."""
        found = cls()._ranges
        for word in words:
            name, equals, text = word.partition("=")
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
        return cls(**found)

    def refuse(self, terms: Terms) -> None:
        """Raise Refused where a term is out of bounds in any round."""
        self.refuse_value("rounds", "rounds", terms.setting.rounds)  # before schedules are evaluated
        self.refuse_value("clients", "data.clients", terms.setting.clients)
        self.refuse_value("parameters", "the model's number of parameters", terms.charged.parameters)
        algorithm, rounds = terms.settings.algorithm, terms.setting.rounds
        for name, key, value in chain(_asked(algorithm, rounds), _clips(algorithm, rounds, terms.charged.parameters)):
            self.refuse_value(name, key, value)

    def refuse_model(self, model: Tensor) -> None:
        """Raise Refused where a parameter of the model is too large."""
        self.refuse_value("weight", "the model's largest parameter", float(model.abs().amax()))

    def refuse_value(self, name: str, key: str, value: float) -> None:
        """Raise Refused where the value of `key` is outside bound `name`."""
        low, high = self._ranges[name]
        if not low <= value <= high:
            accepted = f"{_shown(low)} to {_shown(high)}"
            raise Refused(f"{key} is {_shown(value)}, this site accepts {accepted} (its --bound {name}=LOW:HIGH)")

    @property
    def _ranges(self) -> dict[str, Range]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _asked(algorithm: Algorithm, rounds: int) -> Iterator[tuple[str, str, float]]:
    """The bound, key and value of each term that an algorithm sets; for a schedule, its minimum and maximum."""
    records, local = algorithm.records, algorithm.local
    views = f" x {records.augmentations} records.augmentations" if records.augmentations else ""
    yield "batch", f"records.batch{views}", records.batch * max(1, records.augmentations)
    yield "steps", *(("local.epochs", local.epochs) if local.steps is None else ("local.steps", local.steps))
    clips = [("clip", key, text) for each in algorithm.mechanisms for key, text in each.scales().items()]
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
            yield "clip", f"the clip of per_record{where}", per_record.least({}, t, rounds, parameters)
        bound = per_update.public_bound(t, rounds) if per_update is not None else None
        if bound is not None and bound < math.inf:
            yield "clip", f"the clip of per_update{where}", bound


def _shown(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) or value < 10**6 else f"{min(value, 10**18):.3g}"
