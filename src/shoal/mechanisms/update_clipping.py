"""Clips of a whole update before it leaves its client (boundary `per_update`).

`bound` gives this round's bound S: an update of norm z becomes update / max(1, z/S), so that one client moves
the sum by at most S, the sensitivity. A bound that was computed from the clients' data without noise proves
nothing, nor does a missing one: `unproven` then says why. `apply` gives what the server gets.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from shoal.accounting.events import Event, Unbounded
from shoal.accounting.theorems import Observer, Unit
from shoal.errors import ConfigError
from shoal.mechanisms.gaussian import HOW_MANY, WITH_ITS_NOISE, add_to_number, add_to_updates, multiplier
from shoal.mechanisms.mechanism import (
    NO_NOISE,
    RAW,
    Draw,
    Layers,
    Round,
    State,
    UpdateMechanism,
    altered,
    only_on_sum,
    refuse_unheld_noise,
)
from shoal.mechanisms.row_sums_cuda import can_sum, weighted_sum
from shoal.mechanisms.row_sums_cuda import norms as norms_of
from shoal.mechanisms.schedules import (
    LEAST_SCALE,
    MOST_SCALE,
    Schedule,
    parse,
    require_scale,
    require_scales,
    scale_in,
)
from shoal.precision import all_digits

FARTHEST = math.log(MOST_SCALE)  # the largest magnitude of an adaptive bound's logarithm
MARGIN = 2.0**-16
"""Clipped vectors are shorter than the bound by this share, which exceeds all that rounding can add."""
PIECE = 128  # numbers that may be summed in float32
ROUNDING = 1e-4  # by which a clipped update may exceed its bound when it arrives
_LOST = 2.0**-50  # norms below this times sqrt(size) may miss squares that underflow in float32


class Clipping(UpdateMechanism):
    """The base of all clips: an update leaves with norm `bound` at most.

    To write your own, implement `bound` and, where it does not scale the whole update by one factor, `clipped`.
    """

    alike: ClassVar[bool] = True
    unproven: ClassVar[str | None] = None

    @abstractmethod
    def bound(self, state: State, t: int, total: int, norms: Tensor | None) -> float:
        """The bound of round t; `norms`: the cohort's, where it needs them."""

    def apply(
        self, updates: Tensor, norms: Tensor, bound: float, t: int, total: int, draw: Draw, layers: Layers
    ) -> Tensor:
        """The clipped updates."""
        return self.clipped(updates, norms, bound, layers)

    def clipped(self, updates: Tensor, norms: Tensor, bound: float, layers: Layers) -> Tensor:
        """The updates [k, P], of these norms [k], each no longer than the bound; may overwrite them."""
        return clipped(updates, norms, bound)

    def refuse_unfit(self, t: int, total: int) -> None:
        """Raise a ConfigError where the bound of round t is out of range."""
        self.public_bound(t, total)

    def longest(self, bound: float, t: int, total: int, parameters: int) -> float:
        """The bound, plus what rounding may add."""
        return bound * (1 + ROUNDING)

    def unclipped(self) -> Self:
        """The same without its clip, which an audit must flag."""
        found: Self = altered(self, clipped=lambda self, updates, norms, bound, layers: updates)
        return found

    def replay(self, shown: Tensor, seen: Tensor, bound: float, unit: float, layers: Layers) -> Tensor:
        """The dummies, clipped by the public bound."""
        return into_ball(shown, bound * unit)


@dataclass(frozen=True)
class Clip(Clipping):
    """A public bound, constant or falling (Thesis, Algorithm 6: `decay:from:rate:low`).

    Attributes:
        clip_norm: The largest norm of one client's update; a number or a schedule.
    """

    clip_norm: str | float = 1.0

    def __post_init__(self) -> None:
        require_scales("per_update.clip_norm", self.clip_norm)

    def bound(self, state: State, t: int, total: int, norms: Tensor | None) -> float:
        """The bound of round t."""
        return scale_in("per_update.clip_norm", self.clip_norm, t, total)


@dataclass(frozen=True)
class MedianClip(Clipping):
    """Geyer et al. (2017), Algorithm 1: the median of the cohort's norms, which the noise scale reveals exactly."""

    needs_cohort_norms: ClassVar[bool] = True
    unproven: ClassVar[str | None] = (
        "the clip is the median of the clients' norms, computed without noise: it depends on their data"
    )

    def bound(self, state: State, t: int, total: int, norms: Tensor | None) -> float:
        """The median of the cohort's norms, within the range of scales."""
        if norms is None or not len(norms):
            return 0.0
        return min(max(float(norms.median()), LEAST_SCALE), MOST_SCALE)

    def presumed(self) -> Clip:
        """The clip by a public bound that the paper's claim presumes."""
        return Clip(1.0)


@dataclass(frozen=True)
class Quantile:
    """A bound that follows a quantile of norms, estimated with noise (Andrew et al. 2021), on either boundary.

        b~ <- (1/m) (sum_k (1[norm_k <= C] - 1/2) + N(0, sigma_b^2)) + 1/2
        C  <- C exp(-lr (b~ - quantile))

    Counting costs little: with a noise multiplier of z in all, sigma_b = `count_noise_multiplier` x m, the updates
    get z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), and the round is one Gaussian of noise z.

    Attributes:
        initial_clip_norm: C in the first round.
        quantile: The share of norms that should be at most C.
        clip_norm_lr: How fast C follows the quantile.
        count_noise_multiplier: The noise on the count, sigma_b/m.
    """

    initial_clip_norm: float = 1.0
    quantile: float = 0.5
    clip_norm_lr: float = 0.2
    count_noise_multiplier: float = 0.05
    section: ClassVar[str]
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_scale(f"{self.section}.initial_clip_norm", self.initial_clip_norm)
        if not 0 < self.quantile < 1:
            raise ConfigError(f"{self.section}.quantile must be in (0, 1), got {self.quantile}")
        if self.clip_norm_lr < 0:
            raise ConfigError(f"{self.section}.clip_norm_lr must be >= 0, got {self.clip_norm_lr}")
        if not 0 < self.count_noise_multiplier < math.inf:
            raise ConfigError(
                f"{self.section}.count_noise_multiplier must be > 0 and finite, got {self.count_noise_multiplier}"
            )

    def scales(self) -> dict[str, str | float]:
        """The settings, by key, that are bounds on clips."""
        return {f"{self.section}.initial_clip_norm": self.initial_clip_norm}

    def update_noise(self, noise: float, cohort: float) -> float:
        """z_delta: the noise on the updates that, with the count's, costs as much as `noise` alone."""
        if noise == 0:
            return 0.0
        spent = noise**-2 - (2 * self.count_noise_multiplier * cohort) ** -2
        if spent <= 0:
            raise ConfigError(
                f"{self.section}.count_noise_multiplier {self.count_noise_multiplier} x {cohort:g} is too little "
                f"noise for the count of {cohort:g} beside a total noise of {noise:g}: raise it over "
                f"{noise / 2 / cohort:g}"
            )
        return float(spent**-0.5)

    def count_scale(self, cohort: float) -> float:
        """sigma_b."""
        return self.count_noise_multiplier * cohort

    def recounted(self, change: Callable[[float], float]) -> Self:
        """The same with other noise on its count."""
        return replace(self, count_noise_multiplier=change(self.count_noise_multiplier))

    def adapt(self, state: State, share: float) -> None:
        """C <- C exp(-lr (share - quantile)), limited to LEAST_SCALE to MOST_SCALE."""
        power = math.log(float(state.get("clip", self.initial_clip_norm))) - self.clip_norm_lr * (
            share - self.quantile
        )
        moved = math.exp(min(max(power, -FARTHEST), FARTHEST))
        state["clip"] = torch.tensor(min(max(moved, LEAST_SCALE), MOST_SCALE), dtype=torch.float64)


@dataclass(frozen=True)
class QuantileClip(Quantile, Clipping):
    """The bound follows a quantile of the updates' norms (Andrew et al. 2021; see `Quantile`)."""

    section: ClassVar[str] = "per_update"

    def bound(self, state: State, t: int, total: int, norms: Tensor | None) -> float:
        """The bound that the last round left behind."""
        return float(state.get("clip", self.initial_clip_norm))

    def for_cohort(self, before: float, cohort: float) -> Self:
        """The same with as much noise on the sum of a cohort of another size."""
        return replace(self, count_noise_multiplier=self.count_noise_multiplier * before / cohort)

    def audited(self) -> Self:
        """The same with an initial bound of 1."""
        return replace(self, initial_clip_norm=1.0)


@dataclass(frozen=True)
class NoisyClip(Clip):
    """Fed-SDP (Wei et al. 2023): each update is clipped and gets its own N(0, (noise_multiplier x clip)^2).

    Attributes:
        noise_multiplier: The noise, in units of the clip norm; a number or a schedule over the rounds.
        at: Where it is added: at the `client`, before the update leaves, or at the `server`, which then sees the raw
            update.
    """

    noise_multiplier: str | float = 1.0
    at: Literal["server", "client"] = "server"
    alike: ClassVar[bool] = True
    draws_noise: ClassVar[bool] = True
    unproven: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(parse(self.noise_multiplier).values(100)) < 0:
            raise ConfigError(f"per_update.noise_multiplier must be >= 0, got {self.noise_multiplier}")

    def noise_schedule(self) -> Schedule:
        """The schedule of the noise multiplier."""
        return parse(self.noise_multiplier)

    def multiplier(self, t: int, total: int) -> float:
        """The noise multiplier of round t."""
        return multiplier("per_update.noise_multiplier", self.noise_multiplier, t, total)

    def refuse_unfit(self, t: int, total: int) -> None:
        """Raise a ConfigError where the settings cannot be used in round t."""
        noise = self.multiplier(t, total) * self.bound({}, t, total, None)
        refuse_unheld_noise("per_update.noise_multiplier x per_update.clip_norm", noise, t, total)

    def apply(
        self, updates: Tensor, norms: Tensor, bound: float, t: int, total: int, draw: Draw, layers: Layers
    ) -> Tensor:
        """The clipped updates, each with its own noise."""
        scale = self.multiplier(t, total) * bound
        clipped = self.clipped(updates, norms, bound, layers)
        return add_to_updates(clipped, scale, [draw(row) for row in range(len(updates))])

    def event(self, round: Round, unit: Unit, observer: Observer) -> Event:
        """The noise of m updates adds up in the sum; the server sees single updates."""
        if round.clients.separated:
            return only_on_sum(round.clients)
        own = self.multiplier(*round.when)
        if own == 0:
            return NO_NOISE
        if observer == "release":
            return self._released(round, unit, own)
        if self.at == "server":
            return RAW
        if unit == "record" and round.setting.multiplicity > 1:
            return Unbounded("several clients hold the record, and the server sees each one's update")
        return round.shown(unit, own)

    def _released(self, round: Round, unit: Unit, own: float) -> Event:
        if round.clients.shows(round.rate):
            return HOW_MANY
        if round.setting.all_answer:
            return round.on_sum(unit, own * math.sqrt(round.cohort))
        # A record is in one update, which carries its own noise. The amount of noise reveals who answered.
        return WITH_ITS_NOISE if unit == "client" else round.shown(unit, own)

    def draws(self, round: Round) -> int:
        """One noise vector for each client of the cohort."""
        return round.many

    @property
    def leaves_raw(self) -> bool:
        """True where the server adds the noise."""
        return self.at == "server"

    def longest(self, bound: float, t: int, total: int, parameters: int) -> float:
        """Noise exceeds it with probability 1e-20."""
        return bound * (1 + ROUNDING + self.multiplier(t, total) * (math.sqrt(parameters) + 10))

    def limits(self, rounds: int) -> str:
        """The clip, and the noise on each update."""
        clip = UpdateMechanism.limits(self, rounds)
        noise = {self.multiplier(t, rounds) for t in range(rounds)} or {0.0}
        return f"{clip}; each update gets noise of {min(noise):g} x that, or more"

    def assumes(self) -> tuple[str, ...]:
        """Who draws the noise."""
        who = "each client" if self.at == "client" else "the server"
        return (f"{who} draws the noise of each update, of an empty one too, and tells nobody",)

    def for_cohort(self, before: float, cohort: float) -> Self:
        """The same with as much noise on the sum of a cohort of another size."""
        return self.with_noise(parse(self.noise_multiplier).scaled(math.sqrt(before / cohort)))


def noisy_share(
    clip: UpdateMechanism, below: float, clients: int, cohort: float, noise: float, generator: np.random.Generator
) -> float:
    """All that `adapt` learns: the share of the expected `cohort` within the bound, with the count's noise.

    The count of `below`, of the `clients` that came, has none where the sum has none (`noise` is 0).
    """
    scale = clip.count_scale(cohort) if noise else 0.0
    return add_to_number(below - clients / 2, scale, generator) / cohort + 0.5


def into_ball(vectors: Tensor, radius: float) -> Tensor:
    """Rows scaled to norms of at most the radius, differentiable."""
    norms = (vectors.square().sum(1, keepdim=True) + 1e-30).sqrt()
    return vectors * (radius / norms).clamp(max=1.0)


def row_norms(updates: Tensor) -> Tensor:
    """The norm of each row in float64, accurate to 2^-17 for all finite numbers: the clip is only as good as this.

    A long sum of squares in float32 falls short, by 0.6% where a million small numbers follow a few large ones, so on
    a CPU only short sums use float32. Rows whose squares underflow or overflow are summed again in float64.
    """
    if can_sum(updates):
        return norms_of(updates)
    if updates.is_cuda or not updates.numel():
        return _norms(updates)
    size = updates.shape[1]
    whole = size // PIECE
    pieces = updates[:, : whole * PIECE].reshape(len(updates), whole, PIECE)
    rest = updates[:, whole * PIECE :].unsqueeze(1)
    norms = _norms(torch.cat([torch.linalg.vector_norm(part, dim=2) for part in (pieces, rest)], dim=1))
    least, (low, high) = _LOST * math.sqrt(size), torch.aminmax(norms)
    if not least <= float(low) <= float(high) < math.inf:
        doubtful = ~((norms >= least) & (norms < math.inf))
        norms[doubtful] = _norms(updates[doubtful])
    return norms


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms


def summed_products(left: Tensor, right: Tensor, positions: int = 1) -> Tensor:
    """sum_b left[k, b] right[k, b]^T, [K, O, I], of clipped rows [K, B, O] and [K, B, I].

    In a long float32 sum every addition is rounded relative to the running total, and one record added or removed
    changes the rounding, and the positions, of all that follow: it can move the sum by several clips. So only few
    rows are summed in float32, and more in float64; such sums stay in float64 and the caller rounds them once. A
    record of several `positions` may have rows far longer than their clipped sum: always in float64. So are the few
    rows of a piece of a larger batch: their `left` is in float64.
    """
    if left.shape[1] <= PIECE and positions == 1 and left.dtype == right.dtype:
        with all_digits(left):
            return torch.bmm(left.transpose(1, 2), right)
    if left.shape[2] == 1 and can_sum(right):
        return weighted_sum(right, left.squeeze(2)).unsqueeze(1)
    total = left.new_zeros(len(left), left.shape[2], right.shape[2], dtype=torch.float64)
    size = 8 * PIECE if left.is_cuda else PIECE  # few kernels there, little memory traffic here
    for some, others in zip(torch.split(left, size, 1), torch.split(right, size, 1), strict=True):
        total.baddbmm_(some.double().transpose(1, 2), others.double())
    return total


def weighed_sum(rows: Tensor, factors: Tensor) -> Tensor:
    """sum_b factors[k, b] rows[k, b], [K, P], for rows [K, B, P]; many rows in float64."""
    return summed_products(factors.unsqueeze(2), rows).squeeze(1)


def row_sums(rows: Tensor, positions: int = 1) -> Tensor:
    """sum_b rows[k, b], [K, O], for clipped rows [K, B, O]; summed like `summed_products`."""
    return rows.sum(1, dtype=rows.dtype if rows.shape[1] <= PIECE and positions == 1 else torch.float64)


def shrinking(norms: Tensor, bound: float | Tensor) -> Tensor:
    """min(1, bound/norm), less the margin: a vector scaled by it is never longer than the bound.

    A vector 2^126 times too long becomes 0: its factor would have too few digits in float32. NaN stays NaN.
    """
    reached = bound * (1 - MARGIN)
    factors = torch.where(norms <= reached, 1.0, reached / norms)
    return torch.where(factors < torch.finfo(torch.float32).tiny, 0.0, factors)


def clipped(updates: Tensor, norms: Tensor, bound: float) -> Tensor:
    """update / max(1, norm/bound), in place, for each row."""
    return updates.mul_(shrinking(norms, bound).to(updates.dtype).unsqueeze(1))
