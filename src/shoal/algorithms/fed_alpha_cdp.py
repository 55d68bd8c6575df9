"""Fed-alphaCDP and Fed-alphaCDP[sigma]: Wei et al. (2023), Algorithm 1, and a form of it that proves something.

As Fed-CDP (see `fed_cdp`), but with two quantities that adapt:

    S       <- the largest clipped norm in the batch, over records and layers (l2-max)
    sigma_t <- sigma, or a decay of it over the rounds (section 5.3)
    w_i     <- w_i - lr (1/B) (sum_j g_j + N(0, sigma_t^2 S^2))

`fed-alpha-cdp` and `fed-alpha-cdp-sigma` are as printed. S is a statistic of the batch that the scale of the noise
reveals exactly: nothing is proven. The four decays are schedules of `per_step.noise_multiplier`: linear:15:4.85,
staircase:15:4.85:10, exponential:15:4.85 and cyclic:15:1. Tables 8 and 11 used others, in which epsilon_t
rises and sigma_t = sqrt(2 ln(1.25/delta))/epsilon_t: epsilon-linear:0.30747:1.30747:1e-5,
epsilon-staircase:0.35747:1.35747:10:1e-5 and epsilon-exponential:0.30700:1.62109:1e-5.

`fed-alpha-cdp-private` replaces l2-max by a private quantile: in every step each client counts, with noise,
how many gradients are below the clip, which follows the median from round to round (Andrew et al. 2021). Poisson
sampling of clients and of records. The count shares the step's privacy: `count_noise_multiplier` x batch must be
more than half of its noise (3 at noise 6), and with 2 x 5 = 10 the gradients' noise is 6.29 instead of 6. One such
count says little, but the clip follows the mean of 100 x 100 of them. Or use a public clip that falls:
`fed-cdp-private -c per_record.clip_norm=exponential:4:1`.

W. Wei, L. Liu, J. Zhou, K.-H. Chow, Y. Wu (2023), Securing Distributed SGD against Gradient Leakage Threats,
IEEE TPDS. https://arxiv.org/abs/2305.06473
"""

from dataclasses import replace

from shoal.algorithms.fed_cdp import FED_CDP
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import MaxClip, QuantileRecordClip
from shoal.mechanisms.sampling import Clients, Records

FED_ALPHA_CDP = replace(
    FED_CDP,
    name="fed-alpha-cdp",
    paper="Wei et al. (2023), Algorithm 1 (Fed-alphaCDP)",
    summary="noise in every local step, scaled to the largest gradient in the batch (l2-max)",
    per_record=MaxClip(4.0, "each"),
)

FED_ALPHA_CDP_SIGMA = replace(
    FED_ALPHA_CDP,
    name="fed-alpha-cdp-sigma",
    paper="Wei et al. (2023), Algorithm 1 (Fed-alphaCDP[sigma])",
    summary="noise in every local step, scaled to the largest gradient in the batch, and decreasing over the rounds",
    claims="record and client level: epsilon 0.823 at delta 1e-5 after 80 to 96 rounds",
    per_step=StepNoise("linear:15:4.85"),
)

FED_ALPHA_CDP_PRIVATE = replace(
    FED_ALPHA_CDP,
    name="fed-alpha-cdp-private",
    paper="Wei et al. (2023), Algorithm 1 (Fed-alphaCDP), made rigorous",
    summary="noise in every local step, a clip that follows a private quantile, Poisson clients and batches",
    clients=Clients("poisson", cohort=100),
    records=Records("poisson", batch=5),
    per_record=QuantileRecordClip(
        initial_clip_norm=4.0, quantile=0.5, clip_norm_lr=0.2, count_noise_multiplier=2.0, layers="flat"
    ),
)

ALGORITHMS = (FED_ALPHA_CDP, FED_ALPHA_CDP_SIGMA, FED_ALPHA_CDP_PRIVATE)
