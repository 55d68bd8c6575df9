"""A model that many clients train at once: `network(module)` picks the fastest way that is right.

| way | | for |
|---|---|---|
| rules | many clients at once, each layer by its own rule (`batched`) | models whose layers all have rules |
| vmap | many clients, or records, at once (`vmapped`) | models that torch.func.vmap can transform |
| compiled | the same under torch.compile, which takes a while at first | only by name |
| sequential | one client, or record, after the other (`sequential`) | any model |

Every way but the last is compared with plain gradients first, on synthetic records.

`Network.backward` runs the model forward and backward for clients with one parameter vector each and returns
a tape; `Tape.accumulate` then adds the gradient to any vectors, so that a plain SGD step needs no gradient
in memory: `tape.accumulate(params, -lr)`. A tape of `network(module, per_record=True)` also has the norm of
every record's gradient, and can weight the records: clipping needs no gradient of a record in memory either.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.gradients.layout import Layout, Personal
from shoal.gradients.losses import Losses, cross_entropy
from shoal.gradients.protocols import Network
from shoal.gradients.ways import Sizes, Trial, Way, Ways
from shoal.inputs import Inputs
from shoal.precision import no_autocast
from shoal.random.torch_generator import seeded

SLOWER = 1.05
"""A way that is slower than another by less than this is taken before it."""

Seconds = Callable[[Network], float]
"""What a way takes for one record, measured on synthetic ones."""


def network(
    module: nn.Module,
    sample: Inputs | None = None,
    targets: Tensor | None = None,
    *,
    losses: Losses = cross_entropy,
    way: Way = "auto",
    per_record: bool = False,
    kernels: bool = True,
    personal: Personal = 0,
    pieces: bool = False,
    seconds: Seconds | None = None,
    sizes: Sizes | None = None,
) -> Network:
    """The model by the way that is asked for, or by the fastest that is right.

    Args:
        module: The model.
        sample: A few inputs. With them every way is compared with plain gradients first, so that a model whose own
            code mixes records, or reaches into a layer, is never trained wrongly.
        targets: Their targets; class 0 if not given.
        losses: The loss of each record.
        way: How gradients are computed.
        per_record: Whether tapes must have the norm of each record's gradient.
        kernels: Whether layers use the fastest kernels of their device, else plain products.
        personal: The layers that stay with their clients.
        pieces: Whether batches are run in pieces, which a model that mixes their records does not allow.
        seconds: Measures a way, where one must be chosen; the first that is right if not given.
        sizes: Says how many records a way runs at once, at most. Rules are tried with as many, since the model's
            code may treat many records in another way than few.

    Returns:
        The network; its `way` says which it is, and its `because` why it is not by rules.

    Raises:
        ModelError: The way that is asked for, or pieces, cannot train this model.
    """
    ways = Ways(module, Layout.of(module, personal), losses, per_record, kernels, sizes)
    trial = None if sample is None else Trial(ways, sample, targets)
    with seeded(0), no_autocast():  # a trial leaves no trace
        found = _fastest(ways, trial, seconds) if way == "auto" else _named(ways, trial, way)
        if pieces and trial is not None and not trial.agrees("sequential"):
            raise ModelError("engine.micro_batch needs a model that does not mix records of a batch; leave it out")
    return found


def _named(ways: Ways, trial: Trial | None, way: Way) -> Network:
    if (refused := ways.refusal(way, trial)) is not None:
        raise ModelError(f"engine.way is {way}, but {refused}; set engine.way=auto")
    found = ways.make(way, trial)
    if way != "rules":
        found.because = ways.without_rules or f"engine.way is {way}"
    return found


def _fastest(ways: Ways, trial: Trial | None, seconds: Seconds | None) -> Network:
    """The first way that is right, or the fastest where that is not plain: rules are, but for recurrent layers."""
    why = ways.refusal("rules", trial)
    if why is None and not _recurrent(ways.module):
        return ways.make("rules", trial)
    first: Way = "rules" if why is None else "vmap"
    slow = None
    if first == "vmap":
        slow = "nothing is known of its inputs" if trial is None else ways.refusal(first, trial)
    right: tuple[Way, ...] = (first, "sequential") if slow is None else ("sequential",)
    made = [ways.make(way, trial) for way in right]
    times = [seconds(each) for each in made] if seconds is not None and len(made) > 1 else [0.0]
    found = made[0] if times[0] <= SLOWER * min(times) else made[1]
    if found.way == "vmap":
        found.because = why or ""
    elif found.way == "sequential":
        found.because = "; ".join(each for each in (why, slow or f"{first} would be slower here") if each)
    return found


def _recurrent(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.RNNBase | nn.RNNCellBase) for layer in module.modules())
