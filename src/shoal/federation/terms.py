"""A federation's terms: the whole configuration and the public facts, sent to each site once, before any round.

A site builds the algorithm from the terms itself, so that its training and its ledger's charges follow from what it
agreed to, not from later messages. Every round names the digest of these terms.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property

from torch import nn

from shoal import release
from shoal.algorithms.base import Algorithm
from shoal.config import Config, configure
from shoal.errors import ConfigError, PluginError, ShoalError
from shoal.federation.messages import InvalidMessage
from shoal.federation.secagg.round_plan import graph_failure
from shoal.gradients import Layout
from shoal.inputs import InputShape, digest, read_shape
from shoal.mechanisms.setting import Setting
from shoal.toml_text import toml_word
from shoal.training.cohort import Population

PROTOCOL = 9
COUNTS = ("clients", "rounds", "multiplicity", "layers", "clients_per_user")
TERMS, ROUND, END = "query.terms", "train.round", "query.end"
"""The message types, as Flower writes them."""
OLDER_COPY = (
    "this site knows of rounds that the coordinator's ledger does not have: its run folder is an older copy; put the "
    "latest one back, or start a new run"
)
"""A site's refusal, at which a coordinator ends a resumed run: it may reach sites that do not know."""
FOLDER_LOST = (
    "this site has a place in the run, but its folder has no charge of it: the rounds before would never be counted. "
    "Restore the folder as it was last, or take part in the next run"
)
"""The refusal of a site that lost its folder, or had it restored from before it agreed to the run."""
FOLDER_OLD = (
    "this site has answered rounds of this run that its folder does not have: it is an older copy, and these rounds "
    "would never be counted. Restore the folder as it was last, or take part in the next run"
)
"""The refusal of a site that had its folder restored from within the run."""


@dataclass(frozen=True)
class Terms:
    """The terms of a federation.

    `seed` is set only where all random numbers follow from it (`federation.seeded`). `features` names the numbers of
    a row, in order, and `schema` is the digest of the configuration's schema: a site finds its columns by name, so
    that no swapped or renamed one is trained on. `frozen` is the digest of what the model keeps as it is, which a
    site builds itself and compares. `allowed`, which is never sent, names the packages besides Shoal from which the
    reader of the terms permits algorithms.
    """

    run: str
    config: str
    setting: Setting
    classes: tuple[str, ...]
    shape: InputShape
    parameters: int
    seed: int | None
    features: tuple[str, ...] = ()
    schema: str | None = None
    frozen: str = ""
    allowed: Collection[str] = field(default=(), compare=False)

    @property
    def charged(self) -> Setting:
        """The setting that a site charges by; its noise generator, graph and parameter count are its own facts.

        Of the parameters it counts those that get noise in a step, personal ones too; `parameters` are sent.
        """
        most = max(self.parameters, self.setting.parameters)
        failure = population(self.settings).graph_failure
        return replace(self.setting, parameters=most, secure=self.seed is None, graph_failure=failure)

    @cached_property
    def settings(self) -> Config:
        """The configuration, parsed and checked."""
        try:
            config = configure(tomllib.loads(self.config), allowed=self.allowed)
            refuse_groups(config.algorithm)
            refuse_unsettled(config.algorithm, config.rounds)
            if self.schema != schema_digest(config):
                raise InvalidMessage("the terms' schema digest is not that of their configuration's schema")
            return config
        except PluginError:  # for the owner alone: it may reveal what is installed
            raise
        except (ShoalError, ValueError, RecursionError) as error:
            raise InvalidMessage(f"the site cannot use this configuration: {error}") from None

    @cached_property
    def text(self) -> str:
        """The terms as JSON."""
        fields_ = asdict(self)
        del fields_["allowed"]
        return json.dumps({"protocol": PROTOCOL, **fields_}, sort_keys=True)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def refuse_counts(self) -> None:
        """Raise InvalidMessage where a count is below 1: zero rounds, for example, would be charged nothing."""
        counts = {name: getattr(self.setting, name) for name in COUNTS}
        counts |= {"parameters": self.parameters} | {f"sizes[{i}]": n for i, n in enumerate(self.setting.sizes)}
        for name, count in counts.items():
            if count < 1:
                raise InvalidMessage(f"the terms' {name} must be >= 1, got {count}")

    @property
    def label(self) -> str:
        """Whether the terms may be released: not where their configuration may not be."""
        settings, schema = self.settings, self.settings.schema
        found = release.of_config(settings.random, schema is not None and bool(schema.unconfirmed))
        return release.TERMS if found == release.CONFIG else found

    def to_toml(self) -> str:
        """The terms as a file for people, which `from_toml` reads back."""
        found = {key: value for key, value in json.loads(self.text).items() if value is not None and key != "config"}
        lines = [f"# {release.KEY}: {self.label}", f"# The terms of a federation, digest {self.digest}."]
        lines += [f"{key} = {toml_word(value)}" for key, value in found.items()]
        return "\n".join([*lines, "", "# The whole configuration:", f"config = {_several_lines(self.config)}", ""])

    @classmethod
    def from_toml(cls, text: str, allowed: Collection[str] = ()) -> Terms:
        """Read a file that `to_toml` wrote; raise a ConfigError where it is something else."""
        try:
            found = dict.fromkeys(("seed", "schema")) | tomllib.loads(text)
            return cls.read(json.dumps(found, sort_keys=True), allowed)
        except (ValueError, TypeError, RecursionError, InvalidMessage) as error:
            raise ConfigError(f"these are not terms of `shoal policy terms`: {error}") from None

    @classmethod
    def read(cls, text: str, allowed: Collection[str] = ()) -> Terms:
        """Parse terms that were received; raise InvalidMessage where they are malformed."""
        try:
            found = json.loads(text)
            if found.pop("protocol") != PROTOCOL:
                raise InvalidMessage(
                    "the coordinator uses another version of the protocol: install the same Shoal everywhere"
                )
            setting = {each.name: found["setting"].pop(each.name) for each in fields(Setting)}
            setting["sizes"] = tuple(int(size) for size in setting["sizes"])
            if any(type(setting[name]) is not int for name in (*COUNTS, "parameters", "user_columns")):
                raise TypeError
            if type(setting["graph_failure"]) is not float:
                raise TypeError
            flags = ("all_answer", "bounds", "simulated", "secure", "public_ownership")
            if any(type(setting[name]) is not bool for name in flags):
                raise TypeError
            terms = cls(
                run=str(found.pop("run")),
                config=str(found.pop("config")),
                setting=Setting(**setting),
                classes=tuple(map(str, found.pop("classes"))),
                shape=read_shape(found.pop("shape")),
                parameters=int(found.pop("parameters")),
                seed=None if (seed := found.pop("seed")) is None else int(seed),
                features=tuple(map(str, found.pop("features"))),
                schema=None if (schema := found.pop("schema")) is None else str(schema),
                frozen=str(found.pop("frozen")),
                allowed=allowed,
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidMessage(f"malformed field 'terms': {type(error).__name__}") from None
        terms.refuse_counts()
        if terms.text != text:
            raise InvalidMessage("the terms have fields unknown to this site: install the same Shoal everywhere")
        return terms


@dataclass(frozen=True)
class Crossing:
    """What a site sends in a round besides one vector, as the algorithm defines it.

    Attributes:
        raw: The update leaves as trained, because the method clips it or adds its noise at the server.
        below: One bit: whether the update's norm was within the clip norm.
        share: The noisy share of gradients that were.
        records: The number of the site's records, where updates are weighted by it.
    """

    raw: bool
    below: bool
    share: bool
    records: bool

    @classmethod
    def of(cls, algorithm: Algorithm) -> Crossing:
        """What an algorithm sends."""
        per_update, per_record = algorithm.per_update, algorithm.per_record
        return cls(
            raw=per_update is not None and per_update.leaves_raw,
            below=per_update is not None and per_update.counts,
            share=per_record is not None and per_record.counts,
            records=algorithm.aggregate.by_size,
        )

    @property
    def values(self) -> set[str]:
        """The names of the values sent."""
        return {name for name in ("below", "share", "records") if getattr(self, name)}


def frozen_digest(module: nn.Module, layout: Layout) -> str:
    """The digest of what a model keeps as it is, frozen parameters and buffers; empty where it keeps nothing."""
    frozen = layout.frozen(module)
    return digest(frozen).hex()[:64] if frozen else ""


def population(config: Config) -> Population:
    """Return the public facts about the sites: how many there are and, where configured, the range of their sizes.

    Raises:
        ConfigError: Sites would leave out records by users of whom no claim knows.
    """
    section, most = config.federation, config.algorithm.records.max_per_user
    sizes = {size for size in (section.min_records, section.max_records) if size is not None}
    failure = graph_failure(config.algorithm, section, Setting(config.data.clients, config.rounds))
    sites, users = config.data.clients, 0 if config.schema is None else len(config.schema.users)
    if most is not None and not users:
        raise ConfigError(
            f"records.max_per_user is {most}, but the federation names no users: set schema.user_column"
        )
    return Population(
        sites, tuple(sorted(sizes)), all_answer=False, bounds=True, graph_failure=failure, user_columns=users,
        clients_per_user=min(section.max_sites_per_user or sites, sites) if users else 1,
        public_ownership=config.data.public_ownership,
    )  # fmt: skip


def schema_digest(config: Config) -> str | None:
    """The digest of a configuration's schema, if it has one."""
    return None if config.schema is None else config.schema.digest


def refuse_groups(algorithm: Algorithm) -> None:
    """Raise a ConfigError for secret sampling in groups that take turns, which a site's ledger does not support."""
    if algorithm.clients.separated and algorithm.clients.secret:
        raise ConfigError(
            f"clients.sampling={algorithm.clients.sampling} can only be simulated; for a federation use "
            f"min-separation or cyclic, which need no secret sampling"
        )


def refuse_unsettled(algorithm: Algorithm, rounds: int) -> None:
    """Raise a ConfigError where a site would have to find itself what the coordinator's noise is made of."""
    if algorithm.per_round is None:
        return
    algorithm.per_round.refuse_growing(rounds)
    if algorithm.per_round.unsettled:
        raise ConfigError(
            "the terms name an optimised factorisation without its numbers (per_round.numbers), by which a site is "
            "charged: install the same Shoal everywhere"
        )


def _several_lines(text: str) -> str:
    """A TOML string of several lines where that is possible: people read it."""
    plain = "'''" not in text and re.fullmatch(r"[\t\n\x20-\x7e]*", text)
    return f"'''\n{text}'''" if plain else toml_word(text)
