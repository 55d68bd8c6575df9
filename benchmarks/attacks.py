"""The attacks in docs/results/attacks.md, cell by cell: Tables 1 and 3 and Figure 3 of Wei et al. (2023), and more.

    SHOAL_DATA=... python benchmarks/attacks.py --cells 'table1/.*' --out attacks.jsonl [--device cuda]

A cell is one attack; a line is appended as soon as it ends, and cells that are in the file already are not run again.
`--cells` is a regular expression (all of them by itself), `--list` prints their names. For a machine without the data
sets `--export records.npz` writes the few hundred records that are attacked, and `--data records.npz` reads them.
benchmarks/plot_attacks.py makes the tables and pictures.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shoal
from shoal.attacks import Aim, Outcome, attack, recipe
from shoal.attacks.attack_recipes import Recipe
from shoal.attacks.matrix import TYPES, methods
from shoal.attacks.membership import membership
from shoal.attacks.observe import Kind, applied_at_client
from shoal.config import Config, configure
from shoal.random.streams import Streams

Sets = dict[str, shoal.Dataset]
Lines = list[dict[str, Any]]
Cell = Callable[[str, int, Sets, Lines], dict[str, Any]]
"""(device, victims, data sets that were read already, lines that are there) -> the line of a cell.

Many cells of Wei et al. are one attack under several names (type 2 sees the same raw gradient in every method that
leaves it raw): such a line is copied, and `same_as` says from where.
"""
PICTURED = 8  # victims whose pictures go into the line
EXPORTED = 300  # records of each data set: 100 victims of 3
DATA = ("mnist", "cifar10", "lfw")


def export(path: Path) -> None:
    """Write records of each data set, chosen at random, with the names of all classes."""
    held: dict[str, Any] = {}
    for name in DATA:
        try:
            dataset = shoal.load(name)
        except shoal.ShoalError as error:
            print(f"{name} is left out: {error}")
            continue
        places = Streams(0).generator("exported").permutation(len(dataset.train_y))[:EXPORTED]
        held |= {f"{name}.x": dataset.train_x[places].numpy(), f"{name}.y": dataset.train_y[places].numpy()}
        held[f"{name}.classes"] = np.array(dataset.classes)
    np.savez_compressed(path, **held)


def imported(path: Path) -> Sets:
    with np.load(path) as held:
        there = [name for name in DATA if f"{name}.x" in held]
        parts = {name: (held[f"{name}.x"], held[f"{name}.y"], held[f"{name}.classes"]) for name in there}
    return {
        name: shoal.Dataset(
            name, *(torch.from_numpy(part) for part in (x, y, x[:1], y[:1])), classes=tuple(map(str, classes))
        )
        for name, (x, y, classes) in parts.items()
    }


def packed(pictures: Tensor) -> dict[str, Any]:
    """Pictures as bytes in JSON."""
    numbers = (pictures.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    return {"shape": list(numbers.shape), "bytes": base64.b64encode(zlib.compress(numbers.tobytes())).decode()}


def line_of(outcome: Outcome, pictured: int) -> dict[str, Any]:
    truth, found = outcome.truth[:pictured, 0], outcome.quality.x[:pictured, 0]
    return outcome.row() | {"pictures": {"truth": packed(truth), "found": packed(found)}}


def boundaries(config: Config, kind: Kind) -> str:
    """What lies between the record and the attacker: where that is the same, so is all that the attacker sees."""
    algorithm = config.algorithm
    passed: list[Any] = [algorithm.per_record, algorithm.per_step]
    if algorithm.per_record is not None:
        passed.append(algorithm.records.batch)
    if kind == 0 or (kind == 1 and applied_at_client(algorithm)):
        passed.append(algorithm.per_update)
    return f"{kind == 2} {[part for part in passed if part is not None]}"


def leak(name: str, dataset: str, changes: tuple[str, ...], attack_name: str, kind: Kind, pictured: int) -> Cell:
    def run(device: str, victims: int, sets: Sets, known: Lines) -> dict[str, Any]:
        config = configure({"algorithm": name, "data.name": dataset, "engine.device": device}, changes)
        sight = f"{attack_name} {dataset} {victims} {boundaries(config, kind)}"
        for line in known:
            if line.get("sight") == sight:
                same = {"same_as": line["cell"], "algorithm": name, "type": kind}
                return {key: value for key, value in line.items() if key != "cell"} | same
        if dataset not in sets:
            sets[dataset] = shoal.load(dataset)
        outcome = attack(config, recipe(attack_name), Aim(kind, victims), sets[dataset])
        return line_of(outcome, pictured) | {"sight": sight}

    return run


PRIORED = 100  # iterations of 20 evaluations each
GROUPED = 30
GROUPS: dict[str, Recipe] = {
    "one search": replace(recipe("cpl-tv"), iterations=GROUPED),
    "four searches, the best": replace(recipe("cpl-group"), consensus=0.0, iterations=GROUPED),
    "four searches, group consistency": replace(recipe("cpl-group"), iterations=GROUPED),
}
GROUP_SEEDS = range(5)
BATCHES = (8, 32)  # records
BATCHES_EACH = 5


def faces(chosen: Recipe, victims: int | None = None, seed: int = 0, records: int | None = None) -> Cell:
    """Means over faces (three, as in the paper, by default), as types 0 and 1 see them without privacy."""

    def run(device: str, asked: int, sets: Sets, known: Lines) -> dict[str, Any]:
        if "lfw" not in sets:
            sets["lfw"] = shoal.load("lfw")
        config = configure({"algorithm": "fedavg", "data.name": "lfw", "engine.device": device, "seed": seed})
        outcome = attack(config, chosen, Aim(0, victims or asked, records), sets["lfw"])
        found = {"rmses": outcome.quality.rmse.flatten().tolist(), "iterations_allowed": chosen.iterations}
        return line_of(outcome, PICTURED) | found | {"seed": seed}

    return run


def told(name: str, changes: tuple[str, ...]) -> Cell:
    def run(device: str, victims: int, sets: Sets, known: Lines) -> dict[str, Any]:
        config = configure({"algorithm": name, "engine.device": device}, changes)
        found = membership(replace(config, baseline=False), models=32)
        return found.facts() | {"rows": found.rows()}

    return run


BINS = 1024  # rows of imprint-mlp
SEEDS = (0, 1, 2)
_CLIP, _NOISE = "per_record.clip_norm=1.0", "per_step.noise_multiplier"
_AT_CLIENT = ("per_update.at=client", "per_update.clip_norm=1.0")
PLANTED: dict[str, tuple[str, tuple[str, ...], int]] = {
    "no privacy": ("fedavg", (), 1),
    "updates clipped, noise by the server": ("trusted-curator", (), 1),
    "records clipped, no noise": ("dp-sgd", (_CLIP, f"{_NOISE}=0"), 1),
    "record-level noise 0.0001": ("dp-sgd", (_CLIP, f"{_NOISE}=1e-4"), 1),
    "record-level noise 0.001": ("dp-sgd", (_CLIP, f"{_NOISE}=1e-3"), 1),
    "record-level noise 0.01": ("dp-sgd", (_CLIP, f"{_NOISE}=0.01"), 1),
    "record-level noise 1": ("dp-sgd", (_CLIP, f"{_NOISE}=1.0"), 1),
    "client-level noise 0.0001, by the client": ("fed-sdp", (*_AT_CLIENT, "per_update.noise_multiplier=1e-4"), 1),
    "client-level noise 1, by the client": ("fed-sdp", (*_AT_CLIENT, "per_update.noise_multiplier=1.0"), 1),
    "secure aggregation": ("fedavg", (), 10),
    "secure aggregation, noise by the server": ("trusted-curator", (), 10),
    "secure aggregation, record-level noise 1 in shares": ("distributed-dp-sgd", (), 10),
    "secure aggregation, client-level noise 1 in shares": (
        "trusted-curator", ("per_round.at=shared", "per_round.noise_multiplier=1.0"), 10,
    ),
}  # fmt: skip
"""Methods, their settings, and the sites in a sum: what a malicious server gets of each."""


def plant(method: str, records: int) -> Cell:
    name, changes, sites = PLANTED[method]

    def run(device: str, victims: int, sets: Sets, known: Lines) -> dict[str, Any]:
        if "mnist" not in sets:
            sets["mnist"] = shoal.load("mnist")
        rows = []
        for seed in SEEDS:
            base = {"algorithm": name, "data.name": "mnist", "engine.device": device, "seed": seed}
            aim = Aim(0, max(1, 10 // sites), records, sites=sites)
            rows.append(attack(configure(base, changes), recipe("imprint"), aim, sets["mnist"]).row())
        mean = {key: float(np.mean([row[key] for row in rows])) for key in ("success", "rmse", "ssim", "label_hits")}
        alone = (1 - 1 / BINS) ** (records * sites - 1)
        by_seed = [row["success"] for row in rows]
        return rows[0] | mean | {"by_seed": by_seed, "alone": alone, "seconds": sum(row["seconds"] for row in rows)}

    return run


_SMALL = ("rounds=30", "model=digits-mlp", "data.clients=10", "local.lr=0.2", "clients.sampling=all")
MEMBERSHIP = {
    "fedavg": (*_SMALL, "local.epochs=5"),
    "fed-cdp-private": (*_SMALL, "local.steps=10", "per_step.noise_multiplier=1.0", "per_record.clip_norm=1.0"),
    "trusted-curator": (*_SMALL, "local.epochs=5", "records.batch=10", "per_round.noise_multiplier=1.0"),
}
"""The same network and clients; the first overfits, the others add noise for records and for clients."""


def cells() -> Iterator[tuple[str, Cell]]:
    for dataset in DATA:
        for name in ("dlg", "idlg", "gradinv", "gradinv-lbfgs", "cpl"):
            yield f"table1/{dataset}/{name}", leak("fedavg", dataset, (), name, 2, PICTURED)
    for dataset in ("mnist", "lfw"):
        for method in methods("table3"):
            for kind in TYPES:
                run = leak(method.algorithm, dataset, method.changes, "cpl", kind, PICTURED)
                yield f"table3/{dataset}/{method.label}/{kind}", run
    for method in methods("figure3"):
        for kind in TYPES:
            run = leak(method.algorithm, "lfw", method.changes, "cpl", kind, PICTURED)
            yield f"figure3/lfw/{method.label}/{kind}", run
    for name in ("cpl", "cpl-tv"):
        yield f"three/lfw/{name}", faces(replace(recipe(name), iterations=PRIORED))
    for seed in GROUP_SEEDS:
        for name, chosen in GROUPS.items():
            yield f"group/lfw/{name}/{seed}", faces(chosen, 1, seed)
    for records in BATCHES:
        for name in ("cpl", "cpl-tv", "cpl-group"):
            chosen = replace(recipe(name), iterations=PRIORED)
            yield f"batch/lfw/{name}/{records}", faces(chosen, BATCHES_EACH, records=records)
    for method in PLANTED:
        for records in (8, 32, 64):
            yield f"imprint/mnist/{method}/{records}", plant(method, records)
    for name, changes in MEMBERSHIP.items():
        yield f"membership/digits/{name}", told(name, changes)


def read(path: Path) -> Lines:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=".*", help="a regular expression for whole names")
    parser.add_argument("--out", type=Path, default=Path("attacks.jsonl"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--victims", type=int, default=100)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--export", type=Path, metavar="NPZ", help="write the records that are attacked, and end")
    parser.add_argument("--data", type=Path, metavar="NPZ", help="take the records from there")
    options = parser.parse_args()
    if options.export:
        export(options.export)
        return
    sets = imported(options.data) if options.data else {}
    lines = read(options.out)
    finished = {line["cell"] for line in lines}
    for name, run in cells():
        if not re.fullmatch(options.cells, name):
            continue
        if options.list:
            print(name, "(done)" if name in finished else "")
            continue
        if name in finished:
            continue
        start = time.perf_counter()
        line = {"cell": name, "device": _device(options.device)} | run(options.device, options.victims, sets, lines)
        lines.append(line)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        brief = {key: line.get(key) for key in ("success", "rmse", "iterations_to_success")}
        print(f"{name}: {brief} {time.perf_counter() - start:.0f} s", flush=True)


def _device(name: str) -> str:
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.cuda.get_device_name() if cuda else "cpu"


if __name__ == "__main__":
    main()
