"""A method and a budget that fit a table: what `shoal init` writes, as a start.

With a hundred clients or more, one of them can hide in the noise of their sum. With fewer it cannot, so their records
are protected instead: each client adds noise to every gradient step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.data.schema import TaskKind

MANY_CLIENTS = 100
ROUNDS = 100  # of one step each, at record level
REACH = {"classification": 4.0, "regression": 0.4, "multi-label": 20.0}
"""How far the noise of all rounds together may move the model (see `_record_lr`): chosen by held-out figures of heart
disease, Adult and generated tables at epsilon 1, 4 and 8."""
MOST_LR = {"regression": 0.3}
CLIENT_LR = {"regression": 0.2, "multi-label": 2.0}
"""The squared error is steeper than the cross-entropy of classes, whose mean over labels is flatter. Measured by
benchmarks/own_tables.py."""


@dataclass(frozen=True)
class Plan:
    """Keys of a configuration, by section, and the reason for each that needs one."""

    keys: dict[str, dict[str, Any]]
    why: dict[str, str]


def suggest(
    rows: int,
    sizes: Sequence[int],
    task: TaskKind,
    parameters: int,
    *,
    epsilon: float | None = None,
    test_fraction: float = 0.2,
) -> Plan:
    """A plan for a table.

    Args:
        rows: How many rows it has.
        sizes: How many of them each client has; empty for one client.
        task: What is learnt.
        parameters: How many the linear model has.
        epsilon: The budget; by default what suits the number of clients or records.
        test_fraction: The share of the rows that is held out.
    """
    train = max(1, round(rows * (1 - test_fraction)))
    if len(sizes) >= MANY_CLIENTS:
        return _client_level(len(sizes), task, epsilon)
    return _record_level(train, len(sizes), task, parameters, epsilon)


def _record_level(train: int, clients: int, task: TaskKind, parameters: int, epsilon: float | None) -> Plan:
    nominal = _down(train / max(1, clients))
    rate = min(0.25, max(0.005, _down(2000 / train)))
    budget = _budget("record", train, epsilon or (4.0 if train < 50_000 else 2.0))
    lr = _record_lr(nominal, max(1, clients), task, parameters, budget["epsilon"], budget["delta"])
    because = f"{clients} clients are too few for one of them to hide among" if clients > 1 else "there is one client"
    return Plan(
        {
            "": {"algorithm": "dp-sgd", "model": "linear", "rounds": ROUNDS},
            "budget": budget,
            "records": {"rate": rate, "nominal_records": nominal},
            "local": {"steps": 1, "lr": lr},
            "per_record": {"clip_norm": 1.0},
            "server": {"momentum": 0.5, "average": 0.5},
        },
        {
            "algorithm": "every client adds noise to each step",
            "model": "a small model suffers least from noise",
            "budget.unit": f"records, because {because}",
            "budget.delta": f"below 1/{train:,}, one over the records to train on",
            "budget.calibrate": "the noise is set so that all rounds together spend epsilon",
            "records.rate": "the share of records in a step",
            "local.lr": "for this epsilon: a smaller one means more noise, and needs a lower rate",
            "records.nominal_records": "a client's records, on average, rounded down; public: sums are divided by it",
        },
    )


def _record_lr(nominal: int, clients: int, task: TaskKind, parameters: int, epsilon: float, delta: float) -> float:
    """The learning rate for clip norm 1: high, unless the noise would then move the model further than `REACH`.

    The mean gradient of a round has noise of about 2 sqrt(2 T K log(1/delta)) / (epsilon N) in each of d parameters:
    T rounds, K clients, N records, whatever share of them a round takes. T rounds of noise move a model by
    lr sqrt(T d) times that, and the rate that bounds this distance is the one of noisy gradient descent (Bassily et
    al. 2014). All of these numbers are public.
    """
    noise = 2 * math.sqrt(2 * ROUNDS * clients * math.log(1 / delta)) / (epsilon * nominal * clients)
    return min(MOST_LR.get(task, 10.0), float(f"{REACH[task] / (math.sqrt(ROUNDS * parameters) * noise):.1g}"))


def _client_level(clients: int, task: TaskKind, epsilon: float | None) -> Plan:
    """By the number of clients alone: how many records each has is as private as they are."""
    few = clients <= 1000
    cohort = {"sampling": "all"} if few else {"sampling": "poisson", "cohort": max(500, _down(clients / 10))}
    return Plan(
        {
            "": {"algorithm": "geyer-private", "model": "linear", "rounds": 30 if few else 60},
            "budget": _budget(
                "client", clients, epsilon or (8.0 if clients < 300 else 4.0 if clients < 5000 else 2.0)
            ),
            "clients": cohort,
            "records": {"batch": 20},
            "local": {"epochs": 3, "lr": CLIENT_LR.get(task, 0.5)},
            "per_update": {"initial_clip_norm": 1.0},
        },
        {
            "algorithm": "the server adds noise to the sum of clipped updates",
            "model": "a small model suffers least from noise",
            "budget.unit": f"clients, because one of {clients:,} can hide among the others",
            "budget.delta": f"below 1/{clients:,}, one over the clients",
            "budget.calibrate": "the noise is set so that all rounds together spend epsilon",
            "per_update.initial_clip_norm": "it then follows a private quantile of the updates",
        },
    )


def _budget(unit: str, units: int, epsilon: float) -> dict[str, Any]:
    delta = 10.0 ** -(math.floor(math.log10(units)) + 1)
    return {"unit": unit, "epsilon": epsilon, "delta": delta, "calibrate": True}


def _down(number: float) -> Any:
    """Rounded down to one significant digit."""
    power = 10.0 ** math.floor(math.log10(number))
    found = math.floor(number / power + 1e-9) * power
    return int(found) if found >= 1 else float(f"{found:.1g}")
