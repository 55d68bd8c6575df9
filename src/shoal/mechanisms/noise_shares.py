"""Noise for one record that sites share: each adds a part of it to the sum of its clipped gradients.

    GradientSum  (per_update)  the update is lr/B x the sum of one step's clipped gradients, and nothing else
    NoiseShares  (per_round)   site k adds N(0, s^2), s^2 = sigma^2 S^2 / (n - t), and secure aggregation adds up

S = lr C/B is what one record moves the sum by. n is the `threshold`: secure aggregation unmasks one sum a round, of n
sites or more, or none. t sites are `colluding`: they know their shares, and subtract them. So a sum of m >= n sites
has noise of at least

    sigma sqrt((m - t)/(n - t)) >= sigma     against the server with any t sites
    sigma sqrt(m/(n - t))                    against who sees released models alone
    sigma / sqrt(n - t)                      against the server with all other sites: the record's own site is left

in units of S. Nobody but its own site sees whether a record was sampled, so sampling amplifies. Who answers is seen,
and the server, which is not trusted, chooses them: against it a record's site takes part in every round.

Each record's part is rounded towards 0 to multiples of a public step, at least 2^bits of them to S, which makes none
longer; noise on a grid would hide nothing of what lies between its points. A share is a discrete Gaussian of
r = s/step on that grid. The sum of h shares is within a factor e^tau, in each coordinate, of the discrete Gaussian of
width r sqrt h (Kairouz, Liu & Steinke 2021, section 3),

    tau = 10 sum_{k=1}^{h-1} exp(-2 pi^2 r^2 k/(k + 1))

so that tau, times the coordinates, is a distance that is added to delta (SamplerError); r must be 4 or more. That
discrete Gaussian is charged as the continuous one of which it is a post-processing (discrete_gaussian.continuous).
On CUDA, in research mode, shares are continuous, and nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from shoal.accounting.events import Event, Unbounded
from shoal.accounting.events import Gaussian as OneGaussian
from shoal.accounting.theorems import Observer, Unit
from shoal.errors import ConfigError
from shoal.mechanisms.gaussian import Gaussian, add_to_updates
from shoal.mechanisms.mechanism import NO_NOISE, Draw, Layers, Round, UpdateMechanism
from shoal.mechanisms.sampling import Clients
from shoal.random.secure_streams import SecureGenerator, charged, grid

LEAST_SHARE = 4.0
"""The least width of a noise share in steps of its grid, r."""
FOR_ONE_RECORD = Unbounded("the noise is for one record, and no clip bounds all records of a client")


@dataclass(frozen=True)
class GradientSum(UpdateMechanism):
    """Boundary `per_update`: the update is the sum of one step's clipped gradients.

    Attributes:
        bits: Each record's gradient is rounded to multiples of 2^-bits of the clip norm, or less.
    """

    bits: int = 14
    alike: ClassVar[bool] = True
    unproven: ClassVar[str | None] = None
    sums_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 8 <= self.bits <= 24:
            raise ConfigError(f"per_update.bits must be from 8 to 24, got {self.bits}")

    def apply(
        self, updates: Tensor, norms: Tensor, bound: float, t: int, total: int, draw: Draw, layers: Layers
    ) -> Tensor:
        """The updates as they are: their records are clipped already."""
        return updates

    def step(self, bound: float) -> float:
        """The rounding step of each record's part."""
        return grid(bound, self.bits)


@dataclass(frozen=True)
class NoiseShares(Gaussian):
    """Boundary `per_round`: N(0, (noise_multiplier x the clip of a record)^2) on the sum, in shares of all sites.

    Attributes:
        threshold: The fewest sites in a sum; two thirds of the cohort plus one if not set.
        colluding: How many of them may tell the server their share.
    """

    threshold: int | None = None
    colluding: int = 1
    at: Literal["shared"] = field(default="shared", kw_only=True)
    alike: ClassVar[bool] = True
    for_records: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.colluding < 1:
            raise ConfigError(
                f"per_round.colluding must be >= 1, got {self.colluding}: every site sees the models, and knows its "
                f"own share of the noise in them"
            )

    def quorum(self, cohort: int) -> tuple[int, int]:
        """The fewest sites in a sum, and how many of them collude."""
        return self.threshold or default_threshold(cohort), self.colluding

    def event(self, round: Round, unit: Unit, observer: Observer) -> Event:
        """What a round costs one record, as one observer sees it."""
        if unit == "client":
            return FOR_ONE_RECORD
        clip = round.per_record
        if clip is None or clip.unproven is not None:
            return Unbounded("gradients are not clipped" if clip is None else clip.unproven or "")
        try:
            self.refuse_cohort(round.many)
        except ConfigError as error:  # no round is run so: too little noise, or none, would be left
            return Unbounded(str(error))
        z = self._left(round, observer) / clip.excess(round.setting.layers)
        if z == 0:
            return NO_NOISE
        if round.setting.multiplicity > 1:  # its copies may be sampled in one round, at that many sites
            return OneGaussian(z / round.setting.multiplicity)
        if not round.uses:
            return Unbounded("clients' sizes are not known, so neither is how often a record is used")
        rate = 1.0 if observer == "server" else round.rate  # the server itself chooses who takes part
        return round.records.event(rate, z, round.uses)[0]  # at the smallest site's rate

    def _left(self, round: Round, observer: Observer) -> float:
        """The noise that an observer cannot subtract, in a sum of as few sites as there may be."""
        threshold, colluding = self.quorum(round.many)
        honest = threshold - (colluding if observer == "server" else 0)
        z = self.multiplier(*round.when) * math.sqrt(honest / (threshold - colluding))
        return charged(z, z * _steps(round)) if z else z

    def distance(self, round: Round) -> float:
        """How far a sum of shares, and a batch of public width, are from what is charged."""
        setting = round.setting
        threshold, colluding = self.quorum(round.many)
        width = self.multiplier(*round.when) * _steps(round) / math.sqrt(threshold - colluding)
        wider = setting.multiplicity * round.records.wider() if setting.secure else 0.0
        return tau(width, round.many) * setting.parameters + wider

    def share(self, bound: float, cohort: int, t: int, total: int) -> float:
        """The standard deviation s of each site's share."""
        threshold, colluding = self.quorum(cohort)
        return self.multiplier(t, total) * bound / math.sqrt(threshold - colluding)

    def assumes(self) -> tuple[str, ...]:
        """Who draws the noise, and who may know parts of it."""
        return (*super().assumes(), f"the server knows the shares of at most {self.colluding} of the sites")

    def for_cohort(self, cohort: int) -> Self:
        """The same where all of this many sites must answer."""
        return replace(self, threshold=cohort, colluding=min(self.colluding, cohort - 1))

    def refuse_beside(self, name: str, clients: Clients, per_update: UpdateMechanism) -> None:
        """Raise a ConfigError where the size of a cohort is not public."""
        if not clients.known_size:
            raise ConfigError(
                f"algorithm {name}: noise shares are made for a cohort of public size; set clients.sampling to all "
                f"or fixed-size"
            )

    def refuse_cohort(self, cohort: int) -> None:
        """Raise a ConfigError where a sum of such a cohort could have too little noise, or two sums be unmasked."""
        refuse_quorum("per_round", *self.quorum(cohort), cohort)


def _steps(round: Round) -> float:
    """The fewest steps of the grid to a clip."""
    return 1 / round.per_update.step(1.0) if round.per_update is not None else math.inf


def on_grid(updates: Tensor, secure: bool) -> bool:
    """Are shares of noise, and so records, on a grid? On CUDA, in research mode, they are not."""
    return secure or not updates.is_cuda


def add_shares(updates: Tensor, scale: float, step: float, generators: Sequence[np.random.Generator]) -> Tensor:
    """Updates [k, P], each plus its site's share of the noise.

    It is what a site draws: a discrete Gaussian on the grid, unless the generators draw continuous ones.
    """
    if scale == 0:
        return updates
    if not isinstance(generators[0], SecureGenerator):
        return add_to_updates(updates, scale, generators)
    for row, generator in enumerate(generators):
        assert isinstance(generator, SecureGenerator)
        share = generator.whole_normal(scale / step, updates.shape[1])
        updates[row] += torch.from_numpy(share).to(updates) * step
    return updates


def tau(width: float, shares: int) -> float:
    """By which factor, e^tau, the sum of this many discrete Gaussians of a width may differ from one, at most.

    Each of its terms is at most the first.
    """
    return 10 * max(shares - 1, 0) * math.exp(-((math.pi * width) ** 2))


def default_threshold(cohort: int) -> int:
    """Two thirds of the cohort, and one more."""
    return 2 * cohort // 3 + 1


def refuse_quorum(section: str, threshold: int, colluding: int, cohort: int) -> None:
    """Raise a ConfigError where a coordinator could unmask two sums, or one without noise."""
    if not colluding < threshold <= cohort:
        raise ConfigError(
            f"{section}.threshold must be greater than {section}.colluding ({colluding}) "
            f"and at most the cohort ({cohort}), got {threshold}"
        )
    if 2 * threshold <= cohort + colluding:
        raise ConfigError(
            f"{section}.threshold {threshold} of {cohort} sites, {colluding} of them colluding, "
            f"would let a coordinator unmask two different sums; set at least {(cohort + colluding) // 2 + 1}"
        )
