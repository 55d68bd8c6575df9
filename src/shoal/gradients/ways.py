"""The ways in which a model's gradients can be computed, and the trial that shows which of them are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor, nn

from shoal.calling import call, in_training
from shoal.copying import copied
from shoal.gradients.batched import BatchedNetwork, drawing, kinds_held, without_rule
from shoal.gradients.dropout import places_of
from shoal.gradients.layers.parameter import Kind, Shape, likely_shapes, only
from shoal.gradients.layout import Layout
from shoal.gradients.losses import Losses
from shoal.gradients.protocols import Network, RecordTape
from shoal.gradients.sequential import RecordNetwork, SequentialNetwork
from shoal.gradients.vmapped import VmappedNetwork, VmappedRecordNetwork
from shoal.inputs import Inputs, count, device_of, each, joined, take
from shoal.random.torch_generator import seeded

Shapes = dict[Kind, Shape]
Functional = SequentialNetwork | RecordNetwork | VmappedNetwork
Way = Literal["auto", "rules", "vmap", "compiled", "sequential"]
NAMED = 3
"""The most layers that a message names."""
LIKE_FEW, ALIKE = 0.01, 1e-5
"""How far outputs for a record may be apart, relative to the largest: among other numbers of records, or as many."""
Sizes = Callable[[Network], tuple[int, int]]
"""How many clients are trained at once, and with how many records each."""


@dataclass(frozen=True, eq=False)
class Ways:
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

    def refusal(self, way: Way, trial: Trial | None) -> str | None:
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

    def _refusal_tried(self, way: Way, trial: Trial) -> str | None:
        if way == "compiled" and trial.places:
            return "a compiled step has no seeds for dropout"
        if trial.draws and (way == "rules" or not self.per_record):
            name = "rules" if way == "rules" else "vmap"
            return f"{name} would draw other random numbers for a client beside others"
        if not trial.agrees(way):
            own = "rules miss what the model's own code does: it mixes records, or reaches into a layer"
            return own if way == "rules" else "vmap cannot transform the model, or the model mixes records"
        if way == "rules" and self.sizes is not None:
            trial.ruled = self._by_rules(trial)
            if not _same_for_many(trial.ruled, self.module, trial.sample, *self.sizes(trial.ruled)):
                return "the model's code treats many records in another way than few"
        return None

    def make(self, way: Way, trial: Trial | None = None) -> Network:
        """The network of a way; what may be recorded on CUDA is known after a trial."""
        if way == "rules":
            return (trial and trial.ruled) or self._by_rules(trial)
        draws, places = (True, ()) if trial is None else (trial.draws, trial.places)
        made = self.functional(way, draws, places)
        if way == "sequential" and trial is not None:
            made.masks = trial.on_cuda and trial.agrees("sequential")
        return made

    def _by_rules(self, trial: Trial | None) -> BatchedNetwork:
        shapes, sample, drops = ({}, None, False) if trial is None else (trial.shapes, trial.sample, trial.places)
        return BatchedNetwork(self.module, self.layout, self.kernels, self.losses, shapes, sample, drops=bool(drops))

    def functional(self, way: Way, draws: bool = True, places: Sequence[int] = ()) -> Functional:
        """A way that is not by rules; `places` are those of records in what dropout draws."""
        given, compiled = (self.module, self.losses, self.layout), way == "compiled"
        made: Functional
        if way == "sequential":
            made = (RecordNetwork if self.per_record else SequentialNetwork)(*given)
            made.draws = draws
        elif self.per_record:
            made = VmappedRecordNetwork(*given, compiled=compiled, draws=draws)
        else:
            made = VmappedNetwork(*given, compiled=compiled)
        made.places = places
        return made


class Trial:
    """A comparison of ways, in float64, for two different clients; the last record of the first has no weight.

    Dropout is by the same seeds in all ways. A model that draws other random numbers is compared in eval mode, where
    it should not, and must run in training mode.
    """

    ruled: BatchedNetwork | None = None
    """The network by rules that was tried, and need not be made again."""

    def __init__(self, ways: Ways, sample: Inputs, targets: Tensor | None) -> None:
        self.sample, self._targets, self.on_cuda = sample, targets, device_of(sample).type == "cuda"
        module, self._x = copied(ways.module).cpu().double(), each(sample, _of_two_clients)
        y = torch.zeros(count(sample), dtype=torch.int64) if targets is None else targets
        self._y = torch.stack([y, y[:1].expand_as(y)]).cpu()
        layout = Layout.of(module)
        start = _perturbed(layout.flatten(module))
        self._params = torch.stack([start, 0.9 * start])
        self._weights = torch.tensor([[1.0], [0.5]], dtype=torch.float64).repeat(1, len(y))
        if len(y) > 1:
            self._weights[0, -1] = 0
        self._seeds = torch.arange(self._weights.numel()).view(self._weights.shape)
        self._ways = Ways(module, layout, ways.losses, ways.per_record, True)

    def _functional(self, way: Way) -> Functional:
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
        module, one = in_training(copied(self._ways.module)), each(self._x, _first)
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
            alone = Trial(replace(self._ways, module=only(module, kind)), self.sample, self._targets)
            ways = ({kind: shape} for shape in likely_shapes(kind[1]))
            if (found := next(filter(alone._agree_by_rules, ways), None)) is None:
                return None
            shapes |= found
        return shapes if self._agree_by_rules(shapes) and self._agree_with_fewer(shapes) else None

    def _agree_with_fewer(self, shapes: Shapes) -> bool:
        """With one record less: a length that the code asks for may be the number of records, by chance."""
        fewer = slice(max(1, count(self.sample) - 1))
        targets = None if self._targets is None else self._targets[fewer]
        return not shapes or Trial(self._ways, take(self.sample, fewer), targets)._agree_by_rules(shapes)

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
