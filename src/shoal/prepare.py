"""From a configuration to a trainer that is ready to run: data, clients, noise and model, all checked."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from shoal.algorithms.base import Algorithm
from shoal.algorithms.charges import calibrated
from shoal.cache import cache_folder
from shoal.config import Config
from shoal.config_sections import DataSection
from shoal.data import Dataset, Partition, load, partition
from shoal.data.features import cached
from shoal.errors import ConfigError, DataError
from shoal.gradients import Layout
from shoal.gradients.ways import Way
from shoal.inputs import parts, single
from shoal.mechanisms.setting import Setting
from shoal.models import build, check
from shoal.models.check import refuse_tokens, takes_tokens
from shoal.models.initial import load_initial
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.tasks import Own, Regression, TaskSettings, choose
from shoal.training.budget import Limit
from shoal.training.cohort import Population
from shoal.training.round import SimulatedCohort
from shoal.training.trainer import Trainer, simulate


def prepare(config: Config, data: Any, model: Any) -> tuple[Config, Trainer[SimulatedCohort]]:
    """Load and check the data and the model, before anything is written.

    Args:
        config: The configuration.
        data: A data set instead of the one that the configuration names, or None.
        model: A module, or a class of modules, instead of the one that the configuration names, or None.

    Returns:
        The configuration with `auto` and `calibrate` resolved, and a trainer of simulated clients.
    """
    config, module, dataset, parts = _built(config, data, model)
    trainer = simulate(
        config.algorithm, module, dataset, parts,
        rounds=config.rounds, streams=streams_of(config), settings=config.engine,
    )  # fmt: skip
    return with_way(config, trainer.cohort.network.way), trainer


def planned(config: Config, data: Any) -> tuple[Config, Setting]:
    """The same for claims alone, which need no trainer: the configuration, and all that they depend on."""
    config, module, _, parts = _built(config, data, None)
    return config, _setting(config, Population.of(parts), module)


def _built(config: Config, data: Any, model: Any) -> tuple[Config, nn.Module, Dataset, Partition]:
    dataset = dataset_of(config, data)
    _refuse_private_stopping(config, dataset)
    config = _resolved(config, dataset)
    parts = parted(config, dataset)
    return *with_model(config, dataset, model, Population.of(parts)), parts


def _setting(config: Config, population: Population, module: nn.Module) -> Setting:
    layout = Layout.of(module, config.algorithm.local.personal)
    return population.setting(config.rounds, layout, config.random == "secure")


def with_way(config: Config, way: str) -> Config:
    """The configuration with the way that was chosen: a resumed run with another would differ in its last digits."""
    return replace(config, engine=replace(config.engine, way=cast(Way, way)))


def dataset_of(config: Config, data: Any) -> Dataset:
    """The data set that was given, or else the one that the configuration names, with its features and its task."""
    dataset = with_features(data if isinstance(data, Dataset) else load_data(config), config.data.features)
    unconfirmed = config.schema is not None and bool(config.schema.unconfirmed)  # which may not be the data's own
    return replace(with_task(dataset, config.task), read_columns=dataset.read_columns or unconfirmed)


def with_task(dataset: Dataset, settings: TaskSettings, allowed: Collection[str] | None = None) -> Dataset:
    """The data set with the task that the configuration asks for; classes named by numbers may become numbers."""
    if settings.kind in (Regression.kind, Own.kind) and dataset.train_y.dtype == torch.int64:
        dataset = as_numbers(dataset, settings.kind)
    task = choose(settings, dataset.train_y, dataset.classes, dataset.known_task, allowed)
    return replace(dataset, known_task=task)


def as_numbers(dataset: Dataset, kind: str = Regression.kind) -> Dataset:
    """Codes of classes become the numbers that name them; for a user's own loss, names stay codes."""
    own, train_y, test_y = kind == Own.kind, dataset.train_y, dataset.test_y
    codes = train_y.dim() == 1 and bool(dataset.classes)
    try:
        values = torch.tensor([int(name) if own else float(name) for name in dataset.classes if codes])
    except ValueError as error:
        if own:
            return dataset
        raise ConfigError(f"task.kind is regression, but the targets are names: {error}") from None
    if codes:
        train_y, test_y = values[train_y], values[test_y]
    elif own:
        return dataset
    else:
        train_y, test_y = train_y.float(), test_y.float()
    return replace(dataset, train_y=train_y, test_y=test_y, classes=(), known_task=None)


def with_model(
    config: Config, dataset: Dataset, model: Any, population: Population
) -> tuple[Config, nn.Module, Dataset]:
    """The configuration with its noise calibrated, the model, built and checked, and the data as it takes them."""
    wanted = config.model if model is None or isinstance(model, str) else deepcopy(model)
    module = build(wanted, dataset.input_shape, dataset.task.outputs, seed=Streams(config.seed).number("model"))
    if config.init is not None:
        load_initial(module, config.init)
    dataset = fitted(module, dataset, config.algorithm)
    return _calibrated(config, population, module), module, dataset


def fitted(module: nn.Module, dataset: Dataset, algorithm: Algorithm) -> Dataset:
    """The data set as the model takes it: whole numbers become floats where it does not; checks that both fit."""
    shape, whole = dataset.input_shape, [n for n, x in parts(dataset.train_x).items() if x.dtype == torch.int64]
    tokens: bool | list[str] = whole
    if isinstance(shape, tuple):
        tokens = bool(whole) and takes_tokens(module, shape)
        if whole and not tokens:
            train_x, test_x = (single(x, DataError, "").float() for x in (dataset.train_x, dataset.test_x))
            dataset = replace(dataset, train_x=train_x, test_x=test_x)
    record_level, noisy = algorithm.per_record is not None, algorithm.draws_noise
    if record_level and dataset.linked:
        raise ConfigError(
            f"algorithm {algorithm.name} protects single records, but those of data '{dataset.name}' hold facts "
            f"about their client's others; protect clients, with algorithm=geyer-private"
        )
    check(
        module, shape, dataset.task, record_level=record_level, noisy_updates=noisy, targets=dataset.train_y,
        tokens=tokens,
    )  # fmt: skip
    if tokens:
        refuse_tokens(module, dataset.train_x, dataset.test_x)
    return dataset


def streams_of(config: Config) -> Streams:
    """The random streams of a run."""
    if config.random == "secure":
        return SecureStreams(config.seed)
    return Streams(config.seed if config.noise_seed is None else config.noise_seed)


def parted(config: Config, dataset: Dataset) -> Partition:
    """Who holds which records, as the configuration says."""
    section, most = config.data, config.algorithm.records.max_per_user
    if most is not None and dataset.users is None:
        raise ConfigError(
            f"records.max_per_user is {most}, but records of data '{dataset.name}' name no users: set "
            f"schema.user_column, or shoal.from_arrays(..., user=...)"
        )
    parts = partition(
        section.partition,
        dataset.train_y,
        clients=None if section.partition == "column" else section.clients,
        shards=section.shards,
        alpha=section.alpha,
        fraction=section.fraction,
        records=section.records,
        owners=dataset.owners,
        generator=Streams(config.seed).generator("partition"),
    )
    parts = replace(parts, users=dataset.users, public_ownership=section.public_ownership)
    return parts if most is None else parts.capped(most)


def with_noise(config: Config, dataset: Dataset, module: nn.Module) -> Config:
    """The configuration with its noise calibrated, where it asks for that."""
    if not config.budget.calibrate:
        return config
    config = _resolved(config, dataset)
    return _calibrated(config, Population.of(parted(config, dataset)), module)


def _calibrated(config: Config, population: Population, module: nn.Module) -> Config:
    """The configuration with the noise that spends the budget, as the run's config.toml then states it."""
    if not config.budget.calibrate:
        return config
    limit = limit_of(config)
    budget = limit.budget()
    assert budget is not None  # calibrate without an epsilon was refused
    algorithm = calibrated(config.algorithm, _setting(config, population, module), budget, limit.unit, limit.observer)
    return replace(config, algorithm=algorithm, budget=replace(config.budget, calibrate=False))


def load_data(config: Config) -> Dataset:
    """The data set that the configuration names, before any features."""
    section = config.data
    return load(
        section.name,
        scale=section.scale,
        label=section.label,
        client=section.client_column,
        schema=config.schema,
        test_fraction=section.test_fraction,
    )


def with_features(dataset: Dataset, name: str) -> Dataset:
    """The data set with public features, computed once and cached."""
    if name == "none":
        return dataset
    folder = cache_folder() / "features"
    of_pictures = (single(x, DataError, f"features '{name}'") for x in (dataset.train_x, dataset.test_x))
    train_x, test_x = (cached(name, x, folder) for x in of_pictures)
    return replace(dataset, train_x=train_x, test_x=test_x, rows=dataset.digest())


def _resolved(config: Config, dataset: Dataset) -> Config:
    """The configuration with `auto` resolved, now that the data are known."""
    section = config.data
    if section.partition == "auto" and dataset.owners is None and not dataset.known:
        return _of_one_client(config, dataset)
    if section.partition == "auto":
        section = replace(section, partition="iid" if dataset.owners is None else "column")
    if section.partition == "column" and dataset.owners is not None:
        named = len(dataset.owner_names)
        if section.clients not in (DataSection.clients, named):
            raise ConfigError(
                f"data.clients is {section.clients}, but the data name {named} clients; leave it out, or assign "
                f"the rows to simulated clients with data.partition=iid"
            )
        section = replace(section, clients=named)
    elif dataset.linked:
        raise ConfigError(
            f"data.partition is {section.partition}, but records of data '{dataset.name}' hold facts about their "
            f"client's others: leave them with their clients, data.partition=column"
        )
    return replace(config, data=section)


def _of_one_client(config: Config, dataset: Dataset) -> Config:
    """Data without owners belong to one client: clients are simulated only where the user asks for it."""
    section, method, budget = config.data, config.algorithm, config.budget
    wanted = None
    if section.clients not in (1, DataSection.clients):
        wanted = f"data.clients is {section.clients}"
    elif budget.epsilon is not None and budget.unit == "client":
        wanted = "budget.unit is client"
    elif method.clients.greatest(config.rounds) > 1:
        wanted = f"clients.cohort is {method.clients.cohort}"
    if wanted is not None:
        raise ConfigError(
            f"{wanted}, but data '{dataset.name}' name no clients, so they are one client: name the column of "
            f"owners with data.client_column, assign the rows to simulated clients with data.partition=iid, or "
            f"protect records with algorithm=dp-sgd and budget.unit=record"
        )
    return replace(config, data=replace(section, partition="iid", clients=1))


def _refuse_private_stopping(config: Config, dataset: Dataset) -> None:
    """Raise a ConfigError where early stopping would look at records that are protected."""
    stop = config.stop
    if stop.patience is None or not config.algorithm.draws_noise:
        return
    if not stop.public:
        raise ConfigError(
            f"stop.patience {stop.patience} looks at the held-out records, which no claim covers: set "
            f"stop.public=true if they are public, or leave it out"
        )
    if config.algorithm.local.personal:
        raise ConfigError(
            f"stop.patience {stop.patience} looks at figures computed with personal layers (local.personal), which "
            f"no noise covers: leave one of the two out"
        )
    if dataset.held_out or dataset.test_owners is not None:
        raise ConfigError(
            f"stop.public is true, but the held-out records of data '{dataset.name}' belong to its clients, or were "
            f"cut from the same table: pass public ones, shoal.from_arrays(..., test=(x, y)), or leave stop out"
        )


def limit_of(config: Config) -> Limit:
    """The budget as training takes it."""
    budget = config.budget
    return Limit(budget.delta, budget.epsilon, budget.unit, budget.observer)
