"""`shoal.run`: one federated run from a configuration, as the command line does it and as Python calls it."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import release
from shoal.config import Config, configure, flat, read_toml, to_dict, to_toml
from shoal.errors import ConfigError, LedgerError, RunError
from shoal.report.claim_rows import Claims

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.accounting.claims import Published
    from shoal.accounting.ledger import Ledger
    from shoal.data import Dataset
    from shoal.training.budget import Spending
    from shoal.training.ranks import Ranks
    from shoal.training.round import SimulatedCohort
    from shoal.training.run_folder import RunFolder
    from shoal.training.trainer import Trainer

OnStart = Callable[[Config, "Trainer[Any]", Path], None]
OnRound = Callable[[dict[str, Any]], None]
OnEnd = Callable[["Result"], None]
Prepared = tuple[Config, "Trainer[SimulatedCohort]"]


@dataclass(repr=False)
class Result:
    """How a run ended.

    Attributes:
        run: Its folder.
        stopped: Why it ended: `rounds`, `budget`, `early` (see the section `stop`), or `sites` (too few were left in
            a federation).
        baseline: The headline figure of the same training without clip and noise, where that was asked for.
        headline: The figure that says how good the model is: `score` is its value.
        figures: All figures on the held-out records.
        trivial: The same of the best constant prediction, `trivial_answer` in words.
        figures_by_client: The figures on each client's held-out records.
        proven: The proven bounds.
        published: The paper's own figures.
        model: The released parameters, by name.
        metrics: The metrics of every round.
    """

    run: Path
    algorithm: str
    dataset: str
    rounds: int
    stopped: str
    seconds: float = 0.0
    random: str = "research"
    baseline: float | None = None
    task: str = "classification"
    headline: str = "accuracy"
    higher_is_better: bool = True
    trivial_answer: str = ""
    figures: dict[str, float | None] = field(default_factory=dict)
    trivial: dict[str, float | None] = field(default_factory=dict)
    figures_by_client: list[dict[str, Any]] = field(default_factory=list, repr=False)
    proven: Claims = field(default_factory=Claims)
    published: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    model: dict[str, Tensor] = field(default_factory=dict, repr=False)
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        claims = "; ".join(claim.brief() for claim in self.proven.least) or "nothing is proven"
        return f"Result({self._words()}; {claims}; {self.run})"

    def _repr_html_(self) -> str:
        from shoal.html_text import html_table
        from shoal.report.claim_rows import HEAD, published_rows, shown_rows
        from shoal.report.scores import Scores

        published = [
            (row["unit"], "published, not proven", row["epsilon"], row["delta"], row["recipe"])
            for row in published_rows(self.published)
        ]
        notes = [*filter(None, [Scores.of(self.to_json()).verdict()]), *self.warnings]
        notes += [f"page: {self.run / 'report.html'}"]
        return html_table(self._words(), [*shown_rows(self.proven), *published], HEAD, notes)

    def _words(self) -> str:
        score = "not finite" if self.score is None else f"{self.score:.4g}"
        return f"{self.algorithm} on {self.dataset}: {self.headline} {score} after {self.rounds} rounds"

    @property
    def score(self) -> float | None:
        """The headline figure; None where the model has diverged."""
        return self.figures.get(self.headline)

    @property
    def accuracy(self) -> float:
        """The accuracy, of a task that has one."""
        if "accuracy" not in self.figures:
            raise RunError(f"a {self.task} has no accuracy; its headline figure is {self.headline}: result.score")
        return self.figures["accuracy"] or 0.0

    @property
    def learnt(self) -> bool:
        """Is the model better than the best constant prediction?"""
        score, trivial = self.score, self.trivial.get(self.headline)
        if score is None or trivial is None:
            return score is not None
        return score > trivial if self.higher_is_better else score < trivial

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        names = [each.name for each in fields(self) if each.name not in ("run", "model", "metrics")]
        accuracy = {"accuracy": self.accuracy} if "accuracy" in self.figures else {}
        head = {release.KEY: release.RESULT, "run": str(self.run)} | accuracy | {"score": self.score}
        return head | {name: getattr(self, name) for name in names} | {"learnt": self.learnt}


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
    from shoal.prepare import prepare, with_way
    from shoal.report import notebook
    from shoal.training.ranks import join

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
        return carry_out(
            settings, trainer, started=started, resume=resume, runs=runs, on_start=on_start, on_round=on_round,
            on_end=on_end, passed=passed,
        )  # fmt: skip

    ranks = join()
    if ranks.count == 1:
        return train(*ready())
    return _led(ranks, ready, train) if ranks.rank == 0 else _followed(ranks, ready)


def _led(ranks: Ranks, ready: Callable[[], Prepared], train: Callable[[Config, Trainer[Any]], Result]) -> Result:
    """A run over several ranks, on rank 0: it prepares first, so that the others find what it has cached."""
    from shoal.training.distributed import DistributedCohort, agree, facts

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
    from shoal.training.distributed import DistributedCohort, facts, offer
    from shoal.training.ranks import Dismissed

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
        _board(settings.log).require()
    return settings


def _board(log: str) -> Any:
    """The module whose `Board` logs each round."""
    from shoal.report import mlflow_board, tensorboard

    return {"tensorboard": tensorboard, "mlflow": mlflow_board}[log]


def carry_out(
    config: Config,
    trainer: Trainer[Any],
    *,
    started: float,
    resume: str | Path | None,
    runs: str | Path,
    on_start: OnStart | None,
    on_round: OnRound | None,
    on_end: OnEnd | None = None,
    passed: bool = False,
) -> Result:
    """Train in a run folder, with a ledger: what `shoal.run` and a federation's coordinator share.

    `passed`: the model was passed in Python, and no name can build it again.
    """
    from shoal.accounting.ledger import Ledger
    from shoal.report.recorder import Recorder
    from shoal.training.ranks import Lost
    from shoal.training.run_folder import RunFolder

    folder = _new_folder(config, trainer, Path(runs)) if resume is None else RunFolder.open(Path(resume))
    with folder, Ledger(folder.path / "ledger.jsonl") as ledger, closing(trainer):
        spending = _begun(config, trainer, folder, ledger, new=resume is None)
        if on_start:
            on_start(config, trainer, folder.path)
        board = None if config.log == "none" else _board(config.log).Board(folder.path, trainer.done)
        recorder = Recorder(folder.path, board)

        def report(line: dict[str, Any]) -> None:
            recorder.round(line)
            if on_round:
                on_round(line)

        try:
            stopped = trainer.run(folder, spending, report, config.stop.reached if config.stop.patience else None)
            if stopped == "stopped":
                raise Interrupted(folder.path, trainer.done, trainer.rounds)
            by_client = _by_client(trainer, spending)
            proven = _proven(ledger, spending)
            model = _model_file(config, trainer, folder, ledger, proven)
            _end(ledger, trainer, stopped, proven, by_client, model)
            result = _released(config, trainer, folder, stopped, proven, model, passed)
            plain = _without_privacy(trainer) if config.baseline else []
            result.baseline = plain[-1][result.headline] if plain else None
            result.seconds = round(time.perf_counter() - started, 3)
        except BaseException as error:
            recorder.stop()
            if isinstance(error, Lost):
                raise Lost(f"{error}; {_resume_with(folder.path)}") from error
            raise
        recorder.end(lambda: result.to_json() | _facts(trainer) | by_client, plain)
    if on_end:
        on_end(result)
    return result


def _new_folder(config: Config, trainer: Trainer[Any], runs: Path) -> RunFolder:
    from shoal.prepare import limit_of
    from shoal.training.budget import refuse_budget
    from shoal.training.run_folder import RunFolder

    refuse_budget(config.algorithm, trainer.setting, limit_of(config))
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{config.algorithm.name}-{Path(config.data.name).stem}")
    return RunFolder.create(runs, name)


def _begun(config: Config, trainer: Trainer[Any], folder: RunFolder, ledger: Ledger, new: bool) -> Spending:
    """The budget of this run, with its ledger open; a resumed run continues from its checkpoint."""
    from shoal.prepare import limit_of
    from shoal.training.budget import Spending
    from shoal.training.run_folder import environment

    if new:
        mode = trainer.cohort.streams.mode
        folder.write_text("environment.txt", environment(trainer.params.device, mode))
        label = release.of_config(mode, config.schema is not None and bool(config.schema.unconfirmed))
        folder.write_text("config.toml", f"# {release.KEY}: {label}\n{to_toml(config)}")
    facts = _about_data(trainer, folder, ledger.opened)
    name, written = folder.path.resolve().name, folder.digest("config.toml")
    ledger.begin(name, config.algorithm.name, written, asdict(config.budget), facts=facts)
    spending = Spending(config.algorithm, trainer.setting, limit_of(config), ledger)
    if not new:
        trainer.resume(folder, spending)
    return spending


def _proven(ledger: Ledger, spending: Spending) -> Claims:
    """What is proven in the end; for a run that had already ended, what its ledger says."""
    closed = ledger.closed or {}
    return Claims(closed["proven"] if "proven" in closed else (claim.to_json() for claim in spending.proven()))


def _model_file(config: Config, trainer: Trainer[Any], folder: RunFolder, ledger: Ledger, proven: Claims) -> bytes:
    """The content of model.safetensors; of a run that had already ended, the file that its ledger names."""
    from shoal.models.bundle import WEIGHTS
    from shoal.saved_model import read_from_data
    from shoal.training.run_folder import packed

    before = folder.path / WEIGHTS
    if before.is_file() and folder.digest(WEIGHTS) == (ledger.closed or {}).get("model"):
        return before.read_bytes()
    mode = trainer.cohort.streams.mode
    label = release.of_model(proven, mode, read_from_data(config.schema, trainer.evaluation.dataset))
    return packed(trainer.model_state(), {"round": str(trainer.done), release.KEY: label})


def _end(
    ledger: Ledger, trainer: Trainer[Any], stopped: str, proven: Claims, by_client: Mapping[str, Any], model: bytes
) -> None:
    """Close the ledger, before the model that it names is written; an earlier version's closing line names none."""
    from shoal.accounting.ledger import digest_of_heads

    digest, closed, heads = hashlib.sha256(model).hexdigest(), ledger.closed, trainer.cohort.ledger_heads
    others = bool(heads) and (closed or {}).get("sites") != digest_of_heads(heads)
    if closed is None or closed.get("model", digest) != digest or others:
        rows = by_client.get("by_client", {}).get("clients", [])
        costs = [(row["records"], row["epsilon"]) for row in rows]
        ledger.end(stopped, proven, costs, digest, heads)


def _released(
    config: Config,
    trainer: Trainer[Any],
    folder: RunFolder,
    stopped: str,
    proven: Claims,
    model: bytes,
    passed: bool,
) -> Result:
    """Write the model and its description; returns the result."""
    from shoal.models.bundle import DESCRIPTION, PERSONAL, WEIGHTS
    from shoal.saved_model import describe
    from shoal.training.run_folder import write_whole

    mode, metrics = trainer.cohort.streams.mode, folder.metrics()
    write_whole(folder.path / WEIGHTS, model)
    description = describe(config, trainer, proven, folder.digest(WEIGHTS), passed)
    folder.write_text(DESCRIPTION, description.to_json())
    if own := trainer.personal_tensors():
        folder.write_tensors(PERSONAL, own, {"round": str(trainer.done), release.KEY: release.PERSONAL})
    return Result(
        run=folder.path,
        algorithm=config.algorithm.name,
        dataset=config.data.name,
        rounds=trainer.done,
        stopped=stopped,
        **trainer.evaluation.figures(trainer.model, trainer.personal),
        random=mode,
        proven=proven,
        published=[claim.to_json() for claim in _published(config, trainer)],
        warnings=_warnings(proven, config.budget.delta, trainer),
        model=trainer.model_tensors(),
        metrics=metrics,
    )


def _about_data(trainer: Trainer[Any], folder: RunFolder, opened: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the ledger records of the data, so that a run cannot be resumed with others.

    Sites' records are not here, and a ledger that an earlier version `opened` does not record them.
    """
    from shoal.training.budget import assumed_facts
    from shoal.training.client_data import digest

    about = assumed_facts(trainer.setting)
    parts, dataset = trainer.cohort.partition, trainer.evaluation.dataset
    about |= {"read_classes": True} if dataset.read_classes and dataset.classes else {}
    if parts is None or (opened is not None and "data" not in opened):
        return about
    return about | {"data": digest(dataset, parts, folder.data_key(new=opened is None))}


def _refuse_empty_claims(config: Config) -> None:
    from shoal.algorithms.charges import proves

    said = proves(config.algorithm)
    if config.algorithm.claims_privacy and said.startswith("nothing"):
        raise ConfigError(
            f"algorithm {config.algorithm.name} claims privacy but proves {said}. "
            f"To run it anyway: --no-guarantee (in Python: no_guarantee=True)"
        )


def _without_privacy(trainer: Trainer[Any]) -> list[dict[str, Any]]:
    """Headline figure and loss of the same training without clip and noise, by round. None of it is private."""
    plain, headline = trainer.without_privacy(), trainer.evaluation.dataset.task.headline
    lines = []
    try:
        while plain.done < trainer.done:
            line = plain.run_round(0)
            if plain.done == trainer.done and headline not in line:
                line |= plain.evaluate()
            if headline in line:
                lines.append({name: line[name] for name in ("round", headline, "loss")})
    finally:
        plain.close()
    return lines


def _warnings(proven: Claims, delta: float, trainer: Trainer[Any]) -> list[str]:
    """Warnings of a delta that is too large, for the units for which something is proven."""
    from shoal.accounting.claims import large_delta

    held, users = _held(trainer), trainer.evaluation.dataset.users
    owned = np.zeros(0) if users is None or not len(held) else users[held]
    units = {"client": trainer.setting.clients, "record": len(held), "user": len(np.unique(owned[owned >= 0]))}
    found = {claim["unit"] for claim in proven if claim["epsilon"] is not None}
    said = [large_delta(unit, delta, count) for unit, count in units.items() if unit in found]
    return [warning for warning in said if warning]


def _facts(trainer: Trainer[Any]) -> dict[str, Any]:
    """Other facts for the report: sizes and, of a classification, classes and the confusion matrix."""
    dataset, confusion = trainer.evaluation.dataset, trainer.evaluation.confusion(trainer.model, trainer.personal)
    held = dataset.train_y.numpy()[_held(trainer)]
    of_classes = (
        {}
        if confusion is None
        else {
            "classes": list(dataset.classes),
            "train_classes": np.bincount(held, minlength=dataset.class_count).tolist(),
            "confusion": confusion.tolist(),
        }
    )
    return of_classes | {
        "clients": trainer.setting.clients,
        "simulated_clients": trainer.setting.simulated,
        "parameters": trainer.params.numel(),
        "gradients": trainer.cohort.gradients,
        "train_rows": len(held),
        "test_rows": len(dataset.test_y),
        "notes": trainer.notes,
    }


def _held(trainer: Trainer[Any]) -> np.ndarray:
    """The distinct records that clients hold; none where they are elsewhere."""
    parts = trainer.cohort.partition
    return np.zeros(0, np.int32) if parts is None else parts.held


def _by_client(trainer: Trainer[Any], spending: Spending) -> dict[str, Any]:
    """What a record of each client costs, the worst first, where it depends on the client's size."""
    parts = trainer.cohort.partition
    rows = [] if parts is None else spending.by_client(parts.sizes)
    if parts is None or not rows:
        return {}
    names = trainer.client_names
    clients = [
        {"client": names[client], "records": int(parts.sizes[client]), "epsilon": claim.epsilon}
        for client, claim in rows
    ]
    about = {"unit": "record", "observer": "release", "delta": spending.limit.delta}
    return {
        "by_client": {release.KEY: release.BY_CLIENT, **about, "clients": clients, "more": len(parts) - len(clients)}
    }


def _published(config: Config, trainer: Trainer[Any]) -> tuple[Published, ...]:
    recipe = config.algorithm.published
    if recipe is None:
        return ()
    return recipe(config.algorithm, trainer.setting, trainer.done, config.budget.delta)


def _resume_with(run: Path) -> str:
    return f"resume with: shoal run --resume {shlex.quote(os.fspath(run))}"


class Interrupted(RunError):
    """The run was stopped by the user between two rounds, and can be resumed."""

    exit_code = 130

    def __init__(self, run: Path, done: int, rounds: int) -> None:
        super().__init__(f"stopped after round {done} of {rounds}; {_resume_with(run)}")
        self.run, self.done = run, done


def _resumed_settings(run: Path, data: Any, model: Any, algorithm: Any) -> Config:
    """The configuration of an earlier run; only data, model and algorithm that it cannot name may be passed again."""
    from shoal.accounting.ledger import FILE

    for key, value in (("data", data), ("model", model), ("algorithm", algorithm)):
        if isinstance(value, str | Mapping):
            raise ConfigError(f"a resumed run keeps its own configuration: leave out {key}={value!r}")
    if not (run / "config.toml").is_file():
        raise RunError(f"{run} is not a run folder: it has no config.toml")
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
    from shoal.data import Dataset

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
