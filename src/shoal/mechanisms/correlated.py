"""Correlated Gaussian noise on a stream of sums, part of which later rounds cancel, and what it protects.

DP-FTRL (Kairouz et al. 2021) as a matrix mechanism with a Toeplitz matrix C, whose first column is 1, c_1, c_2, ...
(`factorisations`):

    z_t ~ N(0, noise^2);  w_t <- z_t - c_1 w_{t-1} - c_2 w_{t-2} - ...;  release sum_t + clip w_t

The releases y_t and the values y_t + c_1 y_{t-1} + ... = (sum_t + c_1 sum_{t-1} + ...) + clip z_t determine each
other. So round t is one Gaussian mechanism, with fresh noise z_t, on a weighted sum of the rounds' sums. A client
that took part d_1, d_2, ... rounds ago moves that sum by |c_{d_1}| + |c_{d_2}| + ... clips at most: its `reach`,
which is attained where no coefficient is negative and all its updates point the same way. Rounds compose adaptively,
as other Gaussians do, and so does a round that is run again with a fresh z_t. Where past noise was forgotten, some
sums are missing from the weighted sum, which makes no reach longer.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from torch import Tensor

from shoal.accounting.events import Event, Unbounded
from shoal.accounting.theorems import Unit
from shoal.errors import ConfigError
from shoal.mechanisms.factorisations import OPTIMISED, Factorisation, Kind, factorise, given
from shoal.mechanisms.gaussian import Gaussian, gaussian_like
from shoal.mechanisms.mechanism import Round, State, UpdateMechanism
from shoal.mechanisms.participation import Array, Participation
from shoal.mechanisms.sampling import Clients
from shoal.random.secure_streams import FINEST, SecureGenerator, charged, grid, on_grid

PAST = "noise.past"
"""The key of what is kept of the noise so far, in units of the clip. It must stay secret."""
MOST_BUFFERS = 16
MOST_GROWTH = 2.0**10  # of old noise, by numbers from others; that of an optimised factorisation never grows
MOST_CANCELLED = 2.0**14  # in units of fresh noise: float64 then rounds a sum to 1% of a step of the finest grid


@dataclass(frozen=True)
class Correlated(Gaussian):
    """Boundary `per_round`: fresh noise of noise_multiplier x sensitivity, less a share of that of earlier rounds.

    Attributes:
        bands: Bands of `square-root` and `banded`, of which one fewer is kept, best as many as the rounds between two
            participations of a client; bands of the inverse for `bisr` and `band-inverse`. One band makes noise
            independent.
        momentum: The server's momentum, for which the correlation is made.
        factorisation: How noise is correlated; `banded`, `blt` and `band-inverse` are optimised at the start.
        buffers: Models that `blt` keeps between rounds.
        numbers: What was found for an optimised factorisation, instead of optimising it again: its bands or, for
            `blt`, decay and zero of each buffer in turn. A coordinator sends them to its sites.
    """

    bands: int = 1
    momentum: float = 0.0
    factorisation: Kind = "square-root"
    buffers: int = 3
    numbers: tuple[float, ...] = ()

    alike: ClassVar[bool] = True
    correlated: ClassVar[bool] = True
    _participation: ClassVar[Participation] = Participation(1)  # set by `fitted`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bands < 1:
            raise ConfigError(f"per_round.bands must be >= 1, got {self.bands}")
        if not 1 <= self.buffers <= MOST_BUFFERS:
            raise ConfigError(f"per_round.buffers must be from 1 to {MOST_BUFFERS}, got {self.buffers}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"per_round.momentum must be in [0, 1), got {self.momentum}")
        if self.numbers:
            given(self.factorisation, self.numbers)
            most = 2 * self.buffers if self.factorisation == "blt" else self.bands
            if len(self.numbers) > most:
                raise ConfigError(f"per_round.numbers must be {most} or fewer, got {len(self.numbers)}")

    event = Gaussian.event  # by its `coefficients`

    def fitted(self, participation: Participation) -> Self:
        """The same for clients that take part so."""
        made = copy.copy(self)
        object.__setattr__(made, "_participation", participation)
        return made

    @property
    def unsettled(self) -> bool:
        """Is its factorisation still to be optimised?"""
        return self.factorisation in OPTIMISED and not self.numbers

    def settled(self, participation: Participation) -> Self:
        """The same with the numbers of its factorisation."""
        return replace(self, numbers=self.factors(participation).numbers) if self.unsettled else self

    def refuse_unfit(self, t: int, total: int) -> None:
        """Raise a ConfigError where given numbers make noise that rounding spoils."""
        if t == 0:
            self.refuse_growing(total)

    def refuse_growing(self, rounds: int) -> None:
        """Raise a ConfigError where numbers from others make old noise grow until new noise is lost beside it."""
        if not self.numbers:
            return
        with np.errstate(all="ignore"):
            found = given(self.factorisation, self.numbers)
            largest, cancelled = float(np.abs(found.inverse(rounds)).max()), found.cancelled(rounds)
        if not largest <= MOST_GROWTH:
            raise ConfigError(
                f"per_round.numbers make old noise grow by {largest:.3g} in {rounds} rounds: no optimum"
            )
        if not cancelled <= MOST_CANCELLED:
            raise ConfigError(
                f"per_round.numbers add up old noise, {cancelled:.3g} times as large as new noise, and nearly all "
                f"cancels: rounding would move a sum further than is charged"
            )

    def add(self, total: Tensor, z: float, bound: float, state: State, generator: np.random.Generator) -> Tensor:
        """The sum of clipped updates plus clip w_t; in secure mode on the clip's grid, on which the sum lies."""
        secure = isinstance(generator, SecureGenerator) and z > 0
        like = total.double() if secure else total
        factors = self.factors(self._participation)
        past = state.get(PAST, like.new_zeros(0, like.numel())).to(like)
        share = factors.share(past)
        if isinstance(generator, SecureGenerator) and secure:
            added = _on_fine_grid(share * bound, z * bound, grid(bound), generator)
        else:
            added = share * bound + gaussian_like(like, z * bound, generator)
        state[PAST] = factors.following(past, share, added / bound)
        return (total + added).to(total.dtype)

    def factors(self, participation: Participation) -> Factorisation:
        """The factorisation, for clients that take part so."""
        if self.numbers:
            return given(self.factorisation, self.numbers)
        size = self.buffers if self.factorisation == "blt" else self.bands
        return factorise(self.factorisation, size, self.momentum, participation)

    def coefficients(self, participation: Participation, rounds: int) -> Array:
        """The coefficients 1, c_1, c_2, ... of the correlated noise, over this many rounds."""
        return self.factors(participation).coefficients(rounds)

    def rounding(self, parameters: int) -> float:
        """How far rounding may move a round's weighted sum, in clips for each unit of noise.

        One step of the grid in each coordinate (`_on_fine_grid`), and float64's own rounding.
        """
        return 1.01 * math.sqrt(parameters) / FINEST

    def counted(self, noise: float, count_rounding: float) -> float:
        """Each round's sum is rounded together with those of other rounds, so its noise lies on the finest grid."""
        return charged(noise, FINEST)

    def refuse_beside(self, name: str, clients: Clients, per_update: UpdateMechanism) -> None:
        """Raise a ConfigError beside secret sampling that does not amplify, or a clip that follows counts."""
        if clients.secret and not clients.separated:
            raise ConfigError(
                f"algorithm {name}: correlated noise gains nothing from {clients.sampling} sampling; "
                f"set clients.sampling to cyclic, min-separation, cyclic-poisson or all"
            )
        fits = self.factorisation in ("square-root", "banded") and self.bands <= (clients.separation or 1)
        if clients.secret and not fits:
            raise ConfigError(
                f"algorithm {name}: clients.sampling={clients.sampling} amplifies only where a client's rounds do "
                f"not meet: set per_round.factorisation to square-root or banded, and per_round.bands to "
                f"{clients.separation} (clients.separation) or fewer"
            )
        if per_update.counts:
            raise ConfigError(f"algorithm {name}: correlated noise needs a clip that follows no counts")

    def _shared(self, round: Round, unit: Unit) -> Event:
        return Unbounded("correlated noise cannot be shared among clients that may drop out")


def _on_fine_grid(share: Tensor, scale: float, coarse: float, generator: SecureGenerator) -> Tensor:
    """The share of earlier noise, rounded down onto a grid of at least FINEST to the noise, plus a discrete Gaussian.

    The sum lies on a coarser grid. What is kept of the noise is computed from what was added, so that rounding moves
    the weighted sum, on which round t is the Gaussian mechanism, by at most one step in each coordinate, and only
    once.
    """
    step = min(coarse, 2.0 ** math.floor(math.log2(scale / FINEST)))
    return on_grid(share.div(step).floor_().mul_(step), scale, step, generator)
