"""DP-SGD at every client, with a clip for each layer by its size: a method of another package, in one file.

McMahan, Ramage, Talwar, Zhang (2018), Learning differentially private recurrent language models, section 3
(https://arxiv.org/abs/1710.06963), clip each layer by a bound of its own. Here layer l, with d_l of the model's d
parameters, gets C_l = C sqrt(d_l / d), so that one record moves the sum of a batch by sqrt(sum_l C_l^2) = C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.mechanism import Bound, Layers, State
from shoal.mechanisms.record_clipping import FactorClip
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.schedules import require_scales, scale_in
from shoal.mechanisms.update_clipping import shrinking


@dataclass(frozen=True)
class LayerClip(FactorClip):
    """Each layer of a record's gradient has norm C sqrt(its share of the parameters) at most."""

    clip_norm: str | float = 1.0

    def __post_init__(self) -> None:
        require_scales("per_record.clip_norm", self.clip_norm)

    def bound(self, state: State, t: int, total: int) -> float:
        return scale_in("per_record.clip_norm", self.clip_norm, t, total)

    def factors(self, squares: Tensor, bound: Bound, layers: Layers) -> Tensor:
        sizes = [place.stop - place.start for place in layers.values()]
        bounds = [bound * math.sqrt(size / sum(sizes)) for size in sizes]
        return torch.stack([shrinking(norms, each) for norms, each in zip(squares.sqrt(), bounds, strict=True)])


LAYERED = Algorithm(
    name="layered",
    paper="McMahan et al. (2018), section 3",
    summary="noise in every local step, on gradients whose layers are clipped each by a bound of its own",
    claims="record level: what the accountant says",
    clients=Clients("all"),
    records=Records("poisson", batch=20),
    local=Local(steps=5, lr=0.5),
    per_record=LayerClip(1.0),
    per_step=StepNoise(2.0),
    aggregate=Aggregate("equal"),
)
