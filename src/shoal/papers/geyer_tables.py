"""Geyer et al. (2017), Differentially Private Federated Learning: A Client Level Perspective (arXiv 1712.07557).

Table 1 and Figures 1 to 3 (numbered as in the ICLR 2019 submission), on MNIST with two digits a client.

Not stated there and chosen here: m_t is constant (its published mean), sigma is the constant one that spends the
budget in the published rounds, E = 4, batches of 50, lr 0.1. Quick versions: digits, fewer clients and rounds.
"""

from __future__ import annotations

from typing import Any

from shoal.accounting import published as recipes
from shoal.papers.table import Cell, Claim, Table
from shoal.papers.work import Account, Run

SIZES = {  # clients: cohort, sigma, rounds, delta
    100: (50.0, 1.2, 11, 1e-3),
    1000: (220.0, 1.44, 54, 1e-5),
    10_000: (508.5, 1.0925, 412, 1e-6),
}
MEDIAN = "the clip bound is the median of the clients' norms; the noise scale reveals it, without noise of its own"
LITTLE = {100: 2.0, 1000: 0.5, 10_000: 0.5}
QUICK = {100: (10, 5), 1000: (40, 20), 10_000: (100, 60)}  # clients, cohort


def as_printed(clients: int, lr: float = 0.1) -> dict[str, Any]:
    """The paper's setting."""
    cohort, noise, rounds, delta = SIZES[clients]
    return {
        "algorithm": "geyer",
        "model": "geyer-mlp",
        "rounds": rounds,
        "data.name": "mnist",
        "data.partition": "shards",
        "data.clients": clients,
        "data.records": 600,
        "clients.cohort": cohort,
        "records.sampling": "fixed-order",
        "records.batch": 50,
        "local.epochs": 4,
        "local.lr": lr,
        "per_round.noise_multiplier": noise,
        "budget.delta": delta,
    }


def not_private() -> dict[str, Any]:
    """The same without privacy."""
    same = {
        key: value
        for key, value in as_printed(100).items()
        if key not in ("clients.cohort", "per_round.noise_multiplier")
    }
    return same | {"algorithm": "fedavg", "rounds": 380, "clients.sampling": "all"}


def proven(clients: int, epsilon: float = 8.0) -> dict[str, Any]:
    """The presets in examples/: public features, a linear model, a public clip, noise calibrated by PLD.

    A small epsilon has fewer rounds and a smaller clip.
    """
    sampling = {"clients.sampling": "poisson", "clients.cohort": 2000.0}
    little = epsilon <= LITTLE[clients]
    return {
        "algorithm": "geyer-private",
        "model": "linear",
        "rounds": {100: (40, 30), 1000: (100, 80), 10_000: (300, 100)}[clients][little],
        "data.name": "mnist",
        "data.partition": "shards",
        "data.clients": clients,
        "data.records": 600,
        "data.features": "hog2",
        **(sampling if clients == 10_000 else {"clients.sampling": "all"}),
        "records.sampling": "fixed-order",
        "records.batch": 600,
        "local.epochs": 5,
        "local.lr": 50.0,
        "per_update.initial_clip_norm": {100: (4.0, 4.0), 1000: (4.0, 2.0), 10_000: (8.0, 4.0)}[clients][little],
        "per_update.clip_norm_lr": 0.0,
        "per_update.count_noise_multiplier": 1.0,
        "server.momentum": 0.5 if little and clients == 100 else 0.8,
        "server.average": 0.5,
        "budget.epsilon": epsilon,
        "budget.delta": SIZES[clients][3],
        "budget.calibrate": True,
    }


def quantile(clients: int, epsilon: float, features: str) -> dict[str, Any]:
    """The same on other features, without a bias; the clip norm follows a private quantile."""
    return proven(clients, epsilon) | {
        "model": "linear-without-bias",
        "data.features": features,
        "per_update.clip_norm_lr": 0.2,
        "per_update.count_noise_multiplier": 0.05,
    }


def run(config: dict[str, Any]) -> Run:
    """A run with its quick version."""
    clients, cohort = QUICK[config["data.clients"]]
    small: dict[str, Any] = {
        "data.name": "digits",
        "rounds": 8,
        "data.clients": clients,
        "data.records": 60,
        "records.batch": 10,
    }
    if "clients.cohort" in config:
        small["clients.cohort"] = cohort
    if "per_update.count_noise_multiplier" in config:
        small["per_update.count_noise_multiplier"] = 0.5  # of few clients, beside as much noise in all
    if config["model"].startswith("linear"):
        small |= {"data.features": "none", "local.lr": 5.0}
    else:
        small |= {"model": "digits-mlp"}
    return Run(config, small)


def tables() -> list[Table]:
    """All tables and figures of the paper."""
    both = ("accuracy", "communication")
    cells = [Cell("non-private", "100", run(not_private()), both)]
    claim = Claim("client", "release", 8, MEDIAN)
    for clients, (cohort, noise, rounds, delta) in SIZES.items():
        column = str(clients)
        cells.append(Cell("private", column, run(as_printed(clients)), both, claim=claim))
        for lr in (0.02, 0.03, 0.05) if clients == 100 else ():
            cells.append(Cell("private", column, run(as_printed(clients, lr)), change=f"lr {lr:g}", claim=claim))
        rigorous = Cell(
            "private",
            column,
            run(proven(clients)),
            change="public features and geyer-private",
            claim=Claim("client", "release", 8),
        )
        spent = Account("epsilon", recipes.moments_epsilon, (cohort / clients, noise, rounds, delta, "2-33"))
        cells += [rigorous, Cell("private", column, spent, ("epsilon",))]
    table = Table("geyer-table1", ("mnist",), 8, tuple(cells))
    runs = tuple(cell for cell in cells if isinstance(cell.work, Run) and not cell.change)
    return [
        table,
        Table("geyer-figure1", (), 0, ()),
        Table("geyer-figure2", ("mnist",), 6, runs, plots=("accuracy",)),
        Table("geyer-figure3", ("mnist",), 6, runs, plots=("accuracy", "v_c", "u_s")),
    ]
