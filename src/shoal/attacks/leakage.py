"""`attack`: a published gradient-leakage attack on any method, scored against the truth that it never sees."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.attacks import imprint, trap
from shoal.attacks.arithmetic import exact
from shoal.attacks.attack_recipes import CPL, TRAP, Recipe
from shoal.attacks.attacked_task import of_classes, refuse_other_losses
from shoal.attacks.consensus import agreed
from shoal.attacks.labels import infer
from shoal.attacks.objective import Objective
from shoal.attacks.observe import Kind, Seen, Victims, observe
from shoal.attacks.quality import Quality, judge
from shoal.attacks.reconstruct import Found, reconstruct
from shoal.config import Config
from shoal.data import Dataset
from shoal.errors import ConfigError, DataError, ModelError
from shoal.inputs import single
from shoal.models import build, check, mixing_layers
from shoal.prepare import load_data, with_noise
from shoal.random.streams import Streams
from shoal.training.context import pick_device

BATCHED = 256  # victims attacked at once
DUMMIES = 64  # random inputs that show an attacker the model's average output
PAPER_RECORDS = 3  # Wei et al. (2023) attack batches of three at types 0 and 1

Progress = Callable[[int, int], None]
"""(iteration, victims left)."""


@dataclass(frozen=True)
class Aim:
    """The attacker and its victims.

    Attributes:
        kind: 0 at the server, 1 at the client before sending, 2 inside local training.
        count: The number of victims.
        records: The records in one observed gradient or update.
        honest: Whether to attack a real update, after all local steps.
        knowing: Whether the attacker replays public clipping on its dummies.
        sites: How many clients' updates the server sees, only as their sum (secure aggregation).
    """

    kind: Kind = 2
    count: int = 20
    records: int | None = None
    honest: bool = False
    knowing: bool = True
    sites: int = 1

    def __post_init__(self) -> None:
        if self.kind not in (0, 1, 2):
            raise ConfigError(
                f"there is no attack of type {self.kind}: 0 is at the server, 1 at the client before sending, "
                f"2 inside local training"
            )
        if self.count < 1:
            raise ConfigError(f"count must be at least 1 victim, got {self.count}")
        if self.records is not None and self.records < 1:
            raise ConfigError(f"records must be at least 1 a victim, got {self.records}")
        if self.sites < 1:
            raise ConfigError(f"sites must be at least 1 in a sum, got {self.sites}")
        if self.kind != 0 and self.sites > 1:
            raise ConfigError(f"sites={self.sites}: only the server sees a sum; use type 0")
        if self.kind == 2 and self.records not in (None, 1):
            raise ConfigError(f"type 2 sees one record's gradient at a time, got records={self.records}")
        if self.kind == 2 and self.honest:
            raise ConfigError("honest needs a whole update: use it with type 0 or 1")

    @property
    def each(self) -> int:
        """The records of one victim."""
        return self.records or (1 if self.kind == 2 else PAPER_RECORDS)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of an attack, and the truth."""

    algorithm: str
    dataset: str
    model: str
    recipe: Recipe
    aim: Aim
    truth: Tensor  # [V, B, ...]
    found: Found
    quality: Quality
    reached: Tensor  # [V, B]: the iteration from which the best guess was a success; the limit if it never was
    seconds: float

    def row(self) -> dict[str, Any]:
        """The figures of a table: means over records, or over victims."""
        quality, found = self.quality, self.found
        return {
            "algorithm": self.algorithm,
            "type": self.aim.kind,
            "attack": self.recipe.name,
            "dataset": self.dataset,
            "model": self.model,
            "victims": self.aim.count,
            "records": self.aim.each,
            "sites": self.aim.sites,
            "honest": self.aim.honest,
            "naive": not self.aim.knowing,
            "success": _mean(quality.success),
            "rmse": _mean(quality.rmse),
            "psnr": _mean(quality.psnr),
            "ssim": _mean(quality.ssim) if quality.ssim is not None else None,
            "label_hits": _mean(quality.label_hit),
            "iterations": _mean(found.iterations),
            "iterations_to_success": _mean(self.reached[quality.success]) if quality.success.any() else None,
            "gradient_left": None if self.recipe.plants else float(found.left.median()),
            "rmse_of_successes": _mean(quality.rmse[quality.success]) if quality.success.any() else None,
            "restarts": int(found.restarts.sum()),
            "diverged": int(found.diverged.sum()),
            "seconds": round(self.seconds, 2),
        }


def attack(config: Config, recipe: Recipe, aim: Aim, data: Dataset | None = None, progress: Progress | None = None,
           ) -> Outcome:  # fmt: skip
    """Attack a configuration's method.

    Args:
        config: Algorithm, data and model (`auto`: the papers' attack network).
        recipe: The attack.
        aim: Attacker and victims.
        data: The data set; loaded from the configuration by default.
        progress: Called as the search goes on.

    Returns:
        The outcome.

    Raises:
        ConfigError: Where the attacker would not see what it needs.
    """
    refuse_unseen(config, aim)
    refuse_role(recipe, aim)
    refuse_other_losses(config)
    dataset = of_classes(data or load_data(config), config)
    device, streams = pick_device(config.engine.device), Streams(config.seed)
    victims = choose(dataset, aim, streams, device)
    module = attacked_model(config, dataset, streams, recipe).to(device)
    if recipe.plants:
        planter = trap if recipe.name == TRAP.name else imprint
        module = planter.planted(module, single(dataset.test_x, DataError, recipe.name).float(), streams)
    config = with_noise(config, dataset, module)
    started = time.perf_counter()
    seen = observe(
        config.algorithm, aim.kind, module, victims, streams,
        rounds=config.rounds, honest=aim.honest, knowing=aim.knowing, sites=aim.sites,
    )  # fmt: skip
    victims = victims.summed(aim.sites)
    if recipe.plants:
        with exact():
            found = planter.read_off(module, seen.gradients, tuple(victims.x.shape[2:]), victims.y.shape[1])
        reached = torch.ones_like(victims.y)
    else:
        found, reached = _search(recipe, aim, module, seen, victims, streams, progress)
    quality = judge(found.x, found.labels, victims.x, victims.y)
    seconds = time.perf_counter() - started
    names = config.algorithm.name, dataset.name, str(model_name(config, dataset, recipe))
    return Outcome(*names, recipe, aim, victims.x, found, quality, reached, seconds)


def refuse_unseen(config: Config, aim: Aim) -> None:
    """Refuse to reconstruct what the attacker does not see."""
    if config.data.features != "none":
        raise ConfigError(
            f"data.features={config.data.features}: a reconstruction attacks pixels, not features; omit it, or "
            f"use --membership"
        )
    if aim.kind == 0 and aim.sites == 1 and config.federation.aggregation == "secure":
        raise ConfigError(
            "federation.aggregation=secure: the coordinator sees only sums, no single update; use --type 1, "
            "--type 2, or --attack imprint --sites with their number"
        )


def refuse_role(recipe: Recipe, aim: Aim) -> None:
    """Refuse an attack that its attacker has no part in."""
    if recipe.plants and aim.kind == 2:
        raise ConfigError(f"{recipe.name} is the server's attack on a batch: use --type 0")
    if aim.sites > 1 and not recipe.plants:
        raise ConfigError(f"sites={aim.sites}: {recipe.name} explains single updates; use --attack imprint")


def choose(dataset: Dataset, aim: Aim, streams: Streams, device: torch.device) -> Victims:
    """Draw training records without replacement; a seed gives the same ones for every method and attack."""
    clients = aim.count * aim.sites
    wanted, there = clients * aim.each, len(dataset.train_y)
    if wanted > there:
        raise ConfigError(
            f"{clients} victims of {aim.each} records are {wanted}, but data '{dataset.name}' has {there} to train "
            f"on; ask for at most {there // aim.each} victims"
        )
    places = torch.from_numpy(streams.generator("victims").permutation(there)[:wanted])
    x = single(dataset.train_x, DataError, "attacks on gradients")[places].float()
    y = dataset.train_y[places]
    if float(x.min()) < 0 or float(x.max()) > 1:
        raise DataError(
            f"attacks search in [0, 1], but data '{dataset.name}' are {float(x.min()):g} to {float(x.max()):g}; "
            f"scale them (your own images as 0 to 255, tables by public ranges)"
        )
    each = (clients, aim.each)
    return Victims(x.view(*each, *x.shape[1:]).to(device), y.view(each).to(device), dataset.classes)


def model_name(config: Config, dataset: Dataset, recipe: Recipe) -> str:
    """The model's name; `auto` is the papers' attack network."""
    if config.model != "auto":
        return config.model
    if recipe.plants:
        return "imprint-mlp"
    return "attack-cnn" if len(dataset.input_shape) == 3 else "attack-mlp"


def attacked_model(config: Config, dataset: Dataset, streams: Streams, recipe: Recipe = CPL) -> nn.Module:
    """The global model of the first round."""
    module = build(
        model_name(config, dataset, recipe), dataset.input_shape, dataset.class_count, seed=streams.number("model")
    )
    check(module, dataset.input_shape, dataset.task, record_level=config.algorithm.per_record is not None)
    with torch.no_grad():
        scores = module(torch.zeros(2, *dataset.input_shape)).shape[1:]
    if tuple(scores) != (dataset.class_count,):
        raise ModelError("the model has one logit for two classes; a reconstruction needs one score per class")
    if found := mixing_layers(module):
        raise ModelError(f"layer '{found[0]}' mixes the records of a batch; attacks take models without BatchNorm")
    return module


def _search(
    recipe: Recipe, aim: Aim, module: nn.Module, seen: Seen, victims: Victims, streams: Streams,
    progress: Progress | None,
) -> tuple[Found, Tensor]:  # fmt: skip
    """Search for a few hundred victims at a time; also the iteration from which each was a success."""
    labels = None
    if recipe.labels != "joint":
        shape = (DUMMIES, *victims.x.shape[2:])
        dummies = torch.from_numpy(streams.generator("dummies").random(shape, dtype="float32")).to(victims.x.device)
        labels = infer(recipe.labels, seen.gradients, module, aim.each, dummies)
    reached = torch.full(victims.y.shape, float(recipe.iterations), device=victims.x.device)
    parts = []
    for group in torch.split(torch.arange(aim.count, device=victims.x.device), BATCHED):
        objective = Objective(
            recipe=recipe, shown=seen.shown, replay=seen.replay, shape=tuple(victims.x.shape[2:]), batch=aim.each,
            classes=len(victims.classes), seen=seen.gradients[group],
            labels=None if labels is None else labels[group],
        )  # fmt: skip

        def watch(iteration: int, which: Tensor, best: Tensor, group: Tensor = group) -> None:
            who = group[which]
            good = judge(best, victims.y[who], victims.x[who], victims.y[who]).success
            reached[who] = torch.where(good, reached[who].clamp(max=iteration), recipe.iterations)
            if progress is not None:
                progress(iteration, len(which))

        first = int(group[0])
        own = replace(streams, seed=streams.number("group", first)) if first else streams
        parts.append((reconstruct if recipe.copies == 1 else agreed)(objective, own, watch))
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in Found.__dataclass_fields__}
    return Found(**joined), reached


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
