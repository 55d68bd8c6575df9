"""CIFAR-10 at a proven epsilon, from features that no photograph was used for: one JSON line a figure.

    SHOAL_DATA=... python benchmarks/cifar10.py --features features.safetensors --out FOLDER --epsilon 1 [--sites 10]
    SHOAL_DATA=... python benchmarks/cifar10.py --out FOLDER --epsilon 8 --head-steps 0 --steps 2000 --rate 2 \
        [--corrected 3 --chosen docs/results/patches_search.jsonl]

The features are those of benchmarks/synthetic_pictures.py. Training is in two phases, as in Tang et al. (2023),
https://arxiv.org/abs/2306.06076: the last layer alone on the features of every picture, then the whole network. All
steps of both sample records at the same rate and have the same noise, so that together they are one composition, and
the noise is calibrated for all of them (delta 1e-5, add-or-remove; replace-one is printed beside it). With `--sites`
the records are dealt out to sites that share the noise (distributed-dp-sgd), against the server and one site.

Settings are those of the paper (clip 1, learning rates 15 for the last layer and 0.4 for 777 steps of the network),
but for the number of steps and views; with fewer steps the learning rate of the network is larger by as much. With
`--rate 2` it is that of De et al. (2022), https://arxiv.org/abs/2204.13650. None of these was
chosen by looking at CIFAR-10.

Without `--features` the network starts from scratch, with standardised weights, as that of De et al., and with the
scale normalisation of Klause et al. (2022), https://arxiv.org/abs/2203.00324.

With `--corrected` a part of the budget, which alone would be that epsilon, goes to a regression on features of
patches (benchmarks/patch_features.py). It is trained after the network, and added to its log-probabilities. Those are
means over a picture, its mirror image, and both moved by two pixels in four directions.

A phase is a run below FOLDER/CELL; what was interrupted, or reached `--minutes`, goes on when the same command is
given again; a regression that was interrupted is trained anew, with other noise. Lines are appended to
FOLDER/cifar10.jsonl. Their epsilon is that of all rounds that the ledgers were charged for: a round that was killed,
and drew its noise again, counts twice.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import patch_features
import shoal
from record_budget import DELTA, charged, noise_for, spent, steps_of
from shoal.accounting.events import Event
from shoal.data import Dataset
from shoal.models import StandardisedConv2d
from shoal.result import Interrupted
from shoal.training.augmentation import CROPS, PADDING, augmented
from synthetic_pictures import WIDTH, PictureNetwork

HEAD_RATE, NETWORK_RATE, NETWORK_STEPS = 15.0, 0.4, 777
"""Learning rates of Tang et al. at epsilon 1, and the number of steps of the second."""
PHASES = "head", "network", "correction"
"""Folders of a cell; in each are runs."""
MOVES = (0, 0), (-2, 0), (2, 0), (0, -2), (0, 2)
"""Of a picture that is classified, in pixels; each place is seen with its mirror image."""


@torch.no_grad()
def features(network: PictureNetwork, x: Tensor, views: int, seed: int, device: str, at_once: int = 500) -> Tensor:
    """The features of every picture, the mean over its views; of the picture itself where there are none."""
    network.to(device).eval()
    random = torch.Generator().manual_seed(seed)
    found = []
    for part in torch.split(x, at_once):
        seen = part.to(device)
        if views:
            chosen = torch.randint(2 * CROPS**2, (1, len(part), views), generator=random).to(device)
            seen = augmented(seen.unsqueeze(0), chosen).squeeze(0)
        found.append(network.features(seen).view(len(part), -1, WIDTH).mean(1).cpu())
    return torch.cat(found)


@torch.no_grad()
def log_probabilities(network: PictureNetwork, x: Tensor, device: str, at_once: int = 500) -> Tensor:
    """Those of every picture's classes [N, classes], the mean over ten of the views of training."""
    network.to(device).eval()
    moved = [(PADDING + down) * CROPS + PADDING + across for down, across in MOVES]
    views = torch.tensor([2 * place + flipped for place in moved for flipped in (0, 1)], device=device)
    found = []
    for part in torch.split(x, at_once):
        seen = augmented(part.to(device).unsqueeze(0), views.expand(1, len(part), -1)).squeeze(0)
        found.append(torch.log_softmax(network(seen), 1).view(len(part), len(views), -1).mean(1).cpu())
    return torch.cat(found)


def settings(given: argparse.Namespace, noise: float, records: int, steps: int, rate: float) -> dict[str, Any]:
    """What both phases have in common."""
    shared = given.sites > 1
    where = {"per_round.noise_multiplier": noise, "per_round.threshold": given.sites, "per_round.colluding": 1}
    return {
        "algorithm": "distributed-dp-sgd" if shared else "dp-sgd",
        "rounds": steps,
        "seed": given.seed,
        "data.clients": given.sites,
        "data.partition": "iid",
        "records.sampling": "poisson",
        "records.rate": given.batch / records,
        "records.nominal_records": records // given.sites,
        "local.steps": 1,
        "local.lr": rate,
        "per_record.clip_norm": 1.0,
        "server.average": given.averaged,
        "budget.delta": DELTA,
        "engine.evaluate_every": max(1, steps // 4),
        "engine.checkpoint_every": 25,
    } | (where if shared else {"per_step.noise_multiplier": noise})


def trained(
    given: argparse.Namespace, runs: Path, ends: float, wanted: dict[str, Any], data: Dataset, model: nn.Module
) -> shoal.Result:
    """A new run below a folder, or the one that is there, resumed; at `ends` it is stopped at the next checkpoint.

    A correction is not resumed: its data are logits, which no other device computes to the last bit.
    """
    stop = []

    def on_round(line: dict[str, Any]) -> None:
        if line["round"] in (1, 2, 5) or line["round"] % wanted["engine.evaluate_every"] == 0:
            told = {key: line[key] for key in ("round", "accuracy", "clipped_records", "seconds") if key in line}
            print(json.dumps(told), flush=True)
        if time.perf_counter() > ends:
            stop[0].stop()

    more = {"data": data, "model": model, "device": given.device, "on_round": on_round}
    more["on_start"] = lambda _config, trainer, _path: stop.append(trainer)
    runs.mkdir(parents=True, exist_ok=True)
    kept, there = runs / "settings.json", sorted(runs.glob("*/config.toml"))
    learnt_from = given.features and sha256(given.features.read_bytes()).hexdigest()
    settings = wanted | {"features": learnt_from, "frozen": given.frozen}
    if there and runs.name != "correction":
        if json.loads(kept.read_text()) != settings:
            raise SystemExit(f"{kept}: the run there was started with other settings; give another --out")
        return shoal.run(resume=there[0].parent, **more)
    kept.write_text(json.dumps(settings))
    never_before = json.dumps([runs.parent.name, runs.name, len(there), settings], sort_keys=True)
    noise_seed = int(sha256(never_before.encode()).hexdigest()[:12], 16)
    return shoal.run(wanted | {"noise_seed": noise_seed}, runs=runs, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, help="without them the network starts from scratch, standardised")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--head-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200, help="of the whole network; 0: the last layer alone")
    parser.add_argument("--rate", type=float, help="learning rate of the whole network; else that of Tang et al.")
    parser.add_argument("--batch", type=int, default=4096, help="expected records in a step, of all sites")
    parser.add_argument("--views", type=int, default=4, help="views of each record, averaged before the clip")
    parser.add_argument("--averaged", type=float, default=0.3, help="share of the last steps, whose mean is released")
    parser.add_argument("--corrected", type=int, metavar="EPSILON", help="of a regression on patches' features")
    parser.add_argument("--chosen", type=Path, metavar="SEARCH", help="its settings: the lines of patch_features.py")
    parser.add_argument("--frozen", type=int, default=0, help="how many of the first 7 blocks stay as they are")
    parser.add_argument("--records", type=int, help="use the first so many alone (to try the script)")
    parser.add_argument("--micro-views", type=int, default=1024, help="views that are run at once")
    parser.add_argument("--precision", default="bf16", choices=("auto", "float32", "tf32", "bf16"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    given = parser.parse_args()
    started = time.perf_counter()
    ends = started + 60 * given.minutes

    pictures = shoal.load("cifar10")
    train_x, train_y, test_x, test_y = (
        each[: given.records] for each in (pictures.train_x, pictures.train_y, pictures.test_x, pictures.test_y)
    )
    records, steps = len(train_y), given.head_steps + given.steps
    network_rate = given.rate or NETWORK_RATE * NETWORK_STEPS / max(1, given.steps)
    rate = given.batch / records

    def regression(steps: int = patch_features.STEPS) -> list[Event]:
        return [patch_features.cost(given.corrected, steps)] if given.corrected else []

    noise = noise_for(given.epsilon, rate, steps, *regression())
    torch.manual_seed(given.seed)
    network = PictureNetwork() if given.features else PictureNetwork(StandardisedConv2d, scale_norm=True)
    if given.features:
        network.load_state_dict(load_file(given.features))
    elif given.head_steps:
        parser.error("--head-steps needs --features; from scratch set it to 0")
    if given.corrected and given.chosen is None:
        parser.error("--chosen: give the file of a search")
    if given.corrected and not given.chosen.is_file():
        parser.error(f"--chosen: there is no file {given.chosen}")
    start = ("" if given.features else "scratch-") + (f"corrected{given.corrected}-" if given.corrected else "")
    cell = (
        f"{start}epsilon{given.epsilon:g}-sites{given.sites}-steps{given.head_steps}-{given.steps}-seed{given.seed}"
    )
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    costs = spent(steps_of(noise, rate, steps), *regression())
    print(json.dumps({"cell": cell, "noise_multiplier": noise, "rate": rate} | costs), flush=True)

    path, runs = given.out / "cifar10.jsonl", dict[str, shoal.Result]()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    figures = {(line["cell"], line["phase"], line.get("run")) for line in lines}

    def figure(phase: str, accuracy: float | None, stopped: str | None = None) -> None:
        rounds = {name: count for name in PHASES if (count := charged(given.out / cell / name))}
        of_pictures = {name: count for name, count in rounds.items() if name != "correction"}
        costs = spent(
            steps_of(noise, rate, sum(of_pictures.values())),
            *regression(max(patch_features.STEPS, rounds.get("correction", 0))),
        )
        run = runs["network" if "network" in runs else "head"].run.name
        line = {
            "cell": cell, "phase": phase, "run": run, "accuracy": accuracy, "delta": DELTA, "epsilon": costs,
            "noise_multiplier": noise, "rate": rate,
            "steps": sum(result.rounds for name, result in runs.items() if name != "correction"), "charged": rounds,
            "views": given.views, "frozen": given.frozen,
            "rate_of_network": network_rate,
            "clip_norm": 1.0, "averaged": given.averaged, "sites": given.sites, "seed": given.seed, "device": device,
            "records": records,
            "seconds": round(sum(line["seconds"] for result in runs.values() for line in result.metrics), 1),
            "stopped": stopped,
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        if (cell, phase, run) not in figures:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def phase(name: str, wanted: dict[str, Any], data: Dataset, model: nn.Module) -> shoal.Result:
        runs[name] = trained(given, given.out / cell / name, ends, wanted, data, model)
        return runs[name]

    def last_layer() -> dict[str, Tensor]:
        """The last layer, trained alone on the features of every picture."""
        kept = given.out / cell / "features.safetensors"  # no other device computes them to the last bit
        if not (kept.exists() and any(kept.parent.glob("head/*/config.toml"))):
            computed = {
                name: features(network, x, views, given.seed, given.device)
                for name, x, views in (("train", train_x, 8), ("test", test_x, 0))
            }
            kept.parent.mkdir(parents=True, exist_ok=True)
            save_file(computed, kept.with_suffix(".part"))
            kept.with_suffix(".part").replace(kept)
        seen = [load_file(kept)[name] for name in ("train", "test")]
        data = shoal.from_arrays(
            seen[0].numpy(), train_y.numpy(), test=(seen[1].numpy(), test_y.numpy()), name="features",
            classes=pictures.classes,
        )  # fmt: skip
        print(json.dumps({"features": list(seen[0].shape), "norm": seen[0].norm(dim=1).mean().item()}), flush=True)
        last = nn.Linear(WIDTH, 10)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        result = phase("head", settings(given, noise, records, given.head_steps, HEAD_RATE), data, last)
        figure("head", result.accuracy, result.stopped)
        return result.model

    def correction(logits: list[Tensor]) -> shoal.Result:
        name = f"cifar10/{given.sites}/{given.corrected}/{given.seed}"
        data = replace(pictures, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
        chosen = patch_features.best(given.chosen, given.corrected)
        return phase("correction", *patch_features.correction(name, chosen, data, logits, given.device))

    given.out.mkdir(parents=True, exist_ok=True)
    try:
        if given.head_steps:
            network.head.load_state_dict(last_layer())
        if not given.steps:
            return
        for block in network.blocks[: given.frozen]:
            block.requires_grad_(False)
        wanted = settings(given, noise, records, given.steps, network_rate) | {
            "records.augmentations": given.views,
            "engine.micro_batch": max(1, given.micro_views // given.views),
            "engine.precision": given.precision,
            "engine.graphs": False,
        }
        data = shoal.from_arrays(
            train_x.numpy(), train_y.numpy(), test=(test_x.numpy(), test_y.numpy()), name="cifar10",
            classes=pictures.classes,
        )  # fmt: skip
        result = phase("network", wanted, data, network.cpu().train())
        figure("network", result.accuracy, result.stopped)
        if given.corrected and (cell, "corrected by patches", result.run.name) not in figures:
            network.load_state_dict(result.model, strict=False)  # frozen layers are not released
            logits = [log_probabilities(network, x, given.device) for x in (train_x, test_x)]
            figure("network, ten views", (logits[1].argmax(1) == test_y).float().mean().item())
            figure("corrected by patches", correction(logits).accuracy)
    except Interrupted as stopped:
        print(json.dumps({"cell": cell, "interrupted": str(stopped)}), flush=True)


if __name__ == "__main__":
    main()
