"""The quality of a reconstruction, measured against the truth: RMSE, PSNR, SSIM, label hits.

Wei et al. (2023) judged success by eye. Here it is an RMSE below 0.15 *and* an SSIM above 0.5 (Wang et al. 2004,
uniform 7 x 7 window, range 1; one window where an image is smaller). Tables have no SSIM, and the mean record, which
uses no gradient, is often within 0.15: for them the RMSE must be below 0.15 *and* below half of that of the mean of
the other victims' records (with one victim 0.15 alone).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MOST_RMSE = 0.15
LEAST_SSIM = 0.5
LEAST_GAIN = 0.5  # tables: the error, of that of the mean record
WINDOW = 7


@dataclass(frozen=True, eq=False)
class Quality:
    """Figures [V, B] of every record, and its matched reconstruction [V, B, ...]."""

    x: Tensor
    rmse: Tensor
    psnr: Tensor
    ssim: Tensor | None
    label_hit: Tensor
    typical: Tensor | None  # tables: the error that the mean of the other victims' records has

    @property
    def success(self) -> Tensor:
        """Which records were reconstructed, [V, B]."""
        return succeeded(self.rmse, self.ssim, self.typical)


def judge(found: Tensor, labels: Tensor, truth: Tensor, true_labels: Tensor) -> Quality:
    """Compare reconstructions [V, B, ...] with the truth; within a batch each is matched with its nearest record."""
    order = _pairing(found, truth)
    found = torch.stack([rows[places] for rows, places in zip(found, order, strict=True)])
    error, pictures = rmse(found, truth), truth.dim() == 5
    return Quality(
        x=found,
        rmse=error,
        psnr=-20 * error.clamp(min=1e-6).log10(),
        ssim=ssim(found, truth) if pictures else None,
        label_hit=label_hits(labels, true_labels),
        typical=None if pictures or len(truth) == 1 else rmse(_mean_of_others(truth), truth),
    )


def succeeded(error: Tensor, similarity: Tensor | None, typical: Tensor | None = None) -> Tensor:
    """Whether an error, a similarity and the mean record's error make a success."""
    good = error < MOST_RMSE
    if similarity is not None:
        good = good & (similarity > LEAST_SSIM)
    return good if typical is None else good & (error < LEAST_GAIN * typical)


def label_hits(found: Tensor, true: Tensor) -> Tensor:
    """Which true labels [V, B] are among those found, with multiplicity, in any order."""
    times = (found.unsqueeze(1) == true.unsqueeze(2)).sum(2)
    before = (true.unsqueeze(1) == true.unsqueeze(2)).tril(-1).sum(2)
    return before < times


def rmse(found: Tensor, truth: Tensor) -> Tensor:
    """Over all pixels of a record, [V, B]."""
    return (found - truth).square().flatten(2).mean(2).sqrt()


def ssim(found: Tensor, truth: Tensor) -> Tensor:
    """The mean over windows and channels, [V, B], for pictures [V, B, C, H, W]."""
    window = (min(WINDOW, truth.shape[-2]), min(WINDOW, truth.shape[-1]))
    a, b = found.flatten(0, 1).double(), truth.flatten(0, 1).double()

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, window, stride=1)

    mean_a, mean_b = mean(a), mean(b)
    pixels = window[0] * window[1]
    unbiased = pixels / (pixels - 1) if pixels > 1 else 1.0
    var_a = unbiased * (mean(a * a) - mean_a**2)
    var_b = unbiased * (mean(b * b) - mean_b**2)
    both = unbiased * (mean(a * b) - mean_a * mean_b)
    c1, c2 = 0.01**2, 0.03**2
    similar = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return similar.flatten(1).mean(1).view(truth.shape[:2]).to(truth.dtype)


def _mean_of_others(truth: Tensor) -> Tensor:
    """For every record the mean of all records of the other victims, [V, 1, ...]."""
    own = truth.mean(1, keepdim=True)
    return (own.sum(0, keepdim=True) - own) / (len(truth) - 1)


def _pairing(found: Tensor, truth: Tensor) -> Tensor:
    """Which reconstruction goes with which record, [V, B], with the least error in all."""
    victims, batch = truth.shape[:2]
    if batch == 1:
        return torch.zeros(victims, 1, dtype=torch.int64, device=truth.device)
    from scipy.optimize import linear_sum_assignment

    errors = (found.flatten(2).unsqueeze(1) - truth.flatten(2).unsqueeze(2)).square().mean(3).cpu().numpy()
    places = [linear_sum_assignment(error)[1] for error in errors]
    return torch.from_numpy(np.stack(places)).to(truth.device)
