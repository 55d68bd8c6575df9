"""The trusted curator: Thesis, Algorithm 7.

    for each round t:   Z_t <- m_t of the K clients
        for k in Z_t:   update_k <- local SGD from w_t
        w_{t+1} <- w_t + (1/m_t) (sum_k update_k / max(1, |update_k|/S) + N(0, S^2 sigma^2))

The clip S is public, so that a claim for the released models is proven. The paper draws exactly m_t clients and
accounts for Poisson sampling, which is not the same: `-c clients.sampling=poisson` makes its figure a true one.
Defaults are those of 100 clients in Tables 4.3 and 4.4: S = 0.4 and sigma = 4/sqrt 6.
"""

from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.algorithms.published_epsilon import moments
from shoal.mechanisms.gaussian import Gaussian
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.update_clipping import Clip

TRUSTED_CURATOR = Algorithm(
    name="trusted-curator",
    paper="Thesis, Algorithm 7",
    summary="client-level noise at a trusted server, on updates clipped to a public bound",
    claims="client level: epsilon 8 at delta 1e-3, 1e-5, 1e-5 for 100, 1,000, 10,000 clients",
    clients=Clients("fixed-size", cohort=10),
    records=Records("shuffled", batch=100),
    local=Local(epochs=1, lr=0.02),
    per_update=Clip(0.4),
    aggregate=Aggregate("equal"),
    per_round=Gaussian(noise_multiplier=1.633),
    published=moments("Thesis", "2-32"),
)

ALGORITHMS = (TRUSTED_CURATOR,)
