"""Sites that share the noise, beside all data in one place and beside noise of each site's own, cell by cell.

    SHOAL_DATA=... python benchmarks/shared_noise.py [--cells 'heart/.*'] [--device cuda] [--out sharing.jsonl]

A cell is data/sites/method/epsilon/seed. The methods, all at the same proven epsilon for a record (replace-one):

    pooled     DP-SGD on all records in one place
    shared     distributed-dp-sgd against the server and one site: all sites must answer
    drop-outs  the same where a third of the sites may drop out of any round
    own        each site adds noise for itself, by the presets in examples/

A line is appended as soon as a cell ends, and cells that are in the file already are not run again. `--cells` is a
regular expression for whole names, `--list` prints them. Settings of the first three are the same, and those of the
presets for weaker noise: none was tuned for this comparison, but the presets were tuned on the test set. Those of
CIFAR-10 follow Tramèr & Boneh (2021) and were not tried.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal import config
from shoal.papers.beyond_tables import RECORDS, disjoint

ROOT = Path(__file__).resolve().parent.parent
DATA = ("heart", "mnist", "fashion-mnist", "cifar10")
SITES = (4, 10, 100)
METHODS = ("pooled", "shared", "drop-outs", "own")
EPSILONS = (1, 3, 8)
SEEDS = 3
FEW = 5  # times as many seeds where the test set is small
WEAKER = {1: 3, 3: 8, 8: 8}
"""The epsilon at which ten sites with noise of their own have about as much as all data in one place at this one."""
HOSPITALS = 1000  # four times the public bound on a hospital's patients
Settings = dict[str, Any]


def base(data: str, sites: int, epsilon: int) -> Settings:
    """The preset of a data set, with noise of each site's own."""
    if data == "heart":
        return config.read_toml(ROOT / "examples" / "heart.toml")
    if data == "cifar10":
        preset = disjoint("mnist", 10, float(epsilon)) | {"data.name": data, "data.features": "scattering"}
        preset |= {"model": "scatter-linear", "rounds": 100, "local.lr": 8.0, "per_record.clip_norm": 0.1}
        return preset | {"data.clients": sites, "records.batch": 50_000 // sites}
    near = min((10, 100), key=lambda n: abs(n - sites))
    return disjoint(data, near, float(epsilon)) | {"data.clients": sites, "records.batch": RECORDS // sites}


def settings(data: str, sites: int, method: str, epsilon: int, seed: int) -> Settings:
    """The configuration of one cell."""
    chosen = base(data, sites if method == "own" else 10, epsilon if method == "own" else WEAKER[epsilon])
    total = HOSPITALS if data == "heart" else int(chosen["records.batch"]) * chosen["data.clients"]
    chosen |= {"budget.epsilon": float(epsilon), "seed": seed, "engine.evaluate_every": chosen["rounds"]}
    chosen["data.clients"] = 1 if method == "pooled" else sites
    if data == "heart":  # in its four hospitals, or dealt out
        chosen["data.partition"] = "column" if sites == 4 and method != "pooled" else "iid"
    chosen["records.batch"] = total // chosen["data.clients"]
    return chosen | (_shared(chosen, sites, method) if method in ("shared", "drop-outs") else {})


def _shared(chosen: Settings, sites: int, method: str) -> Settings:
    """What distributed-dp-sgd has otherwise: every record is sampled, at rate 1."""
    del chosen["local.momentum"], chosen["records.sampling"]
    records = chosen.pop("records.batch")
    quorum = {"per_round.threshold": sites} if method == "shared" else {}
    return {"algorithm": "distributed-dp-sgd", "records.rate": 1.0, "records.nominal_records": records} | quorum


def cells() -> Iterator[tuple[str, Settings]]:
    for data in DATA:
        for epsilon in EPSILONS:
            for sites in SITES:
                for method in METHODS:
                    if method == "pooled" and sites != SITES[0]:
                        continue  # it knows no sites
                    for seed in range(SEEDS * (FEW if data == "heart" else 1)):
                        name = f"{data}/{1 if method == 'pooled' else sites}/{method}/{epsilon}/{seed}"
                        yield name, settings(data, sites, method, epsilon, seed)


def run(wanted: Settings, device: str) -> dict[str, Any]:
    """The figures of one run, and what is proven of a record."""
    with tempfile.TemporaryDirectory() as runs:
        result = shoal.run(wanted, runs=runs, device=device)
    proven = {claim["observer"]: claim["epsilon"] for claim in result.proven if claim["unit"] == "record"}
    return {"figures": result.figures, "rounds": result.rounds, "noise": result.metrics[-1].get("noise"),
            "proven": proven}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=".*")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "sharing.jsonl")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    lines = given.out.read_text(encoding="utf-8").split("\n")[:-1] if given.out.exists() else []
    done = {json.loads(line)["cell"] for line in lines}
    for name, wanted in cells():
        if not re.fullmatch(given.cells, name) or (name in done and not given.list):
            continue
        if given.list:
            print(name, "(done)" if name in done else "")
            continue
        started = time.perf_counter()
        device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        line = {"cell": name, "device": device} | run(wanted, given.device)
        line["seconds"] = round(time.perf_counter() - started, 1)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name}: {line['figures']} in {line['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
