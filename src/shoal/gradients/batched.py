"""Batched over clients: every layer with parameters is replaced by its rule; the model's own code runs as it is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.calling import call, evaluating, in_training
from shoal.copying import copied
from shoal.errors import ModelError
from shoal.gradients.dropout import dropping
from shoal.gradients.layers.attention import put_records_first
from shoal.gradients.layers.client_layer import ClientLayer, RuledLayer, SpecialLayer, Taped
from shoal.gradients.layers.deferred_linear import DeferredLinearRule, capacity_for
from shoal.gradients.layers.linear import LinearRule
from shoal.gradients.layers.merging import merged
from shoal.gradients.layers.parameter import HoldsParameters, Kind, Shape, hold_parameters, own_parameters
from shoal.gradients.layers.pooling_cuda import MaxPool, can_pool
from shoal.gradients.layers.rule import Item, Rule, wide
from shoal.gradients.layers.rules import client_layer
from shoal.gradients.layout import Entry, Layout, layer_of
from shoal.gradients.losses import Losses, cross_entropy
from shoal.gradients.sequential import with_same_tensors
from shoal.inputs import Inputs, each
from shoal.mechanisms.update_clipping import PIECE
from shoal.precision import all_digits, without_autocast
from shoal.random.noise_source import Product

Left = Callable[[Product], bool]


class BatchedNetwork:
    """A model whose layers all have rules."""

    way, because = "rules", ""
    batched, draws, recordable = True, False, True

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        kernels: bool = True,
        losses: Losses = cross_entropy,
        shapes: Mapping[Kind, Shape] | None = None,
        sample: Inputs | None = None,
        drops: bool = False,
    ) -> None:
        self.layout, self._losses, self.drops = layout, losses, drops
        self._whole, self._given = copied(module), (kernels, shapes, sample)
        self._threads = threading.local()
        _ = self._own  # what fails, fails here

    @property
    def _own(self) -> tuple[nn.Module, Taped]:
        """This thread's module and tape: code may keep what it computes, which is for no other thread's clients."""
        if not hasattr(self._threads, "own"):
            (kernels, shapes, sample), taped = self._given, Taped()
            module = in_training(_with_rules(with_same_tensors(self._whole), self.layout, taped, kernels, shapes))
            if sample is not None:
                taped.watch(module, self.layout.flatten(self._whole), sample)
            if self.drops and not taped.places:
                raise ModelError("no dimension of what dropout draws is that of records; set engine.way=auto")
            self._threads.own = module, taped
        own: tuple[nn.Module, Taped] = self._threads.own
        return own

    @property
    def faster_for_one(self) -> bool:
        """Has it convolutions, whose kernels for one client on a GPU are faster in bfloat16 than those for many?"""
        module, taped = self._own
        special = [layer.special for layer in module.modules() if isinstance(layer, SpecialLayer)]
        return taped.last and any(rule.products for rule in special)

    def backward(
        self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor | None = None
    ) -> LayerTape:
        """The tape of the gradients of a batch for every client."""
        tape = LayerTape(weights, params.shape[1], self.layout.layer_names)
        if weights.numel() == 0:
            return tape
        outputs = self.outputs(params, x, weights.numel(), seeds, tape)
        with without_autocast(params):
            losses = self._losses(outputs, y.flatten(0, 1))
            torch.autograd.backward((losses * weights.flatten()).sum())
        return tape

    def outputs(
        self, params: Tensor, x: Inputs, records: int, seeds: Tensor | None, tape: list[Item] | None = None
    ) -> Tensor:
        """What the model gives for all records, [N, ...]; their gradients are put on the tape."""
        module, taped = self._own
        taped.bind(params, [] if tape is None else tape, records)
        with dropping(seeds, taped.places if self.drops else None):
            return call(module, each(x, lambda part: part.flatten(0, 1)))

    @torch.no_grad()
    def losses(self, params: Tensor, x: Inputs, y: Tensor) -> Tensor:
        """The loss of every record, [K, B]."""
        if y.shape[1] == 0:
            return params.new_zeros(y.shape[:2])
        module, taped = self._own
        taped.bind(params, [], y.shape[:2].numel())
        with evaluating(module), without_autocast(params):
            outputs = call(module, each(x, lambda part: part.flatten(0, 1)))
            return self._losses(outputs, y.flatten(0, 1)).view(y.shape[:2])

    @contextmanager
    def deferred_updates(self, start: Tensor, params: Tensor, batch: int) -> Iterator[None]:
        """A context in which updates of linear layers are kept as low-rank products."""
        module, taped = self._own
        layers = [layer for layer in module.modules() if isinstance(layer, ClientLayer)]
        used = Counter(_ruled(module))
        capacities = {
            layer.rule: capacity_for(layer.rule, batch)
            for layer in layers
            if isinstance(layer, RuledLayer)
            and isinstance(layer.rule, LinearRule)
            and layer.rule.kernels
            and used[layer.rule.weight] == 1
            and not params.is_cuda
            and not layer.rule.weight.personal
        }
        clients = len(params)
        taped.deferred = {
            rule: DeferredLinearRule(rule, start, clients, rows) for rule, rows in capacities.items() if rows
        }
        try:
            yield
            for rule in taped.deferred.values():
                rule.flush(params)
        finally:
            taped.deferred = {}


class LayerTape(list[tuple[Rule, Any, Tensor]]):
    """A tape of each layer's input and the gradient of its output; in bfloat16 where they were computed so."""

    def __init__(self, weights: Tensor, size: int, layers: list[str]) -> None:
        super().__init__()
        self._weights, self._size, self._layers = weights, size, layers
        self._kept: list[Any] = []
        self._merged = False

    @torch.no_grad()
    def _merge(self) -> None:
        """Let every parameter be in one item alone: its norm is that of the sum over all its uses."""
        if not self._merged:
            self[:], self._merged = merged(self), True

    @torch.no_grad()
    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient."""
        if factors is not None:
            self.accumulate_except(None, into, scale, factors)
            return
        for rule, saved, grad in map(wide, self):
            rule.accumulate(saved, grad, into, scale)

    @torch.no_grad()
    def accumulate_except(self, left: Left | None, into: Tensor, scale: float, factors: Tensor) -> list[Product]:
        """The same, but for products that are added together with the noise."""
        products, layers = [], self.layers
        for place, (rule, saved, grad) in enumerate(map(wide, self)):
            mine = factors[layers.index(rule.layer) if len(factors) > 1 else 0].to(into.dtype)
            kept = self._kept[place] if self._kept else None
            product = rule.product(saved, kept, grad, mine, scale) if left else None
            if left and product and product.rows.shape[1] <= PIECE and left(product):
                rule.accumulate_rest(product, into)
                products.append(product)
            else:
                with all_digits(grad):
                    rule.accumulate_weighted(saved, kept, grad, mine, into, scale)
        return products

    @torch.no_grad()
    def squares(self) -> Tensor:
        """The squared norm of every gradient, in float64."""
        if not len(self):
            return self._weights.new_zeros(len(self._layers), *self._weights.shape, dtype=torch.float64)
        with all_digits(self._weights):
            self._merge()
            found = [rule.squares(saved, grad) for rule, saved, grad in map(wide, self)]
        self._kept = [kept for _, kept in found]
        totals: dict[str, Tensor] = {}
        for (rule, _, _), (squares, _) in zip(self, found, strict=True):
            totals[rule.layer] = totals[rule.layer] + squares if rule.layer in totals else squares
        return torch.stack(list(totals.values())).view(-1, *self._weights.shape)

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order of `squares`."""
        self._merge()
        return list(dict.fromkeys(rule.layer for rule, _, _ in self)) or self._layers

    @torch.no_grad()
    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0."""
        self[:] = [(rule, finite(saved), finite(grad)) for rule, saved, grad in self]
        self._kept = finite(self._kept)

    def records(self, views: int = 1) -> Tensor:
        """The gradients of single records, [K, B, P], of this many rows each."""
        clients, rows = self._weights.shape
        gradients = self._weights.new_zeros(clients * rows // views, self._size)
        self.accumulate(gradients, 1.0)
        return gradients.view(clients, rows // views, self._size)


def finite(held: Any) -> Any:
    """What a tape holds, with 0 for every number that is not finite."""
    if isinstance(held, Tensor):
        return torch.nan_to_num(held, nan=0.0, posinf=0.0, neginf=0.0) if held.is_floating_point() else held
    return type(held)(finite(each) for each in held) if type(held) in (tuple, list) else held


def _with_rules(
    module: nn.Module,
    layout: Layout,
    taped: Taped,
    kernels: bool = True,
    shapes: Mapping[Kind, Shape] | None = None,
) -> nn.Module:
    """The module with client layers in the place of its own; those without a rule stay."""
    by_id = _by_id(module, layout)
    made: dict[nn.Module, nn.Module] = {}

    def replaced(layer: nn.Module) -> nn.Module:
        if layer not in made:
            made[layer] = client_layer(layer, by_id, taped, kernels) or layer
            if kernels and can_pool(layer):
                made[layer] = MaxPool(layer)
            elif made[layer] is layer:
                put_records_first(layer)
                for name, child in list(layer._modules.items()):
                    layer._modules[name] = child and replaced(child)
                if own := own_parameters(layer, by_id):
                    hold_parameters(layer, own, taped, shapes)
        return made[layer]

    return replaced(module)


def _by_id(module: nn.Module, layout: Layout) -> dict[int, Entry]:
    """The place of each trained parameter, by its id."""
    entries = {entry.name: entry for entry in layout.entries}
    return {id(p): entries[name] for name, p in module.named_parameters() if name in entries}


def _ruled(module: nn.Module) -> list[Entry]:
    """The parameters that have a rule, once for each layer that uses them."""
    found: list[Entry] = []
    for layer in module.modules():
        if isinstance(layer, ClientLayer):
            found += layer.entries
        elif isinstance(layer, HoldsParameters):
            found += layer.client_parameters.values()
    return found


def kinds_held(module: nn.Module, layout: Layout) -> list[Kind]:
    """The kinds of parameters that the model's own code uses."""
    module = _with_rules(copied(module), layout, Taped())
    owners = [layer for layer in module.modules() if isinstance(layer, HoldsParameters)]
    kinds = ((name, entry.shape) for layer in owners for name, entry in layer.client_parameters.items())
    return list(dict.fromkeys(kinds))


def without_rule(module: nn.Module, layout: Layout) -> list[str]:
    """The layers that keep a model from being batched over clients: "name (Class)" of each.

    Their trained parameters have no rule, or they mix records.
    """
    hindering = {name: layer for name, layer in module.named_modules() if _mixes(layer)}
    ruled = _ruled(_with_rules(copied(module), layout, Taped()))
    for entry in layout.entries:
        if entry.trainable and entry not in ruled:
            name = layer_of(entry.name)
            hindering[name] = module.get_submodule(name)
    return [_described(name, layer) for name, layer in hindering.items()]


def mixing(module: nn.Module) -> list[str]:
    """The layers that mix the records of a batch: "name (Class)" of each."""
    return [_described(name, layer) for name, layer in module.named_modules() if _mixes(layer)]


def _described(name: str, layer: nn.Module) -> str:
    return f"{name or 'the model'} ({type(layer).__name__})"


def drawing(module: nn.Module) -> list[str]:
    """The layers that draw random numbers: "name (Class)" of each; its own code may draw too."""
    return [_described(name, layer) for name, layer in module.named_modules() if _draws(layer)]


def _draws(layer: nn.Module) -> bool:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.training and layer.p > 0
    several = not isinstance(layer, nn.RNNBase) or layer.num_layers > 1
    return isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.training and layer.dropout > 0 and several


def _mixes(layer: nn.Module) -> bool:
    """Layers in eval mode do not."""
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return layer.training and layer.track_running_stats
    return isinstance(layer, nn.modules.batchnorm._NormBase) and (layer.training or layer.running_mean is None)
