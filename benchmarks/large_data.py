"""Training on data larger than memory: the peak memory of a process whose records stay on disk.

    python benchmarks/large_data.py [--gigabytes 8] [--folder FOLDER]
    python benchmarks/large_data.py --kind parquet      or csv

Writes synthetic records (numbers [N, 1024] in float32, 1,000 clients) as a folder of .npy files or as a table, trains
FedAvg without privacy, with client-level (geyer-private) and with record-level privacy (dp-sgd) on them, each in a
process of its own, and prints its peak resident memory (pages of mapped files included), also less that of the same
training on 4 records a client: what the size of the data costs. FedAvg, which is first, converts the table. All files
lie in a folder of their own below FOLDER, which is removed at the end. For Linux, whose /proc has the peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, CLIENTS, TEST = 1024, 1000, 2000
NAMES = [f"x{place:04}" for place in range(WIDTH)]
SCHEMA = {
    "label": "y",
    "classes": ["0", "1"],
    "client_column": "client",
    "columns": {name: {"kind": "number", "range": [-0.2, 0.2]} for name in NAMES},
}

PRIVACY: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "geyer-private": {"per_update": {"initial_clip_norm": 0.5}, "per_round": {"noise_multiplier": 0.5}},
    "dp-sgd": {"per_record": {"clip_norm": 1.0}, "per_step": {"noise_multiplier": 0.5}},
}


def rows_of(gigabytes: float) -> int:
    """How many records have this size."""
    return max(CLIENTS * 4, int(gigabytes * 2**30) // (4 * WIDTH))


def write_table(path: Path, gigabytes: float) -> None:
    """A table of this size once it is encoded."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    rows, open_file = rows_of(gigabytes), parquet.ParquetWriter if path.suffix == ".parquet" else csv.CSVWriter
    generator, truth = np.random.default_rng(0), np.random.default_rng(1).standard_normal(WIDTH)
    kinds = dict.fromkeys(NAMES, pa.float32()) | {"y": pa.int64(), "client": pa.string()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_file(path, pa.schema(list(kinds.items()))) as file:
        for start in range(0, rows, 1 << 13):
            part = generator.standard_normal((min(1 << 13, rows - start), WIDTH), np.float32) / WIDTH**0.5
            part = part.round(4) if path.suffix == ".csv" else part
            owners = [f"c{row % CLIENTS}" for row in range(start, start + len(part))]
            columns = dict(zip(NAMES, part.T, strict=True)) | {"y": (part @ truth > 0).astype(int), "client": owners}
            file.write_table(pa.table(columns, schema=pa.schema(list(kinds.items()))))


def write(folder: Path, gigabytes: float) -> None:
    """The files of a data set of this size."""
    rows = rows_of(gigabytes)
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


def train(data: Path, algorithm: str, rounds: int) -> dict[str, float | str]:
    """Train in this process; its peak memory, in GiB."""
    import shoal

    started = time.perf_counter()
    result = shoal.run(
        {
            "algorithm": algorithm,
            "rounds": rounds,
            "model": "linear",
            "data": {"name": str(data)},
            "clients": {"cohort": 20},
            "records": {"batch": 64},
            "local": {"lr": 5.0, "epochs": 1},
            "engine": {"device": "cpu", "evaluate_every": rounds},
        }
        | PRIVACY[algorithm]
        | ({} if data.is_dir() else {"schema": SCHEMA}),
        runs=data.parent / "runs",
        no_guarantee=True,
    )
    seconds, lines = time.perf_counter() - started, Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
    return {"algorithm": algorithm, "accuracy": result.accuracy, "peak_gib": peak, "seconds": seconds}


def measured(data: Path, algorithm: str, rounds: int) -> dict[str, float | str]:
    """The same in a process of its own."""
    words = [sys.executable, __file__, "--folder", str(data), "--train", algorithm, "--rounds", str(rounds)]
    own = os.environ | {"SHOAL_CACHE": str(data.parent / "cache")}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=own)
    found: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(folder: Path, kind: str, gigabytes: float, rounds: int) -> None:
    """Write both data sets into a folder, and print a line for each algorithm."""
    small, large = (folder / (size if kind == "npy" else f"{size}.{kind}") for size in ("small", "large"))
    for path, size in ((small, 0.0), (large, gigabytes)):
        (write if kind == "npy" else write_table)(path, size)
    for algorithm in PRIVACY:
        base, found = (measured(data, algorithm, rounds) for data in (small, large))
        cost = float(found["peak_gib"]) - float(base["peak_gib"])
        print(json.dumps(found | {"kind": kind, "gigabytes": gigabytes, "beyond_small_gib": cost}), flush=True)


def main() -> None:
    """Write, train, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kind", choices=("npy", "parquet", "csv"), default="npy")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        print(json.dumps(train(given.folder, given.train, given.rounds)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="large-data-") as folder:
        compare(Path(folder), given.kind, given.gigabytes, given.rounds)


if __name__ == "__main__":
    main()
