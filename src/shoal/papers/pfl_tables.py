"""Bhaskar et al. (2025), Optimal Strategies for Federated Learning Maintaining Client Privacy (arXiv 2501.14453).

Tables 2 to 5. Each client draws a tenth of the records; batches of 64, clip 1, lr 0.3, momentum 0.5.

The noise is what Opacus finds for 20 epochs (PRV). One client alone (Table 5) has all records. Quick versions are
digits, with networks that fit them, and a batch of 16.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

from shoal.accounting import published as recipes
from shoal.papers.table import Cell, Claim, Table
from shoal.papers.work import Run

MODELS = {  # name: network, features, network of the quick version
    "CNN+RL": ("pfl-cnn", "none", "digits-cnn"),
    "CNN+TS": ("pfl-cnn-ts", "none", "digits-mlp"),
    "SN+Lin": ("scatter-linear", "scattering", "linear"),
    "SN+CNN": ("scatter-cnn", "scattering", "digits-cnn"),
}
DATA = {"MNIST": "mnist", "Fashion-MNIST": "fashion-mnist", "CIFAR-10": "cifar10"}
NOISE = {  # of two epsilons, with ten clients and more
    "MNIST": {"2.93": 0.959, "1.2": 1.660},
    "Fashion-MNIST": {"2.7": 0.998, "1.2": 1.660},
    "CIFAR-10": {"7.53": 0.685, "3.0": 0.997},
}
HALF = 1.286
"""The noise that 1.2 needs for 10 epochs instead of 20, which fits the published accuracies; it proves 1.73."""
ALONE = {"MNIST": 0.611, "Fashion-MNIST": 0.623, "CIFAR-10": 0.496}
"""Of the first epsilon, where one client has all records: 938 batches an epoch (782), found by `pfl_noise`."""
SPLITS = ((1, 20), (2, 10), (4, 5), (5, 4), (10, 2), (20, 1))
CLIENTS = (10, 25, 50, 100, 1)
RECORDS = {"MNIST": 60_000, "Fashion-MNIST": 60_000, "CIFAR-10": 50_000}
BATCH = 64
BETWEEN = "between (1, 20) and (20, 1), which were run; Tables 2 and 3 have all six rows on two other data sets"
FEWER = "between 10 and 100 clients, which were run"
LONG = "published at 0.18 or less, where guessing has 0.1; the step changed nothing in plain averaging of CNN+RL"
HUNDRED = "ten million gradients a run; with the step as stated they lie 5 and 9 points low, and no epsilon is proven"
ONE = "one client with all records is not federated; two other data sets have it"
TABLES = {"pfl-table2": "MNIST", "pfl-table3": "Fashion-MNIST", "pfl-table4": "CIFAR-10"}


def pfl(
    data: str,
    model: str,
    noise: float | None,
    epochs: int = 1,
    rounds: int = 20,
    clients: int = 10,
    lr: float = 0.3,
    momentum: float = 0.5,
) -> Run:
    """A run in the paper's setting; without noise it is federated averaging."""
    network, features, quick = MODELS[model]
    if data == "CIFAR-10":
        network = network.replace("pfl-cnn", "pfl-cifar-cnn")
    config: dict[str, Any] = {
        "algorithm": "fedavg" if noise is None else "pfl",
        "model": network,
        "rounds": rounds,
        "data.name": DATA[data],
        "data.partition": "sample",
        "data.clients": clients,
        "data.fraction": 1.0 if clients == 1 else 0.1,
        "data.features": features,
        "data.scale": "unit" if features == "scattering" else "standard",
        "clients.sampling": "all",
        "records.batch": BATCH,
        "local.epochs": epochs,
        "local.lr": lr,
        "local.momentum": momentum,
    }
    if noise is not None:
        config["per_step.noise_multiplier"] = noise
    small = {
        "data.name": "digits",
        "data.scale": "unit",
        "data.features": "none",
        "model": quick,
        "records.batch": 16,
    }
    return Run(config, small)


def claim_of(data: str, epsilon: str, noise: float, clients: int = 10) -> Claim:
    """True under add-or-remove, if a record lies on one client only."""
    records = RECORDS[data] * (1.0 if clients == 1 else 0.1)
    proven = partial(own_data, noise, math.ceil(records / BATCH))
    if clients == 1:
        return Claim("record", "server", float(epsilon), add_or_remove=proven)
    return Claim("record", "server", float(epsilon), amended=("disjoint data, under add-or-remove", proven))


@cache
def own_data(noise: float, batches: int) -> float:
    """What PLD proves of 20 epochs for a record of one client."""
    return recipes.pfl_epsilon(noise, batches, 20 * batches)


def by_split(name: str) -> Table:
    """Tables 2 to 4: accuracy by local epochs and rounds."""
    data = TABLES[name]
    columns: dict[str, tuple[float | None, Claim | None]] = {"FedAvg": (None, None)}
    columns |= {f"PFL {epsilon}": (noise, claim_of(data, epsilon, noise)) for epsilon, noise in NOISE[data].items()}
    cells = []
    for epochs, rounds in SPLITS:
        for method, (noise, claim) in columns.items():
            for model in MODELS:
                work = pfl(data, model, noise, epochs, rounds)
                why = BETWEEN if data == "CIFAR-10" and 1 < epochs < 20 else ""
                cells.append(Cell(f"({epochs}, {rounds})", f"{method} {model}", work, claim=claim, unneeded=why))
                if noise == NOISE["MNIST"]["1.2"] and model != "SN+Lin":  # which agrees as it is
                    less = pfl(data, model, HALF, epochs, rounds)
                    own = Claim("record", "server", 1.2)  # which it does not keep
                    change = f"noise for 10 epochs, sigma {HALF}"
                    cells.append(replace(cells[-1], work=less, change=change, claim=own))
                plain = (noise, epochs) == (None, 1) or epochs == 20
                if data == "CIFAR-10" and plain and MODELS[model][1] == "none":
                    # with lr 0.3 and no clip they stay on a plateau; this is the authors' script for such networks
                    steeper = pfl(data, model, noise, epochs, rounds, lr=0.1, momentum=0.9)
                    why = LONG if epochs == 20 else ""
                    cells.append(replace(cells[-1], work=steeper, change="lr 0.1, momentum 0.9", unneeded=why))
    minutes = 60 if data == "CIFAR-10" else 15
    return Table(name, (DATA[data],), minutes, tuple(cells))


def by_clients() -> Table:
    """Table 5: accuracy by the number of clients."""
    cells = []
    for clients in CLIENTS:
        for data, noises in NOISE.items():
            epsilon, noise = next(iter(noises.items()))
            sigma = ALONE[data] if clients == 1 else noise
            claim = claim_of(data, epsilon, sigma, clients)
            for model in MODELS:
                work = pfl(data, model, sigma, clients=clients)
                why = {25: FEWER, 50: FEWER, 1: ONE}.get(clients, "") if data == "CIFAR-10" else ""
                cells.append(Cell(str(clients), f"{data} {model}", work, claim=claim, unneeded=why))
                if (clients, data) == (100, "CIFAR-10") and MODELS[model][1] == "none":
                    steeper = pfl(data, model, sigma, clients=clients, lr=0.1, momentum=0.9)
                    change = "lr 0.1, momentum 0.9"
                    cells.append(replace(cells[-1], work=steeper, change=change, unneeded=HUNDRED))
                if clients == 1 and data != "CIFAR-10":  # no averaging over clients: a smaller step
                    slow = pfl(data, model, sigma, clients=1, lr=0.03)
                    cells.append(Cell("1", f"{data} {model}", slow, change="lr 0.03", claim=claim))
    return Table("pfl-table5", tuple(DATA.values()), 60, tuple(cells))


def tables() -> list[Table]:
    """All tables of the paper."""
    return [*map(by_split, TABLES), by_clients()]
