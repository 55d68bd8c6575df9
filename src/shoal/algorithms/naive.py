"""The naive method for end-to-end privacy: Thesis, Algorithm 8.

    for each round t:   Z_t <- m of the K clients
        for k in Z_t:   update_k <- local steps with noise for records, as in `end_to_end`
        w_{t+1} <- w_t + (1/m) (sum_k update_k / max(1, |update_k|/S_cl) + N(0, sigma_cl^2 S_cl^2))

Two noises for two units: noise in the steps protects records, noise at the server protects clients. The paper draws
exactly m clients and cuts batches from a partition, but accounts for Poisson sampling of both. Defaults are those of
100 clients in Table 4.4: sigma 4, S_cl = 0.4 and sigma_cl = 4/sqrt 6.
"""

from dataclasses import replace

from shoal.algorithms.base import Aggregate
from shoal.algorithms.end_to_end import END_TO_END
from shoal.algorithms.published_epsilon import thesis_naive
from shoal.mechanisms.gaussian import Gaussian
from shoal.mechanisms.update_clipping import Clip

NAIVE = replace(
    END_TO_END,
    name="naive",
    paper="Thesis, Algorithm 8",
    summary="noise in every local step for records, and on the sum of clipped updates for clients",
    per_update=Clip(0.4),
    aggregate=Aggregate("equal"),
    per_round=Gaussian(noise_multiplier=1.633),
    published=thesis_naive,
)

ALGORITHMS = (NAIVE,)
