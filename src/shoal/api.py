"""`shoal.run`: one federated run from a configuration, as the command line does it and as Python calls it."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from shoal.accounting.privacy_ledger import FILE
from shoal.algorithms.charges import proves
from shoal.config import Config, configure, read_toml, to_dict
from shoal.data import Dataset
from shoal.errors import ConfigError, LedgerError, RunError
from shoal.execution import OnEnd, OnRound, OnStart, board_module, execute
from shoal.prepare import prepare, with_way
from shoal.report import notebook
from shoal.report.claim_rows import Claims
from shoal.result import Result
from shoal.toml_text import flat
from shoal.training.context import current_gpu_kept
from shoal.training.distributed import DistributedCohort, agree, facts, offer
from shoal.training.ranks import Dismissed, Ranks, join
from shoal.training.round import SimulatedCohort
from shoal.training.trainer import Trainer

Prepared = tuple[Config, Trainer[SimulatedCohort]]


def run(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    data: Dataset | Mapping[str, Any] | str | None = None,
    model: nn.Module | type[nn.Module] | str | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    resume: str | Path | None = None,
    runs: str | Path = "runs",
    no_guarantee: bool = False,
    on_start: OnStart | None = None,
    on_round: OnRound | None = None,
    on_end: OnEnd | None = None,
    progress: bool | None = None,
    **keys: Any,
) -> Result:
    """Train a model over clients; the result states its accuracy and its privacy claims.

    Keys of the configuration may be given by name too, sections as mappings:
    `shoal.run(algorithm="fedavg", rounds=20, local={"lr": 0.05})`.

    Args:
        config: A TOML file, or a mapping of its shape.
        data: A name, a `Dataset` (see `shoal.from_clients`), or the keys of the section `data`.
        model: A name or an `nn.Module`.
        overrides: Changes to single keys, each as `key=value`.
        device: `cpu` or `cuda`, instead of engine.device.
        resume: The folder of a run to resume.
        runs: Where run folders are created.
        no_guarantee: Start a method that claims privacy but proves none.
        on_start: Called once before the first round, also of a resumed run, with the configuration (`Config`), the
            trainer and the run's folder. `trainer.stop()`, then or later, stops the run at its next checkpoint, so
            that it can be resumed.
        on_round: Called after every round with its metrics, the line that metrics.jsonl gets: `round`, the headline
            figure and `loss` where it was evaluated, `proven` so far. They are computed from records without noise:
            whoever stops a run by them spends privacy that no claim counts (the section `stop` does not).
        on_end: Called once with the result, after all files are written; not where the run was stopped or has failed.
        progress: Show a progress bar in a notebook; by default where there is one.
        **keys: Keys of the configuration, over those of `config`; `algorithm` may be an `Algorithm`.

    Returns:
        How the run ended.

    Raises:
        ConfigError: Something is wrong with the configuration; the message names the key and the fix.
        Interrupted: The run was stopped between two rounds, and can be resumed.
    """
    started = time.perf_counter()
    if notebook.display() is not None if progress is None else progress:
        on_start, on_round = notebook.with_bar(on_start, on_round)
    passed = model is not None and not isinstance(model, str) and not _importable(model)

    def ready(way: str | None = None) -> Prepared:
        settings = settings_of(config, data, model, overrides, keys, resume=resume, no_guarantee=no_guarantee)
        if device is not None:
            settings = replace(settings, engine=replace(settings.engine, device=device))
        return prepare(settings if way is None else with_way(settings, way), data, model)

    def train(settings: Config, trainer: Trainer[Any]) -> Result:
        return execute(
            settings, trainer, started=started, resume=resume, runs=runs, on_start=on_start, on_round=on_round,
            on_end=on_end, passed=passed, named=not isinstance(data, Dataset),
        )  # fmt: skip

    ranks = join()
    with current_gpu_kept():
        if ranks.count == 1:
            return train(*ready())
        return _led(ranks, ready, train) if ranks.rank == 0 else _followed(ranks, ready)


def _led(ranks: Ranks, ready: Callable[[], Prepared], train: Callable[[Config, Trainer[Any]], Result]) -> Result:
    """A run over several ranks, on rank 0: it prepares first, so that the others find what it has cached."""
    with ranks.leading():
        settings, trainer = ready()
        for rank in ranks.others:
            ranks.send(rank, {}, way=settings.engine.way)
        agree(ranks, facts(trainer, flat(to_dict(settings))))
        trainer.cohort = DistributedCohort.of_ranks(trainer.cohort, ranks)
        result = train(settings, trainer)
        shown = {each.name: getattr(result, each.name) for each in fields(result) if each.name != "model"}
        ranks.end(result.model, shown | {"run": str(result.run)})
    return result


def _followed(ranks: Ranks, ready: Callable[[str], Prepared]) -> Result:
    """The same on another rank; the result is rank 0's."""
    try:
        way = ranks.receive(0)[1]["way"]
        with ranks.reporting():
            settings, trainer = ready(way)
            own = facts(trainer, flat(to_dict(settings)))
        with closing(trainer):
            offer(ranks, own)
            DistributedCohort.of_ranks(trainer.cohort, ranks).follow(trainer.params)
    except Dismissed as ended:
        if ended.result is None:
            raise
        shown = ended.result | {"run": Path(ended.result["run"]), "proven": Claims(ended.result["proven"])}
        return Result(**shown, model=ended.tensors)


def settings_of(
    config: str | Path | Mapping[str, Any] | None,
    data: Any,
    model: Any,
    overrides: Sequence[str],
    keys: Mapping[str, Any],
    *,
    resume: str | Path | None,
    no_guarantee: bool,
) -> Config:
    """The configuration of a new or a resumed run; raises where it should not start."""
    if resume is None:
        settings = _settings(config, data, model, overrides, keys)
        if not no_guarantee:
            _refuse_empty_claims(settings)
    elif config is not None or overrides or keys.keys() - {"algorithm"}:
        raise ConfigError("a resumed run keeps its own configuration: give --resume alone")
    else:
        settings = _resumed_settings(Path(resume), data, model, keys.get("algorithm"))
    if settings.log != "none":
        board_module(settings.log).require()
    return settings


def _refuse_empty_claims(config: Config) -> None:
    said = proves(config.algorithm)
    if config.algorithm.claims_privacy and said.startswith("nothing"):
        raise ConfigError(
            f"algorithm {config.algorithm.name} claims privacy but proves {said}. "
            f"To run it anyway: --no-guarantee (in Python: no_guarantee=True)"
        )


def _resumed_settings(run: Path, data: Any, model: Any, algorithm: Any) -> Config:
    """The configuration of an earlier run; only data, model and algorithm that it cannot name may be passed again."""
    for key, value in (("data", data), ("model", model), ("algorithm", algorithm)):
        if isinstance(value, str | Mapping):
            raise ConfigError(f"a resumed run keeps its own configuration: leave out {key}={value!r}")
    if not (run / "config.toml").is_file():
        raise RunError(f"{run} is not a run folder: it has no config.toml; `shoal runs list` lists them")
    if not (run / FILE).is_file():
        raise LedgerError(
            f"{run / FILE} is missing, so nothing can be proven for this run; put it back, or start a new one"
        )
    written = read_toml(run / "config.toml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its keys are those of the version that wrote it
        settings = configure(written if algorithm is None else written | {"algorithm": algorithm})
    if algorithm is not None and (given := settings.algorithm.name) != (was := written.get("algorithm")):
        raise ConfigError(f"{run} was run with algorithm '{was}', it cannot be resumed with '{given}'")
    if data is not None and data.name != settings.data.name:
        raise ConfigError(f"{run} was run on data '{settings.data.name}', it cannot be resumed with '{data.name}'")
    if model is not None and _name_of(model) != settings.model:
        raise ConfigError(
            f"{run} was run with model '{settings.model}', it cannot be resumed with '{_name_of(model)}'"
        )
    return settings


def _settings(
    config: str | Path | Mapping[str, Any] | None,
    data: Any,
    model: Any,
    overrides: Sequence[str],
    keys: Mapping[str, Any],
) -> Config:
    given: Any = config if config is not None or (not keys and data is None and model is None) else dict(keys)
    words = list(overrides)
    if given is None:
        return configure(None, words)
    given = (flat(given) if isinstance(given, Mapping) else read_toml(Path(given))) | flat(keys)
    if isinstance(data, str):
        given["data.name"] = data
    elif isinstance(data, Mapping):
        given |= {f"data.{key}": value for key, value in data.items()}
    elif isinstance(data, Dataset):
        given |= {"data.name": data.name}
    elif data is not None:
        kind = type(data).__name__
        raise ConfigError(
            f"data is a {kind}; give a name, or what shoal.from_arrays or shoal.from_clients makes of it"
        )
    if isinstance(model, str):
        given["model"] = model
    elif model is not None:
        given["model"] = _name_of(model)
    return configure(given, words)


def _name_of(model: Any) -> str:
    kind = model if isinstance(model, type) else type(model)
    return f"{kind.__module__}:{kind.__qualname__}"


def _importable(model: Any) -> bool:
    """Can a class be imported by its name? A module is an instance, and what is in a script has no name elsewhere."""
    if not isinstance(model, type) or model.__module__ == "__main__":
        return False
    return getattr(sys.modules.get(model.__module__), model.__qualname__, None) is model
