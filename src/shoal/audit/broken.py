"""Methods that are broken on purpose: what an audit must catch, or its silence means nothing.

Each variant plays something else than what is charged: mistakes that real libraries made (noise off by a factor, a
clip that is ignored, noise drawn twice, ...). They are made from the method's own record, never by another engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from shoal.algorithms.base import Algorithm
from shoal.audit.cases import Case
from shoal.mechanisms.mechanism import Mechanism, altered
from shoal.mechanisms.sampling import Clients
from shoal.mechanisms.update_clipping import MedianClip
from shoal.random.streams import Streams


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

    def lessened(mechanism: Mechanism) -> Mechanism:
        noise = mechanism.noise_schedule()
        less = mechanism if noise is None else mechanism.with_noise(noise.scaled(share))
        return less.recounted(lambda count: count * share)

    return record.with_mechanisms(lessened)


def clip_off(case: Case, streams: Streams) -> Broken | None:
    """Noise as ever, on what nobody has clipped."""
    record = case.record
    if (case.where == "steps" or record.sums_gradients) and record.per_record is not None:
        return Broken(case, replace(record, per_record=record.per_record.unclipped()), streams)
    unclipped = record.per_update.unclipped() if record.per_update is not None else None
    return Broken(case, replace(record, per_update=unclipped), streams) if unclipped is not None else None


def layers_forgotten(case: Case, streams: Streams) -> Broken | None:
    """Each of M layers is clipped to C, and the sensitivity taken for C: off by sqrt M."""
    clip = case.record.per_record
    forgotten = clip.layers_forgotten() if case.where == "steps" and clip is not None else None
    if forgotten is None:
        return None
    charged, played = (replace(case.record, per_record=each) for each in forgotten)
    return Broken(replace(case, record=charged), played, streams)


def batch_forgotten(case: Case, streams: Streams) -> Broken | None:
    """Noise for the mean of a batch is added to its sum: a factor B is missing."""
    if case.where != "steps":
        return None
    return Broken(case, with_noise(case.record, 1 / case.record.records.batch), streams)


def noise_reused(case: Case, streams: Streams) -> Broken | None:
    return Broken(case, case.record, Reused(streams.seed))


def statistic_unprotected(case: Case, streams: Streams) -> Broken | None:
    """The clip is the median of the updates, or the noise follows the greatest gradient, and nothing is charged."""
    record, clip = case.record, case.record.per_record
    if case.where == "steps" and clip is not None and (following := clip.following_data()) is not None:
        return Broken(case, replace(record, per_record=following), streams)
    if case.where == "sum" and record.per_round is not None and not record.sums_gradients:
        return Broken(case, replace(record, per_update=MedianClip()), streams)
    return None


def cap_off(case: Case, streams: Streams) -> Broken | None:
    """All records of a user are used, and only as many charged as may be."""
    if case.unit != "user":
        return None
    records = replace(case.record.records, max_per_user=None)
    return Broken(case, replace(case.record, records=records), streams)


def one_more_colludes(case: Case, streams: Streams) -> Broken | None:
    """The shares of the noise were made for one colluding site less."""
    more = replace(case, colluding=case.colluding + 1)
    return Broken(more, case.record, streams) if case.colluding else None


def turns_known(case: Case, streams: Streams) -> Broken | None:
    """Rounds are charged as if each client's turn in a block were secret, and all have it in the first round."""
    clients, count = case.record.clients, case.setting.clients
    length = clients.cycle_length(count)
    if length == 1 or not clients.secret:
        return None

    def take_part(self: Clients, generator: object, state: object, t: int, *_: object) -> np.ndarray:
        return np.arange(0 if t % length else count)

    played = replace(case.record, clients=altered(clients, take_part=take_part))
    return Broken(case, played, streams)


VARIANTS: dict[str, Callable[[Case, Streams], Broken | None]] = {
    "noise x 1/2": less_noise(0.5),
    "noise x 1/4": less_noise(0.25),
    "clip off": clip_off,
    "sensitivity off by sqrt M": layers_forgotten,
    "factor B missing": batch_forgotten,
    "noise reused": noise_reused,
    "median or maximum unprotected": statistic_unprotected,
    "users uncapped": cap_off,
    "one more site colludes": one_more_colludes,
    "turns known": turns_known,
}


class Reused(Streams):
    """Random numbers whose noise does not know the round, the attempt or the client."""

    def _key(self, purpose: str, *numbers: int) -> bytes:
        drawn = "noise" in purpose or "count" in purpose
        return super()._key(purpose, *(() if drawn else numbers))
