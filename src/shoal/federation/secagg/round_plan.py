"""What is public about a round under secure aggregation: who must answer, the step, a share of noise, the modulus.

Site and coordinator each compute it from the terms, so that neither takes the other's word.

Noise. Each site adds a discrete Gaussian of variance sigma^2 / (threshold - colluding), where sigma = noise x clip.
At least `threshold` sites are in a sum that can be unmasked, and all but `colluding` of them keep their share to
themselves: the sum holds at least sigma^2 that nobody can take away, and more where more sites answer. A sum of n
discrete Gaussians of scale s is almost one of scale s sqrt n: no number's probability is off by more than a factor

    e^tau,  tau = 10 sum_{k=1}^{n-1} exp(-2 pi^2 s^2 k/(k+1))                (Kairouz, Liu & Steinke 2021, section 3)

so that a round of P numbers costs at most 2 tau P more epsilon than one Gaussian (and by their Proposition 14 a Renyi
divergence of tau P more, at every order). `excess` is 2 tau P; where it is over 1e-30 a plan is refused.

Modulus. A coordinate is at most clip/step, a share of noise at most what its table holds: a sum of `cohort` of both
must be less than 2^31 either way, so that it never wraps around.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.algorithms.base import Algorithm
from shoal.config import FederationSection
from shoal.errors import ConfigError
from shoal.federation.secagg.masks import MODULUS
from shoal.mechanisms.setting import Setting
from shoal.random.discrete_gaussian import Whole, furthest
from shoal.random.secure_streams import grid

FAINT = 1e-30  # an `excess` that is none
COUNT_STEP = 2.0**-13  # of the count for a quantile: a site adds 1/2 or -1/2 to it


@dataclass(frozen=True)
class Plan:
    """One round's numbers. `noise` is in units of the clip, `count_noise` in clients (None: nothing is counted);
    both are 0 where the coordinator adds the noise."""

    cohort: int
    threshold: int
    colluding: int
    parameters: int
    bound: float
    noise: float
    count_noise: float | None

    @classmethod
    def of(
        cls, algorithm: Algorithm, section: FederationSection, setting: Setting, parameters: int, t: int, bound: float
    ) -> Plan:
        """Round t's, under this clip."""
        assert algorithm.per_round is not None
        assert algorithm.per_update is not None
        cohort = int(algorithm.clients.expected(t, setting.rounds, setting.clients))
        z = algorithm.per_round.multiplier(t, setting.rounds) if algorithm.per_round.at == "shared" else 0.0
        clip = algorithm.per_update
        count_noise = (clip.count_scale(cohort) if z else 0.0) if clip.counts else None
        noise = clip.update_noise(z, cohort)
        threshold = section.threshold or 2 * cohort // 3 + 1
        plan = cls(cohort, threshold, section.colluding, parameters, bound, noise, count_noise)
        plan.refuse_unsound()
        return plan

    @property
    def slots(self) -> int:
        """Numbers that a site sends: its update, and its part of the count."""
        return self.parameters + (self.count_noise is not None)

    @property
    def step(self) -> float:
        return grid(self.bound)

    @property
    def greatest(self) -> int:
        """The greatest number of steps in one coordinate of an update."""
        return math.floor(self.bound / self.step)

    @property
    def share(self) -> float:
        """The scale of a share of noise, in steps."""
        return self._share(self.noise * self.bound / self.step)

    @property
    def count_share(self) -> float:
        return self._share((self.count_noise or 0.0) / COUNT_STEP)

    @property
    def half(self) -> int:
        """1/2 of a client, in the count's steps."""
        return round(0.5 / COUNT_STEP)

    @property
    def excess(self) -> float:
        """What a round costs beyond one Gaussian, in epsilon."""
        scales = [scale for scale in (self.share, self.count_share) if scale]
        if not scales:
            return 0.0
        # each term of the sum is at most that of k = 1
        tau = 10 * max(self.threshold - self.colluding - 1, 0) * math.exp(-((math.pi * min(scales)) ** 2))
        return 2 * tau * self.slots

    @property
    def most(self) -> int:
        """The greatest number that a slot of an honest sum can hold."""
        return self.cohort * max(self.greatest + furthest(self.share), self.half + furthest(self.count_share))

    def noise_of(self, senders: int) -> float:
        """The noise in a sum of so many, as it is told in metrics."""
        return self.noise * self.bound * math.sqrt(senders / (self.threshold - self.colluding))

    def implausible(self, total: Whole, senders: int) -> str | None:
        """Why this sum cannot come of honest sites (noise passes the norm once in 10^20 times); None where it can."""
        if (high := int(abs(total).max(initial=0))) > self.most:
            return f"a number in the sum is {high:,} steps, {self.most:,} at most can be"
        update = total[: self.parameters].astype(float)
        norm = math.sqrt(update @ update) * self.step
        longest = senders * self.bound + self.noise_of(senders) * (math.sqrt(self.parameters) + 10)
        return f"the sum's norm is {norm:.4g}, {longest:.4g} at most can be" if norm > longest else None

    def refuse_unsound(self) -> None:
        """A ConfigError where drop-outs, colluding sites, the modulus or the noise could break what is promised."""
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise ConfigError(f"secure aggregation needs a clip > 0, got {self.bound:g}")
        if not self.colluding < self.threshold <= self.cohort:
            raise ConfigError(
                f"federation.threshold must be over federation.colluding ({self.colluding}) and at most the cohort "
                f"({self.cohort}), got {self.threshold}"
            )
        if 2 * self.threshold <= self.cohort + self.colluding:
            least = (self.cohort + self.colluding) // 2 + 1
            raise ConfigError(
                f"federation.threshold {self.threshold} of {self.cohort} sites, {self.colluding} of them colluding, "
                f"would let a coordinator unmask two different sums; take at least {least}"
            )
        if 2 * self.most >= MODULUS:
            raise ConfigError(
                f"{self.cohort} sites with noise {self.noise:g} could pass the modulus 2^32 of secure aggregation; "
                f"take fewer sites in a round (clients.cohort) or less noise"
            )
        if self.excess > FAINT:
            raise ConfigError(
                f"noise {self.noise:g} shared by {self.threshold} sites is too little for the grid: a share is "
                f"{min(self.share, self.count_share or math.inf):.3g} steps"
            )

    def _share(self, scale: float) -> float:
        return scale / math.sqrt(self.threshold - self.colluding)


def refuse_unfit(algorithm: Algorithm, section: FederationSection, setting: Setting, parameters: int) -> None:
    """A ConfigError where this method cannot be played under the aggregation that is asked for."""
    per_round, per_update = algorithm.per_round, algorithm.per_update
    shared = per_round is not None and per_round.at == "shared"
    if section.aggregation != "secure":
        if shared:
            raise ConfigError('per_round.at = "shared" hides a sum: it needs federation.aggregation = "secure"')
        return
    secure = 'federation.aggregation = "secure"'
    bound = per_update.public_bound(0, setting.rounds) if per_update is not None else None
    if per_round is None or per_update is None or bound in (None, math.inf) or per_update.draws_noise:
        raise ConfigError(
            f"{secure} is for methods that clip each update by a public bound and add noise to the sum "
            f"(trusted-curator, geyer-private, quantile, end-to-end-private); {algorithm.name} does not"
        )
    if algorithm.per_record is not None and algorithm.per_record.counts:
        raise ConfigError(
            f"{secure}: {algorithm.name} tells shares of gradients besides updates, which no mask hides"
        )
    if algorithm.aggregate.by_size:
        raise ConfigError(f"{secure}: {algorithm.name} weights updates by records; set aggregate.weights=equal")
    if not algorithm.clients.known_size:
        raise ConfigError(
            f"{secure}: noise and threshold are made for a cohort of public size; set clients.sampling to all or "
            f"fixed-size"
        )
    for t in algorithm.different_rounds(setting.rounds):
        Plan.of(algorithm, section, setting, parameters, t, per_update.bound({}, t, setting.rounds, None))
