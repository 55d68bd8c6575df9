"""The boundaries inside a client: `per_record` clips every record's gradient, `per_step` adds noise to every step.

The clip makes one `Sanitiser` for a chunk of clients and the steps of one round. It turns the tape of a batch into
one that adds the noisy gradient.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from shoal.mechanisms.sanitiser import LocalSteps, Sanitiser
from shoal.random.noise_source import Normals
from shoal.random.normals import normals
from shoal.training.context import TrainingContext
from shoal.training.round_index import RoundIndex


def sanitiser(
    context: TrainingContext, params: Tensor, clients: np.ndarray, index: RoundIndex, state: dict[str, Tensor]
) -> Sanitiser | None:
    """The sanitiser of the method, or None where gradients are not clipped."""
    algorithm, when = context.algorithm, (index.t, index.total)
    per_record, per_step, batch = algorithm.per_record, algorithm.per_step, algorithm.records.batch
    if per_record is None:
        return None
    algorithm.refuse_unheld(per_record.least(state, *when, params.shape[1]), *when)

    def draw(purpose: str, like: Tensor) -> Normals:
        numbers, whole = (index.t, index.attempt), like is params  # a count is one number, which needs no threads
        spread, fused = context.workers.spread if whole else None, whole and context.graphs is not None
        return normals(context.streams, purpose, numbers, clients.tolist(), like, spread, fused, context.kernels)

    noise = per_step.multiplier(*when, batch) if per_step is not None else 0.0
    layers = context.network.layout.named_layers
    return per_record.sanitiser(LocalSteps(params, layers, noise, batch, state, *when, draw))
