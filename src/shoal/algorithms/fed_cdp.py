"""Fed-CDP: noise for every record inside the client (Wei et al. (2023), section 4), as printed and made rigorous.

    for each round t:   K_t of the N clients;   for each of L local steps, a batch of B records:
            each layer m of each gradient g_j: g_jm <- g_jm min(1, C/|g_jm|)
            w_i <- w_i - lr (1/B) (sum_j g_j + N(0, sigma^2 C^2))
        w <- w + (1/K_t) sum_i (w_i - w)

`fed-cdp` clips each of M layers to C, so that a whole gradient may have norm C sqrt(M), while the noise is scaled to
C; its batches are a shuffled partition, without amplification. Both are charged as they are. The paper gives three
scales of the noise (`per_step.placement`), and assumes a sampling rate of 0.01 whatever the data.

`fed-cdp-private` is the smallest change: C/sqrt(M) per layer, Poisson sampling of clients and of records. Its clip
may fall on a public schedule: `-c per_record.clip_norm=exponential:4:1`.

W. Wei, L. Liu, J. Zhou, K.-H. Chow, Y. Wu (2023), Securing Distributed SGD against Gradient Leakage Threats,
IEEE TPDS. https://arxiv.org/abs/2305.06473
"""

from dataclasses import replace

from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.algorithms.published_epsilon import fed_cdp
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Clients, Records

FED_CDP = Algorithm(
    name="fed-cdp",
    paper="Wei et al. (2023), section 4 (Fed-CDP)",
    summary="noise in every local step, on gradients that are clipped layer by layer",
    claims="record and client level: epsilon 0.823 at delta 1e-5 after 100 rounds",
    clients=Clients("fixed-size", cohort=100),
    records=Records("shuffled", batch=5),
    local=Local(steps=100, lr=0.05),
    per_record=RecordClip(4.0, "each"),
    per_step=StepNoise(6.0),
    aggregate=Aggregate("equal"),
    published=fed_cdp,
)

FED_CDP_PRIVATE = replace(
    FED_CDP,
    name="fed-cdp-private",
    paper="Wei et al. (2023), section 4 (Fed-CDP), made rigorous",
    summary="noise in every local step, a clip divided among layers, Poisson clients and batches",
    clients=Clients("poisson", cohort=100),
    records=Records("poisson", batch=5),
    per_record=RecordClip(4.0, "split"),
)

ALGORITHMS = (FED_CDP, FED_CDP_PRIVATE)
