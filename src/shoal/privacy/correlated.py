"""Noise that later rounds take back: correlated Gaussian noise on a stream of sums, and what it protects.

DP-FTRL (Kairouz et al. 2021) as a banded matrix mechanism (Choquette-Choo et al. 2023), with the square root of the
matrix that adds up all rounds, cut off after some bands (Kalinin & Lampert 2024), for its coefficients:

    1 + c_1 x + c_2 x^2 + ...  =  ((1 - x) (1 - momentum x))^(-1/2),  up to x^(bands - 1)
    z_t ~ N(0, noise^2);  w_t <- z_t - c_1 w_{t-1} - ... - c_{bands-1} w_{t-bands+1};  release sum_t + clip w_t

Whoever sees all releases y_t can work out y_t + c_1 y_{t-1} + ... = (sum_t + c_1 sum_{t-1} + ...) + clip z_t, and
back: so round t is one Gaussian mechanism, with fresh noise z_t, on a weighted sum of the last rounds' sums. In it a
client that came d_1, d_2, ... rounds ago moves it by c_{d_1} + c_{d_2} + ... clips: its `reach`. No coefficient is
negative, so that this is met where all its updates point one way. Rounds compose as other Gaussians do, whatever
each has learnt from those before, and so does a round that is played again with a fresh z_t. Noise that was
forgotten leaves some sums out of the weighted one, which makes no reach longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.privacy.noise import Gaussian, Memory, gaussian_like
from shoal.privacy.secure import FINEST, SecureGenerator, grid, on_grid

Array = npt.NDArray[np.float64]

PAST = "noise.past"
"""Where the noise of the last rounds is remembered, newest first, in units of the clip. It must stay secret."""


@dataclass(frozen=True)
class Correlated(Gaussian):
    """Boundary `per_round`: fresh noise of `noise` x sensitivity, less a share of that of `bands` - 1 rounds before.

    Best with as many bands as there are rounds from one time that a client comes to the next, and with the server's
    `momentum`. One band is independent noise.
    """

    bands: int = 1
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bands < 1:
            raise ConfigError(f"per_round.bands must be >= 1, got {self.bands}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"per_round.momentum must be in [0, 1), got {self.momentum}")

    def add(self, total: Tensor, z: float, bound: float, memory: Memory, generator: np.random.Generator) -> Tensor:
        """The sum of clipped updates plus clip w_t; in secure mode on the clip's grid, where the sum is already."""
        secure = isinstance(generator, SecureGenerator) and z > 0
        like = total.double() if secure else total
        past = memory.get(PAST, like.new_zeros(0, like.numel())).to(like)
        back = torch.as_tensor(coefficients(self)[1 : len(past) + 1]).to(like) @ past * -bound
        if isinstance(generator, SecureGenerator) and secure:
            added = _on_fine_grid(back, z * bound, grid(bound), generator)
        else:
            added = back + gaussian_like(like, z * bound, generator)
        memory[PAST] = torch.cat([added.unsqueeze(0) / bound, past])[: self.bands - 1]
        return (total + added).to(total.dtype)


def _on_fine_grid(back: Tensor, scale: float, coarse: float, generator: SecureGenerator) -> Tensor:
    """-c_1 w_{t-1} - ..., rounded down onto a grid of at least FINEST to the noise, plus a discrete Gaussian on it.

    The sum lies on a coarser one: rounded with it, the weighted sum of which round t is the Gaussian mechanism comes
    out the same, moved by up to a step in each coordinate.
    """
    step = min(coarse, 2.0 ** math.floor(math.log2(scale / FINEST)))
    return on_grid(back.div(step).floor_().mul_(step), scale, step, generator)


def coefficients(noise: Gaussian) -> Array:
    """1, c_1, c_2, ...: how much of earlier rounds is in what a round gives away."""
    if not isinstance(noise, Correlated):
        return np.ones(1)
    j = np.arange(1, noise.bands)
    root = np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])  # of 1/(1 - x)
    found: Array = np.convolve(root, root * noise.momentum ** np.arange(noise.bands))[: noise.bands]
    return found


def reach(weights: Array, turns: int, rounds: int) -> Array:
    """By how many clips a client moves a round's weighted sum, 0, 1, ... rounds after it first came.

    It comes again every `turns` rounds, or less often.
    """
    padded = np.zeros(-(-rounds // turns) * turns)
    padded[: min(len(weights), rounds)] = weights[:rounds]
    found: Array = padded.reshape(-1, turns).cumsum(axis=0).ravel()[:rounds]
    return found


def price(noise: Gaussian, t: int, total: int, turns: int, again: bool = False, rounding: float = 0.0) -> float:
    """What round t costs: (reach / noise)^2 of one client, which over all rounds is the squared shift of a Gaussian.

    Clients begin in different rounds, and at any time some have paid more than others. Rounds that are played for
    the first time come in order, and each is charged by how much the greatest of these sums has grown. A round that
    is played `again` is charged what it costs the client that it hits hardest. So nobody pays more than was charged.
    `rounding`: by how many clips rounding may move a weighted sum beyond that, for each unit of noise.
    """
    first, once_more = _prices(noise, turns, total, max(total, t + 1), rounding)
    return float((once_more if again else first)[t])


@lru_cache(maxsize=8)
def _prices(noise: Gaussian, turns: int, total: int, rounds: int, rounding: float) -> tuple[Array, Array]:
    scales = np.array([noise.multiplier(t, total) for t in range(rounds)])
    # A round without noise has no price: the ledger says of it that nothing is proven.
    weight = np.divide(1.0, scales**2, out=np.zeros(rounds), where=scales > 0)
    reached = reach(coefficients(noise), turns, rounds)
    dearest, hardest = np.zeros(rounds), np.zeros(rounds)
    for start in range(min(turns, rounds)):
        moved = reached[: rounds - start]
        paid = (moved + (moved > 0) * rounding * scales[start:]) ** 2 * weight[start:]
        dearest[start:] = np.maximum(dearest[start:], np.cumsum(paid))
        hardest[start:] = np.maximum(hardest[start:], paid)
    return np.diff(dearest, prepend=0.0), hardest
