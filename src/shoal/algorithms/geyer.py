"""Client-level DP: Geyer et al. (2017), Algorithm 1, and a form of it that proves what is claimed.

    for each round t:   Z_t <- m_t of the K clients
        for k in Z_t:   update_k, norm_k <- local SGD
        S <- median of the norms
        w_{t+1} <- w_t + (1/m_t) (sum_k update_k / max(1, norm_k/S) + N(0, sigma_t^2 S^2))

`geyer` is as printed. Its clip is a statistic of the clients, which the scale of the noise reveals exactly, so
nothing is proven. (The authors' code clips each layer by its own median, and divides by
min(1, norm/S), which never clips; the paper is followed here. m_t and sigma_t may be schedules; the paper's
were not released. It finds that m_t should rise with sigma_t^2/m_t constant.)

`geyer-private` is the smallest change that makes the claim true: clients are Poisson sampled, the sum is
divided by the public qK, and the clip follows a private quantile (Andrew et al. 2021), which the noise accounts for.
(Its server's momentum and its mean over the models of the last half cost no privacy and gain accuracy.)

R. C. Geyer, T. Klein, M. Nabi (2017), Differentially Private Federated Learning: A Client Level Perspective.
https://arxiv.org/abs/1712.07557
"""

from dataclasses import replace

from shoal.algorithms.base import Aggregate, Algorithm, Local, Server
from shoal.algorithms.published_epsilon import moments
from shoal.mechanisms.gaussian import Gaussian
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.update_clipping import MedianClip, QuantileClip

GEYER = Algorithm(
    name="geyer",
    paper="Geyer et al. (2017), Algorithm 1",
    summary="client-level noise on updates that are clipped to their own median, as printed",
    claims="client level: epsilon 8 at delta 1e-3, 1e-5, 1e-6 for 100, 1,000, 10,000 clients",
    clients=Clients("fixed-size", cohort=50),
    records=Records("fixed-order", batch=50),
    local=Local(epochs=4, lr=0.1),
    per_update=MedianClip(),
    aggregate=Aggregate("equal"),
    per_round=Gaussian(noise_multiplier=1.2),
    published=moments("Geyer et al. (2017)", "2-33"),
)

GEYER_PRIVATE = replace(
    GEYER,
    name="geyer-private",
    summary="client-level noise, Poisson clients, and a clip that follows a private quantile",
    clients=Clients("poisson", cohort=50),
    per_update=QuantileClip(initial_clip_norm=1.0, quantile=0.5, clip_norm_lr=0.2, count_noise_multiplier=0.05),
    server=Server(momentum=0.5, average=0.5),
)

ALGORITHMS = (GEYER, GEYER_PRIVATE)
