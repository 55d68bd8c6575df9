"""The check of a client's update before it is summed."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.mechanisms.update_clipping import row_norms

GREATEST = 1e30


def finite_or_zero(updates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The updates [k, P] with every non-finite one set to zero; their norms; which were bad.

    A norm over 1e30 is bad too: no honest update is that large, and it could turn a sum into Inf.
    """
    norms = row_norms(updates)
    bad = ~(norms <= GREATEST)
    if updates.is_cuda or bad.any():  # a GPU is not asked: it would have to finish all it was given first
        updates = torch.where(bad.unsqueeze(1), 0.0, updates)
        norms = torch.where(bad, 0.0, norms)
    return updates, norms, bad
