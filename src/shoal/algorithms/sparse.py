"""Defences that Wei et al. (2023), section 4, compare with: compression, DSSGD and plain random noise.

    compression     the smallest share of an update's coordinates becomes 0
    dssgd           a client sends a random fraction of its coordinates, capped (Shokri & Shmatikov (2015))
    dssgd-noise     the same, with noise on what is sent
    random-noise    noise of a fixed scale on an unclipped update

None of them bounds what an update reveals, so nothing is proven for any.

W. Wei, L. Liu, J. Zhou, K.-H. Chow, Y. Wu (2023), Securing Distributed SGD against Gradient Leakage Threats,
IEEE TPDS. https://arxiv.org/abs/2305.06473
"""

from dataclasses import replace

from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.sparsification import Prune, RandomNoise, Select

COMPRESSION = Algorithm(
    name="compression",
    paper="Wei et al. (2023), section 4 (gradient compression)",
    summary="the smallest coordinates of an update are left out",
    claims="resilience to gradient leakage, no epsilon",
    clients=Clients("fixed-size", cohort=100),
    records=Records("shuffled", batch=5),
    local=Local(steps=100, lr=0.05),
    per_update=Prune(share=0.3),
    aggregate=Aggregate("equal"),
)

DSSGD = replace(
    COMPRESSION,
    name="dssgd",
    paper="Shokri & Shmatikov (2015); Wei et al. (2023), section 4",
    summary="a random fraction of an update's coordinates is sent, capped",
    per_update=Select(fraction=0.1),
)

DSSGD_NOISE = replace(
    DSSGD,
    name="dssgd-noise",
    summary="a random fraction of an update's coordinates is sent, capped and with noise",
    per_update=Select(fraction=0.1, noise_multiplier=1.0),
)

RANDOM_NOISE = replace(
    COMPRESSION,
    name="random-noise",
    paper="Wei et al. (2023), section 4 (random noise)",
    summary="noise of a fixed scale on an unclipped update",
    per_update=RandomNoise(scale=0.01),
)

ALGORITHMS = (COMPRESSION, DSSGD, DSSGD_NOISE, RANDOM_NOISE)
