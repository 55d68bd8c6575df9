"""What an attacker sees: the engine plays the method's own boundaries, and the attacker sits at one of them.

    type 0   at the server: the client's update as the server holds it (Wei et al. 2023, section 3.1)
    type 1   at the client, after local training and before the update leaves it
    type 2   inside the client: one record's gradient in the first local step, as it moves the local model

Types 0 and 1 are played as in the paper: the mean gradient of a few records at the first local step, with a step of
length 1 and a batch of these records; or, `honest`, as a real update after all of the method's local steps, with its
own batch. Noise and clips are those of the engine (engine.local, privacy.*), in the same order. What is public and
certain (a clip's bound, the batch that a sum is divided by, which coordinates were sent and their cap) the attacker
replays on its own dummies; noise it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Algorithm, Local
from shoal.attacks.arithmetic import exact
from shoal.attacks.gradient_map import GradientMap, Shrink, clipped, gradients, updates
from shoal.attacks.objective import Replay
from shoal.data import Dataset, ListedPartition, Partition
from shoal.errors import ConfigError
from shoal.gradients import Layout
from shoal.mechanisms.mechanism import Layers
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.schedules import parse
from shoal.mechanisms.update_clipping import row_norms
from shoal.random.streams import Streams
from shoal.training.engine_settings import Settings
from shoal.training.local_training import train
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate

Kind = Literal[0, 1, 2]


@dataclass(frozen=True, eq=False)
class Seen:
    """What crossed the boundary, [V, P], in units of a gradient; and how dummies would look there."""

    gradients: Tensor
    shown: GradientMap
    replay: Replay


@dataclass(frozen=True, eq=False)
class Victims:
    """Clients with a few records each: x [V, B, ...], y [V, B]."""

    x: Tensor
    y: Tensor
    classes: tuple[str, ...]

    def summed(self, sites: int) -> Victims:
        """The same, where the records of this many clients are seen in one sum."""
        x, y = (part.reshape(-1, sites * part.shape[1], *part.shape[2:]) for part in (self.x, self.y))
        return Victims(x, y, self.classes)

    def dataset(self) -> Dataset:
        rows, labels = self.x.flatten(0, 1).cpu(), self.y.flatten().cpu()
        return Dataset("victims", rows, labels, rows[:1], labels[:1], self.classes)

    def partition(self) -> Partition:
        count, records = self.y.shape
        return ListedPartition(np.arange(count * records, dtype=np.int32), np.arange(count + 1) * records)


def observe(
    algorithm: Algorithm,
    kind: Kind,
    module: nn.Module,
    victims: Victims,
    streams: Streams,
    *,
    rounds: int = 100,
    honest: bool = False,
    knowing: bool = True,
    sites: int = 1,
) -> Seen:
    """What the attacker of this type sees of every victim in the first of this many rounds.

    Without `knowing` it replays nothing, as the attacks of the papers. With several `sites` it sees the mean of as
    many updates.
    """
    _refuse_unknown(algorithm.local, honest)
    played, layers = _played(algorithm, kind, victims.y.shape[1], honest), Layout.of(module).named_layers
    with exact():
        left = _left_client(played, module, victims, streams, rounds)
    per_update = played.per_update if kind != 2 else None
    if per_update is not None and kind == 1 and not applied_at_client(algorithm):
        per_update = None
    bound = float("inf")
    if per_update is not None:
        norms = row_norms(left)
        bound = per_update.bound({}, 0, rounds, norms)
        left = per_update.apply(left, norms, bound, 0, rounds, _draw(streams), layers)
    if sites > 1:
        left = _aggregated(replace(played, per_round=algorithm.per_round), left, sites, rounds, streams)
    clip = _record_clip(played, layers, rounds) if knowing else None
    shown, unit = _map(played, module, victims.y.shape[1], rounds, clip)

    def replay(dummies: Tensor, seen: Tensor) -> Tensor:
        known = per_update if knowing else None
        return dummies if known is None else known.replay(dummies, seen, bound, abs(unit), layers)

    return Seen((left * unit).detach().to(victims.x.dtype), shown, replay)


def _refuse_unknown(local: Local, honest: bool) -> None:
    """Raise a ConfigError where the attacker could not replay a client's training, or would not see all of it."""
    if local.personal:
        raise ConfigError(
            f"local.personal {local.personal!r}: no attack here knows personal layers, which never leave a client; "
            f"leave it out to attack a model that is shared as a whole"
        )
    sgd = Local(local.epochs, local.steps, local.lr, local.momentum, local.keep_momentum)
    if honest and local != sgd:
        raise ConfigError(
            "an honest update is replayed by SGD with momentum alone: leave out local.optimizer, "
            "local.weight_decay, local.proximal and local.max_grad_norm"
        )


def applied_at_client(algorithm: Algorithm) -> bool:
    """Is what `per_update` does done before the update leaves the client?"""
    return algorithm.per_update is None or not algorithm.per_update.leaves_raw


def _played(algorithm: Algorithm, kind: Kind, records: int, honest: bool) -> Algorithm:
    """The method as it is played on the victims: all of them take part, and nobody waits for the sum.

    A count in every step is noisier than a batch needs by a factor that belongs to the method's own batch.
    """
    everybody = replace(algorithm, clients=Clients("all"), per_round=None)
    if honest and kind != 2:
        return everybody
    per_record = algorithm.per_record
    if per_record is not None:
        times = algorithm.records.batch / records
        per_record = per_record.recounted(lambda noise: noise * times)
    one_step = Local(steps=1, lr=1.0)
    return replace(everybody, records=Records("fixed-order", records), local=one_step, per_record=per_record)


def _left_client(algorithm: Algorithm, module: nn.Module, victims: Victims, streams: Streams, rounds: int) -> Tensor:
    """The updates [V, P] of the victims' local training, by the engine."""
    settings = Settings(device=str(victims.x.device), threads=1)
    data, parts, streams = victims.dataset(), victims.partition(), Streams(streams.seed)
    trainer = simulate(algorithm, module, data, parts, rounds=rounds, streams=streams, settings=settings)
    try:
        chunks = list(trainer.cohort.chunker.chunks(np.arange(len(victims.y)), parts.sizes))
        updates = [train(trainer.cohort, trainer.params, clients, RoundIndex(0, rounds), {})[0] for clients in chunks]
        order = np.concatenate(chunks)
    finally:
        trainer.close()
    return torch.cat(updates)[torch.from_numpy(np.argsort(order)).to(victims.x.device)]


def _aggregated(algorithm: Algorithm, left: Tensor, sites: int, rounds: int, streams: Streams) -> Tensor:
    """The means of this many updates each, with noise that sites add in shares; what a server adds, it knows."""
    total = left.view(-1, sites, left.shape[1]).sum(1)
    noise = algorithm.per_round
    if noise is not None and noise.at == "shared":
        assert algorithm.per_update is not None, "noise is in units of a clip"
        z = algorithm.per_update.update_noise(noise.multiplier(0, rounds), sites)
        scale = z * algorithm.bound({}, 0, rounds, row_norms(left))
        drawn = [streams.generator("sum noise", row).standard_normal(left.shape[1]) for row in range(len(total))]
        total = total + scale * torch.from_numpy(np.stack(drawn)).to(total)
    return total / sites


def _draw(streams: Streams) -> Callable[[int], np.random.Generator]:
    return lambda row: streams.generator("update noise", 0, 0, row)


def _map(
    algorithm: Algorithm, module: nn.Module, records: int, rounds: int, clip: Shrink | None
) -> tuple[GradientMap, float]:
    """How dummies look, and the factor that turns an update into the mean gradient that it is about."""
    local, sampler = algorithm.local, algorithm.records
    lr = parse(local.lr).value(0, rounds)
    steps = local.steps or sampler.steps(records, local.epochs)
    held = min(sampler.batch, records)
    divisor = sampler.batch if algorithm.per_record is not None else None  # as the engine's sums: the public batch
    unit = -(divisor or held) / held / (lr * steps)
    if steps == 1 and sampler.batch >= records:
        alone = gradients(module)
        return (clipped(alone, clip) if clip else alone), unit
    # Which records a batch held nobody outside knows: the attacker takes them as they lie.
    order = Records("fixed-order", sampler.batch).draw(Streams(0).generator("order"), records, steps)
    batches = [[int(place) for place in row if place >= 0] for row in order]
    whole = updates(module, batches, lr=lr, momentum=local.momentum, clip=clip, divisor=divisor)
    return (lambda x, y: unit * whole(x, y)), unit


def _record_clip(algorithm: Algorithm, layers: Layers, rounds: int) -> Shrink | None:
    """The clip of single records, on vectors [N, P] that can be differentiated."""
    clip = algorithm.per_record
    return None if clip is None else lambda vectors: clip.replay(vectors, layers, 0, rounds)
