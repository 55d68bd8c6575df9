"""Milliseconds of one step of example-level DP for all clients at once, each gradient clipped and noise in each step.

    python benchmarks/private_step.py [--device cuda] [--repeats 3] [--kernels] [--plainly]

A round of the simulator, everything included, is timed and divided by its steps; the first one, which compiles and
records, does not count. `--kernels` also tells which kernels of a GPU took the time, `--plainly` turns ours off.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch

from plain_loop import Task, _name, _wait, synthetic
from shoal.algorithms import algorithm
from shoal.algorithms.base import Aggregate, Local
from shoal.data.partitions import partition
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Clients, Records
from shoal.models import build
from shoal.random.streams import Streams
from shoal.training.engine_settings import Settings
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import Trainer, simulate

TASKS = (
    Task("CNN 1,663,370", "thesis-cnn", 100, 100, 5),
    Task("CNN 34,720", "alphacdp-cnn", 100, 100, 5),
    Task("MLP 795,010", "thesis-mlp", 10, 6, 100),
)


def simulator(task: Task, settings: Settings) -> Trainer:
    data = synthetic(task)
    record = replace(
        algorithm("fedavg"),
        clients=Clients("all"),
        records=Records("shuffled", task.batch),
        local=Local(epochs=1, lr=0.1),
        aggregate=Aggregate("equal"),
        per_record=RecordClip(1.0),
        per_step=StepNoise(1.0),
    )
    module = build(task.model, data.input_shape, data.class_count, seed=0)
    parts = partition("iid", data.train_y, clients=task.clients, generator=Streams(0).generator("partition"))
    return simulate(record, module, data, parts, rounds=1, streams=Streams(0), settings=settings)


def seconds(played: Trainer, device: torch.device) -> float:
    start = time.perf_counter()
    run_round(played.cohort, played.params, played.state, RoundIndex(0, 1))
    _wait(device)
    return time.perf_counter() - start


def kernels(played: Trainer, device: torch.device, steps: int) -> list[str]:
    """The kernels that take longest, with their microseconds and how often they run in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds(played, device)
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    return [f"{row.device_time_total / steps:.0f} us, {row.count / steps:.1f}: {row.key[:80]}" for row in rows[:20]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--plainly", action="store_true")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    for task in TASKS:
        played = simulator(task, Settings(chosen.device, kernels=not chosen.plainly))
        seconds(played, device)
        best = min(seconds(played, device) for _ in range(chosen.repeats))
        found = {"task": task.name, "device": _name(device), "round_seconds": round(best, 4)}
        print(json.dumps(found | {"step_ms": round(best / task.steps * 1e3, 3)}), flush=True)
        if chosen.kernels and device.type == "cuda":
            print("\n".join(kernels(played, device, task.steps)), flush=True)
        del played


if __name__ == "__main__":
    main()
