"""Record-level accuracy at a proven epsilon on fixed features, in one place and over sites: one JSON line a run.

    SHOAL_DATA=... python benchmarks/fixed_features.py --search --out SEARCH [--cells '.*/1/3/0/.*'] [--device cuda]
    SHOAL_DATA=... python benchmarks/fixed_features.py --chosen SEARCH --out FILE [--cells 'mnist/.*'] [--device cuda]
    SHOAL_DATA=... python benchmarks/fixed_features.py --forms FORMS --out FILE [--cells 'mnist/.*'] [--device cuda]
    python benchmarks/fixed_features.py --out FILE --plot PICTURE [--patches FILE] [--network FILE] [--clients FILE]

A small network on the wavelet features of Tramèr & Boneh (2021), https://arxiv.org/abs/2011.11660, or a linear one on
random Fourier features of gradient histograms (`hog-fourier`). A cell is data/sites/epsilon/seed. One site is DP-SGD
on all records (delta 1e-5, add-or-remove; replace-one is printed beside it); several sites share the noise
(distributed-dp-sgd), against the server and one site.

No data set chooses for itself: what Fashion-MNIST uses is best on MNIST, what MNIST and CIFAR-10 use is best on
Fashion-MNIST. On wavelet features `--search` tries the grids at epsilon 3, by seed. (CIFAR-10 was run with sampled
batches.) The form of `hog-fourier` and its learning rate are chosen among the lines of feature_forms.py. What FILE
holds is not run again. To the picture `--patches` adds what patch_features.py wrote, `--network` the longest
trainings of cifar10.py, and `--clients` (one file or more) what `shoal papers run beyond-client` and paper_search.py
wrote of 1,000 clients with settings from another data set: there epsilon is that of a client (zero-out).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import feature_forms
import shoal
from record_budget import DELTA, noise_for, spent, steps_of
from shoal.data import Dataset
from shoal.data.features import features
from shoal.papers import table
from shoal.papers.comparing import measured
from shoal.papers.running import read_lines
from shoal.papers.work import Run

NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
DATA, SITES, EPSILONS, SEEDS = tuple(NAMES), (1, 10), (1, 3, 8), 5
PUBLISHED = {
    "Tramèr & Boneh (2021)": {"mnist": {3: 0.987}, "fashion-mnist": {3: 0.897}, "cifar10": {3: 0.693}},
    "De et al. (2022), WRN-40-4": {"cifar10": {8: 0.814}},
    "Klause et al. (2022)": {"cifar10": {8: 0.825}},
    "Tang et al. (2023), synthetic pictures": {"cifar10": {1: 0.723}},
}
STEPS = {1: 200, 3: 400, 8: 600}
GRIDS = (
    {
        "model": ("scatter-linear", "scatter-cnn"),
        "lr": (2.0, 4.0, 8.0, 16.0),
        "momentum": (0.0, 0.9),
        "batch": (8192,),
        "clip_norm": (0.1,),
        "features": ("scattering",),
    },
    {
        "model": ("scatter-linear",),
        "lr": (4.0, 8.0, 16.0, 32.0),
        "momentum": (0.9,),
        "batch": ("all",),
        "clip_norm": (0.1,),
        "features": ("scattering",),
    },
)
MARKS = {"scattering": "o", "hog2": "X", "hog-sharp": "P", "hog-fourier": "s", "patches": "D"}
MARKS["patches and a network"] = "*"
PLACES = {  # how many hold the records: words, colour
    1: ("all records in one place", "#0f766e"),
    10: ("10 sites that share the noise", "#4338ca"),
    1000: ("1,000 clients, epsilon of a client", "#c2410c"),
}
FOURIER = {
    "model": "linear-without-bias",
    "momentum": 0.9,
    "batch": "all",
    "clip_norm": 0.1,
    "features": "hog-fourier",
}
CHOSEN_ON = {"mnist": "fashion-mnist", "fashion-mnist": "mnist", "cifar10": "fashion-mnist"}


def featured(name: str, chosen: dict[str, Any], device: str) -> Dataset:
    """A data set by its features."""
    pictures, kind = shoal.load(name), chosen["features"]

    def transform(x: Tensor) -> Tensor:
        return feature_forms.featured(x, chosen["form"]) if "form" in chosen else features(kind, x)

    train, test = (
        torch.cat([transform(part.to(device)).cpu() for part in torch.split(x, 5000)]).numpy()
        for x in (pictures.train_x, pictures.test_x)
    )
    labels, held_out = pictures.train_y.numpy(), pictures.test_y.numpy()
    return shoal.from_arrays(
        train,
        labels,
        test=(test, held_out),
        classes=pictures.classes,
        scale="raw",
        pictures=False,
        name=f"{name}-{kind}",
    )


def cells(given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the settings of every cell."""
    if given.search:
        for seed, name, grid in itertools.product(range(SEEDS), DATA, GRIDS):
            for values in itertools.product(*grid.values()):
                yield f"{name}/1/3/{seed}/" + "/".join(map(str, values)), dict(zip(grid, values, strict=True))
        return
    for name, sites, epsilon, seed in itertools.product(DATA, SITES, EPSILONS, range(SEEDS)):
        cell, chosen = f"{name}/{sites}/{epsilon}/{seed}", best(given, CHOSEN_ON[name])
        yield (f"{cell}/{given.model}", chosen | {"model": given.model}) if given.model else (cell, chosen)


def best(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """The settings that are best on a data set in the mean of their seeds."""
    if given.forms:
        form, lr = feature_forms.best(given.forms, name)
        return FOURIER | {"lr": lr, "form": form}
    found: dict[tuple[Any, ...], list[float]] = {}
    for line in map(json.loads, given.chosen.read_text().splitlines()):
        if line["cell"].startswith(f"{name}/"):
            found.setdefault(tuple(line[key] for key in GRIDS[0]), []).append(line["accuracy"])
    return dict(zip(GRIDS[0], max(found, key=lambda values: mean(found[values])), strict=True))


def settings(cell: str, chosen: dict[str, Any], records: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of a cell, and what it spends."""
    sites, epsilon, seed = map(int, cell.split("/")[1:4])
    steps, rate = STEPS[epsilon], 1.0 if chosen["batch"] == "all" else chosen["batch"] / records
    noise = noise_for(epsilon, rate, steps)
    shared = {"per_round.noise_multiplier": noise, "per_round.threshold": sites, "per_round.colluding": 1}
    return {
        "algorithm": "distributed-dp-sgd" if sites > 1 else "dp-sgd",
        "model": chosen["model"],
        "rounds": steps,
        "seed": seed,
        "data.clients": sites,
        "data.partition": "iid",
        "records.sampling": "poisson",
        "records.rate": rate,
        "records.nominal_records": records // sites,
        "local.steps": 1,
        "local.lr": chosen["lr"],
        "server.momentum": chosen["momentum"],
        "server.average": 0.3,
        "per_record.clip_norm": chosen["clip_norm"],
        "budget.delta": DELTA,
        "engine.evaluate_every": steps,
        "engine.checkpoint_every": steps,
    } | (shared if sites > 1 else {"per_step.noise_multiplier": noise}), spent(steps_of(noise, rate, steps))


def of_clients(paths: list[Path]) -> list[dict[str, Any]]:
    """What was measured of 1,000 clients with settings from another data set, as lines of this script."""
    kept = [line for path in paths for line in read_lines(path)]
    return [
        {"features": cell.work.config["data.features"], "accuracy": line["accuracy"]}
        | {"cell": f"{cell.work.config['data.name']}/1000/{cell.work.config['budget.epsilon']:g}/{line['seed']}"}
        for cell, lines in measured(table("beyond-client"), kept)
        if isinstance(cell.work, Run) and cell.work.config["data.clients"] == 1000 and "settings from" in cell.row
        for line in lines
        if "accuracy" in line
    ]


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against proven epsilon, a panel for each data set; published results are hollow."""
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(11, 4.1), layout="constrained")
    for axes, name in zip(sheet.subplots(1, len(DATA)), DATA, strict=True):
        for (kind, mark), (holders, (place, colour)) in itertools.product(MARKS.items(), PLACES.items()):
            found: dict[int, list[float]] = {}
            for line in lines:
                where, over, epsilon, _ = line["cell"].split("/")
                if (line["features"], where, int(over)) == (kind, name, holders):
                    found.setdefault(int(epsilon), []).append(line["accuracy"])
            if found:
                means = {epsilon: mean(found[epsilon]) for epsilon in sorted(found)}
                axes.plot(*zip(*means.items(), strict=True), f"{mark}-", color=colour, label=f"{kind}, {place}", ms=5)
                axes.vlines([*found], [*map(min, found.values())], [*map(max, found.values())], color=colour)
        for (label, points), mark in zip(PUBLISHED.items(), "v^<>", strict=True):
            there = points.get(name, {})
            axes.plot([*there], [*there.values()], mark, color="#be185d", markerfacecolor="none", label=label)
        axes.set(title=NAMES[name], xlabel="proven epsilon", xticks=EPSILONS)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    sheet.axes[0].set_ylabel("accuracy on the test set")
    shown = {
        label: line for axes in sheet.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    sheet.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, fontsize=8)
    sheet.savefig(path, dpi=130)


def existing(name: str) -> Path:
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {name}")
    return Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", default=".*", help="a regular expression for whole names")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--search", action="store_true")
    way.add_argument("--chosen", type=existing, metavar="SEARCH", help="wavelet features, by the lines of a search")
    way.add_argument("--forms", type=existing, help="random Fourier features, by the lines of feature_forms.py")
    way.add_argument("--plot", type=Path, help="draw the lines of FILE, and run nothing")
    parser.add_argument("--model", help="instead of the one chosen; the name of a cell then ends with it")
    parser.add_argument("--patches", type=existing, metavar="FILE", help="lines of patch_features.py to draw as well")
    parser.add_argument("--network", type=existing, metavar="FILE", help="lines of cifar10.py, likewise")
    parser.add_argument("--clients", type=existing, nargs="+", default=[], metavar="FILE", help="of 1,000 clients")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    if given.plot and not given.out.is_file():
        parser.error(f"--out: there is no file {given.out} to draw")
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    lines, patches, network = (
        [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
        for path in (given.out, given.patches, given.network)
    )
    if given.plot:
        lines = [line for line in lines if line["cell"].count("/") == 3]  # without those of another model
        lines += [line | {"features": "patches"} for line in patches]
        corrected = [line for line in network if line["phase"] == "corrected by patches"]
        longest = {
            f"cifar10/{line['sites']}/{math.ceil(line['epsilon']['add-or-remove'])}/{line['seed']}": line["accuracy"]
            for line in sorted(corrected, key=lambda line: line["steps"])
        }
        lines += [
            {"features": "patches and a network", "cell": cell, "accuracy": accuracy}
            for cell, accuracy in longest.items()
        ]
        lines += of_clients(given.clients)
        return plot(lines, given.plot)
    done = {(line["cell"], line["features"]) for line in lines}
    held: dict[tuple[str, str], Dataset] = {}
    for cell, chosen in cells(given):
        if (cell, chosen["features"]) in done or not re.fullmatch(given.cells, cell):
            continue
        name = cell.split("/")[0], chosen["features"]
        if name not in held:
            held = {name: featured(name[0], chosen, given.device)}
        wanted, epsilon = settings(cell, chosen, len(held[name].train_y))
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as runs:
            result = shoal.run(wanted, runs=runs, data=held[name], device=given.device)
        line = {
            "cell": cell, "accuracy": result.accuracy, "epsilon": epsilon, "delta": DELTA, "rounds": wanted["rounds"],
            "device": device, "seconds": round(time.perf_counter() - started, 1),
        } | chosen  # fmt: skip
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
