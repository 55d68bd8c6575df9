"""Flower's side: one process with its simulation, which plays a round whenever it is told to.

    worker.py ACTORS

It is run by the python of Flower's own environment, so it must not import Shoal. Standard input gives the task first,
then a line of JSON for each round (see against_opacus/rivals.py). Timed is what `FedAvg.start` does in a round but
for evaluation: messages to all nodes, their replies, and the mean.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from against_flower.client import app, data

PULL = 0.005
"""Seconds between two looks for replies; Flower's own 0.1 would be counted in every round."""


def play(grid: Grid, told: str, order: dict[str, Any]) -> dict[str, Any]:
    task = json.loads(told)
    first = ArrayRecord(data(task["data"])["module"].state_dict())
    share = order["clients"] / task["clients"]
    strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    config = ConfigRecord({"task": told, "order": json.dumps(order)})
    start = time.perf_counter()
    replies = list(grid.send_and_receive(strategy.configure_train(1, first, config, grid)))
    arrays, _ = strategy.aggregate_train(1, replies)
    seconds = time.perf_counter() - start
    if failed := [reply.error.reason for reply in replies if reply.has_error()]:
        return {"error": failed[0].strip().splitlines()[-1]}
    assert arrays is not None
    if order.get("save"):
        mean = torch.cat([weights.reshape(-1) for weights in arrays.to_torch_state_dict().values()])
        torch.save(mean * order["clients"], order["save"])
    metrics = [reply.content["metrics"] for reply in replies]
    counted = {"steps": "steps", "examples": "num-examples"}
    return {"seconds": seconds, **{key: sum(m[name] for m in metrics) for key, name in counted.items()}}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Flower and Ray print to standard output
    told = sys.stdin.readline().strip()
    actors, cores = int(sys.argv[1]), torch.get_num_threads()
    server = ServerApp()

    @server.main()
    def rounds(grid: Grid, context: Context) -> None:
        grid.pull_interval = PULL
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(play(grid, told, json.loads(line))), file=answers, flush=True)

    run_simulation(
        server,
        app,
        num_supernodes=json.loads(told)["clients"],
        backend_config={
            "init_args": {"num_cpus": cores, "log_to_driver": False},
            "client_resources": {"num_cpus": cores // actors, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
