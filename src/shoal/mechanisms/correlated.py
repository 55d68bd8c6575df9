"""Correlated Gaussian noise on a stream of sums, part of which later rounds cancel, and what it protects.

DP-FTRL (Kairouz et al. 2021) as a banded matrix mechanism (Choquette-Choo et al. 2023), with the square root of the
prefix-sum matrix, truncated to some bands (Kalinin & Lampert 2024), for its coefficients:

    1 + c_1 x + c_2 x^2 + ...  =  ((1 - x) (1 - momentum x))^(-1/2),  up to x^(bands - 1)
    z_t ~ N(0, noise^2);  w_t <- z_t - c_1 w_{t-1} - ... - c_{bands-1} w_{t-bands+1};  release sum_t + clip w_t

The releases y_t and the values y_t + c_1 y_{t-1} + ... = (sum_t + c_1 sum_{t-1} + ...) + clip z_t determine each
other. So round t is one Gaussian mechanism, with fresh noise z_t, on a weighted sum of the last rounds' sums. A
client that took part d_1, d_2, ... rounds ago moves that sum by c_{d_1} + c_{d_2} + ... clips: its `reach`. No
coefficient is negative, so the reach is attained where all its updates point the same way. Rounds compose adaptively,
as other Gaussians do, and so does a round that is run again with a fresh z_t. Where past noise was forgotten, some
sums are missing from the weighted sum, which makes no reach longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.accounting.events import Event, Unbounded
from shoal.accounting.theorems import Unit
from shoal.errors import ConfigError
from shoal.mechanisms.gaussian import Gaussian, gaussian_like
from shoal.mechanisms.mechanism import Round, State, UpdateMechanism
from shoal.mechanisms.sampling import Clients
from shoal.random.secure_streams import FINEST, SecureGenerator, charged, grid, on_grid

Array = npt.NDArray[np.float64]

PAST = "noise.past"
"""The key of the noise of the last rounds, newest first, in units of the clip. It must stay secret."""


@dataclass(frozen=True)
class Correlated(Gaussian):
    """Boundary `per_round`: fresh noise of noise_multiplier x sensitivity, less a share of the last `bands` - 1.

    Best with as many bands as there are rounds between two participations of a client, and with the server's
    `momentum`. One band is independent noise.
    """

    bands: int = 1
    momentum: float = 0.0

    correlated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bands < 1:
            raise ConfigError(f"per_round.bands must be >= 1, got {self.bands}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"per_round.momentum must be in [0, 1), got {self.momentum}")

    event = Gaussian.event  # by its `coefficients`

    def add(self, total: Tensor, z: float, bound: float, state: State, generator: np.random.Generator) -> Tensor:
        """The sum of clipped updates plus clip w_t; in secure mode on the clip's grid, on which the sum lies."""
        secure = isinstance(generator, SecureGenerator) and z > 0
        like = total.double() if secure else total
        past = state.get(PAST, like.new_zeros(0, like.numel())).to(like)
        back = torch.as_tensor(self.coefficients()[1 : len(past) + 1]).to(like) @ past * -bound
        if isinstance(generator, SecureGenerator) and secure:
            added = _on_fine_grid(back, z * bound, grid(bound), generator)
        else:
            added = back + gaussian_like(like, z * bound, generator)
        state[PAST] = torch.cat([added.unsqueeze(0) / bound, past])[: self.bands - 1]
        return (total + added).to(total.dtype)

    def coefficients(self) -> Array:
        """The coefficients 1, c_1, c_2, ... of the correlated noise."""
        j = np.arange(1, self.bands)
        root = np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])  # of 1/(1 - x)
        found: Array = np.convolve(root, root * self.momentum ** np.arange(self.bands))[: self.bands]
        return found

    def rounding(self, parameters: int) -> float:
        """How far rounding may move a round's weighted sum, in clips for each unit of noise."""
        return 1.001 * math.sqrt(parameters) / FINEST

    def counted(self, noise: float, count_rounding: float) -> float:
        """Each round's sum is rounded together with those of other rounds, so its noise lies on the finest grid."""
        return charged(noise, FINEST)

    def refuse_beside(self, name: str, clients: Clients, per_update: UpdateMechanism) -> None:
        """Raise a ConfigError beside secret sampling or a clip that follows counts."""
        if clients.secret:
            raise ConfigError(
                f"algorithm {name}: correlated noise gains nothing from {clients.sampling} sampling; "
                f"set clients.sampling to cyclic or all"
            )
        if per_update.counts:
            raise ConfigError(f"algorithm {name}: correlated noise needs a clip that follows no counts")

    def _shared(self, round: Round, unit: Unit) -> Event:
        return Unbounded("correlated noise cannot be shared among clients that may drop out")


def _on_fine_grid(back: Tensor, scale: float, coarse: float, generator: SecureGenerator) -> Tensor:
    """-c_1 w_{t-1} - ..., rounded down onto a grid of at least FINEST to the noise, plus a discrete Gaussian on it.

    The sum lies on a coarser grid. Rounding moves the weighted sum, on which round t is the Gaussian mechanism, by at
    most one step in each coordinate.
    """
    step = min(coarse, 2.0 ** math.floor(math.log2(scale / FINEST)))
    return on_grid(back.div(step).floor_().mul_(step), scale, step, generator)
