"""The boundaries inside a client: `per_example` clips every record's gradient, `per_step` adds noise to every step.

One `Sanitiser`, which the clip makes, serves a slice of clients for the steps of one round. It turns the tape of a
batch into one that adds the noisy gradient.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.mechanisms.record_clipping import ClippedByFactors
from shoal.mechanisms.sanitiser import Sanitiser, Told
from shoal.random.normals import Normals, normals
from shoal.training.context import Stage
from shoal.training.round_index import Moment

__all__ = ["ClippedByFactors", "Sanitiser", "Told", "sanitiser", "step_noise"]


def sanitiser(
    stage: Stage, params: Tensor, clients: np.ndarray, moment: Moment, memory: dict[str, Tensor]
) -> Sanitiser | None:
    """The method's own, or None where gradients are left as they are."""
    algorithm, when = stage.algorithm, (moment.t, moment.total)
    per_example, per_step, batch = algorithm.per_example, algorithm.per_step, algorithm.examples.batch
    if per_example is None:
        return None
    algorithm.refuse_unheld(per_example.least(memory, *when, params.shape[1]), *when)

    def draw(purpose: str, like: Tensor) -> Normals:
        numbers, whole = (moment.t, moment.attempt), like is params  # a count is one number: no threads for that
        spread, fused = stage.workers.spread if whole else None, whole and stage.graphs is not None
        return normals(stage.streams, purpose, numbers, clients.tolist(), like, spread, fused, stage.kernels)

    noise = per_step.multiplier(*when, batch) if per_step is not None else 0.0
    return per_example.sanitiser(params, stage.network.layout.named_layers, noise, batch, memory, *when, draw)


def step_noise(algorithm: Algorithm, memory: dict[str, Tensor], moment: Moment, size: int) -> float:
    """How much noise one local step leaves in a parameter, at least: what is public of it."""
    per_example, per_step, batch = algorithm.per_example, algorithm.per_step, algorithm.examples.batch
    when = moment.t, moment.total
    if per_example is None or per_step is None:
        return 0.0
    clip = per_example.least(memory, *when, size)
    return algorithm.local.rate(*when) * per_step.multiplier(*when, batch) * clip / batch
