"""The public numbers of a round under secure aggregation: threshold, step, noise shares, modulus.

Site and coordinator each compute them from the terms, so that neither has to trust the other.

Noise. Each site adds a discrete Gaussian of variance sigma^2 / (threshold - colluding), where sigma = noise x clip.
A sum that can be unmasked has at least `threshold` sites, and all but `colluding` of them keep their share secret:
the sum has noise of variance at least sigma^2 that nobody can remove, and more where more sites answer. A sum of n
discrete Gaussians of scale s is almost one of scale s sqrt n: no number's probability is off by more than a factor

    e^tau,  tau = 10 sum_{k=1}^{n-1} exp(-2 pi^2 s^2 k/(k+1))                (Kairouz, Liu & Steinke 2021, section 3)

so that a round of P numbers costs at most 2 tau P more epsilon than one Gaussian (and by their Proposition 14 a Renyi
divergence of tau P more, at every order). `excess` is 2 tau P; a plan is refused where it exceeds 1e-30.

In a sparse round (`graph`) the sum may be without the noise of a few honest sites, `loose`: shares are then made for
threshold - colluding - loose sites.

Where an update is the sum of a batch's clipped gradients (`noise_shares`), all this is for one record: the clip norm
is what one record adds to a sum, and the step is that of its rounding.

Modulus. A coordinate is at most `longest`/step, a noise share at most the largest entry of its table: a sum of
`cohort` of both must be less than 2^31 in absolute value, so that it never wraps around. A site's sum of gradients is
as long as its batch has records: at most `records` of them, but for the probability `wraps`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.algorithms.base import Algorithm
from shoal.config_sections import FederationSection
from shoal.errors import ConfigError
from shoal.federation.secagg.graph import SPARSE_ABOVE, Graph, computed
from shoal.federation.secagg.masks import MODULUS
from shoal.mechanisms.gaussian import Gaussian
from shoal.mechanisms.noise_shares import LEAST_SHARE, default_threshold, refuse_quorum, tau
from shoal.mechanisms.sampling import LARGEST_BATCH
from shoal.mechanisms.setting import Setting
from shoal.random.discrete_gaussian import Whole, furthest
from shoal.random.secure_streams import FINE, grid

NEGLIGIBLE = 1e-30  # the largest `excess` allowed
COUNT_STEP = 2.0**-13  # of the count for a quantile, to which a site adds 1/2 or -1/2


@dataclass(frozen=True)
class Plan:
    """One round's public numbers.

    `noise` is in units of the clip norm, `count_noise` in clients (None: nothing is counted); both are 0 where the
    coordinator adds the noise.
    """

    cohort: int
    threshold: int
    colluding: int
    parameters: int
    bound: float
    noise: float
    count_noise: float | None
    neighbours: int | None = None
    share_threshold: int | None = None
    lists: int = 1
    records: int = 1
    fine: int = FINE
    wraps: float = 0.0

    @classmethod
    def of(
        cls, algorithm: Algorithm, section: FederationSection, setting: Setting, parameters: int, t: int, bound: float
    ) -> Plan:
        """Return the plan of round t under this clip norm; raise a ConfigError where it is unsound."""
        assert algorithm.per_round is not None
        assert algorithm.per_update is not None
        cohort = int(algorithm.clients.expected(t, setting.rounds, setting.clients))
        z = algorithm.per_round.multiplier(t, setting.rounds) if algorithm.per_round.at == "shared" else 0.0
        clip = algorithm.per_update
        count_noise = (clip.count_scale(cohort) if z else 0.0) if clip.counts else None
        noise = clip.update_noise(z, cohort)
        threshold, colluding = _quorum(algorithm, section, cohort)
        sparse = section.neighbours, section.share_threshold, _lists(setting, cohort)
        plan = cls(cohort, threshold, colluding, parameters, bound, noise, count_noise, *sparse)
        if algorithm.sums_gradients:
            records, fine, wraps = _batch(algorithm, setting, cohort)
            plan = replace(plan, records=records, fine=fine, wraps=wraps)
        plan.refuse_unsound()
        own = algorithm.per_round.share(bound, cohort, t, setting.rounds) or 0.0
        if z and (type(algorithm.per_round).add is not Gaussian.add or own > plan.share * plan.step * (1 + 1e-9)):
            raise ConfigError(
                f"under secure aggregation sites draw Gaussian shares of {z:g} x the clip: the `add` or `share` "
                f"of {type(algorithm.per_round).__name__}, for which its event is, would not be used"
            )
        return plan

    @cached_property
    def graph(self) -> Graph:
        """Who shares with whom."""
        sparse = self.neighbours, self.share_threshold, self.lists
        return Graph(self.cohort, self.threshold, self.colluding, *sparse)

    @property
    def sharing(self) -> int:
        """How many honest sites' shares add up to the noise that is charged."""
        return self.threshold - self.colluding - self.graph.loose

    @property
    def slots(self) -> int:
        """How many numbers a site sends: its update, and its part of the count."""
        return self.parameters + (self.count_noise is not None)

    @property
    def step(self) -> float:
        """The rounding step of an update's coordinates."""
        return grid(self.bound, self.fine)

    @property
    def longest(self) -> float:
        """The largest norm of an update."""
        return self.records * self.bound

    @property
    def greatest(self) -> int:
        """The largest number of steps in one coordinate of an update."""
        return math.floor(self.longest / self.step)

    @property
    def share(self) -> float:
        """The scale of a noise share, in steps."""
        return self._share(self.noise * self.bound / self.step)

    @property
    def count_share(self) -> float:
        """The scale of a noise share of the count, in its steps."""
        return self._share((self.count_noise or 0.0) / COUNT_STEP)

    @property
    def half(self) -> int:
        """Half a client, in the count's steps."""
        return round(0.5 / COUNT_STEP)

    @property
    def excess(self) -> float:
        """The epsilon that a round costs beyond one Gaussian."""
        scales = [scale for scale in (self.share, self.count_share) if scale]
        if not scales:
            return 0.0
        return 2 * tau(min(scales), self.sharing) * self.slots

    @property
    def most(self) -> int:
        """The largest absolute value of a number in an honest sum."""
        return self.cohort * max(self.greatest + furthest(self.share), self.half + furthest(self.count_share))

    def noise_of(self, senders: int) -> float:
        """Return the standard deviation of the noise in a sum of this many sites, for the metrics."""
        return self.noise * self.bound * math.sqrt(senders / self.sharing)

    def implausible(self, total: Whole, senders: int) -> str | None:
        """Return why honest sites cannot have made this sum, or None; false alarms have probability 1e-20."""
        if (high := int(abs(total).max(initial=0))) > self.most:
            return f"a number in the sum is {high:,} steps, must be at most {self.most:,}"
        update = total[: self.parameters].astype(float)
        norm = math.sqrt(update @ update) * self.step
        longest = senders * self.longest + self.noise_of(senders) * (math.sqrt(self.parameters) + 10)
        return f"the sum's norm is {norm:.4g}, must be at most {longest:.4g}" if norm > longest else None

    def refuse_unsound(self) -> None:
        """Raise a ConfigError where drop-outs, collusion, the modulus or the noise could break the guarantees."""
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise ConfigError(f"secure aggregation needs a finite clip norm > 0, got {self.bound:g}")
        refuse_quorum("federation", self.threshold, self.colluding, self.cohort)
        self.graph.refuse_unsafe()
        if 2 * self.most >= MODULUS:
            fix = "use fewer sites in a round (clients.cohort) or less noise"
            if self.records > 1:
                fix = (
                    f"a batch may have {self.records:,} records: set federation.min_records and max_records, a lower "
                    f"records.rate, or fewer per_update.bits"
                )
            raise ConfigError(
                f"{self.cohort} sites with noise {self.noise:g} could exceed the modulus 2^32 of secure aggregation; "
                f"{fix}"
            )
        if self.excess > NEGLIGIBLE or 0 < self.share < LEAST_SHARE:
            raise ConfigError(
                f"noise {self.noise:g} shared by {self.threshold} sites is too little for the grid: a share is "
                f"{min(self.share, self.count_share or math.inf):.3g} steps"
            )

    def _share(self, scale: float) -> float:
        return scale / math.sqrt(self.sharing)


def with_graph(algorithm: Algorithm, section: FederationSection, setting: Setting) -> FederationSection:
    """Return the section with the graph computed, where a cohort is so large that not all can share with all."""
    if section.aggregation != "secure" or section.neighbours is not None or not algorithm.clients.known_size:
        return section
    cohort = int(algorithm.clients.expected(0, setting.rounds, setting.clients))
    if cohort <= SPARSE_ABOVE:
        return section
    graph = computed(cohort, *_quorum(algorithm, section, cohort), _lists(setting, cohort))
    return replace(section, neighbours=graph.neighbours, share_threshold=graph.share_threshold)


def graph_failure(algorithm: Algorithm, section: FederationSection, setting: Setting) -> float:
    """Return the probability, for each round, that a sparse graph breaks the guarantee against the coordinator."""
    if section.aggregation != "secure" or section.neighbours is None or not algorithm.clients.known_size:
        return 0.0
    return max(
        _graph(algorithm, section, setting, t).failure_of_round(setting.rounds)
        for t in algorithm.different_rounds(setting.rounds)
    )


def _graph(algorithm: Algorithm, section: FederationSection, setting: Setting, t: int) -> Graph:
    cohort = int(algorithm.clients.expected(t, setting.rounds, setting.clients))
    sparse = section.neighbours, section.share_threshold, _lists(setting, cohort)
    threshold, colluding = _quorum(algorithm, section, cohort)
    graph = Graph(cohort, threshold, colluding, *sparse)
    graph.refuse_unsafe()
    return graph


def _quorum(algorithm: Algorithm, section: FederationSection, cohort: int) -> tuple[int, int]:
    """The threshold, and how many sites collude: the method's own, where its noise shares are made for them."""
    own = algorithm.per_round.quorum(cohort) if algorithm.per_round is not None else None
    if own is None:
        return section.threshold or default_threshold(cohort), section.colluding
    for name, mine, other in zip(
        ("threshold", "colluding"), own, (section.threshold, section.colluding), strict=True
    ):
        if other not in (mine, getattr(FederationSection, name)):
            raise ConfigError(
                f"federation.{name} {other} contradicts per_round.{name}, which is {mine}: leave it out"
            )
    return own


def _batch(algorithm: Algorithm, setting: Setting, cohort: int) -> tuple[int, int, float]:
    """The most records in a site's sum, the bits of the grid, and the probability that some batch is larger."""
    per_update, records = algorithm.per_update, algorithm.records
    assert per_update is not None
    most = records.widest(max(setting.sizes)) if setting.sizes else max(records.batch, LARGEST_BATCH)
    return most, round(-math.log2(per_update.step(1.0))), min(1.0, cohort * records.wider())


def _lists(setting: Setting, cohort: int) -> int:
    return math.ceil(setting.clients / max(cohort, 1))


def refuse_unfit(algorithm: Algorithm, section: FederationSection, setting: Setting, parameters: int) -> None:
    """Raise a ConfigError where this algorithm does not support the configured aggregation."""
    per_round, per_update = algorithm.per_round, algorithm.per_update
    shared = per_round is not None and per_round.at == "shared"
    if section.aggregation != "secure":
        if shared:
            raise ConfigError('per_round.at = "shared" protects a sum: it needs federation.aggregation = "secure"')
        return
    secure = 'federation.aggregation = "secure"'
    bound = algorithm.public_bound(0, setting.rounds) if per_update is not None else None
    if per_round is None or per_update is None or bound in (None, math.inf) or per_update.draws_noise:
        raise ConfigError(
            f"{secure} needs an algorithm that clips each update to a public bound and adds noise to the sum "
            f"(trusted-curator, geyer-private, quantile, end-to-end-private, distributed-dp-sgd); "
            f"{algorithm.name} does not"
        )
    if algorithm.per_record is not None and algorithm.per_record.counts:
        raise ConfigError(f"{secure}: {algorithm.name} also sends shares of clipped gradients, which no mask hides")
    if algorithm.aggregate.by_size:
        raise ConfigError(f"{secure}: {algorithm.name} weights updates by records; set aggregate.weights=equal")
    if not algorithm.clients.known_size:
        raise ConfigError(
            f"{secure}: noise and threshold need a cohort of public size; set clients.sampling to all or fixed-size"
        )
    for t in algorithm.different_rounds(setting.rounds):
        Plan.of(algorithm, section, setting, parameters, t, algorithm.bound({}, t, setting.rounds))
