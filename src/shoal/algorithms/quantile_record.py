"""Adaptive clipping inside the client (Andrew et al. (2021), for gradients instead of updates).

    b_j <- 1[|g_j| <= C];   w <- w - lr (1/B) (sum_j g_j / max(1, |g_j|/C) + N(0, z_delta^2 C^2))
    C <- C exp(-lr (b~ - quantile)) after the round,  b~ the mean of all clients' noisy shares of b_j

A step spends what `per_step.noise_multiplier` says, the count included. Wei et al. (2023), Table 10, have sigma 6,
C_0 = 4, shuffled batches of 5, fixed-size cohorts. A count noise of B/20 is too little there: beside
sigma 6 it must be over 3, and it is 2 x 5 here.

G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy (2021), Differentially Private Learning with Adaptive Clipping.
https://arxiv.org/abs/1905.03871
"""

from dataclasses import replace

from shoal.algorithms.fed_cdp import FED_CDP
from shoal.mechanisms.record_clipping import QuantileRecordClip

QUANTILE_RECORD = replace(
    FED_CDP,
    name="quantile-record",
    paper="Andrew et al. (2021); comparator in Wei et al. (2023)",
    summary="noise in every local step, and a clip that follows a private quantile of the gradients' norms",
    claims="record level: what the accountant says",
    per_record=QuantileRecordClip(
        initial_clip_norm=4.0, quantile=0.5, clip_norm_lr=0.2, count_noise_multiplier=2.0, layers="flat"
    ),
    published=None,
)

ALGORITHMS = (QUANTILE_RECORD,)
