"""Differentially private SGD on one data set: Abadi et al. (2016), the central baseline (Thesis, Algorithm 3).

    for each step t:   L_t <- each record independently with probability L/N
        g_t(x_i) <- gradient of each record in L_t;   g_t(x_i) <- g_t(x_i) / max(1, |g_t(x_i)|/C)
        w_{t+1} <- w_t - lr (1/L) (sum_i g_t(x_i) + N(0, sigma^2 C^2))

One client holds everything: set `data.clients=1`. A round is one epoch (N/L steps). Table 4.2 has sigma 8, 4 and 2
for 51, 247 and 730 epochs at epsilon 0.5, 2 and 8; its accountant uses add-or-remove
adjacency, Shoal replace-one, which costs about twice as much.

M. Abadi et al. (2016), Deep Learning with Differential Privacy. https://arxiv.org/abs/1607.00133
"""

from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.algorithms.published_epsilon import thesis_examples
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Clients, Records

DP_SGD = Algorithm(
    name="dp-sgd",
    paper="Abadi et al. (2016); Thesis, Algorithm 3",
    summary="noise in every step, on clipped gradients of a Poisson batch, at every client",
    claims="record level: epsilon 0.5, 2, 8 at delta 1e-5 after 51, 247, 730 epochs",
    clients=Clients("all"),
    records=Records("poisson", batch=600),
    local=Local(epochs=1, lr=0.02),
    per_record=RecordClip(4.0, "flat"),
    per_step=StepNoise(4.0),
    aggregate=Aggregate("equal"),
    published=thesis_examples,
)

ALGORITHMS = (DP_SGD,)
