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

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from shoal.calling import call, in_training
from shoal.errors import ModelError
from shoal.gradients.batched import BatchedNetwork, drawing, kinds_held, without_rule
from shoal.gradients.dropout import places_of
from shoal.gradients.layers.parameter import Kind, Shape, likely_shapes, only
from shoal.gradients.layout import Layout, Personal
from shoal.gradients.losses import Losses, cross_entropy
from shoal.gradients.sequential import RecordNetwork, SequentialNetwork
from shoal.gradients.vmapped import VmappedNetwork, VmappedRecordNetwork
from shoal.inputs import Inputs, count, device_of, each, joined, take
from shoal.random.noise_source import Product
from shoal.random.torch_generator import seeded

Shapes = dict[Kind, Shape]
_Functional = SequentialNetwork | RecordNetwork | VmappedNetwork
Way = Literal["auto", "rules", "vmap", "compiled", "sequential"]
NAMED = 3
"""The most layers that a message names."""
SLOWER = 1.05
"""A way that is slower than another by less than this is taken before it."""
LIKE_FEW, ALIKE = 0.01, 1e-5
"""How far outputs for a record may be apart, relative to the largest: among other numbers of records, or as many."""


class Tape(Protocol):
    """What a backward pass recorded: the gradient of each client's loss, not yet written anywhere."""

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""


class RecordTape(Tape, Protocol):
    """The gradients of each client's records, not yet written, nor even computed."""

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x sum_b factors[layer, k, b] gradient[k, b]; factors [1, K, B] are for all layers."""

    def accumulate_except(
        self, left: Callable[[Product], bool], into: Tensor, scale: float, factors: Tensor
    ) -> list[Product]:
        """The same, but for products that are added together with the noise in one pass."""

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order of `squares` and `factors`."""

    def squares(self) -> Tensor:
        """The squared norm of every record's gradient in each layer, [layers, K, B], in float64."""

    def records(self, views: int = 1) -> Tensor:
        """The gradients themselves, [K, B, P]; of so many rows each where a record has several views."""

    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0, once the norms are known, so that such records can be left out."""


class Network(Protocol):
    """A model with one parameter vector [P] per client.

    Attributes:
        layout: Where each parameter lies in the vector.
        way: How gradients are computed.
        because: Why not by rules; empty where they are.
        batched: Many clients at once, in several threads if need be; otherwise one after the other.
        draws: Whether a pass may draw random numbers, which then depend on who is trained before.
        drops: Whether a pass needs a seed for each record: dropout draws nothing else.
        recordable: Whether a step can be recorded as a CUDA graph: what it does depends on no value.
    """

    layout: Layout
    way: str
    because: str
    batched: bool
    draws: bool

    @property
    def drops(self) -> bool: ...

    @property
    def recordable(self) -> bool: ...

    def backward(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor | None = None) -> Tape:
        """The gradient of sum_b weights[k, b] loss(params[k]; x[k, b], y[k, b]), for every client k.

        Args:
            params: One vector per client, [K, P].
            x: Inputs, [K, B, ...], one tensor or several by name.
            y: Targets, [K, B, ...].
            weights: Weights of the records, [K, B]; 0 for padding.
            seeds: Decide what dropout drops of each record, [K, B]; may be missing where it `drops` nothing.

        Returns:
            A tape, from which the gradient can be added anywhere.
        """

    def losses(self, params: Tensor, x: Inputs, y: Tensor) -> Tensor:
        """The loss of every record [K, B] in eval mode, for clients with parameters [K, P]; without gradients."""

    def deferred_updates(self, start: Tensor, params: Tensor, batch: int) -> AbstractContextManager[None]:
        """While it is open, updates of `params` may be deferred where that is faster.

        Args:
            start: The parameters that all clients begin with: all [P], or the first, before personal ones.
            params: The clients' parameters, [K, P]; whole again when the context is left.
            batch: Records of one client in a step.
        """


Seconds = Callable[[Network], float]
"""What a way takes for one record, measured on synthetic ones."""
Sizes = Callable[[Network], tuple[int, int]]
"""How many clients are trained at once, and with how many records each."""


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
    ways = _Ways(module, Layout.of(module, personal), losses, per_record, kernels, sizes)
    trial = None if sample is None else _Trial(ways, sample, targets)
    with seeded(0):  # a trial leaves no trace
        found = _fastest(ways, trial, seconds) if way == "auto" else _named(ways, trial, way)
        if pieces and trial is not None and not trial.agrees("sequential"):
            raise ModelError("engine.micro_batch needs a model that does not mix records of a batch; leave it out")
    return found


def _named(ways: _Ways, trial: _Trial | None, way: Way) -> Network:
    if (refused := ways.refusal(way, trial)) is not None:
        raise ModelError(f"engine.way is {way}, but {refused}; set engine.way=auto")
    found = ways.make(way, trial)
    if way != "rules":
        found.because = ways.without_rules or f"engine.way is {way}"
    return found


def _fastest(ways: _Ways, trial: _Trial | None, seconds: Seconds | None) -> Network:
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


@dataclass(frozen=True, eq=False)
class _Ways:
    """All ways of one model."""

    module: nn.Module
    layout: Layout
    losses: Losses
    per_record: bool
    kernels: bool
    sizes: Sizes | None = None

    @cached_property
    def without_rules(self) -> str | None:
        """Which layers have no rule; None where all have."""
        layers = without_rule(self.module, self.layout)
        more = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
        return f"no rule for layer {', '.join(layers[:NAMED])}{more}" if layers else None

    def refusal(self, way: Way, trial: _Trial | None) -> str | None:
        """Why the model cannot be trained so; None where it can."""
        if way == "sequential":
            return None
        if way == "rules" and self.without_rules:
            return self.without_rules
        return self._refusal_untried(way) if trial is None else self._refusal_tried(way, trial)

    def _refusal_untried(self, way: Way) -> str | None:
        if random := drawing(self.module):
            return f"nothing is known of what layer {random[0]} draws"
        held = kinds_held(self.module, self.layout) if way == "rules" else []
        return f"the model's own code uses its parameter {held[0][0]}" if held else None

    def _refusal_tried(self, way: Way, trial: _Trial) -> str | None:
        if way == "compiled" and trial.places:
            return "a compiled step has no seeds for dropout"
        if trial.draws and (way == "rules" or not self.per_record):
            name = "rules" if way == "rules" else "vmap"
            return f"{name} would draw other random numbers for a client beside others"
        if not trial.agrees(way):
            own = "rules miss what the model's own code does: it mixes records, or reaches into a layer"
            return own if way == "rules" else "vmap cannot transform the model, or the model mixes records"
        if way == "rules" and self.sizes is not None:
            net = cast(BatchedNetwork, self.make(way, trial))
            if not _same_for_many(net, self.module, trial.sample, *self.sizes(net)):
                return "the model's code treats many records in another way than few"
        return None

    def make(self, way: Way, trial: _Trial | None = None) -> Network:
        """The network of a way; what may be recorded on CUDA is known after a trial."""
        if way == "rules":
            shapes, sample, drops = ({}, None, False) if trial is None else (trial.shapes, trial.sample, trial.places)
            return BatchedNetwork(
                self.module, self.layout, self.kernels, self.losses, shapes, sample, drops=bool(drops)
            )
        draws, places = (True, ()) if trial is None else (trial.draws, trial.places)
        made = self.functional(way, draws, places)
        if way == "sequential" and trial is not None:
            made.masks = trial.on_cuda and trial.agrees("sequential")
        return made

    def functional(self, way: Way, draws: bool = True, places: Sequence[int] = ()) -> _Functional:
        """A way that is not by rules; `places` are those of records in what dropout draws."""
        given, compiled = (self.module, self.losses, self.layout), way == "compiled"
        made: _Functional
        if way == "sequential":
            made = (RecordNetwork if self.per_record else SequentialNetwork)(*given)
            made.draws = draws
        elif self.per_record:
            made = VmappedRecordNetwork(*given, compiled=compiled, draws=draws)
        else:
            made = VmappedNetwork(*given, compiled=compiled)
        made.places = places
        return made


class _Trial:
    """A comparison of ways, in float64, for two different clients; the last record of the first has no weight.

    Dropout is by the same seeds in all ways. A model that draws other random numbers is compared in eval mode, where
    it should not, and must run in training mode.
    """

    def __init__(self, ways: _Ways, sample: Inputs, targets: Tensor | None) -> None:
        self.sample, self._targets, self.on_cuda = sample, targets, device_of(sample).type == "cuda"
        module, self._x = copy.deepcopy(ways.module).cpu().double(), each(sample, _of_two_clients)
        y = torch.zeros(count(sample), dtype=torch.int64) if targets is None else targets
        self._y = torch.stack([y, y[:1].expand_as(y)]).cpu()
        layout = Layout.of(module)
        start = _perturbed(layout.flatten(module))
        self._params = torch.stack([start, 0.9 * start])
        self._weights = torch.tensor([[1.0], [0.5]], dtype=torch.float64).repeat(1, len(y))
        if len(y) > 1:
            self._weights[0, -1] = 0
        self._seeds = torch.arange(self._weights.numel()).view(self._weights.shape)
        self._ways = _Ways(module, layout, ways.losses, ways.per_record, True)

    def _functional(self, way: Way) -> _Functional:
        return self._ways.functional(way, self.draws, self.places)

    @cached_property
    def _plain(self) -> list[Tensor] | None:
        return self._found(self._functional("sequential"))

    @cached_property
    def draws(self) -> bool:
        """Does a pass draw random numbers, but for dropout by seeds?"""
        return not self.places and self._draws(())

    @cached_property
    def places(self) -> list[int]:
        """Where records are in what dropout draws, if nothing else is drawn, also when a part is run again."""
        module, one = in_training(copy.deepcopy(self._ways.module)), each(self._x, _first)
        many = {1: one, 2: joined(one, one)}
        try:
            found = places_of(lambda times: call(module, many[times]), torch.device("cpu"))
        except Exception:
            return []
        return found if found and not self._draws(found) else []

    def _draws(self, places: Sequence[int]) -> bool:
        """Is there another draw than those of dropout with records in these places?"""
        with seeded(0):
            before = torch.get_rng_state()
            found = self._found(self._ways.functional("sequential", places=places))
            failed = bool(places) and found is None
            draws = failed or not torch.equal(torch.get_rng_state(), before)
        if not draws:
            self._plain = found  # with these places, which are then those of the model
        return draws

    @cached_property
    def shapes(self) -> Shapes | None:
        """The shapes in which the model's own code takes its parameters; None where rules give other gradients."""
        module, shapes = self._ways.module, Shapes()
        for kind in kinds_held(module, self._ways.layout):
            alone = _Trial(replace(self._ways, module=only(module, kind)), self.sample, self._targets)
            ways = ({kind: shape} for shape in likely_shapes(kind[1]))
            if (found := next(filter(alone._agree_by_rules, ways), None)) is None:
                return None
            shapes |= found
        return shapes if self._agree_by_rules(shapes) and self._agree_with_fewer(shapes) else None

    def _agree_with_fewer(self, shapes: Shapes) -> bool:
        """With one record less: a length that the code asks for may be the number of records, by chance."""
        fewer = slice(max(1, count(self.sample) - 1))
        targets = None if self._targets is None else self._targets[fewer]
        return not shapes or _Trial(self._ways, take(self.sample, fewer), targets)._agree_by_rules(shapes)

    def _agree_by_rules(self, shapes: Shapes) -> bool:
        ways = self._ways
        try:
            sample = each(self._x, _first)
            net = BatchedNetwork(
                ways.module, ways.layout, losses=ways.losses, shapes=shapes, sample=sample, drops=bool(self.places)
            )
        except Exception:
            return False
        return _all_close(self._found(net), self._plain)

    def agrees(self, way: Way) -> bool:
        """Does a way give plain gradients? Of the sequential one: also where padding stays in the batch?"""
        if way == "rules":
            return self.shapes is not None
        module, way = self._ways.module, "vmap" if way == "compiled" else way
        if self.draws and any(layer.training for layer in module.modules()):
            if self._found(self._functional(way)) is None:
                return False
            module.eval()
            self.__dict__.pop("_plain", None)
        other = self._functional(way)
        if way == "sequential":
            other.masks = True
        return _all_close(self._found(other), self._plain)

    def _found(self, net: Network) -> list[Tensor] | None:
        """The gradients, and at record level their squared norms; None where the model fails."""
        params = self._params.clone()  # running statistics are written into it
        grads = torch.zeros_like(params)
        try:
            tape = net.backward(params, self._x, self._y, self._weights, self._seeds)
            tape.accumulate(grads, 1.0)
            norms = [cast(RecordTape, tape).squares().sum(0)] if self._ways.per_record else []
        except Exception:
            return None
        return [grads, params, *norms]


def _same_for_many(net: BatchedNetwork, module: nn.Module, sample: Inputs, clients: int, batch: int) -> bool:
    """Does the model give a record of the sample what it gives it there, in a batch and in those of many clients?

    In float32. Other kernels may run for other numbers of records, so that only the first digits must be the same.
    Beside others, of as many and then of smaller numbers, all digits but the last must be.
    """
    few, params = count(sample), _perturbed(net.layout.flatten(module))
    held = joined(sample, each(sample, lambda part: part * 0.25 if part.is_floating_point() else part))

    def outputs(rows: Tensor) -> Tensor:
        x = each(held, lambda part: part[rows])
        return net.outputs(params.expand(len(rows), -1), x, rows.numel(), rows).detach()

    def same(found: Tensor, wanted: Tensor, digits: float) -> bool:
        return torch.allclose(found, wanted, rtol=0, atol=digits * float(wanted.abs().max()), equal_nan=True)

    try:
        wanted = outputs(torch.arange(few, device=device_of(sample)).unsqueeze(0))
        for many in {1, clients}:
            places = torch.arange(many * batch, device=device_of(sample))
            rows, own = places % few, places % 2 == 0
            among = rows, torch.where(own, rows + few, rows), torch.where(own, rows + few, few)
            found, large, small = (outputs(each.view(many, batch)) for each in among)
            if not (same(found, wanted[rows], LIKE_FEW) and same(large[own], small[own], ALIKE)):
                return False
    except torch.OutOfMemoryError:
        return True  # fewer are run at once, as they fit
    except Exception:
        return False
    return True


def _perturbed(params: Tensor) -> Tensor:
    """Parameters [P] near these: a layer that starts at zero would hide everything before it."""
    return params + 0.1 * torch.sin(torch.arange(len(params), device=params.device).double() * 12.9898).to(params)


def _first(sample: Tensor) -> Tensor:
    return sample[0]


def _of_two_clients(sample: Tensor) -> Tensor:
    x = torch.stack([sample.cpu(), sample[:1].cpu().expand_as(sample)])
    return x.double() if x.is_floating_point() else x


def _all_close(ours: list[Tensor] | None, theirs: list[Tensor] | None) -> bool:
    return ours is not None and theirs is not None and all(map(_close, ours, theirs))


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Relative to the largest, since little may reach a layer before training; but for what is 0 up to rounding."""
    return torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9 * max(1e-20, float(theirs.abs().max())))
