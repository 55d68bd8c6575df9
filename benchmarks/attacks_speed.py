"""How much faster an attack is on many victims at once than on one after the other, in one run.

    SHOAL_DATA=... python benchmarks/attacks_speed.py [--victims 100] [--alone 100] [--device cuda] [--dataset mnist]

Three ways to run CPL on the same clean type-2 gradients: all victims together, each of them alone with the same code,
and each alone as published code does it (autograd twice, torch.optim.LBFGS). Times are for whole attacks, to the same
end: |shown - seen|^2 below 1e-8 of |seen|^2, or 300 iterations. One JSON line is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.algorithms import algorithm
from shoal.attacks.attack_recipes import CPL, SOLVED
from shoal.attacks.labels import infer
from shoal.attacks.leakage import Aim, attacked_model, choose
from shoal.attacks.objective import Objective
from shoal.attacks.observe import observe
from shoal.attacks.reconstruct import reconstruct
from shoal.attacks.starts import start
from shoal.config import configure
from shoal.data import load
from shoal.random.streams import Streams
from shoal.training.context import pick_device


def settled(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def published_way(module: nn.Module, seen: Tensor, label: Tensor, shape: tuple[int, ...], streams: Streams) -> Tensor:
    """The loop of the papers' public code, for one victim."""
    x = start("tile", shape, streams.generator("attack start", 0, 0)).unsqueeze(0).to(seen.device).requires_grad_()
    optimiser = torch.optim.LBFGS([x])
    parameters = list(module.parameters())
    whole = seen.square().sum()

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(module(x), label)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        distance = (torch.cat([s.flatten() for s in slopes]) - seen).square().sum()
        (x.grad,) = torch.autograd.grad(distance, x)
        return distance

    for _ in range(CPL.iterations):
        if not optimiser.step(closure) > SOLVED * whole:
            break
    return x.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", type=int, default=100)
    parser.add_argument("--alone", type=int, default=None, help="how many of them are attacked alone as well")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device, streams = pick_device(options.device), Streams(0)
    dataset = load(options.dataset)
    config = configure({"data.name": options.dataset, "engine.device": options.device})
    victims = choose(dataset, Aim(2, options.victims), streams, device)
    module = attacked_model(config, dataset, streams).to(device)
    seen = observe(algorithm("fedavg"), 2, module, victims, streams)
    dummies = victims.x.new_full((8, *dataset.input_shape), 0.5)
    labels = infer("rows", seen.gradients, module, 1, dummies)
    together = Objective(
        CPL, seen.shown, seen.replay, dataset.input_shape, 1, dataset.class_count, seen.gradients, labels
    )

    def one(victim: int) -> Objective:
        mine = slice(victim, victim + 1)
        return replace(together, seen=seen.gradients[mine], labels=labels[mine])

    def published(victim: int) -> Tensor:
        return published_way(module, seen.gradients[victim], labels[victim, 0], dataset.input_shape, streams)

    alone = min(options.alone or options.victims, options.victims)
    reconstruct(replace(one(0), recipe=replace(CPL, iterations=1)), streams)  # libraries are loaded
    begin = settled(device)
    found = reconstruct(together, streams)
    middle = settled(device)
    apart = [reconstruct(one(victim), streams) for victim in range(alone)]
    end = settled(device)
    pictures = torch.cat([published(victim) for victim in range(alone)])
    last = settled(device)
    error = (pictures.clamp(0, 1) - victims.x[:alone, 0]).square().flatten(1).mean(1).sqrt()
    each = (middle - begin) / options.victims, (end - middle) / alone, (last - end) / alone
    line = {
        "dataset": options.dataset,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "victims": options.victims,
        "alone": alone,
        "seconds_a_victim": {"together": each[0], "alone": each[1], "published_way": each[2]},
        "times_faster_than_alone": each[1] / each[0],
        "times_faster_than_published_way": each[2] / each[0],
        "iterations": {
            "together": float(found.iterations[:alone].float().mean()),
            "alone": sum(float(part.iterations) for part in apart) / alone,
        },
        "recovered": {
            "together": float(((found.x - victims.x).square().flatten(1).mean(1).sqrt() < 0.15).float().mean()),
            "published_way": float((error < 0.15).float().mean()),
        },
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
