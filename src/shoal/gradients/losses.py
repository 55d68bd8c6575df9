"""What a network is trained to lower: the loss of each record, as the task defines it."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Losses = Callable[[Tensor, Tensor], Tensor]
"""From outputs [N, ...] and targets [N, ...] to one loss a record, [N]."""


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, one number per record."""
    return F.cross_entropy(logits, y, reduction="none")
