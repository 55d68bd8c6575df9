"""Federated averaging on MNIST, Shoal beside a plain PyTorch loop that shares nothing with it but the data.

    SHOAL_DATA=... python benchmarks/fedavg_mnist.py [--rounds 50] [--seeds 0,1,2]

MLP 784-1000-10, 100 clients IID, 10 a round, one epoch, batches of 100, lr .1: both should end at the same accuracy.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile

import torch
import torch.nn.functional as F

import shoal
from shoal.data import Dataset, load
from shoal.models import build


def simulated(data: Dataset, rounds: int, seed: int) -> float:
    with tempfile.TemporaryDirectory() as runs:
        result = shoal.run(
            {
                "algorithm": "fedavg",
                "model": "thesis-mlp",
                "rounds": rounds,
                "seed": seed,
                "data.clients": 100,
                "clients.cohort": 10,
                "records.batch": 100,
                "local.lr": 0.1,
                "engine.evaluate_every": rounds,
            },
            data=data,
            runs=runs,
        )
    return result.accuracy


def plain(data: Dataset, rounds: int, seed: int) -> float:
    torch.manual_seed(seed)
    model = build("thesis-mlp", data.input_shape, data.class_count, seed=seed + 1000)
    owned = torch.randperm(len(data.train_y)).view(100, -1)
    for _ in range(rounds):
        start = copy.deepcopy(model.state_dict())
        total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        for client in torch.randperm(100)[:10]:
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            records = owned[client][torch.randperm(owned.shape[1])]
            for batch in records.split(100):
                optimiser.zero_grad()
                F.cross_entropy(model(data.train_x[batch]), data.train_y[batch]).backward()
                optimiser.step()
            for name, tensor in model.state_dict().items():
                total[name] += tensor / 10
        model.load_state_dict(total)
    with torch.no_grad():
        return float((model(data.test_x).argmax(1) == data.test_y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", default="0,1,2")
    chosen = parser.parse_args()
    data = load("mnist")
    for seed in map(int, chosen.seeds.split(",")):
        found = {"shoal": simulated(data, chosen.rounds, seed), "plain": plain(data, chosen.rounds, seed)}
        print(json.dumps({"seed": seed, **{name: round(value, 4) for name, value in found.items()}}), flush=True)


if __name__ == "__main__":
    main()
