"""Fed-SDP (Wei et al. (2023), section 4): client-level noise on each update, added at the server or at the client.

    for each round t:   K_t of the N clients train locally
        each update <- update / max(1, |update|/C) + N(0, sigma^2 C^2)
        w_{t+1} <- w_t + mean of the updates

Each of the K_t updates gets its own noise, so that the sum carries sqrt(K_t) times as much as the paper's
accountant counts. With `per_update.at=client` the noise is added before the update leaves, and something is
proven against the server too; `at=server` adds the same noise later.

W. Wei, L. Liu, J. Zhou, K.-H. Chow, Y. Wu (2023), Securing Distributed SGD against Gradient Leakage Threats,
IEEE TPDS. https://arxiv.org/abs/2305.06473
"""

from shoal.accounting.claims import Published
from shoal.accounting.published import fed_sdp_epsilon
from shoal.algorithms.base import Aggregate, Algorithm, Local
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.update_clipping import NoisyClip


def _recipe(algorithm: Algorithm, setting: Setting, rounds: int, delta: float) -> tuple[Published, ...]:
    """Table 6: a step a round, and one more."""
    assert algorithm.per_update is not None
    rate = algorithm.clients.expected(0, max(rounds, 1), setting.clients) / setting.clients
    noise = algorithm.per_update.multiplier(0, max(rounds, 1))
    if noise == 0:
        return ()
    epsilon = fed_sdp_epsilon(rounds, noise, delta, rate)
    return (Published("client", epsilon, delta, "Wei et al. (2023), Table 6: moments accountant, rounds + 1 steps"),)


FED_SDP = Algorithm(
    name="fed-sdp",
    paper="Wei et al. (2023), section 4 (Fed-SDP)",
    summary="noise on each clipped update, at the server or at the client",
    claims="client level: epsilon 0.854 at delta 1e-5 after 100 rounds",
    clients=Clients("fixed-size", cohort=100),
    records=Records("shuffled", batch=5),
    local=Local(steps=100, lr=0.05),
    per_update=NoisyClip(clip_norm=4.0, noise_multiplier=6.0, at="server"),
    aggregate=Aggregate("equal"),
    published=_recipe,
)

ALGORITHMS = (FED_SDP,)
