"""The client-level results in docs/results/client-level.md, cell by cell.

    SHOAL_DATA=... python benchmarks/client_level.py --out cells.jsonl [--only REGEX] [--seeds 0,1,2] [--device cuda]

Each cell is a normal run; a line is appended to the file as soon as it ends, and cells that are in it already are not
run again. `--list` prints the cells and their settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cells import Cell, main

DELTAS = {100: 1e-3, 1000: 1e-5, 10_000: 1e-6}


def geyer_private(clients: int, epsilon: float) -> dict[str, Any]:
    """examples/geyer-private-*.toml, with rounds, clip and momentum that suit a smaller epsilon."""
    small = epsilon <= {100: 2.0, 1000: 0.5, 10_000: 0.5}[clients]
    rounds = {100: (40, 30), 1000: (100, 80), 10_000: (300, 100)}[clients][small]
    clip = {100: (4.0, 4.0), 1000: (4.0, 2.0), 10_000: (8.0, 4.0)}[clients][small]
    sampling = {"sampling": "poisson", "cohort": 0.2 * clients} if clients == 10_000 else {"sampling": "all"}
    return {
        "algorithm": "geyer-private",
        "model": "linear",
        "rounds": rounds,
        "data": {"partition": "shards", "clients": clients, "records": 600, "features": "hog2"},
        "clients": sampling,
        "examples": {"sampling": "fixed-order", "batch": 600},
        "local": {"epochs": 5, "lr": 50.0},
        "per_update": {"initial": clip, "rate": 0.0, "count_noise": 1.0},
        "server": {"momentum": 0.5 if small and clients == 100 else 0.8, "average": 0.5},
        "budget": {"epsilon": epsilon, "delta": DELTAS[clients], "calibrate": True},
    }


def geyer(clients: int, cohort: float, noise: float, rounds: int, lr: float = 0.1) -> dict[str, Any]:
    """001 Table 1 as printed; sigma is the constant one that spends the budget in the published rounds."""
    return {
        "algorithm": "geyer",
        "model": "geyer-mlp",
        "rounds": rounds,
        "data": {"partition": "shards", "clients": clients, "records": 600},
        "clients": {"cohort": cohort},
        "examples": {"sampling": "fixed-order", "batch": 50},
        "local": {"epochs": 4, "lr": lr},
        "per_round": {"noise": noise},
        "budget": {"delta": DELTAS[clients]},
        "engine": {"evaluate_every": 1},
    }


def curator(clients: int, cohort: int, noise: float, rounds: int, kind: str, lr: float = 0.02) -> dict[str, Any]:
    """000 Tables 4.4 to 4.6, the trusted curator."""
    return {
        "algorithm": "trusted-curator",
        "model": "thesis-mlp",
        "rounds": rounds,
        "data": {"partition": kind, "clients": clients, "records": 600},
        "clients": {"cohort": cohort},
        "examples": {"batch": 100},
        "local": {"lr": lr},
        "per_round": {"noise": noise},
        "budget": {"delta": 1e-3 if clients == 100 else 1e-5},
    }


def cells() -> Iterator[Cell]:
    fedavg = {"algorithm": "fedavg", "examples": {"batch": 100}, "local": {"lr": 0.1}}
    yield "fedavg", fedavg | {"model": "thesis-mlp", "rounds": 50, "clients": {"cohort": 10}}
    same = geyer(100, 100, 0.0, 380)
    plain = {key: same[key] for key in ("model", "rounds", "data", "examples", "local")}
    yield "geyer-table1/none", plain | {"algorithm": "fedavg", "clients": {"sampling": "all"}}
    for clients, cohort, noise, rounds in ((100, 50, 1.2, 11), (1000, 220, 1.44, 54), (10_000, 508.5, 1.0925, 412)):
        yield f"geyer-table1/{clients}", geyer(clients, cohort, noise, rounds)
    for lr in (0.02, 0.03, 0.05):
        yield f"geyer-table1/100/lr{lr}", geyer(100, 50, 1.2, 11, lr)
    for clients, epsilons in ((100, (1, 2, 4, 8)), (1000, (0.25, 0.5, 1, 2, 8)), (10_000, (0.15, 0.25, 0.5, 2, 8))):
        for epsilon in epsilons:
            yield f"geyer-private/{clients}/{epsilon}", geyer_private(clients, float(epsilon))
    for clients, cohort, noise, rounds in (
        (100, 10, 1.633, 635),
        (1000, 50, 1.633, 1740),
        (10_000, 50, 0.755, 15_000),
    ):
        for kind in ("iid", "shards"):
            yield f"curator/{clients}/{kind}", curator(clients, cohort, noise, rounds, kind)
    for kind in ("iid", "shards"):
        yield f"curator/100/{kind}/lr0.1", curator(100, 10, 1.633, 635, kind, lr=0.1)


if __name__ == "__main__":
    main(__doc__, cells(), ("client", "release"))
