"""Cells of a table of results, each a normal run: shared by the programs that measure them."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import shoal

Cell = tuple[str, dict[str, Any]]
EVALUATIONS = 20  # over a long run; each costs as much as a round


def measure(name: str, config: dict[str, Any], seed: int, device: str, claim: tuple[str, str]) -> dict[str, Any]:
    """Run one cell; what is kept of it."""
    every = config.get("engine", {}).get("evaluate_every", max(1, config["rounds"] // EVALUATIONS))
    engine = {"evaluate_every": every, "checkpoint_every": max(1, config["rounds"] // EVALUATIONS), "device": device}
    given = config | {"seed": seed, "engine": engine}
    given["data"] = {"name": "mnist", **config.get("data", {})}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as runs:
        result = shoal.run(given, runs=runs, no_guarantee=True)
    proven = next(found for found in result.proven if (found["unit"], found["observer"]) == claim)
    return {
        "cell": name,
        "seed": seed,
        "accuracy": result.accuracy,
        "rounds": result.rounds,
        "proven_epsilon": proven["epsilon"],
        "proven": [[found["unit"], found["observer"], found["epsilon"]] for found in result.proven],
        "delta": given.get("budget", {}).get("delta"),
        "published_epsilon": [found["epsilon"] for found in result.published],
        "communication": sum(line["clients"] for line in result.metrics),
        "seconds": round(time.perf_counter() - start, 1),
        "device": device,
        "curve": [
            [line["round"], line.get("accuracy"), line["v_c"], line["u_s"]]
            for line in result.metrics
            if "accuracy" in line
        ],
    }


def main(doc: str | None, cells: Iterable[Cell], claim: tuple[str, str]) -> None:
    """Run the cells that the command line names; `claim` is the unit and observer that the tables show."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    known = chosen.out.read_text().splitlines() if chosen.out.exists() else []
    done = {(line["cell"], line["seed"]) for line in map(json.loads, known)}
    wanted = [(name, config) for name, config in cells if re.search(chosen.only, name)]
    if chosen.list:
        for name, config in wanted:
            print(name, json.dumps(config))
        return
    for seed in map(int, chosen.seeds.split(",")):
        for name, config in wanted:
            if (name, seed) in done:
                continue
            line = measure(name, config, seed, chosen.device, claim)
            print({key: line[key] for key in ("cell", "seed", "accuracy", "proven_epsilon", "seconds")}, flush=True)
            with chosen.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
