"""What the local steps of a round are charged, where noise is added in each of them (boundary `per_step`).

A step adds z times what one record can move its sum by. Whoever sees the released model is taken to know who took
part: the choice of clients protects a record only where nobody can tell, and a client's other records usually do.
So the server, and someone who watches the local steps, see no more than that: one event for all three.
"""

from __future__ import annotations

import math

from shoal.accounting.claims import Observer, Unit
from shoal.accounting.events import Event, Gaussian, OnClients, Repeat, Sampled, SamplingKind, TwoLevel, Unbounded
from shoal.algorithms.base import Algorithm, Setting

KINDS: dict[str, SamplingKind] = {
    "poisson": "poisson",
    "with-replacement": "with-replacement",
    "shuffled": "shuffled",
    "fixed-order": "shuffled",  # a known order is no worse than an unknown one: neither is amplified
}
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
    z = per_step.multiplier(t, setting.rounds, batch) / clip.excess(setting.layers)
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


def _of_a_record(algorithm: Algorithm, setting: Setting, rate: float, z: float) -> Event:
    """One record is another one; on each of the clients that hold it, if they are several.

    These are charged as if each came by itself.
    """
    kind, batch = KINDS[algorithm.examples.sampling], algorithm.examples.batch
    uses = _uses(algorithm, setting)
    if not uses:
        return Unbounded(_UNKNOWN)
    if kind == "shuffled":  # the client that uses its records most often
        share, steps = max(uses, key=lambda use: math.ceil(use[0] * use[1] - 1e-9))
    else:  # no client has a greater share, and none makes more steps
        share, steps = (max(values) for values in zip(*uses, strict=True))
    if kind == "with-replacement" and share >= 1:  # all draws of a step may be of one record
        event = TwoLevel(rate, 1.0, steps, z / batch, local="none")
    else:
        event = TwoLevel(rate, share, steps, z, local=kind, draws=batch if kind == "with-replacement" else None)
    return event if setting.multiplicity == 1 else OnClients(setting.multiplicity, event)


def _uses(algorithm: Algorithm, setting: Setting) -> list[tuple[float, int]]:
    """For each size of client: the share of its records that enter a step, and its steps in a round."""
    examples, local = algorithm.examples, algorithm.local
    partition = KINDS[examples.sampling] == "shuffled"
    if not setting.sizes:
        if local.steps is None:
            return [(1.0, local.epochs)] if partition else []
        return [(1.0, local.steps)]
    uses = []
    for records in (max(1, size) for size in setting.sizes):
        share = 1 / examples.steps(records, 1) if partition else min(1.0, examples.batch / records)
        uses.append((share, local.steps or examples.steps(records, local.epochs)))
    return uses


def _of_a_client(algorithm: Algorithm, setting: Setting, rate: float, z: float, observer: Observer) -> Event:
    """All that a client has is something else: every record of a batch may pull the same way, then the other way.

    Such noise was made for one record. The figure is true, and far too large to protect anybody.
    """
    poisson, sizes = algorithm.examples.sampling == "poisson", setting.sizes
    if not sizes and (poisson or algorithm.local.steps is None):
        return Unbounded("how many records a client has is not known, nor how far all of them move a step")
    most = max(1, *sizes) if poisson else algorithm.examples.batch
    steps = {steps for _, steps in _uses(algorithm, setting)}
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
