"""`shoal.run`: one federated run from a configuration, as the command line does it and as Python calls it."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import release
from shoal.config import Config, configure, read_toml, to_toml
from shoal.errors import ConfigError, LedgerError, RunError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.accounting.claims import Published
    from shoal.data import Dataset
    from shoal.engine.folder import RunFolder
    from shoal.engine.simulator import Simulator
    from shoal.engine.spending import Spending


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
    random: str = "research"
    baseline: float | None = None
    proven: list[dict[str, Any]] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    model: dict[str, Tensor] = field(default_factory=dict, repr=False)
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        names = (
            "algorithm",
            "dataset",
            "rounds",
            "accuracy",
            "baseline",
            "seconds",
            "stopped",
            "random",
            "proven",
            "published",
            "warnings",
        )
        return {release.KEY: release.RESULT, "run": str(self.run)} | {name: getattr(self, name) for name in names}


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
    on_start: Callable[[Config, Simulator, Path], None] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    preparing: Callable[[Config, Any, Any], tuple[Config, Simulator]] | None = None,
    **keys: Any,
) -> Result:
    """Train a model over clients; the result says how good it is and what it reveals.

    `config` is a TOML file or a mapping of its shape; keys may be given by name too, sections as mappings:
    `shoal.run(algorithm="fedavg", rounds=20, local={"lr": 0.05})`. `algorithm` may be an `Algorithm`, `data` a
    `Dataset` (see `shoal.from_clients`), `model` an `nn.Module`. `resume` goes on with the run in that folder. A
    method that claims privacy but proves none starts only with `no_guarantee=True`. `preparing` makes something else
    to play than a simulation from (config, data, model): the coordinator of a real federation.
    """
    from shoal.accounting.ledger import Ledger
    from shoal.engine.folder import RunFolder, environment
    from shoal.engine.spending import Spending, refuse_budget
    from shoal.prepare import limit_of, prepare
    from shoal.privacy.random import Streams
    from shoal.privacy.secure import SecureStreams
    from shoal.report import tensorboard
    from shoal.report.record import Recorder

    started = time.perf_counter()
    if resume is not None:
        algorithm = keys.pop("algorithm", None)
        if config is not None or overrides or keys:
            raise ConfigError("a resumed run keeps its own configuration: give --resume alone")
        settings = _settings_of(Path(resume), data, model, algorithm)
    else:
        settings = _settings(config, data, model, overrides, keys)
        if not no_guarantee:
            _refuse_empty_claims(settings)
    if device is not None:
        settings = replace(settings, engine=replace(settings.engine, device=device))
    if settings.log == "tensorboard":
        tensorboard.require()
    settings, simulator = (preparing or prepare)(settings, data, model)
    if settings.noise_seed is not None:
        simulator.draw_from(Streams(settings.noise_seed))
    if settings.random == "secure":
        simulator.draw_from(SecureStreams(settings.seed))
    if resume is not None:
        folder = RunFolder.open(Path(resume))
    else:
        refuse_budget(settings.algorithm, simulator.setting, limit_of(settings))
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{settings.algorithm.name}-{Path(settings.data.name).stem}")
        folder = RunFolder.create(Path(runs), name)
    with folder, Ledger(folder.path / "ledger.jsonl") as ledger:
        if resume is None:
            stage = simulator.stage
            folder.write_text("environment.txt", environment(stage.federation.device, stage.streams.mode))
            note = release.of_config(stage.streams.mode)
            folder.write_text("config.toml", f"# {release.KEY}: {note}\n{to_toml(settings)}")
        written = folder.digest("config.toml")
        facts = _about_data(simulator, folder, ledger.opened)
        name = folder.path.resolve().name
        ledger.begin(name, settings.algorithm.name, written, asdict(settings.budget), facts=facts)
        spending = Spending(settings.algorithm, simulator.setting, limit_of(settings), ledger)
        if resume is not None:
            simulator.resume(folder, spending)
        if on_start:
            on_start(settings, simulator, folder.path)
        board = tensorboard.Board(folder.path, simulator.done) if settings.log == "tensorboard" else None
        recorder = Recorder(folder.path, board)

        def told(line: dict[str, Any]) -> None:
            recorder.round(line)
            if on_round:
                on_round(line)

        try:
            stopped = simulator.run(folder, spending, told)
            if stopped == "stopped":
                raise Interrupted(folder.path, simulator.done, simulator.rounds)
            proven = [claim.to_json() for claim in spending.proven()]
            by_client = _by_client(simulator, spending)
            if ledger.closed is None:
                rows = by_client.get("by_client", {}).get("clients", [])
                ledger.end(stopped, proven, [(row["records"], row["epsilon"]) for row in rows])
            proven = (ledger.closed or {}).get("proven", proven)  # of a run that had ended: what it said then
            note = release.of_model(proven, simulator.stage.streams.mode)
            notes = {"round": str(simulator.done), release.KEY: note}
            folder.write_tensors("model.safetensors", simulator.model_tensors(), notes)
            metrics = folder.metrics()
            plain = _without_privacy(simulator) if settings.baseline else []
            result = Result(
                run=folder.path,
                algorithm=settings.algorithm.name,
                dataset=settings.data.name,
                rounds=simulator.done,
                accuracy=_last_accuracy(metrics, simulator),
                seconds=round(time.perf_counter() - started, 3),
                stopped=stopped,
                random=simulator.stage.streams.mode,
                baseline=plain[-1]["accuracy"] if plain else None,
                proven=proven,
                published=[claim.to_json() for claim in _published(settings, simulator)],
                warnings=_warnings(proven, settings.budget.delta, simulator),
                model=simulator.model_tensors(),
                metrics=metrics,
            )
        except BaseException:
            recorder.stop()
            raise
        finally:
            simulator.close()
        recorder.end(lambda: result.to_json() | _facts(simulator) | by_client, plain)
    return result


def _about_data(simulator: Simulator, folder: RunFolder, opened: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the ledger says of the data, so that a run cannot go on with others.

    Sites' records are not here, and a ledger that an earlier version `opened` says nothing of them.
    """
    federation = simulator.stage.federation
    mode = simulator.stage.streams.mode
    about = {"clients": len(federation), "simulated": simulator.setting.simulated, "random": mode}
    if simulator.setting.bounds or (opened is not None and "data" not in opened):
        return about
    return about | {"data": federation.digest(folder.data_key(new=opened is None))}


def _refuse_empty_claims(config: Config) -> None:
    from shoal.algorithms.charges import proves

    said = proves(config.algorithm)
    if config.algorithm.claims_privacy and said.startswith("nothing"):
        raise ConfigError(
            f"algorithm {config.algorithm.name} claims privacy but proves {said}. "
            f"To run it all the same, say so: --no-guarantee (in Python: no_guarantee=True)"
        )


def _without_privacy(simulator: Simulator) -> list[dict[str, Any]]:
    """Accuracy and loss of the same training without clip and noise, round by round. None of it is private."""
    plain = simulator.without_privacy()
    lines = []
    try:
        while plain.done < simulator.done:
            line = plain.play(0)
            if plain.done == simulator.done and "accuracy" not in line:
                line["accuracy"], line["loss"] = plain.evaluate()
            if "accuracy" in line:
                lines.append({name: line[name] for name in ("round", "accuracy", "loss")})
    finally:
        plain.close()
    return lines


def _warnings(proven: list[dict[str, Any]], delta: float, simulator: Simulator) -> list[str]:
    """A delta that says little, for the units of which something is proven."""
    from shoal.accounting.claims import large_delta

    parts = simulator.stage.federation.partition
    units = {"client": len(parts), "example": len(np.unique(parts.indices))}
    found = {claim["unit"] for claim in proven if claim["epsilon"] is not None}
    said = [large_delta(unit, delta, count) for unit, count in units.items() if unit in found]
    return [warning for warning in said if warning]


def _facts(simulator: Simulator) -> dict[str, Any]:
    """What the report tells besides: how much there was to learn from, and which classes are mistaken for which."""
    federation = simulator.stage.federation
    dataset = federation.dataset
    held = dataset.train_y.numpy()[np.unique(federation.partition.indices)]
    return {
        "clients": len(federation),
        "simulated_clients": simulator.setting.simulated,
        "parameters": simulator.state.model.numel(),
        "train_rows": len(held),
        "test_rows": len(dataset.test_y),
        "classes": list(dataset.classes),
        "train_classes": np.bincount(held, minlength=dataset.class_count).tolist(),
        "confusion": simulator.confusion().tolist(),
        "notes": list(dataset.notes),
    }


def _by_client(simulator: Simulator, spending: Spending) -> dict[str, Any]:
    """What a record of each client costs, the worst first, where it depends on the client's size."""
    federation = simulator.stage.federation
    sizes = [int(size) for size in federation.sizes]
    rows = spending.by_client(sizes)
    names = federation.dataset.owner_names
    named = len(names) == len(sizes) and not federation.partition.simulated
    told = [
        {"client": names[client] if named else str(client + 1), "records": sizes[client], "epsilon": claim.epsilon}
        for client, claim in rows
    ]
    if not told:
        return {}
    about = {"unit": "example", "observer": "release", "delta": spending.limit.delta}
    return {"by_client": {release.KEY: release.BY_CLIENT, **about, "clients": told, "more": len(sizes) - len(told)}}


def _published(config: Config, simulator: Simulator) -> tuple[Published, ...]:
    recipe = config.algorithm.published
    if recipe is None:
        return ()
    return recipe(config.algorithm, simulator.setting, simulator.done, config.budget.delta)


def _last_accuracy(metrics: list[dict[str, Any]], simulator: Simulator) -> float:
    """As the last round's line says, where that round was evaluated."""
    last = metrics[-1] if metrics else {}
    if last.get("round") == simulator.done and "accuracy" in last:
        return float(last["accuracy"])
    return simulator.evaluate()[0]


class Interrupted(RunError):
    """The run was stopped by the user between two rounds, and can be resumed."""

    exit_code = 130

    def __init__(self, run: Path, done: int, rounds: int) -> None:
        again = f"shoal run --resume {shlex.quote(os.fspath(run))}"
        super().__init__(f"stopped after round {done} of {rounds}; go on with: {again}")
        self.run, self.done = run, done


def _settings_of(run: Path, data: Any, model: Any, algorithm: Any) -> Config:
    """The configuration of an earlier run; only data, model and algorithm that it cannot name may be given again."""
    from shoal.accounting.ledger import FILE

    for key, value in (("data", data), ("model", model), ("algorithm", algorithm)):
        if isinstance(value, str | Mapping):
            raise ConfigError(f"a resumed run keeps its own configuration: leave out {key}={value!r}")
    if not (run / "config.toml").is_file():
        raise RunError(f"{run} is no run folder: it has no config.toml")
    if not (run / FILE).is_file():
        raise LedgerError(
            f"{run / FILE} is gone, so nothing can be proven of this run; put it back, or start a new one"
        )
    written = read_toml(run / "config.toml")
    settings = configure(written if algorithm is None else written | {"algorithm": algorithm})
    if algorithm is not None and (given := settings.algorithm.name) != (was := written.get("algorithm")):
        raise ConfigError(f"{run} was run with algorithm '{was}', it cannot go on with '{given}'")
    if data is not None and data.name != settings.data.name:
        raise ConfigError(f"{run} was run on data '{settings.data.name}', it cannot go on with '{data.name}'")
    if model is not None and _name_of(model) != settings.model:
        raise ConfigError(f"{run} was run with model '{settings.model}', it cannot go on with '{_name_of(model)}'")
    return settings


def _settings(
    config: str | Path | Mapping[str, Any] | None,
    data: Any,
    model: Any,
    overrides: Sequence[str],
    keys: Mapping[str, Any],
) -> Config:
    from shoal.data import Dataset

    if config is not None and keys:
        raise ConfigError(f"keys ({', '.join(keys)}) go into the mapping, or into overrides, with a config")
    given: Any = config if config is not None or (not keys and data is None and model is None) else dict(keys)
    words = list(overrides)
    if given is None:
        return configure(None, words)
    given = dict(given) if isinstance(given, Mapping) else read_toml(Path(given))
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
