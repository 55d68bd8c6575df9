"""002, PFL: Tables 2 to 5. Each client draws a tenth of the records; batches of 64, clip 1, lr .3, momentum .5.

The noise is what Opacus finds for 20 epochs (PRV). One client alone (Table 5) has all records. Quick versions are
digits, with networks that fit them, and a batch of 16.
"""

from __future__ import annotations

from typing import Any

from shoal.papers.base import Cell, Claim, Table
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
ALONE = {"MNIST": 0.611, "Fashion-MNIST": 0.623, "CIFAR-10": 0.496}
"""Of the first epsilon, where one client has all records: 938 batches an epoch (782), found by `pfl_noise`."""
SPLITS = ((1, 20), (2, 10), (4, 5), (5, 4), (10, 2), (20, 1))
CLIENTS = (10, 25, 50, 100, 1)
TABLES = {"pfl-table2": "MNIST", "pfl-table3": "Fashion-MNIST", "pfl-table4": "CIFAR-10"}


def pfl(data: str, model: str, noise: float | None, epochs: int = 1, rounds: int = 20, clients: int = 10) -> Run:
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
        "examples.batch": 64,
        "local.epochs": epochs,
        "local.lr": 0.3,
        "local.momentum": 0.5,
    }
    if noise is not None:
        config["per_step.noise"] = noise
    small = {
        "data.name": "digits",
        "data.scale": "unit",
        "data.features": "none",
        "model": quick,
        "examples.batch": 16,
    }
    return Run(config, small)


def by_split(name: str) -> Table:
    data = TABLES[name]
    columns: dict[str, tuple[float | None, Claim | None]] = {"FedAvg": (None, None)}
    columns |= {
        f"PFL {epsilon}": (noise, Claim("example", "server", float(epsilon)))
        for epsilon, noise in NOISE[data].items()
    }
    first = list(columns)[1]
    cells = []
    for epochs, rounds in SPLITS:
        for method, (noise, claim) in columns.items():
            for model in MODELS:
                work = pfl(data, model, noise, epochs, rounds)
                old = f"{name}/{model}/{epochs},{rounds}" if method == first else ""
                cells.append(Cell(f"({epochs}, {rounds})", f"{method} {model}", work, claim=claim, formerly=old))
    minutes = 60 if data == "CIFAR-10" else 15
    return Table(name, (DATA[data],), minutes, tuple(cells))


def by_clients() -> Table:
    cells = []
    for clients in CLIENTS:
        for data, noises in NOISE.items():
            epsilon, noise = next(iter(noises.items()))
            claim = Claim("example", "server", float(epsilon))
            for model in MODELS:
                work = pfl(data, model, ALONE[data] if clients == 1 else noise, clients=clients)
                cells.append(Cell(str(clients), f"{data} {model}", work, claim=claim))
    return Table("pfl-table5", tuple(DATA.values()), 60, tuple(cells))


def tables() -> list[Table]:
    return [*map(by_split, TABLES), by_clients()]
