"""`shoal.run`: one federated run from a configuration, as the command line does it and as Python calls it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config import Config, configure, read_toml, to_toml
from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.accounting.claims import Published
    from shoal.algorithms.charges import Setting
    from shoal.data import Dataset
    from shoal.engine.simulator import Simulator
    from shoal.engine.spending import Limit


@dataclass
class Result:
    """How a run ended."""

    run: Path
    algorithm: str
    dataset: str
    rounds: int
    accuracy: float
    seconds: float
    stopped: str
    proven: list[dict[str, Any]] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Tensor] = field(default_factory=dict, repr=False)
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        names = ("algorithm", "dataset", "rounds", "accuracy", "seconds", "stopped", "proven", "published")
        return {"run": str(self.run)} | {name: getattr(self, name) for name in names}


def run(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    data: Dataset | Mapping[str, Any] | str | None = None,
    model: nn.Module | type[nn.Module] | str | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    resume: str | Path | None = None,
    runs: str | Path = "runs",
    on_start: Callable[[Config, Simulator, Path], None] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    **keys: Any,
) -> Result:
    """Train a model over clients; the result says how good it is and what it reveals.

    `config` is a TOML file or a mapping of its shape; keys may be given by name too, sections as mappings:
    `shoal.run(algorithm="fedavg", rounds=20, local={"lr": 0.05})`. `data` may be a `Dataset` (see
    `shoal.from_clients`), `model` an `nn.Module`. `resume` goes on with the run in that folder.
    """
    from shoal.accounting.ledger import Ledger
    from shoal.engine.folder import RunFolder, environment
    from shoal.engine.spending import Spending

    started = time.perf_counter()
    if resume is not None:
        if config is not None or overrides or keys:
            raise ConfigError("a resumed run keeps its own configuration: give --resume alone")
        folder_path = Path(resume)
        if not (folder_path / "config.toml").is_file():
            raise RunError(f"{folder_path} is no run folder: it has no config.toml")
        settings = configure(folder_path / "config.toml")
    else:
        settings = _settings(config, data, model, overrides, keys)
    if device is not None:
        settings = replace(settings, engine=replace(settings.engine, device=device))
    settings, simulator = _prepare(settings, data, model)
    if resume is not None:
        folder = RunFolder.open(folder_path)
    else:
        name = f"{settings.algorithm.name}-{re.sub(r'[^A-Za-z0-9.-]+', '-', Path(settings.data.name).stem)}"
        folder = RunFolder.create(Path(runs), name)
    with folder, Ledger(folder.path / "ledger.jsonl") as ledger:
        if resume is None:
            folder.write_text("config.toml", to_toml(settings))
            folder.write_text("environment.txt", environment(simulator.stage.federation.device))
        written = folder.digest("config.toml")
        ledger.begin(folder.path.name, settings.algorithm.name, written, asdict(settings.budget))
        spending = Spending(settings.algorithm, simulator.setting, _limit(settings), ledger)
        if resume is not None:
            simulator.resume(folder, spending)
        if on_start:
            on_start(settings, simulator, folder.path)
        try:
            stopped = simulator.run(folder, spending, on_round)
        finally:
            simulator.close()
        if stopped == "stopped":
            raise Interrupted(folder.path, simulator.done, simulator.rounds)
        folder.write_tensors("model.safetensors", simulator.model_tensors(), {"round": str(simulator.done)})
        if ledger.closed is None:
            ledger.end(stopped)
        metrics = folder.metrics()
        proven = spending.proven()
    return Result(
        run=folder.path,
        algorithm=settings.algorithm.name,
        dataset=settings.data.name,
        rounds=simulator.done,
        accuracy=metrics[-1]["accuracy"] if metrics else simulator.evaluate()[0],
        seconds=round(time.perf_counter() - started, 3),
        stopped=stopped,
        proven=[claim.to_json() for claim in proven],
        published=[claim.to_json() for claim in _published(settings, simulator)],
        model=simulator.model_tensors(),
        metrics=metrics,
    )


def _limit(config: Config) -> Limit:
    from shoal.engine.spending import Limit

    budget = config.budget
    return Limit(budget.delta, budget.epsilon, budget.unit, budget.observer)


def _published(config: Config, simulator: Simulator) -> tuple[Published, ...]:
    recipe = config.algorithm.published
    if recipe is None:
        return ()
    return recipe(config.algorithm, simulator.setting.clients, simulator.done, config.budget.delta)


class Interrupted(RunError):
    """The run was stopped by the user between two rounds, and can be resumed."""

    def __init__(self, run: Path, done: int, rounds: int) -> None:
        super().__init__(f"stopped after round {done} of {rounds}; go on with: shoal run --resume {os.fspath(run)}")
        self.run, self.done = run, done


def _settings(
    config: str | Path | Mapping[str, Any] | None,
    data: Any,
    model: Any,
    overrides: Sequence[str],
    keys: Mapping[str, Any],
) -> Config:
    if config is not None and keys:
        raise ConfigError(f"keys ({', '.join(keys)}) go into the mapping, or into overrides, with a config")
    given: Any = dict(keys) if config is None else config
    words = list(overrides)
    given = dict(given) if isinstance(given, Mapping) else read_toml(Path(given))
    if isinstance(data, str):
        given["data.name"] = data
    elif isinstance(data, Mapping):
        given |= {f"data.{key}": value for key, value in data.items()}
    elif data is not None:
        given |= {"data.name": data.name}
    if isinstance(model, str):
        given["model"] = model
    elif model is not None:
        given["model"] = _name_of(model)
    return configure(given, words)


def _name_of(model: Any) -> str:
    kind = model if isinstance(model, type) else type(model)
    return f"{kind.__module__}:{kind.__qualname__}"


def _prepare(config: Config, data: Any, model: Any) -> tuple[Config, Simulator]:
    """Everything that can be wrong with data and model is found here, before anything is written."""
    from shoal.algorithms.charges import Setting
    from shoal.data import Dataset, Partition, partition
    from shoal.engine.simulator import Settings, Simulator, pick_device
    from shoal.models import build, check
    from shoal.privacy.random import Streams

    device = pick_device(config.engine.device)
    dataset = _with_features(data if isinstance(data, Dataset) else _load(config), config.data.features)
    config = _resolved(config, dataset)
    streams, section = Streams(config.seed), config.data
    parts: Partition = partition(
        section.partition,
        dataset.train_y,
        clients=None if section.partition == "column" else section.clients,
        shards=section.shards,
        alpha=section.alpha,
        fraction=section.fraction,
        records=section.records,
        owners=dataset.owners,
        generator=streams.generator("partition"),
    )
    config = _calibrated(config, Setting(len(parts), config.rounds, parts.multiplicity))
    wanted = config.model if model is None or isinstance(model, str) else model
    module = build(wanted, dataset.input_shape, dataset.class_count, seed=streams.number("model"))
    check(module, dataset.input_shape, dataset.class_count, example_level=False)
    engine = config.engine
    simulator = Simulator(
        config.algorithm,
        module,
        dataset,
        parts,
        rounds=config.rounds,
        seed=config.seed,
        device=device,
        settings=Settings(
            memory=engine.memory,
            threads=engine.threads,
            together=engine.together,
            evaluate_every=engine.evaluate_every,
            checkpoint_every=engine.checkpoint_every,
        ),
    )
    return config, simulator


def _calibrated(config: Config, setting: Setting) -> Config:
    """The noise that spends the budget, where that is asked for; it stands in the run's config.toml from then on."""
    if not config.budget.calibrate:
        return config
    from shoal.algorithms.charges import calibrated

    limit = _limit(config)
    algorithm = calibrated(config.algorithm, setting, limit.budget(), limit.unit, limit.observer)
    return replace(config, algorithm=algorithm, budget=replace(config.budget, calibrate=False))


def _load(config: Config) -> Dataset:
    from shoal.data import load

    section = config.data
    return load(
        section.name,
        scale=section.scale,
        label=section.label,
        client=section.client,
        test_fraction=section.test_fraction,
    )


def _with_features(dataset: Dataset, name: str) -> Dataset:
    """The data set with public features, computed once and kept in the user's cache."""
    if name == "none":
        return dataset
    from shoal.data.features import cached
    from shoal.data.sources import writable_folder

    folder = writable_folder() / "features"
    train_x, test_x = (cached(name, x, folder) for x in (dataset.train_x, dataset.test_x))
    return replace(dataset, train_x=train_x, test_x=test_x)


def _resolved(config: Config, dataset: Dataset) -> Config:
    """What `auto` stands for, now that the data are known."""
    section = config.data
    if section.partition == "auto":
        section = replace(section, partition="iid" if dataset.owners is None else "column")
    if section.partition == "column" and dataset.owners is not None:
        section = replace(section, clients=len(dataset.owner_names))
    return replace(config, data=section)
