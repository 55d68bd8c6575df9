"""Local optimisers (`local.optimizer`), one file each: what a step does with the gradient, for many clients at once.

Clients have parameters [K, P]; `active` [K] is 0 for those that have no step left, which must not move. An optimiser
is frozen settings; what it carries from step to step is a mapping of tensors with a row for each client, which local
training copies, records (CUDA graphs) and, where `local.keep_momentum` says so, keeps for the next round.
"""

from __future__ import annotations

from shoal.algorithms.base import Local
from shoal.gradients import Layout
from shoal.training.optimizers.adamw import AdamW
from shoal.training.optimizers.optimizer import Optimizer
from shoal.training.optimizers.sgd import SGD

OPTIMIZERS: dict[str, type[SGD | AdamW]] = {"sgd": SGD, "adamw": AdamW}


def optimizer(local: Local, lr: float, layout: Layout) -> Optimizer:
    """The optimiser of a round with this learning rate."""
    return OPTIMIZERS[local.optimizer].of(local, lr, layout)


__all__ = ["OPTIMIZERS", "Optimizer", "optimizer"]
