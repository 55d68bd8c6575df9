"""Distributed DP-SGD: sites share the noise of DP-SGD under secure aggregation, and nobody is trusted.

    for each round t:   each site k:   L_k <- each of its records independently with probability q
            g_k <- sum over L_k of g(x_i) / max(1, |g(x_i)|/C);   g_k <- g_k + N(0, sigma^2 C^2 / (n - t))
        g <- sum_k g_k, by secure aggregation, of at least n sites; of fewer there is none
        w_{t+1} <- w_t - lr g / (K B)

This is DP-SGD (Abadi et al. (2016)) as if all K sites' records were in one place; B is the public, expected batch of
a site. The server sees only g. Together with any t sites, which subtract their own shares of the noise, it sees noise
of sigma C or more; who sees only models, of sigma C sqrt(n/(n - t)) or more. A record's own site sees the record. n
is `per_round.threshold`, t is `per_round.colluding`. A site that drops out takes its share along, and n are enough.
One step a round: in a second one a record could move the gradients of all others of its site.

Gradients and noise are on a grid, after Kairouz, Liu & Steinke (2021), but each record is rounded
towards 0, which makes none longer (mechanisms/noise_shares.py).

M. Abadi et al. (2016), Deep Learning with Differential Privacy. https://arxiv.org/abs/1607.00133
P. Kairouz, Z. Liu, T. Steinke (2021), The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation. https://arxiv.org/abs/2102.06387
"""

from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.mechanisms.noise_shares import GradientSum, NoiseShares
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Clients, Records

DISTRIBUTED_DP_SGD = Algorithm(
    name="distributed-dp-sgd",
    paper="Kairouz, Liu & Steinke (2021); Abadi et al. (2016)",
    summary="one step a round on all sites' clipped gradients, with noise that the sites share, nobody trusted",
    claims="record level, against the server and colluding sites",
    clients=Clients("all"),
    records=Records("poisson", batch=60),
    local=Local(steps=1, lr=0.5),
    per_record=RecordClip(1.0, "flat"),
    per_update=GradientSum(),
    aggregate=Aggregate("equal"),
    per_round=NoiseShares(noise_multiplier=1.0),
)

ALGORITHMS = (DISTRIBUTED_DP_SGD,)
