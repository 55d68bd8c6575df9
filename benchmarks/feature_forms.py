"""Which form of `hog-fourier` is best on one public data set, so that another can use it: one JSON line a form.

    SHOAL_DATA=... python benchmarks/feature_forms.py --out FILE [--data mnist fashion-mnist] [--device cuda]

A form is what `hog2` and its random Fourier features leave open: whether pictures are smoothed, the number of
directions, whether square roots are taken, whether what all pictures share is taken out, and the sharpness of the
kernel. It is judged on the test set by a linear softmax model, trained with noisy, clipped gradients of all records
(epsilon 3, delta 1e-5) at several learning rates, by the mean accuracy of the seeds. All rates and seeds of a form
are trained at once. No privacy is claimed for the data that choose. What FILE holds is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import shoal
from record_budget import noise_for
from shoal.data.features import _directions, _hog2, _unit_scale, _waves

GRIDS: tuple[dict[str, tuple[Any, ...]], ...] = (
    {
        "smoothed": (True, False),
        "directions": (8, 6, 12),
        "roots": (True, False),
        "shared_part_out": (True, False),
        "sharpness": (4.5, 3.0, 6.75),
    },
    {
        "smoothed": (False,),
        "directions": (8, 12, 16),
        "roots": (True,),
        "shared_part_out": (True, False),
        "sharpness": (1.0, 2.0, 3.0, 4.5),
    },
)
RATES, SEEDS = ((50.0, 125.0, 300.0), (125.0, 300.0, 750.0)), (3, 5)
"""Of the first grid, and of the second, which is finer around what was best in the first."""
STEPS, CLIP_NORM, MOMENTUM, AVERAGED = 400, 0.1, 0.9, 0.3


def featured(x: Tensor, form: dict[str, Any]) -> Tensor:
    """The features of pictures in a form."""
    hog2 = {"smoothed": form["smoothed"], "bins": form["directions"]}
    hog2 |= {"roots": form["roots"], "centred": form["shared_part_out"]}
    edges = torch.cat([_hog2(_unit_scale(part), **hog2) for part in torch.split(x, 5000)])
    return _waves(edges, _directions(edges.shape[1], form["sharpness"]).to(edges))


def accuracies(data: list[Tensor], noise: float, rates: tuple[float, ...], seeds: int) -> list[list[float]]:
    """By rate and seed: of models that are trained side by side on the same features."""
    train, labels, test, held_out = data
    runs, classes = len(rates) * seeds, 10
    rate = torch.tensor(rates).to(train).repeat_interleave(seeds)[:, None]
    random = torch.Generator(train.device).manual_seed(1)
    wanted, norms = one_hot(labels, classes).to(train)[:, None], train.norm(dim=1)[:, None, None]
    weights = train.new_zeros(train.shape[1], runs, classes)
    momentum, average, averaged = torch.zeros_like(weights), torch.zeros_like(weights), 0
    for step in range(STEPS):
        error = (train @ weights.flatten(1)).view(-1, runs, classes).softmax(2) - wanted
        error *= (CLIP_NORM / (error.norm(dim=2, keepdim=True) * norms)).clamp(max=1)
        drawn = torch.randn(weights.shape, generator=random, device=train.device) * (noise * CLIP_NORM)
        momentum = MOMENTUM * momentum + ((train.T @ error.flatten(1)).view_as(weights) + drawn) / len(train)
        weights = weights - rate * momentum
        if step >= (1 - AVERAGED) * STEPS:
            averaged += 1
            average += (weights - average) / averaged
    guessed = (test @ average.flatten(1)).view(-1, runs, classes).argmax(2)
    return (guessed == held_out[:, None]).double().mean(0).view(len(rates), seeds).tolist()


def best(path: Path, data: str) -> tuple[dict[str, Any], float]:
    """The form and the learning rate that are best on a data set, by the mean of all seeds of both grids."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        for rate, each in line["accuracy"].items() if line["data"] == data else ():
            found.setdefault((*(line[key] for key in GRIDS[0]), float(rate)), []).extend(each)
    *form, rate = max(found, key=lambda setting: mean(found[setting]))
    return dict(zip(GRIDS[0], form, strict=True)), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion-mnist"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    held = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(line["data"], line["grid"], *(line[key] for key in GRIDS[0])) for line in held}
    noise = noise_for(3, 1.0, STEPS)
    for name in given.data:
        pictures = shoal.load(name)
        x, y, test_x, test_y = (
            each.to(given.device) for each in (pictures.train_x, pictures.train_y, pictures.test_x, pictures.test_y)
        )
        for number, grid in enumerate(GRIDS):
            for values in itertools.product(*grid.values()):
                if (name, number, *values) in done:
                    continue
                started = time.perf_counter()
                form = dict(zip(grid, values, strict=True))
                data = [featured(x, form), y, featured(test_x, form), test_y]
                found = accuracies(data, noise, RATES[number], SEEDS[number])
                line = {"data": name, "grid": number} | form | {
                    "accuracy": dict(zip(map(str, RATES[number]), found, strict=True)), "noise_multiplier": noise,
                    "device": device, "seconds": round(time.perf_counter() - started, 2),
                }  # fmt: skip
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
