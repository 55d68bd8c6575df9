"""Record-level accuracy at a proven epsilon on features that no data were used for: one JSON line a run.

    SHOAL_DATA=... python benchmarks/patch_features.py --search --out SEARCH --device cuda
    SHOAL_DATA=... python benchmarks/patch_features.py --chosen SEARCH --out FILE [--cells 'cifar10/1/.*']

The features of CIFAR-10's pictures are those of Coates & Ng (2011), "The Importance of Encoding Versus Training with
Sparse Coding and Vector Quantization": patches, contrast-normalised and whitened, are compared with filters that are
patches themselves; what exceeds a threshold is averaged over the parts of a picture. There the patches come from the
training set. Here filters, whitening and the principal components of the features come from pictures that random
processes make (benchmarks/synthetic_pictures.py): no photograph is seen, and nothing of the data.

A softmax regression on them is trained by DP-SGD with all records in every step (delta 1e-5, add-or-remove;
replace-one is printed beside it). A cell is cifar10/sites/epsilon/seed; several sites share the noise
(distributed-dp-sgd), against the server and one site.

CIFAR-10 chose no setting: `--search` tries the grid on the garments of Fashion-MNIST, drawn in random colours and
places on synthetic pictures, and its best are used. Cells that FILE holds are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import shoal
from record_budget import DELTA, noise_for, spent, steps_of
from shoal.accounting.events import Event
from shoal.data import Dataset
from synthetic_pictures import dead_leaves, generated

SITES, EPSILONS, SEEDS = (1, 10), (1, 3, 8), 5
SIZE, PICTURES = 32, 16_384
FLOOR = 0.1
"""What is added to the eigenvalues of patches before they are whitened, as in Coates & Ng."""
NETWORKS: dict[str, tuple[tuple[int, ...], int, int]] = {
    "6, halves": ((6,), 4096, 2),
    "8, thirds": ((8,), 4096, 3),
    "6, 8 and 12, thirds": ((6, 8, 12), 2048, 3),
    "6, 8 and 12, quarters": ((6, 8, 12), 1024, 4),
}
"""Sides of patches, filters of each, and parts of a picture."""
STEPS = 400
CORRECTION = 0.5
"""The clip of a regression that corrects a network, whose errors are small; of the others it is 1.

Chosen on the garments, for a network that is right for 64 of 100: there 0.5 is 1 point better than 1 at the learning
rate 6, and 0.5 points with the best rate of each.
"""
GRID = {"components": (2000, 4000, 8000), "lr": (1.5, 3.0, 5.0, 10.0, 20.0)}


def synthetic(count: int, random: Generator, at_once: int = 512) -> Tensor:
    """Pictures [count, 3, SIZE, SIZE] by both processes in turn."""
    made = []
    for number in range(-(-count // at_once)):
        found = (dead_leaves if number % 2 else generated)(at_once, random)
        low = (found.shape[-1] - SIZE) // 2
        made.append(found[..., low : low + SIZE, low : low + SIZE])
    return torch.cat(made)[:count]


def coloured(shapes: Tensor, random: Generator) -> Tensor:
    """Grey pictures in [0, 1] as coloured ones: in a random colour and place on a synthetic picture."""
    device, count = random.device, len(shapes)
    grounds = synthetic(PICTURES, random)

    def drawn() -> Tensor:
        return grounds[torch.randint(len(grounds), (count,), generator=random, device=device)]

    room = SIZE - shapes.shape[-1] + 4  # a pixel or two may be cut off
    padded = F.pad(shapes.to(device).float(), (room,) * 4)
    places = torch.randint(2, room + 3, (count, 2), generator=random, device=device)
    rows, columns = (places[:, each, None] + torch.arange(SIZE, device=device) for each in (0, 1))
    mask = padded[
        torch.arange(count, device=device)[:, None, None], 0, rows[:, :, None], columns[:, None, :]
    ].unsqueeze(1)
    colour = torch.rand(count, 3, 1, 1, generator=random, device=device)
    return (1 - mask) * drawn() + mask * (0.7 * colour + 0.3 * drawn())


@dataclass(frozen=True)
class Patches:
    """Patches of one size, compared with filters [pixels, filters], and averaged over the parts of a picture.

    Attributes:
        side: Of a patch, in pixels.
        parts: Of a picture, in each direction.
        mean: What is taken from a patch first.
        filters: They whiten a patch, too.
        threshold: What a comparison must exceed, on either side of 0.
    """

    side: int
    parts: int
    mean: Tensor
    filters: Tensor
    threshold: Tensor

    @classmethod
    def of(cls, pictures: Tensor, random: Generator, side: int, filters: int, parts: int) -> Patches:
        """Filters that are whitened patches of these pictures, of unit norm."""
        rows = torch.cat([_some(part, side, 40, random) for part in pictures.split(512)])
        mean, (values, vectors) = rows.mean(0), torch.linalg.eigh(torch.cov(rows.T.double()))
        whitening = ((vectors * (values + FLOOR).rsqrt()) @ vectors.T).to(rows)
        white = (rows - mean) @ whitening
        white = white[white.norm(dim=1) > 0.1 * white.norm(dim=1).median()]
        chosen = torch.randperm(len(white), generator=random, device=random.device)[:filters]
        units = F.normalize(white[chosen], dim=1)
        return cls(side, parts, mean, whitening @ units.T, (white[:4096] @ units.T).square().mean().sqrt())

    def __call__(self, pictures: Tensor) -> Tensor:
        """Features [N, 2 x filters x parts^2]."""
        patches = _normalised(F.unfold(pictures, self.side).transpose(1, 2)) - self.mean
        places = round(patches.shape[1] ** 0.5)
        found = (patches @ self.filters).transpose(1, 2).unflatten(2, (places, places))
        both = [F.adaptive_avg_pool2d(F.relu(sign * found - self.threshold), self.parts) for sign in (1, -1)]
        return torch.cat(both, 1).flatten(1)


def _normalised(patches: Tensor) -> Tensor:
    """Patches [..., pixels] without their mean, and of about one size."""
    centred = patches - patches.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 10 / 255**2).sqrt()


def _some(x: Tensor, side: int, each: int, random: Generator) -> Tensor:
    """Some patches of each picture, normalised."""
    patches = F.unfold(x, side).transpose(1, 2)
    places = torch.randint(patches.shape[1], (len(x), each, 1), generator=random, device=random.device)
    return _normalised(patches.gather(1, places.expand(-1, -1, patches.shape[2])).flatten(0, 1))


@dataclass(frozen=True)
class Network:
    """Patches of several sizes, and the principal components of synthetic pictures' features."""

    patches: tuple[Patches, ...]
    mean: Tensor
    basis: Tensor
    values: Tensor

    @classmethod
    def of(cls, name: str, random: Generator) -> Network:
        """One of NETWORKS, learnt from synthetic pictures."""
        pictures = synthetic(PICTURES, random)
        sides, filters, parts = NETWORKS[name]
        patches = tuple(Patches.of(pictures[:4096], random, side, filters, parts) for side in sides)
        centred = _features(patches, pictures).float()
        mean = centred.mean(0)
        centred -= mean
        values, vectors = torch.linalg.eigh(centred @ centred.T / len(centred))
        most = max(GRID["components"])
        values, vectors = values.flip(0)[:most].clamp(min=1e-9), vectors.flip(1)[:, :most]
        return cls(patches, mean, F.normalize(centred.T @ vectors, dim=0), values)

    def features(self, pictures: Tensor) -> Tensor:
        """The roots of the mean over a picture and its mirror image."""
        return _features(self.patches, pictures)

    def components(self, features: Tensor, count: int) -> Tensor:
        """Unit vectors of so many components, whitened."""
        whitened = self.basis[:, :count] * (self.values[:count] + 0.1 * self.values[:count].mean()).rsqrt()
        return torch.cat([F.normalize((part.float() - self.mean) @ whitened, dim=1) for part in features.split(4096)])


def _features(patches: tuple[Patches, ...], pictures: Tensor, at_once: int = 64) -> Tensor:
    found = []
    for part in pictures.split(at_once):
        one, other = torch.cat([each(torch.cat([part, part.flip(-1)])) for each in patches], 1).chunk(2)
        found.append(((one + other) / 2).sqrt().half())
    return torch.cat(found)


def tried(x: Tensor, y: Tensor, held_out: tuple[Tensor, Tensor], noise: float, lr: float) -> float:
    """The accuracy of such a run, by a plain loop: enough to compare settings on public pictures."""
    random = Generator(x.device).manual_seed(0)
    weights = torch.zeros(10, x.shape[1], device=x.device)
    momentum, total, averaged = torch.zeros_like(weights), torch.zeros_like(weights), 0
    target = F.one_hot(y, 10).float()
    for step in range(STEPS):
        error = torch.softmax(x @ weights.T, 1) - target
        error *= (1 / error.norm(dim=1, keepdim=True).clamp(min=1e-9)).clamp(max=1)
        drawn = noise * torch.randn(weights.shape, generator=random, device=x.device)
        momentum = 0.9 * momentum + (error.T @ x + drawn) / len(x)
        weights = weights - lr * momentum
        if step >= STEPS // 2:
            total, averaged = total + weights, averaged + 1
    return float(((held_out[0] @ (total / averaged).T).argmax(1) == held_out[1]).float().mean())


def search(given: argparse.Namespace, records: int = 50_000) -> None:
    """The grid on coloured pictures, for each network and epsilon."""
    data = shoal.load("fashion-mnist")
    pictures = coloured(data.train_x, Generator(given.device).manual_seed(1))
    labels = data.train_y.to(given.device)
    for name in NETWORKS:
        network = Network.of(name, Generator(given.device).manual_seed(0))
        features = network.features(pictures)
        for components in GRID["components"]:
            x = network.components(features, int(components))
            held_out = (x[records:], labels[records:])
            for epsilon, lr in itertools.product(EPSILONS, GRID["lr"]):
                accuracy = tried(x[:records], labels[:records], held_out, noise_for(epsilon, 1.0, STEPS), lr)
                line = {"epsilon": epsilon, "accuracy": accuracy, "network": name, "components": components, "lr": lr}
                write(given.out, line)
                print(json.dumps(line), flush=True)
            del x, held_out
        del network, features


def best(path: Path, epsilon: int) -> dict[str, Any]:
    """The best settings of a search, at the epsilon nearest to this one."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    nearest = min((line["epsilon"] for line in lines), key=lambda searched: abs(math.log(searched / epsilon)))
    found = max((line for line in lines if line["epsilon"] == nearest), key=lambda line: line["accuracy"])
    return {key: found[key] for key in ("network", "components", "lr")}


def write(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def cost(epsilon: int, steps: int = STEPS) -> Event:
    """What so many steps of a run at this epsilon do to a record."""
    return steps_of(noise_for(epsilon, 1.0, STEPS), 1.0, steps)


def cells(chosen: Path, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the settings of every cell whose name matches."""
    for epsilon, sites, seed in itertools.product(EPSILONS, SITES, range(SEEDS)):
        if re.fullmatch(wanted, cell := f"cifar10/{sites}/{epsilon}/{seed}"):
            yield cell, best(chosen, epsilon)


def settings(cell: str, chosen: dict[str, Any], records: int) -> dict[str, Any]:
    """The configuration of a cell."""
    sites, epsilon, seed = map(int, cell.split("/")[1:])
    noise = noise_for(epsilon, 1.0, STEPS)
    shared = {"per_round.noise_multiplier": noise, "per_round.threshold": sites, "per_round.colluding": 1}
    return {
        "algorithm": "distributed-dp-sgd" if sites > 1 else "dp-sgd",
        "rounds": STEPS,
        "seed": seed,
        "data.clients": sites,
        "data.partition": "iid",
        "records.sampling": "poisson",
        "records.rate": 1.0,
        "records.nominal_records": records // sites,
        "local.steps": 1,
        "local.lr": chosen["lr"],
        "server.momentum": 0.9,
        "server.average": 0.5,
        "per_record.clip_norm": 1.0,
        "budget.delta": DELTA,
        "engine.evaluate_every": STEPS,
        "engine.checkpoint_every": STEPS,
    } | (shared if sites > 1 else {"per_step.noise_multiplier": noise})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--chosen", type=Path, metavar="SEARCH", help="the lines of a search")
    parser.add_argument("--cells", default=".*", help="a regular expression for whole names")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    if given.search:
        return search(given)
    if given.chosen is None:
        parser.error("--chosen: give the file of a search")
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    done = {json.loads(line)["cell"] for line in given.out.read_text().splitlines()} if given.out.exists() else set()
    wanted = [(cell, chosen) for cell, chosen in cells(given.chosen, given.cells) if cell not in done]
    pictures = shoal.load("cifar10")
    for name in dict.fromkeys(chosen["network"] for _, chosen in wanted):
        network = Network.of(name, Generator(given.device).manual_seed(0))
        features = [network.features(x.to(given.device)) for x in (pictures.train_x, pictures.test_x)]
        for components in GRID["components"]:
            of_it = [each for each in wanted if (each[1]["network"], each[1]["components"]) == (name, components)]
            if not of_it:
                continue
            data = components_of(pictures, network, features, int(components))
            for cell, chosen in of_it:
                found = run(cell, chosen, data, given.device)
                write(given.out, line := found | {"device": device})
                print(json.dumps(line), flush=True)


def components_of(
    pictures: Dataset, network: Network, features: list[Tensor], count: int, logits: Sequence[Tensor] = ()
) -> Dataset:
    """Pictures by so many components of their features, of those for training and for the test; then their logits."""
    train, test = (
        torch.cat([network.components(each, count).cpu(), *of_it], 1).numpy()
        for each, *of_it in zip(features, *([logits] if logits else []), strict=True)
    )
    return shoal.from_arrays(
        train, pictures.train_y.numpy(), test=(test, pictures.test_y.numpy()), classes=pictures.classes, scale="raw",
        pictures=False, name="cifar10-patches",
    )  # fmt: skip


class Correction(nn.Module):
    """A linear model of the first numbers of a record, added to the logits that are the others."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 10, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.linear.in_features
        return self.linear(x[:, :inputs]) + x[:, inputs:]


def correction(
    cell: str, chosen: dict[str, Any], pictures: Dataset, logits: Sequence[Tensor], device: str
) -> tuple[dict[str, Any], Dataset, Correction]:
    """The configuration, data and model of a cell that corrects logits of pictures, for training and for the test."""
    network = Network.of(chosen["network"], Generator(device).manual_seed(0))
    features = [network.features(x.to(device)) for x in (pictures.train_x, pictures.test_x)]
    count = int(chosen["components"])
    data = components_of(pictures, network, features, count, logits)
    return settings(cell, chosen, len(data.train_y)) | {"per_record.clip_norm": CORRECTION}, data, Correction(count)


def run(cell: str, chosen: dict[str, Any], data: Dataset, device: str) -> dict[str, Any]:
    """A cell's line."""
    started, wanted = time.perf_counter(), settings(cell, chosen, len(data.train_y))
    model = nn.Linear(data.train_x.shape[1], 10, bias=False)
    nn.init.zeros_(model.weight)
    with tempfile.TemporaryDirectory() as runs:
        result = shoal.run(wanted, runs=runs, data=data, model=model, device=device)
    costs = spent(cost(int(cell.split("/")[2])))
    found = {"cell": cell, "accuracy": result.accuracy, "epsilon": costs, "delta": DELTA, "steps": STEPS}
    return found | chosen | {"seconds": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    main()
