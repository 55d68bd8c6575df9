"""`serve`: a run like that of `shoal.run`, trained by sites over a Flower grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.api import settings_of
from shoal.config import Config, to_toml
from shoal.errors import ConfigError
from shoal.execution import OnRound, OnStart, execute
from shoal.federation.coordinator import Log, RemoteCohort
from shoal.federation.flower.transport import Grid, Transport
from shoal.federation.operations.monitor import Monitor
from shoal.federation.secagg.round_plan import refuse_unfit, with_graph
from shoal.federation.secagg.secure_cohort import SecureCohort
from shoal.federation.terms import Terms, frozen_digest, population, refuse_groups
from shoal.gradients import network
from shoal.inputs import count
from shoal.mechanisms.setting import Setting
from shoal.prepare import dataset_of, with_model, with_way
from shoal.result import Result
from shoal.training.context import pick_device, stand_ins
from shoal.training.evaluation import Evaluation
from shoal.training.trainer import Trainer
from shoal.training.workers import Workers


def serve(
    grid: Grid,
    config: str | Path | dict[str, Any] | None = None,
    *,
    names: dict[str, str] | None = None,
    log: Log = lambda _words: None,
    overrides: Sequence[str] = (),
    resume: str | Path | None = None,
    runs: str | Path = "runs",
    no_guarantee: bool = False,
    on_start: OnStart | None = None,
    on_round: OnRound | None = None,
    data: Any = None,
    model: Any = None,
    monitor: Monitor | None = None,
) -> Result:
    """Coordinate a run over a Flower grid.

    Args:
        grid: The Flower grid that connects to the sites.
        config: As for `shoal.run`, and so are `overrides`, `resume`, `runs`, `no_guarantee`, `on_start`, `on_round`,
            `data` and `model`.
        names: The sites' names, by the hashes of their keys.
        log: Called with one line for each event.
        monitor: Receives events and the federation's status instead of `log`, and has the operators' commands.

    Returns:
        The result of the run.
    """
    started = time.perf_counter()
    settings = settings_of(config, data, model, overrides, {}, resume=resume, no_guarantee=no_guarantee)
    settings, trainer = coordinator(settings, data, model, partial(Transport, grid), names or {}, log, monitor)

    def report(line: dict[str, Any]) -> None:
        if monitor is not None:
            monitor.round(line)
        if on_round is not None:
            on_round(line)

    return execute(settings, trainer, started=started, resume=resume, runs=runs, on_start=on_start, on_round=report)


def planned_terms(config: str | Path | dict[str, Any], overrides: Sequence[str] = ()) -> Terms:
    """Return the terms that `serve` would send to every site, under the name of a run that is only planned."""
    settings = settings_of(config, None, None, overrides, {}, resume=None, no_guarantee=True)
    settings, trainer = coordinator(settings, None, None, partial(Transport, _NoSites()), {}, lambda _words: None)
    try:
        return trainer.cohort.terms("planned", to_toml(settings))
    finally:
        trainer.close()


class _NoSites:
    """A grid to which nobody is connected."""

    def get_nodes(self) -> list[Any]:
        return []

    def push_messages(self, messages: Any) -> list[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Any) -> list[Any]:
        return []


def coordinator(
    config: Config,
    data: Any,
    model: Any,
    transport: Callable[[int], Transport],
    names: dict[str, str],
    log: Log,
    monitor: Monitor | None = None,
) -> tuple[Config, Trainer[RemoteCohort]]:
    """Return the configuration as it is run, and a trainer whose clients are sites."""
    section = config.federation
    refuse_groups(config.algorithm)
    if config.baseline:
        raise ConfigError(
            "baseline=true trains without privacy on all data, which the coordinator does not have; remove it"
        )
    if config.stop.patience is not None:
        raise ConfigError(
            f"stop.patience {config.stop.patience}: sites charge only the rounds that were run, and stopping early "
            f"needs all planned ones charged; leave it out"
        )
    if not isinstance(config.model, str) or (model is not None and not isinstance(model, str)):
        raise ConfigError("sites build the model themselves: give its name, or package.module:Class")
    if config.init is not None and config.algorithm.local.personal:
        raise ConfigError(
            f"init '{config.init}' is a file that sites do not have, so that their personal layers would start "
            f"elsewhere: leave out init, or local.personal"
        )
    if not section.seeded and config.noise_seed is None:
        config = replace(config, random="secure")
    section = with_graph(config.algorithm, section, Setting(config.data.clients, config.rounds))
    config = replace(config, federation=section)
    dataset, engine, sites = dataset_of(_without_owners(config), data), config.engine, population(config)
    config, module, dataset = with_model(config, dataset, model, sites)
    config = replace(config, algorithm=config.algorithm.settled(config.rounds, config.data.clients))

    device, per_record = pick_device(engine.device), config.algorithm.per_record is not None
    module = module.to(device)
    sample, task = stand_ins(dataset.train_x), dataset.task
    targets = task.example_targets(count(sample), dataset.train_y)
    net = network(
        module, sample, targets, losses=task.losses, way=engine.way, per_record=per_record,
        personal=config.algorithm.local.personal,
    )  # fmt: skip
    config, shared = with_way(config, net.way), net.layout.shared
    workers = Workers(device, engine.threads, side_by_side=net.batched, precision=engine.precision)
    evaluation = Evaluation.of(module, net.layout, dataset, workers)
    setting = sites.setting(config.rounds, net.layout, secure=config.random == "secure")
    make = SecureCohort if section.aggregation == "secure" else RemoteCohort
    frozen = frozen_digest(module, net.layout)
    cohort = make(config, sites, setting, shared, dataset, transport, names, log, frozen, monitor)
    trainer = Trainer(cohort, evaluation, rounds=config.rounds, settings=engine)
    refuse_unfit(config.algorithm, section, setting, shared.size)
    return config, trainer


def _without_owners(config: Config) -> Config:
    """The configuration for held-out rows, whose owners do not matter: the clients are the sites."""
    schema = config.schema
    return config if schema is None else replace(config, schema=replace(schema, client_column=None, user_column=None))
