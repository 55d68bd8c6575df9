"""Clips of one record's gradient inside its client (boundary `per_record`).

A batch's gradient is sum_b factor_b g_b, so one record moves it by at most the `sensitivity`, in units of which the
step's noise is drawn. Squared norms are [layers, K, B] for K clients with batches of B, in float64, where no square
of a float32 underflows or overflows; factors are [layers, K, B], or [1, K, B] where all layers share one. AdaClip,
which clips in its own coordinates, is in `coordinate_clipping`. As with whole updates, a bound that was computed from
the data without noise proves nothing.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from shoal.mechanisms.mechanism import Bound, GradientClip, Layers, State, altered
from shoal.mechanisms.sanitiser import Gradients, LocalSteps, Sanitiser, Step, StepMetrics, Summed
from shoal.mechanisms.schedules import require_scales, scale_in
from shoal.mechanisms.update_clipping import Quantile, shrinking
from shoal.random.noise_source import Normals, Product

Scope = Literal["flat", "split", "each"]


class FactorClip(GradientClip):
    """Clips that multiply each layer of a gradient by its own factor: they never need the gradient itself.

    To write your own, implement `bound` and `factors`.
    """

    unproven: ClassVar[str | None] = None

    @abstractmethod
    def bound(self, state: State, t: int, total: int) -> float:
        """What noise is scaled to in round t: how far one record may move the sum of a batch, but for `excess`."""

    @abstractmethod
    def factors(self, squares: Tensor, bound: Bound, layers: Layers) -> Tensor:
        """What each record's gradient is multiplied by; its norm times this must not exceed the bound.

        Args:
            squares: The squared norm of every record in each layer, [layers, K, B], in float64.
            bound: The bound of this round.
            layers: The layers of the model: their names in the order of `squares`, and where their parameters lie.

        Returns:
            [layers, K, B], or [1, K, B] where all layers share a factor.
        """

    def sensitivity(self, squares: Tensor, factors: Tensor, bound: Bound) -> Tensor:
        """What the noise is scaled to, for each client: [K]; the most of its pieces' where a batch is in pieces."""
        return squares.new_ones(squares.shape[1]) * bound

    def count(self, squares: Tensor, mask: Tensor, bound: Bound) -> Tensor:
        """For each client [K], how many more records than half of its batch are below the bound, if it `counts`.

        One record moves it by 1/2, at most. `mask` [K, B] is 0 for padding.
        """
        below = (squares.sum(0).sqrt() <= bound).to(squares.dtype) - 0.5
        return (below * mask).sum(1)

    def public_bound(self, state: State, t: int, total: int) -> float:
        """The bound of round t, which is the same for all records."""
        return self.bound(state, t, total)

    def least(self, state: State, t: int, total: int, size: int) -> float:
        """The smallest bound that round t may have."""
        return self.bound(state, t, total)

    def sensitivity_at_start(self, size: int, layers: int) -> float:
        """The sensitivity of a batch sum in the first step of a run."""
        return self.bound({}, 0, 1) * self.excess(layers)

    def sanitiser(self, steps: LocalSteps) -> Sanitiser:
        """The sanitiser of a chunk of clients for the steps of a round."""
        params, noise = steps.params, self.update_noise(steps.noise, steps.batch)
        return ClippedByFactors(
            self,
            steps.layers,
            params.new_tensor(self.bound(steps.state, steps.t, steps.total)),
            params.new_tensor(noise) if noise else None,
            steps.batch,
            steps.draw("step noise", params),
            steps.draw("step count", params[:, :1]) if self.counts else None,
            torch.zeros_like(params) if noise else None,
            StepMetrics.nothing(params),
        )

    def unclipped(self) -> Self:
        """The same mechanism without its clip, which an audit must flag."""

        def ones(self: Self, squares: Tensor, bound: Bound, layers: Layers) -> Tensor:
            return torch.ones_like(squares)

        found: Self = altered(self, factors=ones)
        return found

    def replay(self, vectors: Tensor, layers: Layers, t: int, total: int) -> Tensor:
        """What an attacker makes of its dummies."""
        squares = torch.stack([vectors[:, place].square().sum(1) for place in layers.values()])
        factors = self.factors(squares.unsqueeze(1) + 1e-30, self.bound({}, t, total), layers).squeeze(1).to(vectors)
        if len(factors) == 1:
            return vectors * factors[0].unsqueeze(1)
        places = zip(layers.values(), factors, strict=True)
        return torch.cat([vectors[:, place] * factor.unsqueeze(1) for place, factor in places], dim=1)


class RecordClipping(FactorClip):
    """The base of the papers' clips: a bound C, on the whole gradient or on its layers.

    Attributes:
        layers: `flat`: the whole gradient has norm C at most. `split`: each of M layers has C/sqrt(M), so that the
            whole has C too. `each`: each layer has C, as in Wei et al. (2023), so that the whole may have C sqrt(M),
            while noise is scaled to C.
    """

    layers: Scope

    def factors(self, squares: Tensor, bound: Bound, layers: Layers) -> Tensor:
        """min(1, bound/norm) of every record, of the whole gradient or of each layer."""
        norms = squares.sum(0, keepdim=True).sqrt() if self.layers == "flat" else squares.sqrt()
        if self.layers == "split":
            bound = bound / math.sqrt(len(squares))
        return shrinking(norms, bound)

    def limits(self, rounds: int) -> str:
        """By how much one record moves a sum: more where each layer has the whole bound."""
        said = super().limits(rounds)
        return f"{said} in each layer, so by sqrt(layers) x that in all" if self.layers == "each" and said else said

    def excess(self, layers: int) -> float:
        """sqrt(M) where each of M layers has the whole bound, else 1."""
        return math.sqrt(layers) if self.layers == "each" else 1.0

    def layers_forgotten(self) -> tuple[GradientClip, GradientClip]:
        """Charged as one bound on the whole gradient, run with one on each layer."""
        return replace(self, layers="flat"), replace(self, layers="each")  # type: ignore[type-var]

    def following_data(self) -> GradientClip:
        """The clip whose noise is scaled to the largest clipped norm in the batch."""
        return MaxClip(self.bound({}, 0, 1), self.layers)


@dataclass(frozen=True)
class RecordClip(RecordClipping):
    """A public bound, constant or on a schedule over the rounds.

    Attributes:
        clip_norm: The largest norm of one record's gradient; a number or a schedule.
    """

    clip_norm: str | float = 1.0
    layers: Scope = "flat"

    def __post_init__(self) -> None:
        require_scales("per_record.clip_norm", self.clip_norm)

    def bound(self, state: State, t: int, total: int) -> float:
        """The bound of round t."""
        return scale_in("per_record.clip_norm", self.clip_norm, t, total)


@dataclass(frozen=True)
class MaxClip(RecordClip):
    """Fed-alphaCDP (Wei et al. 2023): noise is scaled to the largest clipped norm in the batch and its layers."""

    layers: Scope = "each"
    unproven: ClassVar[str | None] = (
        "the noise is scaled to the largest norm in the batch (l2-max), which depends on the data and is revealed"
    )

    def sensitivity(self, squares: Tensor, factors: Tensor, bound: Bound) -> Tensor:
        """The largest clipped norm in the batch of each client, [K]."""
        if self.layers == "flat":
            squares = squares.sum(0, keepdim=True)
        clipped = (squares.sqrt() * factors).nan_to_num(nan=0.0)  # a record without a finite norm is left out
        return clipped.amax((0, 2)) if squares.shape[2] else squares.new_zeros(squares.shape[1])

    def presumed(self) -> RecordClip:
        """The clip by a public bound that the paper's claim presumes."""
        return RecordClip(self.clip_norm, self.layers)


@dataclass(frozen=True)
class QuantileRecordClip(Quantile, RecordClipping):
    """The bound follows a quantile of the gradients' norms, estimated with noise (Andrew et al. 2021, in each step).

    In every step each client counts, with noise, the records whose norm is below the bound; the mean of these
    noisy shares is sent with its update, and sets the next round's bound. Gradient and count are one Gaussian.
    """

    layers: Scope = "flat"
    section: ClassVar[str] = "per_record"

    def bound(self, state: State, t: int, total: int) -> float:
        """The bound that the last round left behind."""
        return float(state.get("clip", self.initial_clip_norm))

    def most_share(self, widest: float) -> float:
        """Half of the widest batch, plus ten standard deviations of the count noise."""
        return 0.5 * widest + 10 * self.count_noise_multiplier


@dataclass
class ClippedByFactors:
    """The sanitiser of clips by factors: (sum_b factor_b g_b + N(0, (z S)^2))/B, B the public, expected batch size.

    Bound and noise change from round to round, and lie on the device, where a recorded step reads them again. An
    empty batch gets the same noise.
    """

    clip: FactorClip
    layers: Layers
    bound: Tensor
    noise: Tensor | None
    batch: float
    source: Normals
    count: Normals | None
    sums: Tensor | None
    metrics: StepMetrics

    @property
    def values(self) -> tuple[object, ...]:
        """The settings that must be equal for another sanitiser to take its place."""
        return self.clip, self.noise is None, self.batch

    def begin(self, other: Sanitiser) -> None:
        """Take over another one's values and random streams."""
        assert isinstance(other, ClippedByFactors)
        self.bound.copy_(other.bound)
        if self.noise is not None and other.noise is not None:
            self.noise.copy_(other.noise)
        self.source.begin(other.source)
        if self.count is not None and other.count is not None:
            self.count.begin(other.count)
        self.metrics.clear()

    def non_finite(self, tape: Gradients) -> Tensor:
        """Which gradients [K, B] have no finite norm."""
        return ~tape.squares().sum(0).isfinite()

    def __call__(self, tape: Gradients, mask: Tensor, active: Tensor) -> Step:
        return self._noisy(tape, self._clipped(tape, mask), active)

    def in_pieces(self, pieces: Iterable[tuple[Gradients, Tensor]], total: Tensor, active: Tensor) -> Step:
        """The same for a batch in pieces; the noise and the count's are added once."""
        all_of_them: _Clipped | None = None
        for tape, mask in pieces:
            clipped = self._clipped(tape, mask)
            tape.accumulate(total, 1.0, clipped.factors)
            all_of_them = clipped if all_of_them is None else all_of_them.with_another(clipped)
            del tape  # before the next one is made
        assert all_of_them is not None
        return self._noisy(Summed(total), all_of_them, active)

    def _clipped(self, tape: Gradients, mask: Tensor) -> _Clipped:
        squares = tape.squares()
        factors = self.clip.factors(squares, self.bound, {name: self.layers[name] for name in tape.layers})
        self.metrics.non_finite += (~squares.sum(0).isfinite()).sum()
        self.metrics.records += mask.sum()
        self.metrics.clipped += ((factors < 1).any(0) * mask).sum()
        return _Clipped(
            factors,
            None if self.noise is None else self.clip.sensitivity(squares, factors, self.bound),
            None if self.count is None else self.clip.count(squares, mask, self.bound),
        )

    def _noisy(self, tape: Gradients | Summed, clipped: _Clipped, active: Tensor) -> Step:
        scales = None
        if self.noise is not None and clipped.sensitivity is not None:
            scales = self.noise * clipped.sensitivity.to(self.noise) * active
        self.metrics.steps += active
        if self.count is not None and clipped.count is not None:
            counts = clipped.count.unsqueeze(1)
            noisy = torch.zeros_like(counts)
            self.count.add(noisy, active * (self.clip.count_scale(self.batch) * (scales is not None)), counts)
            self.metrics.shares += active * (noisy.squeeze(1) / self.batch + 0.5)
        return _Noisy(tape, clipped.factors, scales, self.batch, self.source, self.sums)


@dataclass
class _Clipped:
    """The factors of some records; for each client [K] what its noise is scaled to, and its count, if there are."""

    factors: Tensor
    sensitivity: Tensor | None
    count: Tensor | None

    def with_another(self, other: _Clipped) -> _Clipped:
        """That of both pieces of a batch; the factors were applied already."""
        found = replace(self)
        if self.sensitivity is not None and other.sensitivity is not None:
            found.sensitivity = torch.maximum(self.sensitivity, other.sensitivity)
        if self.count is not None and other.count is not None:
            found.count = self.count + other.count
        return found


@dataclass
class _Noisy:
    tape: Gradients | Summed
    factors: Tensor
    scales: Tensor | None
    batch: float
    source: Normals
    sums: Tensor | None

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x the noisy gradient."""
        scale /= self.batch
        if self.scales is None or self.sums is None:
            self.tape.accumulate(into, scale, self.factors)
            return
        products = self._summed(self.sums, scale)  # the step before left zeros there
        self.source.add(into, self.scales * scale, self.sums, products)

    def _summed(self, sums: Tensor, scale: float) -> list[Product]:
        """The batch's clipped gradients, but for products that are added together with the noise."""
        if self.source.fuses:
            return self.tape.accumulate_except(self.source.takes, sums, scale, self.factors)
        self.tape.accumulate(sums, scale, self.factors)
        return []
