"""FedPer: Arivazhagan et al. (2019), Algorithms 1 and 2.

    for each round t:   S_t <- m of the K clients
        for k in S_t:   (w_k, p_k) <- SGD from (w_t, p_k) on client k's records
        w_{t+1} <- sum_k (n_k/n) w_k

The base layers w are shared and averaged; the personal layers p_k never leave their client, and each client is
evaluated with its own. `local.personal` says which layers they are, by number from the end or by name, and any other
method takes it too. At client level they are neither clipped nor noised. Where every step has noise they have it as
well: the shared layers' gradients go through them, so that without it no claim for a record would hold.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary (2019), Federated Learning with Personalization Layers.
https://arxiv.org/abs/1912.00818
"""

from dataclasses import replace

from shoal.algorithms.fedavg import FEDAVG

FEDPER = replace(
    FEDAVG,
    name="fedper",
    paper="Arivazhagan et al. (2019)",
    summary="federated averaging of the base layers; each client keeps its own last layer",
    local=replace(FEDAVG.local, personal=1),
)

ALGORITHMS = (FEDPER,)
