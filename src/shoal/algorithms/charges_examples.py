"""What the local steps of a round are charged, where noise is added in each of them (boundary `per_step`).

A step adds z times what one record can move its sum by. Whoever sees the released model is taken to know who took
part: the choice of clients protects a record only where nobody can tell, and a client's other records usually do.
So the server, and someone who watches the local steps, see no more than that: one event for all three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from shoal.accounting.claims import Observer, Unit
from shoal.accounting.events import (
    BySize,
    Event,
    Gaussian,
    OnClients,
    Repeat,
    Sampled,
    SamplingKind,
    TwoLevel,
    Unbounded,
    Use,
    passes,
)
from shoal.algorithms.base import Algorithm, Setting
from shoal.privacy.example_clip import QuantileExampleClip
from shoal.privacy.secure import STEPS, charged

KINDS: dict[str, SamplingKind] = {
    "poisson": "poisson",
    "with-replacement": "with-replacement",
    "shuffled": "shuffled",
    "fixed-order": "shuffled",  # a known order is no worse than an unknown one: neither is amplified
}
FINE = 12
"""Kinds of clients that are charged each for itself; greater ones are taken together, in as many kinds."""
LARGEST_BATCH = 2**14
"""Records of a Poisson batch where nobody says how many a client has: a site that may draw more refuses."""
ONE_FOR_ANOTHER = "clients keep their momentum: who comes in a fixed-size sample shows in later updates of others"
HOW_MANY = (
    "each update has noise of its own, so that its amount tells how many came; a fixed-size cohort of fewer than all "
    "clients hides it"
)
WITH_ITS_NOISE = "each client adds noise of its own, and one that does not answer takes it along"
IN_TURN = "clients that come in turn are accounted only where the noise is on their sum"
_UNKNOWN = "how many records a client has is not known, so neither is how often one is used"


def in_steps(algorithm: Algorithm, setting: Setting, t: int, unit: Unit, observer: Observer) -> Event:
    """What the local steps of round t do to one unit, as one observer sees them."""
    clip, per_step, batch = algorithm.per_example, algorithm.per_step, algorithm.examples.batch
    if clip is None or per_step is None:
        return Unbounded("gradients are not clipped: one record can move a step by any amount")
    if clip.unproven is not None:
        return Unbounded(clip.unproven)
    z = _counted(algorithm, per_step.multiplier(t, setting.rounds, batch), setting) / clip.excess(setting.layers)
    if z == 0:
        return Unbounded("the noise is 0")
    if algorithm.clients.sampling == "cyclic":
        return Unbounded(IN_TURN)
    cohort = algorithm.clients.expected(t, setting.rounds, setting.clients)
    rate = cohort / setting.clients
    if unit == "example":
        # Of c clients in a fixed-size sample each comes, whoever came before it, with at most this probability.
        others = setting.multiplicity - 1 if algorithm.clients.sampling == "fixed-size" else 0
        return _of_a_record(algorithm, setting, min(1.0, cohort / max(1, setting.clients - others)), z)
    return _of_a_client(algorithm, setting, rate, z, observer)


def _counted(algorithm: Algorithm, z: float, setting: Setting) -> float:
    """What of the noise z counts: all of it, but in secure mode what rounding a sum leaves.

    One record changes the rounding of 128 additions in float32, or of the result alone (clip.summed_products): 129 or
    1 times 2^-24 of what the sum has, with it as without it. Then the sum is rounded onto its noise's grid. Where
    records are counted too, their noise makes that on gradients more than z, and so are the steps of its grid.
    """
    clip, batch = algorithm.per_example, algorithm.examples.batch
    if not setting.secure or z == 0:
        return z
    most = max(batch, *(setting.sizes or (LARGEST_BATCH,))) if algorithm.examples.sampling == "poisson" else batch
    z /= 1 + 2.0**-9 + most * 2.0**-23
    drawn = clip.update_noise(z, batch) if isinstance(clip, QuantileExampleClip) else z
    share = charged(drawn, STEPS, max(setting.parameters, 1)) / drawn
    if isinstance(clip, QuantileExampleClip):  # one record moves a count by 1/2, and rounding by a step of its grid
        share = min(share, 1 / (1 + 2.002 * clip.count_noise * batch / STEPS))
    return z * share


def _of_a_record(algorithm: Algorithm, setting: Setting, rate: float, z: float) -> Event:
    """One record is another one; on each of the clients that hold it, if they are several.

    These are charged as if each came by itself.
    """
    kind, batch = KINDS[algorithm.examples.sampling], algorithm.examples.batch
    found = uses(algorithm, setting)
    if not found:
        return Unbounded(_UNKNOWN)
    if kind == "shuffled":  # the client that uses its records most often
        found = [max(found, key=lambda use: passes(use[1], use[2]))]
    share, steps = max(share for _, share, _ in found), max(steps for _, _, steps in found)
    if kind == "with-replacement" and share >= 1:  # all draws of a step may be of one record
        worst, found = TwoLevel(rate, 1.0, steps, z / batch, local="none"), found[:1]
    else:
        worst = TwoLevel(rate, share, steps, z, local=kind, draws=batch if kind == "with-replacement" else None)
    if setting.multiplicity > 1:
        return OnClients(setting.multiplicity, worst)
    return worst if len(found) == 1 else BySize(worst, tuple(found))


def uses(algorithm: Algorithm, setting: Setting) -> list[Use]:
    """By clients' sizes: the share of its records that enter a step, and its steps in a round.

    The more records a client has, the smaller is the share, and the more steps it makes. So a stretch of sizes is
    charged for the share of its least and the steps of its greatest, which is exact where the steps are the same.
    """
    examples, local = algorithm.examples, algorithm.local
    steps = partial(_steps, algorithm)
    partition = KINDS[examples.sampling] == "shuffled"
    if not setting.sizes:
        if partition or local.steps is not None or examples.rate is not None:
            return [(0, examples.rate or 1.0, local.epochs if partition and local.steps is None else steps(1))]
        return []
    stretches: list[tuple[int, int]] = []
    for least, most in _sizes(setting, examples.batch):
        if stretches and steps(stretches[-1][0]) == steps(most) and not partition:
            stretches[-1] = stretches[-1][0], most
        else:
            stretches.append((least, most))
    if partition:
        return [(least, 1 / examples.steps(least, 1), steps(least)) for least, _ in stretches]
    return [(least, examples.share(least), steps(most)) for least, most in _few(stretches)]


def _steps(algorithm: Algorithm, records: int) -> int:
    return algorithm.local.steps or algorithm.examples.steps(records, algorithm.local.epochs)


def _sizes(setting: Setting, batch: int) -> Iterator[tuple[int, int]]:
    """The sizes of clients, in ascending order; where only bounds are known, all between, in stretches (from, to)."""
    sizes = sorted({max(1, size) for size in setting.sizes})
    if not setting.bounds:
        yield from ((size, size) for size in sizes)
        return
    least, last = sizes[0], sizes[-1]
    while least <= last:
        batches = max(math.ceil(least / batch), math.floor(1.01 * least / batch))  # wider ones for greater clients
        most = min(batches * batch, last)
        yield least, most
        least = most + 1


def _few(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most some 24 stretches: the least sizes, which cost most, as they are, greater ones a factor apart."""
    few, rest = stretches[:FINE], stretches[FINE:]
    if len(rest) <= FINE:
        return stretches
    factor = (rest[-1][1] / rest[0][0]) ** (1 / FINE)
    for least, most in rest:
        if len(few) > FINE and least < few[-1][0] * factor:
            few[-1] = few[-1][0], most
        else:
            few.append((least, most))
    return few


def _of_a_client(algorithm: Algorithm, setting: Setting, rate: float, z: float, observer: Observer) -> Event:
    """All that a client has is something else: every record of a batch may pull the same way, then the other way.

    Such noise was made for one record. The figure is true, and far too large to protect anybody.
    """
    poisson, sizes = algorithm.examples.sampling == "poisson", setting.sizes
    if not sizes and (poisson or algorithm.local.steps is None):
        return Unbounded("how many records a client has is not known, nor how far all of them move a step")
    most = max(1, *sizes) if poisson else algorithm.examples.batch
    steps = {_steps(algorithm, max(1, size)) for size in sizes or (1,)}
    if len(steps) > 1 or (algorithm.aggregate.weights == "size" and len(sizes) != 1):
        return Unbounded("clients of several sizes add noise of several amounts, which tell their sizes")
    if observer != "release":
        return TwoLevel(rate, 1.0, max(steps), z / most / 2, local="none")
    if algorithm.clients.sampling != "fixed-size" or rate == 1:
        # Only under fixed-size sampling does somebody else's noise take the place of a client that is not there.
        return Unbounded(HOW_MANY)
    if not setting.all_answer:
        return Unbounded(WITH_ITS_NOISE)
    if algorithm.local.remembers:
        return Unbounded(ONE_FOR_ANOTHER)
    return Sampled("fixed-size", rate, Repeat(Gaussian(z / most), max(steps)))
