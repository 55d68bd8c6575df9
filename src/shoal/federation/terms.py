"""What a federation asks of a site: the whole configuration and the public facts, sent once, before any round.

A site reads the algorithm's record from it by itself, so that what it does and what it charges to its own ledger
follow from what it agreed to, not from what it is told later. Every round names the digest of these terms.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property

from shoal.algorithms.base import Algorithm
from shoal.config import Config, configure
from shoal.errors import ConfigError, PluginError, ShoalError
from shoal.federation.messages import InvalidMessage
from shoal.mechanisms.setting import Setting
from shoal.training.cohort import Population

PROTOCOL = 3
TERMS, ROUND, END = "query.terms", "train.round", "query.end"
"""The kinds of messages, as Flower names message types."""


@dataclass(frozen=True)
class Terms:
    """`seed` is there only where every random number follows from it (`federation.seeded`).

    `allowed`: the packages besides Shoal from which their reader lets algorithms be imported; it does not travel.
    """

    run: str
    config: str
    setting: Setting
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    parameters: int
    seed: int | None
    allowed: Collection[str] = field(default=(), compare=False)

    @property
    def charged(self) -> Setting:
        """The setting by which a site charges: which noise it draws, and for how many numbers, it knows itself."""
        return replace(self.setting, parameters=self.parameters, secure=self.seed is None)

    @cached_property
    def settings(self) -> Config:
        try:
            config = configure(tomllib.loads(self.config), allowed=self.allowed)
            refuse_turns(config.algorithm)
            return config
        except PluginError:  # for the owner alone: it may tell what is on this machine
            raise
        except (ShoalError, ValueError, RecursionError) as error:
            raise InvalidMessage(f"the configuration cannot be used here: {error}") from None

    @cached_property
    def text(self) -> str:
        told = asdict(self)
        del told["allowed"]
        return json.dumps({"protocol": PROTOCOL, **told}, sort_keys=True)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def refuse_counts(self) -> None:
        """Spoilt where a count is below 1: no federation has it, and a charge times 0 is none."""
        counts = {name: getattr(self.setting, name) for name in ("clients", "rounds", "multiplicity", "layers")}
        counts |= {"parameters": self.parameters} | {f"sizes[{i}]": n for i, n in enumerate(self.setting.sizes)}
        for name, count in counts.items():
            if count < 1:
                raise InvalidMessage(f"the terms' {name} must be >= 1, got {count}")

    @classmethod
    def read(cls, text: str, allowed: Collection[str] = ()) -> Terms:
        """Terms from the wire; Spoilt where they cannot be understood."""
        try:
            found = json.loads(text)
            if found.pop("protocol") != PROTOCOL:
                raise InvalidMessage(
                    "the coordinator speaks another version of the protocol: use the same Shoal everywhere"
                )
            setting = {each.name: found["setting"].pop(each.name) for each in fields(Setting)}
            setting["sizes"] = tuple(int(size) for size in setting["sizes"])
            if any(
                type(setting[name]) is not int
                for name in ("clients", "rounds", "multiplicity", "layers", "parameters")
            ):
                raise TypeError
            if any(type(setting[name]) is not bool for name in ("all_answer", "bounds", "simulated", "secure")):
                raise TypeError
            told = cls(
                run=str(found.pop("run")),
                config=str(found.pop("config")),
                setting=Setting(**setting),
                classes=tuple(map(str, found.pop("classes"))),
                shape=tuple(int(n) for n in found.pop("shape")),
                parameters=int(found.pop("parameters")),
                seed=None if (seed := found.pop("seed")) is None else int(seed),
                allowed=allowed,
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidMessage(f"the terms cannot be understood: {type(error).__name__}") from None
        told.refuse_counts()
        if told.text != text:
            raise InvalidMessage("the terms hold more than is known here: use the same Shoal everywhere")
        return told


@dataclass(frozen=True)
class Crossing:
    """What crosses from a site to the coordinator in a round besides one vector, by the algorithm's record.

    `raw`: the update leaves as it was trained, for the method clips it or adds its noise at the server.
    `below`: one bit, was its norm within the clip; `share`: the noisy share of gradients that were; `records`: how
    many records the site has, where updates are weighted by that.
    """

    raw: bool
    below: bool
    share: bool
    records: bool

    @classmethod
    def of(cls, algorithm: Algorithm) -> Crossing:
        per_update, per_record = algorithm.per_update, algorithm.per_record
        return cls(
            raw=per_update is not None and per_update.leaves_raw,
            below=per_update is not None and per_update.counts,
            share=per_record is not None and per_record.counts,
            records=algorithm.aggregate.by_size,
        )

    @property
    def values(self) -> set[str]:
        return {name for name in ("below", "share", "records") if getattr(self, name)}


def population(config: Config) -> Population:
    """What is public of the sites: how many there are, and, if the configuration says so, their sizes."""
    section = config.federation
    sizes = {size for size in (section.min_records, section.max_records) if size is not None}
    return Population(config.data.clients, tuple(sorted(sizes)), all_answer=False, bounds=True)


def refuse_turns(algorithm: Algorithm) -> None:
    """A ConfigError where what a site owes depends on whose turn it was: its own ledger counts rounds, not turns."""
    if algorithm.clients.cyclic or (algorithm.per_round is not None and algorithm.per_round.correlated):
        raise ConfigError(
            f"algorithm {algorithm.name}: clients that come in turn, and noise that rounds share, can only be "
            f"simulated; for a federation take another method, such as geyer-private"
        )
