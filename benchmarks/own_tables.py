"""What `shoal init`'s plan learns from tables like a hospital's, by task and number of clients.

    python benchmarks/own_tables.py --seeds 3                              the plans as they are
    python benchmarks/own_tables.py --epsilon 1                            for another budget
    python benchmarks/own_tables.py --seeds 3 --set local.lr=0.1 --set local.lr=0.5   each of these changes instead

For each task, number of clients and seed it writes a synthetic table (numbers with gaps, categories, owners of uneven
sizes), proposes schema and plan as `shoal init` does, and trains; it prints the median over seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
from pyarrow import parquet

import shoal
from shoal.config import override
from shoal.data.load import with_schema
from shoal.data.propose import propose
from shoal.suggest import suggest

TASKS = {"classification": ("died",), "multi-label": ("sepsis", "delirium", "fall"), "regression": ("stay",)}
SHOWN = {
    "classification": ("auroc", "balanced_accuracy"),
    "multi-label": ("auroc", "f1"),
    "regression": ("r2", "rmse"),
}
ROWS_A_CLIENT = {5: 160, 12: 667, 200: 60, 500: 40, 2000: 20}


def table(clients: int, seed: int) -> pa.Table:
    """Rows of patients: their outcomes depend on what is known of them, on their hospital, and on chance."""
    generator = np.random.default_rng(seed)
    weights = generator.lognormal(0, 1, clients)
    sizes = np.maximum(5, np.round(ROWS_A_CLIENT[clients] * clients * weights / weights.sum())).astype(int)
    rows, owner = sizes.sum(), np.repeat(np.arange(clients), sizes)
    age, pressure = generator.normal(65, 15, rows).clip(18, 100), generator.normal(130, 20, rows)
    creatinine, lactate = generator.lognormal(4.5, 0.4, rows), generator.lognormal(0.5, 0.6, rows)
    ward, sex = generator.integers(0, 5, rows), generator.integers(0, 2, rows)
    risk = (age - 65) / 15 + 0.8 * np.log(lactate) + 0.7 * (np.log(creatinine) - 4.5) / 0.4 + 0.5 * (ward == 0)
    risk += generator.normal(0, 0.3, clients)[owner] - 0.3 * (pressure - 130) / 20
    chance = [1 / (1 + np.exp(-(factor * risk - base))) for factor, base in ((1, 2.6), (-0.7, 1.5), (0.5, 1.0))]
    fell = 1 / (1 + np.exp(-(1.5 * (ward == 1) + 0.8 * sex - 2)))
    stay = np.round((6 + 3 * risk + generator.normal(0, 3, rows)).clip(0.5, 40), 1)
    return pa.table(
        {
            "hospital": [f"h{each}" for each in owner],
            "age": age.round(),
            "systolic_bp": pressure.round(),
            "creatinine": pa.array(creatinine.round(1), mask=generator.random(rows) < 0.15),
            "lactate": pa.array(lactate.round(2), mask=generator.random(rows) < 0.3),
            "ward": np.array(["icu", "surgery", "medicine", "stroke", "geriatrics"])[ward],
            "sex": np.array(["F", "M"])[sex],
            "died": (generator.random(rows) < chance[0]).astype(int),
            "sepsis": (generator.random(rows) < chance[2]).astype(int),
            "delirium": (generator.random(rows) < chance[1]).astype(int),
            "fall": (generator.random(rows) < fell).astype(int),
            "stay": stay,
        }
    )


def figures(task: str, clients: int, seed: int, epsilon: float | None, changes: Sequence[str]) -> dict[str, float]:
    """Those of the model that the plan trains, and of the trivial prediction."""
    labels = TASKS[task]
    others = {name for names in TASKS.values() for name in names} - set(labels)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "patients.parquet"
        parquet.write_table(table(clients, seed).drop_columns(sorted(others)), path)
        proposal = propose(path, labels, "hospital")
        plan = suggest(proposal.rows, proposal.sizes, proposal.schema.task, proposal.parameters, epsilon=epsilon)
        keys = plan.keys | {"": plan.keys[""] | {"seed": seed}, "engine": {"device": "cpu"}}
        flat = {f"{section}.{key}".lstrip("."): each for section, held in keys.items() for key, each in held.items()}
        flat |= dict(map(override, changes))
        result = shoal.run(flat, data=with_schema(path, proposal.schema), runs=Path(folder) / "runs")
    found = {name: result.figures.get(name) or 0.0 for name in SHOWN[task]}
    return found | {f"trivial {name}": result.trivial.get(name) or 0.0 for name in SHOWN[task]}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="*", default=list(ROWS_A_CLIENT))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--epsilon", type=float, help="by default as planned")
    parser.add_argument("--set", action="append", default=[], help="a change of the plan; several keys with ','")
    given = parser.parse_args()
    for task in given.tasks:
        for clients in given.clients:
            for change in given.set or [""]:
                changes = change.split(",") if change else []
                found = [figures(task, clients, seed, given.epsilon, changes) for seed in range(given.seeds)]
                middle = {name: round(median(each[name] for each in found), 3) for name in found[0]}
                print(f"{task}, {clients} clients, {change or 'as planned'}: {middle}", flush=True)


if __name__ == "__main__":
    main()
