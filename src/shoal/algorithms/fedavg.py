"""Federated averaging: McMahan et al. (2017) (Thesis, Algorithm 1).

    for each round t:   S_t <- m of the K clients
        for k in S_t:   w_k <- w_t;  for E epochs, for each batch b of client k:  w_k <- w_k - lr grad(w_k; b)
        w_{t+1} <- sum_k (n_k/n) w_k

It protects nothing: updates can be inverted, and models memorise. It is the baseline of all other methods.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas (2017), Communication-Efficient Learning of Deep
Networks from Decentralized Data. https://arxiv.org/abs/1602.05629
"""

from shoal.algorithms.base import NO_CLAIM, Aggregate, Algorithm, Local
from shoal.mechanisms.sampling import Clients, Records

FEDAVG = Algorithm(
    name="fedavg",
    paper="McMahan et al. (2017); Thesis, Algorithm 1",
    summary="plain federated averaging, the baseline of all methods",
    claims=NO_CLAIM,
    clients=Clients("fixed-size", cohort=10),
    records=Records("shuffled", batch=10),
    local=Local(epochs=1, lr=0.1),
    aggregate=Aggregate("size"),
)

ALGORITHMS = (FEDAVG,)
