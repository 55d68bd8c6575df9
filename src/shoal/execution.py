"""A run from its first round to its result: run folder, ledger, released model and report."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from shoal import release
from shoal.accounting.claims import Published, large_delta
from shoal.accounting.privacy_ledger import FILE, Ledger, Record, digest_of_heads
from shoal.config import Config, read_toml, to_toml
from shoal.data.partitions import BY_LABEL
from shoal.errors import ConfigError, LedgerError, RunError
from shoal.files import write_whole
from shoal.models.bundle import DESCRIPTION, PERSONAL, WEIGHTS
from shoal.prepare import limit_of
from shoal.report import mlflow_board, tensorboard
from shoal.report.claim_rows import Claims
from shoal.report.recorder import Recorder
from shoal.result import Interrupted, Result, resume_with
from shoal.saved_model import describe
from shoal.training.budget import Spending, assumed_facts, refuse_budget
from shoal.training.client_data import digests
from shoal.training.ranks import Lost
from shoal.training.run_folder import RunFolder, environment, key_in, packed, started_in
from shoal.training.trainer import Trainer

OnStart = Callable[[Config, Trainer[Any], Path], None]
OnRound = Callable[[dict[str, Any]], None]
OnEnd = Callable[[Result], None]
DIVERGED = "training diverged: no update of the last round was finite, and each counted as zero; lower local.lr"
FAR = 10  # times the loss before training: training that ends above has diverged


def board_module(log: str) -> ModuleType:
    """The module whose `Board` logs each round."""
    return {"tensorboard": tensorboard, "mlflow": mlflow_board}[log]


def execute(
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
    named: bool = True,
) -> Result:
    """Train in a run folder, with a ledger: what `shoal.run` and a federation's coordinator share.

    `passed`: the model was passed in Python, and no name can build it again. `named`: the data were loaded by their
    name, not passed.
    """
    folder = _new_folder(config, trainer, Path(runs), named) if resume is None else RunFolder.open(Path(resume))
    with folder, Ledger(folder.path / "ledger.jsonl") as ledger, closing(trainer):
        spending = _begun(config, trainer, folder, ledger, resume is None, passed)
        if on_start:
            on_start(config, trainer, folder.path)
        board = None if config.log == "none" else board_module(config.log).Board(folder.path, trainer.done)
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
            plain = _without_privacy(trainer, result) if config.baseline else []
            result.seconds = round(time.perf_counter() - started, 3)
        except BaseException as error:
            recorder.stop()
            if isinstance(error, Lost):
                raise Lost(f"{error}; {resume_with(folder.path)}") from error
            raise
        recorder.end(lambda: result.to_json() | _facts(trainer) | by_client, plain)
    if on_end:
        on_end(result)
    return result


def _new_folder(config: Config, trainer: Trainer[Any], runs: Path, named: bool) -> RunFolder:
    refuse_budget(config.algorithm, trainer.setting, limit_of(config))
    refuse_own_weights(config, trainer, named)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{config.algorithm.name}-{Path(config.data.name).stem}")
    return RunFolder.create(runs, name)


def refuse_own_weights(config: Config, trainer: Trainer[Any], named: bool = True) -> None:
    """Raise a ConfigError where a private run begins with what another learnt from the same data.

    Nothing is charged for that, and in research mode both may draw the same noise.
    """
    parts = trainer.cohort.partition
    if config.init is None or parts is None or not config.algorithm.draws_noise:
        return
    now = _place(config.data.name, Path())
    for folder, opened, then in _runs_behind(config.init):
        same = named and now.resolve() == then.resolve()
        with suppress(RunError):  # its key is gone
            own = digests(trainer.evaluation.dataset, parts, key_in(folder))
            same = same or any(opened.get(key) == value for key, value in own.items())
        if same:  # however clients share them
            raise ConfigError(
                f"init {config.init} was learnt from the same data, and nothing would be charged for that: begin "
                f"with a model that has not seen them, or run all rounds as one run"
            )


def _runs_behind(init: str) -> Iterator[tuple[Path, dict[str, Any], Path]]:
    """The runs that weights come from, each of which began with the next one's: folder, ledger's first line, data."""
    seen, left = set[Path](), [Path(init).expanduser().absolute()]
    while left:
        file = left.pop()
        file = file / WEIGHTS if file.is_dir() else file
        for folder in {file.parent, file.resolve().parent} - seen:
            seen.add(folder)
            with suppress(LedgerError, ConfigError, KeyError):  # no run's folder
                opened, written = Record.read(folder / FILE)[1].opened or {}, read_toml(folder / "config.toml")
                here = started_in(folder)
                yield folder, opened, _place(str(written["data.name"]), here)
                if "init" in written:
                    left.append(_place(str(written["init"]), here))


def _place(name: str, folder: Path) -> Path:
    """The file of a name in a folder; where it is no longer there, in the present one."""
    path = Path(name).expanduser()
    return (folder / path if (folder / path).exists() else path).absolute()


def _begun(
    config: Config, trainer: Trainer[Any], folder: RunFolder, ledger: Ledger, new: bool, passed: bool
) -> Spending:
    """The budget of this run, with its ledger open; a resumed run continues from its checkpoint."""
    if new:
        mode = trainer.cohort.streams.mode
        folder.write_text("environment.txt", environment(trainer.params.device, mode))
        label = release.of_config(mode, config.schema is not None and bool(config.schema.unconfirmed))
        # Or guesses of the seed could be tested against the digest in the ledger, and two runs be one to a site.
        salt = secrets.token_hex(16)
        folder.write_text("config.toml", f"# {release.KEY}: {label}\n# salt: {salt}\n{to_toml(config)}")
    facts = run_facts(config, trainer, passed) | _about_data(trainer, folder, ledger.opened)
    name, written = folder.path.resolve().name, folder.digest("config.toml")
    ledger.begin(name, config.algorithm.name, written, asdict(config.budget), facts=facts)
    if ledger.selected is not None:
        raise LedgerError(
            f"{folder.path} cannot be resumed: a private selection chose it; use its model, or start a new run"
        )
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
    before = folder.path / WEIGHTS
    if before.is_file() and folder.digest(WEIGHTS) == (ledger.closed or {}).get("model"):
        return before.read_bytes()
    mode = trainer.cohort.streams.mode
    began = bool((ledger.opened or {}).get("init"))
    label = release.of_model(proven, mode, trainer.evaluation.dataset.read_columns, began)
    return packed(trainer.model_state(), {"round": str(trainer.done), release.KEY: label})


def _end(
    ledger: Ledger, trainer: Trainer[Any], stopped: str, proven: Claims, by_client: Mapping[str, Any], model: bytes
) -> None:
    """Close the ledger, before the model that it names is written; an earlier version's closing line names none."""
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
        warnings=[
            *([DIVERGED] if metrics and _none_finite(metrics[-1]) else []),
            *_large_deltas(proven, config.budget.delta, trainer),
        ],
        model=trainer.model_tensors(),
        metrics=metrics,
    )


def run_facts(config: Config, trainer: Trainer[Any], passed: bool = False) -> dict[str, Any]:
    """What the claims of a run assume (claims.stated); `passed`: the model was passed in Python."""
    about, dataset = assumed_facts(trainer.setting), trainer.evaluation.dataset
    about |= {"read_classes": True} if dataset.read_classes and dataset.classes else {}
    about |= {"read_columns": True} if dataset.read_columns else {}
    about |= {} if dataset.known or dataset.features else {"arrays": True}
    about |= {"dealt_by_label": True} if trainer.setting.simulated and config.data.partition in BY_LABEL else {}
    own = passed or ":" in str(config.model)  # its code may load any weights
    return about | ({"init": True} if config.init is not None or own else {})


def _about_data(trainer: Trainer[Any], folder: RunFolder, opened: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the ledger records of the data, so that a run cannot be resumed with others.

    Sites' records are not here, and a ledger that an earlier version `opened` does not record them.
    """
    parts = trainer.cohort.partition
    if parts is None or (opened is not None and "data" not in opened):
        return {}
    return digests(trainer.evaluation.dataset, parts, folder.data_key(new=opened is None))


def _without_privacy(trainer: Trainer[Any], result: Result) -> list[dict[str, Any]]:
    """Headline figure and loss of the same training without clip and noise, by round, and all figures in the end.

    None of it is private.
    """
    plain, headline, lines = trainer.without_privacy(), result.headline, []
    try:
        start, line = plain.evaluate()["loss"], {}
        while plain.done < trainer.done:
            line = plain.run_round(0)
            if plain.done == trainer.done and headline not in line:
                line |= plain.evaluate()
            if headline in line:
                lines.append({name: line[name] for name in ("round", headline, "loss")})
        if lines:
            result.baseline_figures = plain.evaluation.figures(plain.model, plain.personal)["figures"]
            result.baseline = result.baseline_figures[headline]
            result.baseline_diverged = result.baseline is None or _diverged(line, start)
            lines[-1] |= result.baseline_figures
    finally:
        plain.close()
    return lines


def _diverged(line: Mapping[str, Any], start: float | None) -> bool:
    """Has training diverged: is the last round's loss, or every update, not finite, or the loss far above the first?

    Figures alone do not show it: predictions of numbers are clipped to their range.
    """
    loss = line["loss"]
    far = start is not None and loss is not None and loss > FAR * start > 0
    return loss is None or far or _none_finite(line)


def _none_finite(line: Mapping[str, Any]) -> bool:
    """Was no update of this round finite?"""
    return bool(0 < line.get("clients", 0) <= line.get("bad_updates", 0))


def _large_deltas(proven: Claims, delta: float, trainer: Trainer[Any]) -> list[str]:
    """Warnings of a delta that is too large, for the units for which something is proven."""
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
