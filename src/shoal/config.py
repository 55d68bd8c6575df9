"""A run's configuration: TOML for people, frozen dataclasses inside, every key and value checked on reading.

The sections are the boundaries of the chosen algorithm (`clients`, `records`, `local`, ...), `data` and
`engine`; the keys are the fields of their dataclasses. So `-c clients.cohort=30` changes just that field.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from shoal.algorithms import algorithm as find_algorithm
from shoal.algorithms import mechanism as find_mechanism
from shoal.algorithms.base import BOUNDARIES, Algorithm
from shoal.checked import checked
from shoal.config_sections import BudgetSection, DataSection, FederationSection, StopSection
from shoal.data.schema import Schema
from shoal.data.schema_keys import take_schema
from shoal.errors import ConfigError, nearest
from shoal.renamed import current_keys, current_section, refuse_twice
from shoal.tasks import TaskSettings
from shoal.toml_text import flat, toml_key, toml_word
from shoal.training.engine_settings import Settings


@dataclass(frozen=True)
class Config:
    """Everything that defines a run.

    Attributes:
        algorithm: The method, by name or as `package.module:NAME`.
        model: A built-in network, or `package.module:Class`; `auto` picks one for the data.
        init: A file or run whose weights the model begins with. It must not come from the data that are protected.
        rounds: The most rounds that are run.
        seed: Determines the partition, the initial model and everything else that is random.
        baseline: Also train without clipping and noise, for comparison.
        noise_seed: A seed of its own for clients, batches and noise, so that runs on the same clients share no noise.
        random: `research` draws everything from the seed; `secure` from the system's entropy, and cannot be repeated.
        log: An experiment tracker that gets the metrics of every round.
        data: The section `data`.
        task: The section `task`.
        budget: The section `budget`.
        engine: The section `engine`.
        stop: The section `stop`.
        federation: The section `federation`.
        mechanisms: The boundaries at which another mechanism than the algorithm's was chosen, with its name
            (`per_record.mechanism`).
        schema: What the columns of a table are (shoal.data.schema).
    """

    algorithm: Algorithm
    model: str = "auto"
    init: str | None = None
    rounds: int = 30
    seed: int = 0
    baseline: bool = False
    noise_seed: int | None = None
    random: Literal["research", "secure"] = "research"
    log: Literal["none", "tensorboard", "mlflow"] = "none"
    data: DataSection = field(default_factory=DataSection)
    task: TaskSettings = field(default_factory=TaskSettings)
    budget: BudgetSection = field(default_factory=BudgetSection)
    engine: Settings = field(default_factory=Settings)
    stop: StopSection = field(default_factory=StopSection)
    federation: FederationSection = field(default_factory=FederationSection)
    mechanisms: tuple[tuple[str, str], ...] = ()
    schema: Schema | None = None


MOST_ROUNDS = 1_000_000

_KINDS = get_type_hints(Config)
_SECTIONS = {each.name: each.default_factory() for each in fields(Config) if callable(each.default_factory)}
_TOP: dict[str, tuple[Any, Any]] = {"algorithm": (str, "fedavg")} | {
    each.name: (_KINDS[each.name], each.default)
    for each in fields(Config)
    if each.name not in (*_SECTIONS, "algorithm", "mechanisms", "schema")
}
"""The type and the default of each key outside the sections."""

DEFAULT_EXPERIMENT: dict[str, Any] = {
    "algorithm": "geyer-private",
    "model": "linear",
    "rounds": 30,
    "baseline": True,
    "data.clients": 200,
    "clients.sampling": "all",
    "records.batch": 20,
    "local.epochs": 5,
    "local.lr": 5.0,
    "per_update.initial_clip_norm": 4.0,
    "budget.epsilon": 4.0,
    "budget.delta": 5e-4,  # below 1/1,437, one over the records of digits
    "budget.calibrate": True,
}
"""What `shoal run` does by default: digits over 200 clients, client level, proven epsilon 4."""


def configure(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    allowed: Collection[str] | None = None,
) -> Config:
    """The configuration of a TOML file or a mapping of the same shape, with overrides on top.

    Args:
        source: The file or mapping. Without one, and unless an override names an algorithm, it is the default
            experiment, but for the number of clients where the data are others.
        overrides: Words such as `rounds=50`.
        allowed: The packages from which the configuration may have something imported; None: from any.

    Raises:
        ShoalError: A key or value cannot be used.
    """
    given, written, in_file = _given(source, overrides, here=allowed is None)
    schema = take_schema(given)
    algorithm = _algorithm(given, allowed)
    chosen, sections = _sections(given, algorithm, allowed)
    refuse_twice(in_file, _known(sections))
    given = current_keys(given, _known(sections), written)
    top, changes = _by_section(given, sections, algorithm)
    built = {name: _changed(name, section, changes.get(name, {})) for name, section in sections.items()}
    _refuse_contradictions(top, given)
    _refuse_other_task(built["task"], schema)
    if chosen:
        algorithm = replace(algorithm, published=None)  # the paper's recipe does not speak of them
    algorithm = replace(algorithm, **{name: built.pop(name) for name in BOUNDARIES})
    return Config(algorithm, **top, **built, mechanisms=tuple(chosen.items()), schema=schema)


def _given(
    source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str], *, here: bool
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """All keys and values, the default experiment's included; the user's names of the keys; which a file has.

    `here`: whether `data.name` is the user's own. A coordinator may not learn which files exist at a site.
    """
    read = read_toml(Path(source)) if isinstance(source, str | Path) else flat(source or {})
    in_file = tuple(read) if isinstance(source, str | Path) else ()
    for word in overrides:
        key, value = override(word)
        read.pop(key, None)  # so that it comes after a key of another name that means the same
        read[key] = value
    written = {current_section(key): key for key in read}
    given = {current_section(key): value for key, value in read.items()}
    if here:
        _refuse_bare_table(given)
    if source is None and "algorithm" not in given:
        others = {"data.clients"} if given.get("data.name", DataSection.name) != DataSection.name else set()
        given = {key: value for key, value in DEFAULT_EXPERIMENT.items() if key not in others} | given
    return given, written, in_file


def _algorithm(given: dict[str, Any], allowed: Collection[str] | None) -> Algorithm:
    """The algorithm; its key is taken out of `given`."""
    named = given.pop("algorithm", _TOP["algorithm"][1])
    return find_algorithm(named if isinstance(named, Algorithm) else checked("algorithm", named, str), allowed)


def _sections(
    given: dict[str, Any], algorithm: Algorithm, allowed: Collection[str] | None
) -> tuple[dict[str, str], dict[str, Any]]:
    """The mechanisms chosen, by boundary, and all sections; the keys `*.mechanism` are taken out of `given`."""
    chosen = {name: given.pop(key) for name in BOUNDARIES if (key := f"{name}.mechanism") in given}
    sections = _SECTIONS | {name: getattr(algorithm, name) for name in BOUNDARIES}
    for name, other in chosen.items():
        sections[name] = find_mechanism(checked(f"{name}.mechanism", other, str), name, allowed)
    return chosen, sections


def _by_section(
    given: Mapping[str, Any], sections: Mapping[str, Any], algorithm: Algorithm
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The values of the keys outside sections, defaults included; and what is given in each section."""
    top = {name: default for name, (_, default) in _TOP.items() if name != "algorithm"}
    changes: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        if value == {} and key in sections:
            continue
        _refuse_unknown(key, sections, algorithm)
        section, _, name = key.rpartition(".")
        if section:
            changes.setdefault(section, {})[name] = value
        else:
            top[name] = checked(name, value, _TOP[name][0])
    return top, changes


def _refuse_contradictions(top: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if not 1 <= top["rounds"] <= MOST_ROUNDS:
        raise ConfigError(f"rounds must be in 1 to {MOST_ROUNDS:,}, got {top['rounds']}")
    contradict = "contradict each other: leave one of them out"
    if "records.rate" in given and "records.batch" in given:
        raise ConfigError(
            f"records.rate {given['records.rate']} and records.batch {given['records.batch']} {contradict}"
        )
    if top["random"] == "secure" and top["noise_seed"] is not None:
        raise ConfigError(f"noise_seed {top['noise_seed']} and random=secure {contradict}")


def read_toml(path: Path) -> dict[str, Any]:
    """The keys and values of a TOML file, with dotted keys."""
    try:
        return flat(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # also of a number too long, or lists too deep
        raise ConfigError(f"config file {path} is not TOML: {error}") from None


def to_dict(config: Config) -> dict[str, Any]:
    """The whole configuration, in the shape of its TOML file; unset keys are left out."""
    result: dict[str, Any] = {name: getattr(config, name) for name in _TOP}
    result = {name: value for name, value in result.items() if value is not None}
    result["algorithm"] = config.algorithm.name
    sections = {name: getattr(config, name) for name in _SECTIONS}
    for name in ("federation", "task", "stop"):  # most runs are simulations, of the task that the data bring
        if sections[name] == _SECTIONS[name]:
            del sections[name]
    sections |= {name: getattr(config.algorithm, name) for name in BOUNDARIES}
    for name, section in sections.items():
        if is_dataclass(section):
            values = {field.name: getattr(section, field.name) for field in fields(section)}
            result[name] = {key: value for key, value in values.items() if value is not None}
    for name, mechanism in config.mechanisms:
        result[name]["mechanism"] = mechanism
    if config.algorithm.records.rate is not None:
        del result["records"]["batch"]  # it follows from the rate
    if config.schema is not None:
        result["schema"] = config.schema.to_mapping()
    return result


def to_toml(config: Config) -> str:
    """The configuration as a TOML file that `read_toml` reads back."""
    tables = to_dict(config)
    lines = [f"{key} = {toml_word(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            held = {key: value for key, value in table.items() if not isinstance(value, dict)}
            lines += ["", f"[{name}]", *(f"{key} = {toml_word(value)}" for key, value in held.items())]
            for key in table.keys() - held.keys():
                inner = (f"{toml_key(each)} = {toml_word(value)}" for each, value in table[key].items())
                lines += ["", f"[{name}.{key}]", *inner]
    return "\n".join(lines) + "\n"


def _refuse_bare_table(given: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a table of which nothing is known but its name: any method would be a guess."""
    name, chosen = given.get("data.name"), {key.partition(".")[0] for key in given}
    if chosen & {"algorithm", "budget", "schema", *BOUNDARIES}:
        return
    if not isinstance(name, str) or Path(name).suffix not in (".csv", ".parquet") or not Path(name).is_file():
        return
    flags = {"--label": given.get("data.label"), "--client-column": given.get("data.client_column")}
    words = ["shoal", "init", name, *(word for pair in flags.items() if pair[1] for word in map(str, pair))]
    raise ConfigError(
        f"data.name {name} is a table without a schema, method or budget: `{shlex.join(words)}` writes them to "
        f"experiment.toml; then `shoal run experiment.toml`"
    )


def _refuse_other_task(task: TaskSettings, schema: Schema | None) -> None:
    """Raise a ConfigError where the sections `task` and `schema` contradict each other."""
    if schema is None:
        return
    if task.kind in ("classification", "multi-label", "regression", "next-token") and task.kind != schema.task:
        raise ConfigError(f"task.kind {task.kind} and schema.task {schema.task} contradict each other: leave one out")
    if task.range is not None and task.range != schema.range:
        raise ConfigError("task.range would be ignored, since schema.range is the label's range; leave it out")


def override(word: str) -> tuple[str, Any]:
    """The key and the value of a word `key=value`."""
    key, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(f"'-c {word}' has no '='; write key=value, for example -c rounds=50")
    text = re.sub(r"^([+-]?)\.(?=\d)", r"\g<1>0.", text)  # .5 is a number to people, though not to TOML
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return key.strip(), text
    return key.strip(), read["value"] if len(read) == 1 else text


def _refuse_unknown(key: str, sections: Mapping[str, Any], algorithm: Algorithm) -> None:
    section, _, name = key.partition(".")
    if key in _TOP or (is_dataclass(sections.get(section)) and name in _names(sections[section])):
        return
    if section in sections and sections[section] is None:
        raise ConfigError(
            f"'{key}': algorithm {algorithm.name} has nothing at the boundary '{section}'; leave this key out"
        )
    known = [*_TOP, *(f"{name}.{field}" for name, held in _known(sections).items() for field in sorted(held))]
    raise ConfigError(f"there is no key '{key}' (algorithm {algorithm.name}){nearest(key, known)}")


def _known(sections: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The fields of each section."""
    return {name: _names(section) for name, section in sections.items() if is_dataclass(section)}


def _names(section: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(section))


@cache
def _kinds(section: type) -> dict[str, Any]:
    """The type of each field; resolving their names takes longer than checking the values."""
    return get_type_hints(section)


def _changed(name: str, section: Any, changes: Mapping[str, Any]) -> Any:
    """The section with these changes; an instance where the section is a class."""
    new = isinstance(section, type)
    if not changes and not new:
        return section
    kind: Any = section if new else type(section)
    kinds = _kinds(kind)
    values = {key: checked(f"{name}.{key}", value, kinds[key]) for key, value in changes.items()}
    try:
        return section(**values) if new else replace(section, **values)
    except TypeError as error:  # a setting without a default is missing
        raise ConfigError(f"{name}.mechanism {section.__name__}: {error}") from None
