"""Adaptive clipping: the clip follows a private quantile of the norms (Andrew et al. (2021)).

    b_k <- 1[norm_k <= C];  w_{t+1} <- w_t + (1/m) (sum_k update_k / max(1, norm_k/C) + N(0, z_delta^2 C^2))
    C <- C exp(-lr (b~ - quantile)),  b~ the share of b_k with noise

The count shares the privacy of the same noise (see QuantileClip), so that a round costs what
`per_round.noise_multiplier` says.

G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy (2021), Differentially Private Learning with Adaptive Clipping.
https://arxiv.org/abs/1905.03871
"""

from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.mechanisms.gaussian import Gaussian
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.update_clipping import QuantileClip

QUANTILE = Algorithm(
    name="quantile",
    paper="Andrew et al. (2021); comparator in Wei et al. (2023)",
    summary="client-level noise with a clip that follows a private quantile of the norms",
    claims="client level: what the accountant says",
    clients=Clients("poisson", cohort=100),
    records=Records("shuffled", batch=5),
    local=Local(steps=100, lr=0.05),
    per_update=QuantileClip(initial_clip_norm=4.0, quantile=0.5, clip_norm_lr=0.2, count_noise_multiplier=0.05),
    aggregate=Aggregate("equal"),
    per_round=Gaussian(noise_multiplier=6.0),
)

ALGORITHMS = (QUANTILE,)
