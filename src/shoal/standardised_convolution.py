"""A convolution with standardised weights (Qiao et al. 2019, "Weight Standardization", arXiv 1903.10520).

The weights that lead to one output are shifted to mean 0 and scaled to norm 1 before they are used. With GroupNorm it
takes the place of BatchNorm, which no record-level privacy allows (De et al. 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST = 1e-4
"""The least norm that weights are divided by."""


class StandardisedConv2d(nn.Conv2d):
    """nn.Conv2d whose weights are standardised; its arguments are the same."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution with weights of mean 0 and norm 1 for every output."""
        weights = standardised(self.weight.flatten(1))[0].view_as(self.weight)
        y: Tensor = self._conv_forward(x, weights, self.bias)
        return y


def standardised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [..., outputs, inputs] of mean 0 and norm 1 for each output, and the norms they had."""
    centred = weights - weights.mean(-1, keepdim=True)
    most = torch.finfo(weights.dtype).max  # an infinite norm would be replaced by 0 where a record is left out
    norms = torch.linalg.vector_norm(centred, dim=-1, keepdim=True).clamp(LEAST, most)
    return centred / norms, norms


def before_standardising(gradients: Tensor, weights: Tensor, norms: Tensor) -> Tensor:
    """The gradients of the weights as they were, from those of the `weights` that `standardised` gives.

    What moves the mean or the norm is taken out. Where a norm was below the least, the scale was constant.
    """
    centred = gradients - gradients.mean(-1, keepdim=True)
    along = (centred * weights).sum(-1, keepdim=True) * weights
    return torch.where(norms > LEAST, centred - along, centred) / norms
