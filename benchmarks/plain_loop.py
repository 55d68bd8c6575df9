"""Seconds a round: Shoal's simulator against the same work in a plain PyTorch loop, in one run.

    python benchmarks/plain_loop.py [--device cuda] [--repeats 5]

(a) MLP 784-1000-10, 10 clients x 6 steps of 100;  (b) the CNN of 34,720 parameters, 100 clients x 20 steps of 5.
The plain loop trains one client after the other with its own optimiser; it is timed under every setting that
might suit it (threads, mkldnn on and off, channels last) and the best one counts. Both are timed in turns, so that
a busy machine slows both; the ratio is of the two fastest rounds.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from shoal.algorithms import algorithm
from shoal.algorithms.base import Local
from shoal.data.dataset import Dataset
from shoal.data.partitions import partition
from shoal.mechanisms.sampling import Clients, Records
from shoal.models import build
from shoal.random.streams import Streams
from shoal.training.engine_settings import Settings
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate


@dataclass(frozen=True)
class Task:
    name: str
    model: str
    clients: int
    steps: int
    batch: int


TASKS = (Task("a: MLP", "thesis-mlp", 10, 6, 100), Task("b: CNN 34,720", "alphacdp-cnn", 100, 20, 5))


def synthetic(task: Task) -> Dataset:
    """Pictures of MNIST's shape: what is in them does not change the time."""
    rows = task.clients * task.steps * task.batch
    random = Streams(0).generator("benchmark")
    x = torch.from_numpy(random.random((rows, 1, 28, 28), dtype="float32"))
    y = torch.from_numpy(random.integers(0, 10, rows))
    return Dataset("synthetic", x, y, x[:100], y[:100], tuple("0123456789"))


def simulator_round(task: Task, data: Dataset, module: nn.Module, device: torch.device) -> Callable[[], None]:
    record = replace(
        algorithm("fedavg"),
        clients=Clients("all"),
        records=Records("shuffled", task.batch),
        local=Local(epochs=1, lr=0.1),
    )
    parts = partition("iid", data.train_y, clients=task.clients, generator=Streams(0).generator("partition"))
    simulator = simulate(
        record, copy.deepcopy(module), data, parts, rounds=1, streams=Streams(0), settings=Settings(str(device))
    )

    def run() -> None:
        run_round(simulator.cohort, simulator.params, simulator.state, RoundIndex(0, 1))
        _wait(device)

    return run


def plain_round(task: Task, data: Dataset, module: nn.Module, device: torch.device, last: bool) -> Callable[[], None]:
    module = copy.deepcopy(module).to(device)
    x, y = data.train_x.to(device), data.train_y.to(device)
    if last:
        module, x = module.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    start = copy.deepcopy(list(module.parameters()))
    each = task.steps * task.batch

    def run() -> None:
        total = [torch.zeros_like(p) for p in start]
        for client in range(task.clients):
            with torch.no_grad():
                for p, q in zip(module.parameters(), start, strict=True):
                    p.copy_(q)
            optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
            order = (torch.randperm(each) + client * each).to(device)
            for step in range(task.steps):
                rows = order[step * task.batch : (step + 1) * task.batch]
                optimiser.zero_grad()
                F.cross_entropy(module(x[rows]), y[rows]).backward()
                optimiser.step()
            for t, p in zip(total, module.parameters(), strict=True):
                t += p.detach()
        _wait(device)

    return run


def compare(task: Task, device: torch.device, repeats: int) -> dict[str, object]:
    data = synthetic(task)
    module = build(task.model, data.input_shape, data.class_count, seed=0)
    ours = simulator_round(task, data, module, device)
    pictures = (False, True) if task.model.endswith("cnn") else (False,)
    if device.type == "cpu":
        cores = torch.get_num_threads()
        choices = list(itertools.product(sorted({1, cores}), (True, False), pictures))
    else:
        cores, choices = torch.get_num_threads(), [(torch.get_num_threads(), True, last) for last in pictures]
    plain = {choice: plain_round(task, data, module, device, choice[2]) for choice in choices}
    best: dict[object, float] = {}
    for turn in range(repeats + 1):
        for choice, run in plain.items():
            with _setting(choice[0], choice[1]):
                _time(choice, run, best, warm=turn == 0)
        for mkldnn in (True, False) if device.type == "cpu" else (True,):
            with _setting(cores, mkldnn):
                _time(("shoal", mkldnn), ours, best, warm=turn == 0)
    own = {key[1]: best.pop(key) for key in list(best) if key[0] == "shoal"}
    choice = min(best, key=best.__getitem__)
    return {
        "task": task.name,
        "device": _name(device),
        "plain_seconds": round(best[choice], 4),
        "plain_setting": dict(zip(("threads", "mkldnn", "channels_last"), choice, strict=True)),
        "shoal_seconds": round(own[True], 4),
        "shoal_seconds_without_mkldnn": round(own[False], 4) if False in own else None,
        "ratio": round(best[choice] / own[True], 2),
    }


class _setting:
    """Threads and mkldnn for the time of a `with` block."""

    def __init__(self, threads: int, mkldnn: bool) -> None:
        self.wanted = (threads, mkldnn)

    def __enter__(self) -> None:
        self.before = (torch.get_num_threads(), torch.backends.mkldnn.enabled)
        self._set(*self.wanted)

    def __exit__(self, *_: object) -> None:
        self._set(*self.before)

    @staticmethod
    def _set(threads: int, mkldnn: bool) -> None:
        torch.set_num_threads(threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.backends.mkldnn.set_flags(mkldnn)


def _time(key: object, run: Callable[[], None], best: dict[object, float], *, warm: bool) -> None:
    start = time.perf_counter()
    run()
    if not warm:
        best[key] = min(best.get(key, float("inf")), time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    for task in TASKS:
        print(json.dumps(compare(task, torch.device(chosen.device), chosen.repeats)), flush=True)


if __name__ == "__main__":
    main()
