"""FedProx: Li et al. (2020), Algorithm 2.

    for each round t:   S_t <- m of the K clients
        for k in S_t:   w_k <- SGD from w_t on   loss(w) + (mu/2) |w - w_t|^2
        w_{t+1} <- sum_k (n_k/n) w_k

The proximal term keeps clients whose data differ from drifting apart over many local steps. `local.proximal` is mu;
any other method takes it too. Like FedAvg it protects nothing. Clients are sampled uniformly and weighted by their
records, as in FedAvg.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith (2020), Federated Optimization in Heterogeneous
Networks. https://arxiv.org/abs/1812.06127
"""

from dataclasses import replace

from shoal.algorithms.base import Local
from shoal.algorithms.fedavg import FEDAVG

FEDPROX = replace(
    FEDAVG,
    name="fedprox",
    paper="Li et al. (2020)",
    summary="federated averaging with a proximal term, which keeps clients near the model of the round",
    local=Local(epochs=20, lr=0.03, proximal=1.0),
)

ALGORITHMS = (FEDPROX,)
