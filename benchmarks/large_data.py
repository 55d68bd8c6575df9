"""Training on data larger than memory: the peak memory of a process whose records stay on disk.

    python benchmarks/large_data.py --gigabytes 8 --folder FOLDER

Writes synthetic records (numbers [N, 1024] in float32, 1,000 clients), trains FedAvg and DP-SGD on them, each in a
process of its own, and prints its peak resident memory (pages of mapped files included), also less that of the same
training on 4 records a client: what the size of the data costs. For Linux, whose /proc has the peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

WIDTH, CLIENTS, TEST = 1024, 1000, 2000


def write(folder: Path, gigabytes: float) -> int:
    """The files of a data set of this size; returns its rows."""
    rows = max(CLIENTS * 4, int(gigabytes * 2**30) // (4 * WIDTH))
    folder.mkdir(parents=True, exist_ok=True)
    generator, truth = np.random.default_rng(0), np.random.default_rng(1).standard_normal(WIDTH)
    labels = np.empty(rows, np.int64)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (rows, WIDTH))
    for start in range(0, rows, 1 << 14):
        part = generator.standard_normal((min(1 << 14, rows - start), WIDTH), np.float32) / WIDTH**0.5
        x[start : start + len(part)], labels[start : start + len(part)] = part, part @ truth > 0
    x.flush()
    del x
    test = generator.standard_normal((TEST, WIDTH), np.float32) / WIDTH**0.5
    np.save(folder / "y.npy", labels)
    np.save(folder / "client.npy", np.arange(rows) % CLIENTS)
    np.save(folder / "test_x.npy", test)
    np.save(folder / "test_y.npy", (test @ truth > 0).astype(np.int64))
    return rows


def train(folder: Path, algorithm: str, rounds: int) -> dict[str, float | str]:
    """Train in this process; its peak memory, in GiB."""
    import shoal

    started = time.perf_counter()
    more = {"per_record": {"clip_norm": 1.0}, "per_step": {"noise_multiplier": 0.5}} if algorithm == "dp-sgd" else {}
    result = shoal.run(
        {
            "algorithm": algorithm,
            "rounds": rounds,
            "model": "linear",
            "data": {"name": str(folder)},
            "clients": {"cohort": 20},
            "records": {"batch": 64},
            "local": {"lr": 5.0, "epochs": 1},
            "engine": {"device": "cpu", "evaluate_every": rounds},
        }
        | more,
        runs=folder / "runs",
        no_guarantee=True,
    )
    seconds, lines = time.perf_counter() - started, Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
    return {"algorithm": algorithm, "accuracy": result.accuracy, "peak_gib": peak, "seconds": seconds}


def measured(folder: Path, algorithm: str, rounds: int) -> dict[str, float | str]:
    """The same in a process of its own."""
    words = [sys.executable, __file__, "--folder", str(folder), "--train", algorithm, "--rounds", str(rounds)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Write, train, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        print(json.dumps(train(given.folder, given.train, given.rounds)))
        return
    small, large = given.folder / "small", given.folder / "large"
    write(small, 0)
    rows = write(large, given.gigabytes)
    for algorithm in ("fedavg", "dp-sgd"):
        base, found = (measured(folder, algorithm, given.rounds) for folder in (small, large))
        cost = float(found["peak_gib"]) - float(base["peak_gib"])
        print(json.dumps(found | {"rows": rows, "gigabytes": given.gigabytes, "beyond_small_gib": cost}), flush=True)


if __name__ == "__main__":
    main()
