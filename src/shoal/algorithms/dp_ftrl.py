"""DP-FTRL for clients that cannot be sampled: Kairouz et al. (2021), as a banded matrix mechanism
(Choquette-Choo et al. (2023); the banded square root of Kalinin & Lampert 2024, or another factorisation).

    for each round t:   Z_t <- the next clients of the cycle, in a public order, or those that can come and may
        for k in Z_t:   update_k <- local SGD from w_t, clipped to S
        noise_t <- N(0, (sigma S)^2) - c_1 noise_{t-1} - c_2 noise_{t-2} - ...
        w_{t+1} <- w_t + (1/m) (sum_k update_k + noise_t),  through the server's momentum

Participation is public: privacy comes from correlated noise, part of which later rounds cancel, so that the model,
which is the sum of all rounds, contains less noise than with independent noise. A client that takes part k times in
cycles of b rounds, with b bands or fewer, costs sqrt(k (1 + c_1^2 + ... + c_{b-1}^2)) / sigma: one Gaussian for the
whole run. `per_round.bands` is best at b = data.clients / clients.cohort, and `per_round.momentum` at the server's.
The noise of the last rounds is carried from round to round: see mechanisms/correlated.py, factorisations.py for what
`per_round.factorisation` chooses, and participation.py for clients that come when they can.

P. Kairouz et al. (2021), Practical and Private (Deep) Learning without Sampling or Shuffling.
https://arxiv.org/abs/2103.00039
C. A. Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization: A Unified Approach to Private Training.
https://arxiv.org/abs/2306.08153
"""

from shoal.algorithms.base import Aggregate, Algorithm, Local, Server
from shoal.mechanisms.correlated import Correlated
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.update_clipping import Clip

DP_FTRL = Algorithm(
    name="dp-ftrl",
    paper="Kairouz et al. (2021); Choquette-Choo et al. (2023)",
    summary="client-level correlated noise, for cyclic participation without sampling",
    claims="client level: what the accountant says",
    clients=Clients("cyclic", cohort=10),
    records=Records("shuffled", batch=10),
    local=Local(epochs=1, lr=0.1),
    per_update=Clip(1.0),
    aggregate=Aggregate("equal"),
    per_round=Correlated(noise_multiplier=4.0, bands=10, momentum=0.9),
    server=Server(momentum=0.9),
)

ALGORITHMS = (DP_FTRL,)
