"""The boundaries inside a client: `per_example` clips every record's gradient, `per_step` adds noise to every step.

One `Sanitiser` serves a slice of clients for the steps of one round. It turns the tape of a batch into one that adds
the noisy gradient: (sum_b factor_b g_b + N(0, (z S)^2))/B, with B the public, expected batch. A batch that came out
empty gets the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.base import Algorithm
from shoal.engine.moment import Moment
from shoal.engine.stage import Stage
from shoal.gradients import ExampleTape, Tape
from shoal.privacy.adaclip import AdaClip
from shoal.privacy.example_clip import ExampleClip, QuantileExampleClip
from shoal.privacy.normals import Normals, Product, normals


class Sanitiser(Protocol):
    """What happens to the gradients of a slice of clients."""

    told: Told

    @property
    def values(self) -> tuple[object, ...]:
        """All that must be the same for one to take another's place."""

    def begin(self, other: Sanitiser) -> None:
        """Take the place of another one for a new round: its numbers, its streams, and nothing told yet."""

    def spoilt(self, tape: ExampleTape) -> Tensor:
        """Which gradients [K, B] have no norm: they hold NaN or Inf, or are too great for a float."""

    def __call__(self, tape: ExampleTape, real: Tensor, moving: Tensor) -> Tape:
        """The batch's gradient as it may move the model; `real` [K, B] is 0 where a batch is filled up, `moving` [K]
        where a client has no step left, and so draws no noise."""


@dataclass
class Told:
    """What there is to tell of a slice's steps: sums over its records, clients and steps, kept on the device."""

    records: Tensor
    clipped: Tensor
    spoilt: Tensor
    shares: Tensor
    steps: Tensor

    def clear(self) -> None:
        for tensor in (self.records, self.clipped, self.spoilt, self.shares, self.steps):
            tensor.zero_()

    @classmethod
    def nothing(cls, params: Tensor) -> Told:
        clients = params.new_zeros(len(params))
        number = params.new_zeros(())
        return cls(number, number.clone(), number.clone(), clients, clients.clone())


def sanitiser(
    stage: Stage, params: Tensor, clients: np.ndarray, moment: Moment, memory: dict[str, Tensor]
) -> Sanitiser | None:
    """The method's own, or None where gradients are left as they are."""
    algorithm, streams = stage.algorithm, stage.streams
    per_example, per_step = algorithm.per_example, algorithm.per_step
    if per_example is None:
        return None
    batch, numbers = algorithm.examples.batch, (moment.t, moment.attempt)
    noise = per_step.multiplier(moment.t, moment.total, batch) if per_step is not None else 0.0
    algorithm.refuse_unheld(least_clip(algorithm, memory, moment, params.shape[1]), moment.t, moment.total)
    fused, spread = stage.graphs is not None, stage.workers.spread
    source = normals(streams, "step noise", numbers, clients.tolist(), params, spread, fused, stage.kernels)
    if isinstance(per_example, AdaClip):
        return AdaptiveCoordinates(per_example, noise, batch, source, params)
    bound = per_example.bound(memory, moment.t, moment.total)
    count = None
    if isinstance(per_example, QuantileExampleClip):
        noise = per_example.update_noise(noise, batch)
        count = normals(streams, "step count", numbers, clients.tolist(), params[:, :1], kernels=stage.kernels)
    scale = params.new_tensor(noise) if noise else None
    sums = torch.zeros_like(params) if noise else None
    told = Told.nothing(params)
    return ClippedByFactors(per_example, params.new_tensor(bound), scale, batch, source, count, sums, told)


def step_noise(algorithm: Algorithm, memory: dict[str, Tensor], moment: Moment, size: int) -> float:
    """How much noise one local step leaves in a parameter, at least: what is public of it."""
    per_example, per_step, batch = algorithm.per_example, algorithm.per_step, algorithm.examples.batch
    when = moment.t, moment.total
    if per_example is None or per_step is None:
        return 0.0
    clip = least_clip(algorithm, memory, moment, size)
    return algorithm.local.rate(*when) * per_step.multiplier(*when, batch) * clip / batch


def least_clip(algorithm: Algorithm, memory: dict[str, Tensor], moment: Moment, size: int) -> float:
    """The clip of this round's gradients, or the least that AdaClip's may be."""
    per_example = algorithm.per_example
    assert per_example is not None
    if isinstance(per_example, AdaClip):
        return float(per_example.h1 * size**0.5)
    return per_example.bound(memory, moment.t, moment.total)


@dataclass
class ClippedByFactors:
    """Clips that only shrink gradients: a factor for each record, never the gradient itself.

    Bound and noise change from round to round, and lie on the device: a step that was recorded there reads them anew.
    """

    clip: ExampleClip | QuantileExampleClip
    bound: Tensor
    noise: Tensor | None
    batch: float
    source: Normals
    count: Normals | None
    sums: Tensor | None
    told: Told

    @property
    def values(self) -> tuple[object, ...]:
        return self.clip, self.noise is None, self.batch

    def begin(self, other: Sanitiser) -> None:
        assert isinstance(other, ClippedByFactors)
        self.bound.copy_(other.bound)
        if self.noise is not None and other.noise is not None:
            self.noise.copy_(other.noise)
        self.source.begin(other.source)
        if self.count is not None and other.count is not None:
            self.count.begin(other.count)
        self.told.clear()

    def spoilt(self, tape: ExampleTape) -> Tensor:
        return ~tape.squares().sum(0).isfinite()

    def __call__(self, tape: ExampleTape, real: Tensor, moving: Tensor) -> Tape:
        squares = tape.squares()
        factors = self.clip.factors(squares, self.bound)
        scales = None
        if self.noise is not None:
            scales = self.noise * self.clip.sensitivity(squares, factors, self.bound).to(self.noise) * moving
        self.told.spoilt += (~squares.sum(0).isfinite()).sum()
        self.told.records += real.sum()
        self.told.clipped += ((factors < 1).any(0) * real).sum()
        self.told.steps += moving
        if self.count is not None and isinstance(self.clip, QuantileExampleClip):
            counts = self.clip.counts(squares, real, self.bound).unsqueeze(1)
            noisy = torch.zeros_like(counts)
            self.count.add(noisy, moving * (self.clip.count_noise * self.batch * (scales is not None)), counts)
            self.told.shares += moving * (noisy.squeeze(1) / self.batch + 0.5)
        return _Noisy(tape, factors, scales, self.batch, self.source, self.sums)


@dataclass
class _Noisy:
    tape: ExampleTape
    factors: Tensor
    scales: Tensor | None
    batch: float
    source: Normals
    sums: Tensor | None

    def accumulate(self, into: Tensor, scale: float) -> None:
        scale /= self.batch
        if self.scales is None or self.sums is None:
            self.tape.accumulate(into, scale, self.factors)
            return
        products = self._summed(self.sums, scale)  # what is left there from the step before is 0
        self.source.add(into, self.scales * scale, self.sums, products)

    def _summed(self, sums: Tensor, scale: float) -> list[Product]:
        """The batch's clipped gradients, but for products that whoever draws the noise adds with it."""
        if self.source.fuses:
            return self.tape.accumulate_but(self.source.takes, sums, scale, self.factors)
        self.tape.accumulate(sums, scale, self.factors)
        return []


class AdaptiveCoordinates:
    """AdaClip: the gradients of single records are needed, for each is measured in coordinates of its own."""

    def __init__(self, clip: AdaClip, noise: float, batch: float, source: Normals, params: Tensor) -> None:
        self.clip, self.noise, self.batch, self.source = clip, noise, batch, source
        self.at = clip.start(params)
        self.told = Told.nothing(params)

    @property
    def values(self) -> tuple[object, ...]:
        return self.clip, self.noise, self.batch

    def begin(self, other: Sanitiser) -> None:
        assert isinstance(other, AdaptiveCoordinates)
        self.source.begin(other.source)
        self.at.mean.copy_(other.at.mean)
        self.at.scale.copy_(other.at.scale)
        self.told.clear()

    def spoilt(self, tape: ExampleTape) -> Tensor:
        return ~tape.squares().sum(0).isfinite()

    def __call__(self, tape: ExampleTape, real: Tensor, moving: Tensor) -> Tape:
        self.told.spoilt += self.spoilt(tape).sum()
        noisy = total = self.clip.clipped_sum(self.at, tape.examples(), real)
        if self.noise:
            noisy = torch.zeros_like(total)
            self.source.add(noisy, self.noise * moving, total)
        gradient = self.clip.gradient(self.at, noisy, self.noise, self.batch)
        return _Vectors(gradient * moving.unsqueeze(1))


@dataclass
class _Vectors:
    vectors: Tensor

    def accumulate(self, into: Tensor, scale: float) -> None:
        into.add_(self.vectors, alpha=scale)
