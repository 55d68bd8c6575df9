"""The firewall: what a client sends is checked before it counts (DESIGN, "What must always hold", 3)."""

from __future__ import annotations

import torch
from torch import Tensor


def finite_or_zero(updates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The updates [k, P] with every one that holds NaN or Inf set to zero; their squared norms; which were bad.

    A square that overflows is bad too: such a number is no honest update, and would turn a sum into Inf.
    """
    squares = torch.linalg.vector_norm(updates, dim=1).square()
    bad = ~torch.isfinite(squares)
    if bad.any():
        updates = torch.where(bad.unsqueeze(1), 0.0, updates)
        squares = torch.where(bad, 0.0, squares)
    return updates, squares, bad
