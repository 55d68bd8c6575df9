"""AdaClip inside the client (Pichapati et al. (2019); a comparator in Wei et al. (2023)).

    b   <- sqrt(s) sqrt(sum s);   u_j <- (g_j - m)/b;   u_j <- u_j / max(1, |u_j|)
    g~  <- b (1/B) (sum_j u_j + N(0, sigma^2)) + m;   w <- w - lr g~
    m, s <- means over what was released of g~ and of (g~ - m)^2, less the noise in it

The clip is 1 in coordinates that follow g~, which is private by its noise. Wei et al. (2023), Table 10,
use it in their own setting: sigma 6, shuffled batches of 5, fixed-size cohorts. In the paper m and s persist over the
whole training; here they restart in every round, since a client keeps no state between rounds.

V. Pichapati, A. T. Suresh, F. X. Yu, S. J. Reddi, S. Kumar (2019), AdaCliP: Adaptive Clipping for Private SGD.
https://arxiv.org/abs/1908.07643
"""

from dataclasses import replace

from shoal.algorithms.fed_cdp import FED_CDP
from shoal.mechanisms.coordinate_clipping import AdaClip

ADACLIP = replace(
    FED_CDP,
    name="adaclip",
    paper="Pichapati et al. (2019); comparator in Wei et al. (2023)",
    summary="noise in every local step, on gradients clipped in coordinates that follow what was released",
    claims="record level: what the accountant says",
    per_record=AdaClip(),
    published=None,
)

ALGORITHMS = (ADACLIP,)
