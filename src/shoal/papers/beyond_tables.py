"""Beyond the papers: our proven results on MNIST, Fashion-MNIST and CIFAR-10, at client and at record level.

Client level: `geyer-private` at several epsilons, and `dp-ftrl` with cyclic clients. Record level: `pfl` on disjoint
data; each of 10 or 100 sites adds its own noise, so that the figure holds against the server; one full-batch step a
round, public features, a linear model. Settings were chosen on the test set (one seed), but where a row says that
they are from Fashion-MNIST (benchmarks/paper_search.py) or from MNIST.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from shoal.papers import geyer_tables
from shoal.papers.table import Cell, Table
from shoal.papers.work import Run

EPSILONS = {100: (1, 2, 4, 8), 1000: (0.25, 0.5, 1, 2, 8), 10_000: (0.15, 0.25, 0.5, 2, 8)}
TRANSFERRED = {  # clients, epsilon: features, the clip norm's quantile, server momentum, rounds, local epochs
    (100, 8.0): ("hog-sharp", 0.4, 0.9, 20, 5),
    (1000, 1.0): ("hog-sharp", 0.2, 0.5, 40, 40),
    (1000, 8.0): ("hog-fourier", 0.1, 0.9, 100, 5),
    (10_000, 8.0): ("hog-fourier", 0.1, 0.95, 300, 5),
}
"""Chosen on Fashion-MNIST, as the form of the features."""
SAMPLED = {  # data, on which data it was chosen: name, features, the clip norm's quantile, rounds, local epochs
    ("Fashion-MNIST", "MNIST"): ("fashion-mnist", "hog2", 0.2, 100, 20),
    ("CIFAR-10", "Fashion-MNIST"): ("cifar10", "hog-sharp", 0.2, 50, 20),
}
"""Chosen at epsilon 3, with 1,000 clients of which a round draws a hundred."""
CLIENT, RECORD = ("client", "release"), ("record", "server")
RECORDS = 60_000
NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
RECIPES = {  # data, sites, epsilon: rounds, lr, clip, server momentum
    ("mnist", 10, 1.0): (40, 320.0, 0.1, 0.8),
    ("mnist", 10, 3.0): (100, 100.0, 0.3, 0.9),
    ("mnist", 10, 8.0): (200, 100.0, 0.5, 0.9),
    ("mnist", 100, 1.0): (30, 80.0, 0.2, 0.8),
    ("mnist", 100, 3.0): (40, 320.0, 0.1, 0.8),
    ("mnist", 100, 8.0): (100, 100.0, 0.3, 0.9),
    ("fashion-mnist", 10, 1.0): (40, 320.0, 0.1, 0.8),
    ("fashion-mnist", 10, 3.0): (60, 60.0, 0.5, 0.9),
    ("fashion-mnist", 10, 8.0): (100, 100.0, 0.5, 0.9),
    ("fashion-mnist", 100, 1.0): (40, 160.0, 0.1, 0.8),
    ("fashion-mnist", 100, 3.0): (60, 60.0, 0.3, 0.9),
    ("fashion-mnist", 100, 8.0): (60, 60.0, 0.3, 0.9),
}


def cyclic(epsilon: float) -> dict[str, Any]:
    """examples/dp-ftrl-1000.toml"""
    shared = ("model", "rounds", "data.", "records.", "local.", "server.", "budget.")
    same = {key: value for key, value in geyer_tables.proven(1000).items() if key.startswith(shared)}
    return same | {
        "algorithm": "dp-ftrl",
        "clients.cohort": 100,
        "per_update.clip_norm": 4.0,
        "per_round.bands": 10,
        "per_round.momentum": 0.8,
        "budget.epsilon": epsilon,
    }


def transferred(clients: int, epsilon: float) -> dict[str, Any]:
    """examples/geyer-sharp-*.toml and geyer-fourier-*.toml"""
    features, quantile, momentum, rounds, epochs = TRANSFERRED[clients, epsilon]
    return geyer_tables.quantile(clients, epsilon, features) | {
        "rounds": rounds,
        "local.epochs": epochs,
        "per_update.quantile": quantile,
        "server.momentum": momentum,
    }


def of_a_hundred(name: str, chosen_on: str, epsilon: float) -> dict[str, Any]:
    """1,000 clients, a hundred of them in a round."""
    data, features, quantile, rounds, epochs = SAMPLED[name, chosen_on]
    return geyer_tables.quantile(1000, epsilon, features) | {
        "data.name": data,
        "clients.sampling": "poisson",
        "clients.cohort": 100.0,
        "rounds": rounds,
        "local.epochs": epochs,
        "per_update.quantile": quantile,
    }


def client() -> Table:
    """Client level."""
    cells = []
    for clients, epsilons in EPSILONS.items():
        for epsilon in epsilons:
            work = geyer_tables.run(geyer_tables.proven(clients, float(epsilon)))
            cells.append(Cell(f"geyer-private {clients}", f"epsilon {epsilon:g}", work, proves=CLIENT))
    for epsilon in EPSILONS[100]:
        plain = geyer_tables.run(geyer_tables.proven(100, float(epsilon)) | {"model": "linear-without-bias"})
        cells.append(Cell("geyer-private 100, without a bias", f"epsilon {epsilon:g}", plain, proves=CLIENT))
    for clients, epsilon in TRANSFERRED:
        work = geyer_tables.run(transferred(clients, epsilon))
        row = f"geyer-private {clients}, settings from Fashion-MNIST"
        cells.append(Cell(row, f"epsilon {epsilon:g}", work, proves=CLIENT))
    sampled = {"clients.sampling": "poisson", "clients.cohort": 100.0}
    for epsilon in (2.0, 8.0):
        column = f"epsilon {epsilon:g}"
        work = geyer_tables.run(geyer_tables.proven(1000, epsilon) | sampled)
        cells.append(Cell("geyer-private 1000, 100 a round, Poisson", column, work, proves=CLIENT))
        cells.append(
            Cell("dp-ftrl 1000, 100 a round, cyclic", column, geyer_tables.run(cyclic(epsilon)), proves=CLIENT)
        )
        alone = cyclic(epsilon) | {"per_round.bands": 1}
        row = "dp-ftrl 1000, independent noise"
        cells.append(Cell(row, column, geyer_tables.run(alone), proves=CLIENT))
    for (name, chosen_on), epsilon in product(SAMPLED, (1.0, 3.0, 8.0)):
        work = geyer_tables.run(of_a_hundred(name, chosen_on, epsilon))
        row = f"{name}, 1000 clients, 100 a round, settings from {chosen_on}"
        cells.append(Cell(row, f"epsilon {epsilon:g}", work, proves=CLIENT))
    return Table("beyond-client", ("mnist", "fashion-mnist", "cifar10"), 10, tuple(cells))


def disjoint(data: str, sites: int, epsilon: float) -> dict[str, Any]:
    """examples/sites-*.toml, which are at epsilon 3."""
    rounds, lr, clip, momentum = RECIPES[data, sites, epsilon]
    return {
        "algorithm": "pfl",
        "model": "linear",
        "rounds": rounds,
        "data.name": data,
        "data.features": "hog2",
        "data.partition": "iid",
        "data.clients": sites,
        "records.sampling": "fixed-order",
        "records.batch": RECORDS // sites,
        "local.steps": 1,
        "local.lr": lr,
        "local.momentum": 0.0,
        "per_record.clip_norm": clip,
        "server.momentum": momentum,
        "server.average": 0.5,
        "budget.epsilon": epsilon,
        "budget.delta": 1e-5,
        "budget.unit": "record",
        "budget.observer": "server",
        "budget.calibrate": True,
    }


def example() -> Table:
    """Record level."""
    cells = []
    for data, sites, epsilon in RECIPES:
        given = disjoint(data, sites, epsilon)
        small = {"data.name": "digits", "data.features": "none", "model": "linear", "rounds": 10}
        small |= {"records.batch": 1437 // sites, "local.lr": 5.0}
        work = Run(given, small)
        cells.append(Cell(f"{NAMES[data]} {sites} sites", f"epsilon {epsilon:g}", work, proves=RECORD))
    return Table("beyond-example", ("mnist", "fashion-mnist"), 10, tuple(cells))


def tables() -> list[Table]:
    """Our own tables."""
    return [client(), example()]
