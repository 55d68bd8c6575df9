"""Ranks on CPUs: how much of a second core a second rank turns into speed, and that a killed rank costs no promise.

    python benchmarks/ranks.py speed [--ranks 2] [--clients 400] [--rounds 8]
    python benchmarks/ranks.py kill [--kills 200] [--seed 0] [--results FILE]

`speed`: client-level DP, MNIST-shaped records, a CNN of 34,720 parameters, all clients x 5 steps of 10, one thread a
rank. Runs on one rank and on several alternate; of each the fastest round counts. Efficiency is the time of one rank
over the time of all, divided by their number; by the processor time of rank 0 it leaves out waiting, and says
something on a busy machine too. 400 clients' parameters and updates are 111 MB, more than most caches.

`kill`: private runs on 2 to 4 ranks, of which one is killed with SIGKILL at a random moment, again and again, each
life with another number of ranks. After each kill tests/support/kill_run.py checks that all ranks have ended, that
they say why, and what must always hold of the ledger, the noise and the model. `--results` as for kill.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kill import kills
from support.ports import free_port

RECORDS = 50


def data(clients: int) -> shoal.Dataset:
    generator = np.random.Generator(np.random.Philox(key=1))
    x = generator.standard_normal((clients, RECORDS, 1, 28, 28), dtype=np.float32)
    y = generator.integers(10, size=(clients, RECORDS))
    return shoal.from_clients(list(zip(x, y, strict=True)), test_fraction=0.1)


def fastest(ranks: int, clients: int, rounds: int) -> tuple[float, float]:
    """Of a run on so many ranks, each a forked process with one thread: the fastest round by the clock, and the one
    that took rank 0 the least processor time."""
    config = {
        "algorithm": "trusted-curator", "model": "alphacdp-cnn", "rounds": rounds, "clients.sampling": "all",
        "records.batch": 10, "local.steps": 5, "engine.threads": 1, "engine.evaluate_every": rounds,
        "engine.way": "rules", "baseline": False,
    }  # fmt: skip
    (read, write), port, children = os.pipe(), free_port(), []
    for rank in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            os.environ["MASTER_PORT"] = str(port)
        torch.set_num_threads(1)
        times: list[tuple[float, float]] = []
        with tempfile.TemporaryDirectory() as folder:
            shoal.run(
                config, data=data(clients), runs=folder, device="cpu", no_guarantee=True,
                on_round=lambda line, times=times: times.append((line["seconds"], time.process_time())),
            )  # fmt: skip
        if rank == 0:
            processor = np.diff([at for _, at in times[:-1]])  # the last round evaluates, the first one warms up
            found = min(took for took, _ in times[1:-1]), float(processor.min())
            os.write(write, json.dumps(found).encode())
        os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    os.close(write)
    with os.fdopen(read) as file:
        clock, processor = json.loads(file.read())
    return clock, processor


def speed(given: argparse.Namespace) -> dict[str, Any]:
    load, times = os.getloadavg()[0], {1: [], given.ranks: []}  # type: ignore[var-annotated]
    for _ in range(given.repeats):
        for ranks, found in times.items():
            found.append(fastest(ranks, given.clients, given.rounds))
    one, many = (np.array(found).min(0) for found in times.values())
    clock, processor = (one / many / given.ranks).tolist()
    return {
        "clients": given.clients,
        "ranks": given.ranks,
        "seconds a round, processor seconds of rank 0": times,
        "efficiency": clock,
        "efficiency by processor time": processor,
        "load of the machine before": load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "kill"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--clients", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, metavar="FILE", help="go on with what is there")
    given = parser.parse_args()
    found = speed(given) if given.what == "speed" else kills("ranks", given.kills, given.seed, given.results)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
