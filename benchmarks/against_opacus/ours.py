"""The work that is compared, and Shoal's side of it: rounds in which every client trains by DP-SGD."""

from __future__ import annotations

import copy
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms import algorithm
from shoal.algorithms.base import Local
from shoal.data.dataset import Dataset
from shoal.data.partitions import ListedPartition
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Clients, Records
from shoal.models import build
from shoal.random.streams import Streams
from shoal.training.engine_settings import Settings
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate

Order = Literal["shuffled", "fixed-order"]


@dataclass(frozen=True)
class Task:
    """A round: each of `clients` clients takes `steps` steps of `batch` records, clipped flat, with noise.

    `trial` steps are enough to tell a good setting of a rival from a bad one.
    """

    name: str
    model: str
    clients: int
    steps: int
    batch: int
    trial: int
    lr: float = 0.01
    clip: float = 1.0
    noise: float = 1.0

    @property
    def pictures(self) -> bool:
        return self.model.endswith("cnn")

    @property
    def work(self) -> dict[str, int]:
        return {"steps": self.clients * self.steps, "examples": self.clients * self.steps * self.batch}

    def noise_of(self, update: Tensor) -> float:
        """The size of an update in units of the noise it must hold: 1, and a little for what was learned.

        The noise of every step is in it once, so that a step left out, or one without noise, is seen.
        """
        sigma = self.noise * self.clip * self.lr / self.batch * (self.steps / self.clients) ** 0.5
        learned = self.lr * self.steps * self.clip / len(update) ** 0.5
        size = float(update.double().square().mean().sqrt())
        require(
            0.98 * sigma < size < 1.02 * (sigma**2 + learned**2) ** 0.5,
            f"{self.name}: an update of size {size:.4g} does not hold noise of {sigma:.4g}",
        )
        return round(size / sigma, 3)


TASKS = {
    "mlp": Task("MLP 784-1000-10", "thesis-mlp", clients=10, steps=6, batch=100, trial=2),
    "cnn": Task("CNN 34,720", "alphacdp-cnn", clients=100, steps=100, batch=5, trial=20),
}


@dataclass(frozen=True)
class Bench:
    """A task with its data and first model, which are also in a file for the rivals."""

    task: Task
    dataset: Dataset
    module: nn.Module
    folder: Path

    @classmethod
    def of(cls, task: Task, seed: int, folder: Path, *, smoothed: bool = False) -> Bench:
        dataset = synthetic(task, seed)
        module = build(task.model, dataset.input_shape, dataset.class_count, seed=seed)
        if smoothed:
            smooth(module)
        folder.mkdir(exist_ok=True)
        torch.save({"x": dataset.train_x, "y": dataset.train_y, "module": module}, folder / "data.pt")
        return cls(task, dataset, module, folder)

    @property
    def told(self) -> dict[str, Any]:
        """What a rival's process is told at its start."""
        return asdict(self.task) | {"data": str(self.folder / "data.pt")}

    @property
    def first(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()])


class Shoal:
    """Rounds of Shoal's simulator with its defaults, each from the first model."""

    def __init__(self, bench: Bench, order: Order = "shuffled", *, private: bool = True) -> None:
        task = bench.task
        record = replace(
            algorithm("pfl"),
            clients=Clients("all"),
            records=Records(order, task.batch),
            local=Local(steps=task.steps, lr=task.lr),
            per_record=RecordClip(clip_norm=task.clip, layers="flat") if private else None,
            per_step=StepNoise(noise_multiplier=task.noise) if private else None,
        )
        each = task.steps * task.batch
        held = ListedPartition(np.arange(task.clients * each, dtype=np.int32), np.arange(task.clients + 1) * each)
        self.simulator = simulate(
            record,
            copy.deepcopy(bench.module),
            bench.dataset,
            held,
            rounds=1,
            streams=Streams(0),
            settings=Settings("cpu"),
        )
        self.played = 0

    def play(self) -> float:
        """The seconds of a round."""
        start = time.perf_counter()
        self._round()
        return time.perf_counter() - start

    def update(self) -> Tensor:
        return self._round() - self.simulator.params.cpu()

    def _round(self) -> Tensor:
        self.played += 1
        index = RoundIndex(self.played - 1, self.played)
        params, _, _ = run_round(self.simulator.cohort, self.simulator.params, {}, index)
        return params.cpu()

    def close(self) -> None:
        self.simulator.close()


def synthetic(task: Task, seed: int) -> Dataset:
    """Pictures of MNIST's shape: what is in them does not change the time."""
    rows = task.clients * task.steps * task.batch
    random = Streams(seed).generator("benchmark")
    x = torch.from_numpy(random.random((rows, 1, 28, 28), dtype="float32"))
    y = torch.from_numpy(random.integers(0, 10, rows))
    return Dataset("synthetic", x, y, x[:100], y[:100], tuple("0123456789"))


def smooth(module: nn.Module) -> None:
    """Tanh for ReLU and means for maxima, in place: near a tie those make a great difference of rounding."""
    for name, layer in module.named_children():
        if isinstance(layer, nn.ReLU):
            setattr(module, name, nn.Tanh())
        elif isinstance(layer, nn.MaxPool2d):
            setattr(module, name, nn.AvgPool2d(layer.kernel_size))


def machine() -> str:
    """The processor's name and the cores that this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def require(held: bool, otherwise: str) -> None:
    if not held:
        raise SystemExit(otherwise)
