"""A million simulated clients: seconds until all are trained once in expectation, and the memory that it takes.

    python benchmarks/million.py [--clients 1000000] [--cohort 10000] [--rounds 100] [--device cuda] [--profile 3]
    python benchmarks/million.py --sweep [--plot docs/results/performance-clients.png] [--rounds 5]

Each client holds 50 records of MNIST's shape and takes 5 steps of 10 with the CNN of 34,720 parameters; cohorts are
Poisson samples, updates are clipped, and the sum gets Gaussian noise. It is `shoal.run` as a user would call it, with
its ledger and its checkpoints, evaluated at the end. `setup` is from the call to the first round, `pass` scales the
rounds to one turn of every client. With --sweep the number of clients, and the cohort, are varied alone. Every run
prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.data import Dataset
from shoal.random.streams import Streams

EACH, STEPS, BATCH = 50, 5, 10
MANY = (10_000, 100_000, 1_000_000, 10_000_000)
COHORTS = (1_000, 2_000, 5_000, 10_000)


def pictures(rows: int = 60_000) -> Dataset:
    """Pictures of MNIST's shape: what is in them does not change the time."""
    random = Streams(0).generator("benchmark")
    x = torch.from_numpy(random.random((rows, 1, 28, 28), dtype="float32"))
    y = torch.from_numpy(random.integers(0, 10, rows))
    return Dataset("pictures", x, y, x[:100], y[:100], tuple("0123456789"))


def resident() -> float:
    """GB of memory that this process holds now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024 / 1e9


def measured(data: Dataset, clients: int, cohort: int, rounds: int, device: str, profiled: int = 0) -> dict[str, Any]:
    """One run: its seconds and its memory. The first round, which records and measures, is timed apart."""
    times: list[float] = []
    memory: list[float] = []
    profiler = torch.profiler.profile() if profiled else None

    def begin(*_: object) -> None:
        times.append(time.perf_counter())

    def note(line: dict[str, Any]) -> None:
        if line["round"] > 0:
            times.append(time.perf_counter())
            memory.append(resident())
        if profiler is not None and len(times) == 2:
            profiler.start()
        if profiler is not None and len(times) == 2 + profiled:
            profiler.stop()

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        shoal.run(
            {
                "algorithm": "trusted-curator", "rounds": rounds + 1, "seed": 1, "model": "alphacdp-cnn",
                "data": {"partition": "iid", "clients": clients, "records": EACH},
                "clients": {"sampling": "poisson", "cohort": cohort}, "records": {"batch": BATCH},
                "local": {"steps": STEPS}, "engine": {"evaluate_every": rounds + 1},
            },
            data=data, device=device, runs=folder, on_start=begin, on_round=note,
        )  # fmt: skip
    if profiler is not None:
        print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=25), file=sys.stderr)
        print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=25), file=sys.stderr)
    took = (times[-1] - times[1]) / rounds
    cuda = device.startswith("cuda")
    return {
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        "setup": round(times[0] - start, 2),
        "first_round": round(times[1] - times[0], 2),
        "seconds_a_round": round(took, 4),
        "clients_a_second": round(cohort / took),
        "pass": round(took * clients / cohort, 1),
        "resident_gb": [round(memory[0], 2), round(memory[-1], 2)],
        "gpu_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} cores",
        "torch": torch.__version__,
    }


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Seconds a round against the number of clients, and against the cohort."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    cohort = min(each["cohort"] for each in found)
    by_clients = [each for each in found if each["cohort"] == cohort]
    most = max(each["clients"] for each in found if each["cohort"] != cohort)
    by_cohort = [each for each in found if each["clients"] == most]
    left.plot([each["clients"] for each in by_clients], [each["seconds_a_round"] for each in by_clients], "o-")
    left.set(xscale="log", xlabel=f"clients (cohorts of {cohort:,})", ylabel="seconds a round")
    right.plot([each["cohort"] for each in by_cohort], [each["seconds_a_round"] for each in by_cohort], "o-")
    right.set(xlabel=f"cohort (of {most:,} clients)", xlim=(0, None), ylim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=100, help="timed rounds, after one that is not")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", type=int, default=0, help="rounds of which a profile is printed")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    data = pictures()
    if not chosen.sweep:
        sizes = [(chosen.clients, chosen.cohort)]
    else:
        sizes = [(many, COHORTS[0]) for many in MANY] + [(MANY[-2], cohort) for cohort in COHORTS[1:]]
    found = []
    for clients, cohort in sizes:
        found.append(measured(data, clients, cohort, chosen.rounds, chosen.device, chosen.profile))
        print(json.dumps(found[-1]), flush=True)
    if chosen.plot and chosen.sweep:
        draw(found, chosen.plot)


if __name__ == "__main__":
    main()
