"""Training on data larger than memory: the peak memory of a process whose records stay on disk.

    python benchmarks/large_data.py [--gigabytes 8] [--folder FOLDER]
    python benchmarks/large_data.py --kind parquet      or csv

Writes synthetic records (numbers [N, 1024] in float32, 8,000 of them again and again, 1,000 clients) as a folder of
.npy files or as a table. Trains on them by FedAvg without privacy, with client-level (geyer-private) and with
record-level privacy (dp-sgd), each in a process of its own. Prints its peak resident memory (pages of mapped files
included), also less that of the same training on 4 records a client: what the size of the data costs. FedAvg, which
is first, converts the table. All files lie in a folder of their own below FOLDER, which is removed at the end. For
Linux, whose /proc has the peak.
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
BLOCK = 8 * CLIENTS  # rows
NAMES = [f"x{place:04}" for place in range(WIDTH)]
SCHEMA = {
    "label": "y",
    "classes": ["0", "1"],
    "client_column": "client",
    "columns": {name: {"kind": "number", "range": [-0.2, 0.2]} for name in NAMES},
}

COHORT = {"sampling": "poisson", "cohort": 20}
PRIVACY: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "geyer-private": {"per_update": {"initial_clip_norm": 0.5}, "per_round": {"noise_multiplier": 0.5}},
    "dp-sgd": {"per_record": {"clip_norm": 1.0}, "per_step": {"noise_multiplier": 0.5}},
}


def rows_of(gigabytes: float) -> int:
    """How many records have about this size."""
    return max(1, round(gigabytes * 2**30 / (4 * WIDTH * BLOCK))) * BLOCK if gigabytes else 4 * CLIENTS


def block(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Records and labels, which the files repeat: to draw and to write new ones would take longer than to train."""
    x = np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32) / WIDTH**0.5
    return x, (x @ np.random.default_rng(1).standard_normal(WIDTH) > 0).astype(np.int64)


def write_table(path: Path, rows: int) -> None:
    """A table of so many rows, in blocks in which every client has the same number of them."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    x, y = block(min(rows, BLOCK))
    x = x.round(4) if path.suffix == ".csv" else x
    owners = [f"c{row % CLIENTS}" for row in range(len(x))]
    table = pa.table(dict(zip(NAMES, x.T, strict=True)) | {"y": y, "client": owners})
    if path.suffix == ".parquet":
        with parquet.ParquetWriter(path, table.schema, use_dictionary=False, compression="none") as file:
            for _ in range(0, rows, BLOCK):
                file.write_table(table)
        return
    csv.write_csv(table, path)
    text = path.read_bytes().partition(b"\n")[2]
    with path.open("ab") as stream:
        for _ in range(BLOCK, rows, BLOCK):
            stream.write(text)


def write(folder: Path, rows: int) -> None:
    """The files of a data set of so many rows, and held-out ones."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = block(min(rows, BLOCK) + TEST)
    files = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (rows, WIDTH))
    for start in range(0, rows, BLOCK):
        files[start : start + BLOCK] = x[TEST:]
    files.flush()
    np.save(folder / "y.npy", np.resize(y[TEST:], rows))
    np.save(folder / "client.npy", np.arange(rows) % CLIENTS)
    np.save(folder / "test_x.npy", x[:TEST])
    np.save(folder / "test_y.npy", y[:TEST])


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
            "clients": COHORT,
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
        (write if kind == "npy" else write_table)(path, rows_of(size))
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
