"""Data whose clients are real, cell by cell: heart disease, ratings, Shakespeare, at a proven epsilon and without.

    SHOAL_DATA=... python benchmarks/natural.py [--cells 'heart/.*'] [--device cuda] [--out natural.jsonl]
    python benchmarks/plot_natural.py    the page and the picture

A cell is task/model/epsilon/seed, or task/pooled: what a central model without privacy reaches. A line is appended as
soon as a cell ends, and cells that are in the file already are not run again; processes may share the file. `--cells`
is a regular expression for whole names, `--list` prints them. `--set key=value` changes a setting of every cell, for
trials; give another `--out` then. The training of heart and of ratings without privacy draws nothing at random, so
one seed is enough.

The private cells are the presets in examples/, but for what `TUNED` says. Models that begin with Milton are trained
on it first (examples/milton.toml), once for each network; the result is kept in the user's cache.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV

import shoal
from shoal import config
from shoal.cache import cache_folder
from shoal.tasks import Regression

ROOT = Path(__file__).resolve().parent.parent
EPSILONS = (1, 2, 4, 8, "none")
SEEDS = range(5)
Settings = dict[str, Any]

TUNED: dict[str, dict[int | str, Settings]] = {
    "heart": {},
    "insteval": {1: {"server.lr": 3.0}, 2: {"server.lr": 5.0}, 4: {"server.lr": 8.0}},
    "movielens": {1: {"server.lr": 0.3}, 2: {"server.lr": 0.6}, 4: {"server.lr": 1.0}},
    "shakespeare": {1: {"server.lr": 0.5}, 2: {"server.lr": 1.0}, 4: {"server.lr": 2.0}},
}
"""What a preset does otherwise at an epsilon that is not its own; chosen by the figures on held-out records."""
WITHOUT: dict[str, Settings] = {
    "heart": {"rounds": 100, "local.lr": 1.0, "server.momentum": 0.8},
    "insteval": {"rounds": 40, "local.lr": 100.0, "server.momentum": 0.9},
    "movielens": {"rounds": 30, "local.lr": 100.0, "server.momentum": 0.9},
    "shakespeare": {"rounds": 30, "local.lr": 0.3, "local.steps": 8, "server.momentum": 0.8},
}
"""The same training by federated averaging, with settings of its own, chosen likewise."""
KEPT = ("model", "data.name", "data.scale", "clients.sampling", "records.sampling", "records.batch", "local.steps")
MODELS = {
    "heart": ("linear",),
    "insteval": ("ratings-small",),
    "movielens": ("ratings",),
    "shakespeare": ("char-lstm", "char-transformer", "char-lstm+milton", "char-transformer+milton"),
}


def settings(task: str, model: str, epsilon: int | str, seed: int, device: str) -> Settings:
    """The configuration of one cell."""
    preset = config.read_toml(ROOT / "examples" / f"{task}.toml")
    if epsilon == "none":
        kept = {key: value for key, value in preset.items() if key in KEPT}
        chosen = {"algorithm": "fedavg", "clients.sampling": "all", **kept, **WITHOUT[task]}
    else:
        chosen = preset | {"budget.epsilon": float(epsilon)} | TUNED[task].get(epsilon, {})
    name, _, public = model.partition("+")
    start = {"init": str(pretrained(name, device))} if public else {}
    every = {"model": name, "seed": seed, "engine.device": device, "engine.evaluate_every": chosen["rounds"]}
    return chosen | start | every


def pretrained(model: str, device: str) -> Path:
    """The file of a model that was trained on Milton; trained where it is missing."""
    file = cache_folder() / "natural" / f"{model}.safetensors"
    if not file.exists():
        with tempfile.TemporaryDirectory() as runs:
            result = shoal.run(ROOT / "examples" / "milton.toml", model=model, device=device, runs=runs)
            file.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copy(result.run / "model.safetensors", file.with_suffix(".part"))
            Path(copy).replace(file)  # another process finds the whole file or none
        print(f"{model} on Milton: {brief(result.figures)} in {result.seconds:.0f} s", flush=True)
    return file


def federated(chosen: Callable[[], Settings], changes: Settings, data: shoal.Dataset) -> dict[str, Any]:
    """The figures of one run, and what is proven for it."""
    wanted = chosen() | changes
    with tempfile.TemporaryDirectory() as runs:
        result = shoal.run(wanted, data=data, runs=runs)
    limit = wanted.get("budget.unit", "client"), wanted.get("budget.observer", "release")
    claims = [claim for claim in result.proven if (claim["unit"], claim["observer"]) == limit and claim["epsilon"]]
    return {"figures": result.figures, "rounds": result.rounds, "proven": claims}


def pooled(data: shoal.Dataset) -> dict[str, Any]:
    """A central model on all records together: logistic regression, or biases of people, things and facts."""
    if isinstance(data.task, Regression):
        return {"figures": {"rmse": _pooled_ratings(data, data.task)}, "proven": []}
    strengths = {"C": np.logspace(-3, 2, 11)}  # chosen on the training records
    fit = GridSearchCV(LogisticRegression(max_iter=5000), strengths, scoring="roc_auc", cv=5)
    fit.fit(data.train_x.numpy(), data.train_y.numpy())
    scores = fit.decision_function(data.test_x.numpy())
    return {"figures": {"auroc": float(roc_auc_score(data.test_y.numpy(), scores))}, "proven": []}


def _pooled_ratings(data: shoal.Dataset, task: Regression, weight: float = 5.0, passes: int = 20) -> float:
    """rating = mean + person + sum of tokens, by ridge regression, one kind of bias after the other."""
    train, test = (
        [owners, *(x.numpy().T[1:])] for owners, x in ((data.owners, data.train_x), (data.test_owners, data.test_x))
    )
    y = data.train_y.numpy().astype(np.float64)
    biases = [np.zeros(max(a.max(), b.max()) + 1) for a, b in zip(train, test, strict=True)]
    rest = y - y.mean()
    for _ in range(passes):
        for place, tokens in enumerate(train):
            rest += biases[place][tokens]
            counted = np.ones_like(y) if place == 0 else (tokens > 0).astype(np.float64)
            biases[place] = np.bincount(tokens, rest * counted, len(biases[place])) / (
                np.bincount(tokens, counted, len(biases[place])) + weight
            )
            rest -= biases[place][tokens]
    found = y.mean() + sum(bias[tokens] for bias, tokens in zip(biases, test, strict=True))
    return float(np.sqrt(np.square(np.clip(found, task.low, task.high) - data.test_y.numpy()).mean()))


Cell = Callable[[Settings, shoal.Dataset], dict[str, Any]]


def cells(device: str) -> Iterator[tuple[str, Cell]]:
    for task, models in MODELS.items():
        if task != "shakespeare":
            yield f"{task}/pooled", lambda changes, data: pooled(data)
        for seed in SEEDS:
            for model in models:
                for epsilon in EPSILONS:
                    if epsilon == "none" and task != "shakespeare" and seed > 0:
                        continue
                    chosen = partial(settings, task, model, epsilon, seed, device)
                    yield f"{task}/{model}/{epsilon}/{seed}", partial(federated, chosen)


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; one that was cut off does not count."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines if line and line.count("{") == line.count("}")]


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line, by one write: processes may share the file. One that was cut off is ended first."""
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + json.dumps(line) + "\n")


def brief(figures: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items() if value is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=".*")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "natural.jsonl")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    changes = dict(config.override(word) for word in given.set)
    done = {line["cell"] for line in read(given.out)}
    sets: dict[str, shoal.Dataset] = {}
    for name, run in cells(given.device):
        if not re.fullmatch(given.cells, name):
            continue
        if given.list:
            print(name, "(done)" if name in done else "")
            continue
        if name in done:
            continue
        task, started = name.partition("/")[0], time.perf_counter()
        if task not in sets:
            sets[task] = shoal.load(task, scale="standard")
        line = {"cell": name, "device": device_name(given.device)} | run(changes, sets[task])
        line["seconds"] = round(time.perf_counter() - started, 1)
        append(given.out, line)
        print(f"{name}: {brief(line['figures'])} in {line['seconds']:.0f} s", flush=True)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
