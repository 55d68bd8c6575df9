"""DPSUR, selective update and release: Fu et al. (2023), Algorithm 2.

    while t < T:   w_new <- w_t - lr (1/B) (sum_i g(x_i) / max(1, |g(x_i)|/C) + N(0, sigma^2 C^2)), a Poisson batch
        dE <- loss(w_new) - loss(w_t) on another Poisson batch, clipped to [-C_v, C_v]
        if dE + N(0, sigma_v^2 (2 C_v)^2) < beta C_v:   w_{t+1} <- w_new;   t <- t + 1

One client holds everything: set `data.clients=1`. The paper charges the T steps that are kept, and tries as many as
it takes. That is refuted: the data decide which steps are thrown away (Xie & Huang (2026)), and an audit of the
paper's claim sees it. Here a round tries `local.steps` at most, a public number, and all of them are charged, each
with its test. The losses are divided by the expected size of a batch, not by the size that was drawn. Defaults are
those of MNIST at epsilon 1 in the authors' code, without its noisy normalisation of features.

J. Fu, Q. Ye, H. Hu, Z. Chen, L. Wang, K. Wang, X. Ran (2023), DPSUR: Accelerating Differentially Private Stochastic
Gradient Descent Using Selective Update and Release. https://arxiv.org/abs/2311.14056
F. Xie, X. Huang (2026), Revisiting Privacy Amplification by Subsampling in Selective Release DPSGD.
https://arxiv.org/abs/2606.04384
"""

from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.algorithms.published_epsilon import dpsur
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.selective_release import SelectiveRelease

DPSUR = Algorithm(
    name="dpsur",
    paper="Fu et al. (2023)",
    summary="noise in every step, which is undone where a noisy test on other records finds the loss no lower",
    claims="record level: epsilon 1 to 4 at delta 1e-5, for the steps that are kept",
    clients=Clients("all"),
    records=Records("poisson", batch=1024),
    local=Local(steps=60, lr=2.0),
    per_record=RecordClip(0.1, "flat"),
    per_step=SelectiveRelease(2.0, test_batch=256, test_clip=0.001, test_noise_multiplier=1.3, updates=20),
    aggregate=Aggregate("equal"),
    published=dpsur,
)

ALGORITHMS = (DPSUR,)
