"""Methods that are broken on purpose: what an audit must catch, or its silence means nothing.

Each variant plays something else than what is charged: mistakes that real libraries made (noise off by a factor, a
clip that is ignored, noise drawn twice, ...). They are made from the method's own record, never by another engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.algorithms.base import Algorithm
from shoal.audit.cases import Case
from shoal.privacy.adaclip import AdaClip
from shoal.privacy.clip import Clip, MedianClip, NoisyClip, QuantileClip
from shoal.privacy.example_clip import ExampleClip, ExampleClipping, MaxClip, QuantileExampleClip
from shoal.privacy.random import Streams
from shoal.privacy.schedules import parse


@dataclass(frozen=True)
class Broken:
    """What is charged, what is played instead, and with which random numbers."""

    case: Case
    played: Algorithm
    streams: Streams


def whole(case: Case, streams: Streams) -> Broken:
    """Nothing is broken."""
    return Broken(case, case.record, streams)


def less_noise(share: float) -> Callable[[Case, Streams], Broken | None]:
    return lambda case, streams: Broken(case, with_noise(case.record, share), streams)


def with_noise(record: Algorithm, share: float) -> Algorithm:
    """The method with this share of its noise, that of its counts included."""
    for boundary in ("per_round", "per_step", "per_update"):
        holder: Any = getattr(record, boundary)
        if hasattr(holder, "noise") and not isinstance(holder.noise, bool):
            noise = parse(holder.noise).scaled(share).written()
            record = replace(record, **{boundary: replace(holder, noise=noise)})
    for boundary in ("per_update", "per_example"):
        holder = getattr(record, boundary)
        if isinstance(holder, QuantileClip):
            counts: Any = replace(holder, count_noise=holder.count_noise * share)
            record = replace(record, **{boundary: counts})
    return record


def clip_off(case: Case, streams: Streams) -> Broken | None:
    """Noise as ever, on what nobody has clipped."""
    record = case.record
    if case.where == "steps" and isinstance(record.per_example, AdaClip):
        unclipped = _altered(record.per_example, clipped_sum=_unclipped_sum)
        return Broken(case, replace(record, per_example=unclipped), streams)
    if case.where == "steps" and record.per_example is not None:
        unclipped = _altered(record.per_example, factors=lambda self, squares, bound: torch.ones_like(squares))
        return Broken(case, replace(record, per_example=unclipped), streams)
    if isinstance(record.per_update, Clip | QuantileClip | NoisyClip):
        clip = type(record.per_update)

        def leave(self: Any, updates: Any, norms: Any, *more: Any) -> Any:
            return clip.leave(self, updates, torch.zeros_like(norms), *more)

        return Broken(case, replace(record, per_update=_altered(record.per_update, leave=leave)), streams)
    return None


def layers_forgotten(case: Case, streams: Streams) -> Broken | None:
    """Each of M layers is clipped to C, and the sensitivity taken for C: off by sqrt M."""
    clip = case.record.per_example
    if case.where != "steps" or not isinstance(clip, ExampleClipping):
        return None
    charged = replace(case, record=replace(case.record, per_example=replace(clip, layers="flat")))
    return Broken(charged, replace(case.record, per_example=replace(clip, layers="each")), streams)


def batch_forgotten(case: Case, streams: Streams) -> Broken | None:
    """Noise for the mean of a batch is added to its sum: a factor B is missing."""
    if case.where != "steps":
        return None
    return Broken(case, with_noise(case.record, 1 / case.record.examples.batch), streams)


def noise_reused(case: Case, streams: Streams) -> Broken | None:
    return Broken(case, case.record, Reused(streams.seed))


def statistic_unprotected(case: Case, streams: Streams) -> Broken | None:
    """The clip is the median of the updates, or the noise follows the greatest gradient, and nothing is charged."""
    record = case.record
    if case.where == "steps" and isinstance(record.per_example, ExampleClip | QuantileExampleClip):
        bound = record.per_example.bound({}, 0, 1)
        return Broken(case, replace(record, per_example=MaxClip(bound, record.per_example.layers)), streams)
    if case.where == "sum" and record.per_round is not None:
        return Broken(case, replace(record, per_update=MedianClip()), streams)
    return None


VARIANTS: dict[str, Callable[[Case, Streams], Broken | None]] = {
    "noise x 1/2": less_noise(0.5),
    "noise x 1/4": less_noise(0.25),
    "clip off": clip_off,
    "sensitivity off by sqrt M": layers_forgotten,
    "factor B missing": batch_forgotten,
    "noise reused": noise_reused,
    "median or maximum unprotected": statistic_unprotected,
}


class Reused(Streams):
    """Random numbers whose noise does not know the round, the attempt or the client."""

    def _key(self, purpose: str, *numbers: int) -> bytes:
        drawn = "noise" in purpose or "count" in purpose
        return super()._key(purpose, *(() if drawn else numbers))


def _altered(value: Any, **methods: Any) -> Any:
    """A record of the same fields, with other methods."""
    kind = type(type(value).__name__, (type(value),), methods)
    made: Any = object.__new__(kind)
    made.__dict__.update(value.__dict__)
    return made


def _unclipped_sum(self: AdaClip, at: Any, gradients: Any, real: Any) -> Any:
    moved = (gradients - at.mean.unsqueeze(1)) / at.spread().unsqueeze(1)
    return (moved * real.unsqueeze(2)).sum(1)
