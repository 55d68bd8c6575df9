"""Seconds a round: Shoal's simulator against Apple's pfl 0.6, central Gaussian DP, the same work, in one run.

pfl wants an environment of its own (torch first and by its exact version, as in the Makefile):

    python3 -m venv PFL && PFL/bin/pip install torch==2.13.0
    PFL/bin/pip install 'pfl[pytorch]==0.6.*' torch==2.13.0
    python benchmarks/against_pfl --pfl-python PFL/bin/python [--device cuda] [--repeats 7] [--task b]

(a) MLP 784-1000-10, 100 clients x 600, 10 a round, 6 steps of 100;  (b) the CNN of 1,663,370 parameters, 10 clients a
round x 20 steps of 5;  (c) the CNN of 34,720 parameters, 100 clients x 100 steps of 5;  (million) the same CNN,
1,000,000 clients x 50 records, 10,000 a round, 5 steps of 10, only where it is asked for. Pictures of MNIST's shape,
60,000 at most: where clients hold more, each picture is held by several.

Timed is a round and nothing else: cohort, training, clip, sum, noise, the server's step; no evaluation, checkpoint
or ledger. pfl runs under every setting that might suit it: a process of one thread for each core (joined by gloo, as
its guide says) or one process with all threads, mkldnn on and off, channels last; the best one counts. pfl cannot
join processes that share one GPU, so there several run apart, each with its share of the cohort and no sum over
them: less work than a true round. Shoal runs with its defaults, and shuffles its batches, which pfl does not.

The sides are timed in turns, so that a busy machine slows both; the ratio is of the two fastest rounds. Settings of
pfl that are twice as slow as its best are dropped after one turn, a quarter slower after two. Before any timing it is
checked that without noise, in a fixed order, both sides find the same update; in the warm-up that both take the steps
they should and that the noise is there. Each task prints one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
from processes import Pfl, Start, versions
from torch import Tensor, nn

from shoal.algorithms import algorithm
from shoal.algorithms.base import Local
from shoal.data.dataset import Dataset
from shoal.data.partitions import ListedPartition
from shoal.gradients import Network, Tape
from shoal.mechanisms.gaussian import Gaussian
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.update_clipping import Clip
from shoal.models import build
from shoal.random.streams import Streams
from shoal.training.context import pick_device
from shoal.training.engine_settings import Settings
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate

Order = Literal["shuffled", "fixed-order"]
Work = dict[str, int]
Choice = tuple[Start, bool]
"""How pfl is started, and mkldnn on or off."""

SAME = {"cpu": 1e-3, "cuda": 2e-2}
"""A GPU convolves in TF32."""

DROP = {1: 2.0, 2: 1.25}
"""After which turn pfl's settings go on only if they are at most so much slower than its best."""


@dataclass(frozen=True)
class Task:
    name: str
    model: str
    clients: int
    cohort: int
    steps: int
    batch: int
    lr: float = 0.02
    clip: float = 0.4
    noise: float = 1.633

    @property
    def work(self) -> Work:
        return {"steps": self.cohort * self.steps, "examples": self.cohort * self.steps * self.batch}


TASKS = (
    Task("a: MLP 784-1000-10", "thesis-mlp", 100, 10, 6, 100),
    Task("b: CNN 1,663,370", "thesis-cnn", 100, 10, 20, 5),
    Task("c: CNN 34,720", "alphacdp-cnn", 100, 100, 100, 5),
    Task("million: CNN 34,720", "alphacdp-cnn", 1_000_000, 10_000, 5, 10),
)
MOST_ROWS = 60_000


def synthetic(task: Task) -> Dataset:
    """Pictures of MNIST's shape: what is in them does not change the time."""
    rows = min(task.clients * task.steps * task.batch, MOST_ROWS)
    random = Streams(0).generator("benchmark")
    x = torch.from_numpy(random.random((rows, 1, 28, 28), dtype="float32"))
    y = torch.from_numpy(random.integers(0, 10, rows))
    return Dataset("synthetic", x, y, x[:100], y[:100], tuple("0123456789"))


class Shoal:
    """Shoal's side: rounds of the trusted curator, each from the first model."""

    def __init__(self, task: Task, data: Dataset, module: nn.Module, device: torch.device, order: Order) -> None:
        record = replace(
            algorithm("trusted-curator"),
            clients=Clients("fixed-size", task.cohort),
            records=Records(order, task.batch),
            local=Local(steps=task.steps, lr=task.lr),
            per_update=Clip(task.clip),
            per_round=Gaussian(task.noise),
        )
        each = task.steps * task.batch
        records = np.arange(task.clients * each, dtype=np.int32) % len(data.train_y)
        held = ListedPartition(records, np.arange(task.clients + 1) * each)
        self.device = device
        self.simulator = simulate(
            record, copy.deepcopy(module), data, held, rounds=1, streams=Streams(0), settings=Settings(str(device))
        )

    def play(self, t: int) -> float:
        """Round t, with a cohort of its own: its seconds."""
        start = time.perf_counter()
        run_round(self.simulator.cohort, self.simulator.params, self.simulator.state, RoundIndex(t, t + 1))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def watched(self) -> tuple[Work, Tensor]:
        """A round that is not timed: the work that was done, and the update of the model."""
        counted = Counted(self.simulator.cohort.network)
        cohort = replace(self.simulator.cohort, network=counted, graphs=None)  # a recorded step could not be counted
        params, _, _ = run_round(cohort, self.simulator.params, {}, RoundIndex(0, 1))
        done = {"steps": sum(s for s, _ in counted.seen), "examples": sum(e for _, e in counted.seen)}
        return done, (params - self.simulator.params).cpu()

    def close(self) -> None:
        self.simulator.close()


class Counted:
    """A network that notes for each call how many clients took a step, and with how many records."""

    def __init__(self, network: Network) -> None:
        self.network, self.layout, self.batched = network, network.layout, network.batched
        self.drops, self.draws = network.drops, network.draws
        self.seen: list[tuple[int, int]] = []

    def backward(self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor, seeds: Tensor) -> Tape:
        self.seen.append((len(params), int((weights > 0).sum())))
        return self.network.backward(params, x, y, weights, seeds)

    def deferred_updates(self, start: Tensor, params: Tensor, batch: int) -> AbstractContextManager[None]:
        return self.network.deferred_updates(start, params, batch)


@dataclass(frozen=True)
class Bench:
    """What the two sides of a task have in common."""

    task: Task
    python: str
    device: torch.device
    folder: Path
    dataset: Dataset
    module: nn.Module

    @classmethod
    def of(cls, task: Task, python: str, device: torch.device, folder: Path, *, smoothed: bool = False) -> Bench:
        dataset = synthetic(task)
        module = build(task.model, dataset.input_shape, dataset.class_count, seed=0)
        if smoothed:
            smooth(module)
        torch.save({"x": dataset.train_x, "y": dataset.train_y, "module": module}, folder / "data.pt")
        return cls(task, python, device, folder, dataset, module)

    def starts(self) -> list[Start]:
        """The ways of starting pfl that might be the best."""
        if self.device.type == "cuda":
            return [Start(n, 1, joined=n == 1, channels_last=False) for n in (1, 10)]
        layouts = (False, True) if self.task.model.endswith("cnn") else (False,)
        cores = torch.get_num_threads()
        ways = sorted({(cores, 1), (1, cores)}, reverse=True)
        return [Start(n, threads, joined=True, channels_last=last) for n, threads in ways for last in layouts]

    def pfl(self, start: Start) -> Pfl:
        return Pfl(self.python, start, asdict(self.task), self.folder / "data.pt", self.device)

    def shoal(self, order: Order) -> Shoal:
        return Shoal(self.task, self.dataset, self.module, self.device, order)

    def watched(self, pfl: Pfl) -> tuple[Work, Tensor]:
        """A round of pfl that is not timed: the work that was done, and the update of the model."""
        model = self.folder / "model.pt"
        told = pfl.play(mkldnn=True, save=model)
        first = torch.cat([p.detach().reshape(-1) for p in self.module.parameters()])
        return {key: told[key] for key in self.task.work}, torch.load(model) - first


def agreement(bench: Bench) -> float:
    """How far apart the sides' updates are, as a share of their length: all of a few train, are clipped, no noise.

    The network is smoothed for it: near a tie a ReLU or a maximum makes a great difference of rounding.
    """
    few = min(bench.task.cohort, 100)
    task = replace(bench.task, clients=few, cohort=few, clip=0.01, noise=0.0)
    with tempfile.TemporaryDirectory() as folder:
        twin = Bench.of(task, bench.python, bench.device, Path(folder), smoothed=True)
        with closing(twin.shoal("fixed-order")) as shoal, closing(twin.pfl(twin.starts()[0])) as pfl:
            (_, ours), (_, theirs) = shoal.watched(), twin.watched(pfl)
    apart = float((ours - theirs).norm() / ours.norm())
    require(
        apart < SAME[bench.device.type],
        f"{task.name}: without noise the updates are {apart:.2g} of their length apart",
    )
    return float(f"{apart:.1g}")


def smooth(module: nn.Module) -> None:
    """Tanh for ReLU and means for maxima, in place."""
    for name, layer in module.named_children():
        if isinstance(layer, nn.ReLU):
            setattr(module, name, nn.Tanh())
        elif isinstance(layer, nn.MaxPool2d):
            setattr(module, name, nn.AvgPool2d(layer.kernel_size))


def warm_up(bench: Bench, shoal: Shoal, groups: dict[Start, Pfl]) -> dict[str, list[float]]:
    """A round of everyone, checked: the size of the updates in units of the noise they must hold."""
    task = bench.task
    sides = [("shoal", task.cohort, shoal.watched())]
    sides += [("pfl", group.cohort, bench.watched(group)) for group in groups.values()]
    held: dict[str, list[float]] = {"shoal": [], "pfl": []}
    for side, cohort, (work, update) in sides:
        require(work == task.work, f"{task.name}: {side} did {work}, not {task.work}")
        held[side].append(noise_held(task, side, cohort, update))
    return held


def noise_held(task: Task, side: str, cohort: int, update: Tensor) -> float:
    """The root mean square of the update over the noise's sigma: 1, and a little for what was learned."""
    sigma = task.noise * task.clip / cohort
    most = (sigma**2 + task.clip**2 / len(update)) ** 0.5
    size = float(update.double().square().mean().sqrt())
    require(0.98 * sigma < size < 1.02 * most, f"{task.name}: {side}'s update is {size:.4g}, its noise {sigma:.4g}")
    return round(size / sigma, 3)


def in_turns(shoal: Shoal, groups: dict[Start, Pfl], repeats: int) -> tuple[list[float], dict[Choice, list[float]]]:
    """The seconds of every round: Shoal's, and pfl's under each of its settings."""
    flags = (True, False) if shoal.device.type == "cpu" else (True,)
    own: list[float] = []
    theirs: dict[Choice, list[float]] = {(start, mkldnn): [] for start in groups for mkldnn in flags}
    running = list(theirs)
    for turn in range(1, repeats + 1):
        for start, mkldnn in running:
            theirs[start, mkldnn].append(groups[start].play(mkldnn)["seconds"])
        own.append(shoal.play(turn))
        if turn in DROP:
            fastest = min(map(min, theirs.values()))
            running = [choice for choice in running if min(theirs[choice]) <= DROP[turn] * fastest]
    return own, theirs


def compare(bench: Bench, repeats: int) -> dict[str, object]:
    apart = agreement(bench)
    with ExitStack() as stack:
        shoal = stack.enter_context(closing(bench.shoal("shuffled")))
        groups = {start: stack.enter_context(closing(bench.pfl(start))) for start in bench.starts()}
        noises = warm_up(bench, shoal, groups)
        own, theirs = in_turns(shoal, groups, repeats)
    best = min(theirs, key=lambda choice: min(theirs[choice]))
    return {
        "task": bench.task.name,
        "device": name_of(bench.device),
        "pfl_seconds": round(min(theirs[best]), 4),
        "shoal_seconds": round(min(own), 4),
        "ratio": round(min(theirs[best]) / min(own), 2),
        "pfl_median": round(median(theirs[best]), 4),
        "shoal_median": round(median(own), 4),
        "ratio_of_medians": round(median(theirs[best]) / median(own), 2),
        "repeats": repeats,
        "pfl_setting": described(best),
        "pfl_tried": [described(choice) | {"seconds": round(min(times), 4)} for choice, times in theirs.items()],
        "work_a_round": bench.task.work,
        "updates_apart_without_noise": apart,
        "update_over_noise": noises,
        "versions": versions(bench.python) | {"shoal_torch": torch.__version__},
    }


def described(choice: Choice) -> dict[str, object]:
    start, mkldnn = choice
    return asdict(start) | {"mkldnn": mkldnn}


def require(held: bool, otherwise: str) -> None:
    if not held:
        raise SystemExit(otherwise)


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfl-python", required=True, help="the python of pfl's environment")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--task", default="abc", help="which tasks, by their letters, or million")
    parser.add_argument("--steps", type=int, help="local steps other than the task's, for a quick look")
    chosen = parser.parse_args()
    require(chosen.repeats > 0, "--repeats must be at least 1")
    versions(chosen.pfl_python)
    for task in TASKS:
        if task.name.partition(":")[0] in chosen.task:
            task = replace(task, steps=chosen.steps or task.steps)
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench.of(task, chosen.pfl_python, pick_device(chosen.device), Path(folder))
                print(json.dumps(compare(bench, chosen.repeats)), flush=True)


if __name__ == "__main__":
    main()
