"""Batched over clients: every layer with parameters is replaced by its rule; the model's own code runs as it is."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.calling import call, in_training
from shoal.errors import ModelError
from shoal.gradients.deferred import DeferredLinearRule, capacity_for
from shoal.gradients.layer_rule import Rule
from shoal.gradients.layers import LinearRule, rule_for
from shoal.gradients.layout import Layout
from shoal.gradients.losses import Losses, cross_entropy
from shoal.gradients.pooling_cuda import MaxPool, can_pool
from shoal.inputs import Inputs, each
from shoal.mechanisms.update_clipping import PIECE
from shoal.precision import all_digits
from shoal.random.noise_source import Product

Left = Callable[[Product], bool]


class BatchedNetwork:
    """A model whose layers all have rules."""

    way, because = "rules", ""
    batched, draws, recordable = True, False, True

    def __init__(
        self, module: nn.Module, layout: Layout, kernels: bool = True, losses: Losses = cross_entropy
    ) -> None:
        self.layout, self._losses = layout, losses
        self._bound = threading.local()
        self._module = in_training(_with_rules(copy.deepcopy(module), layout, self._bound, kernels))

    def backward(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor) -> LayerTape:
        """The tape of the gradients of a batch for every client."""
        tape = LayerTape(weights, params.shape[1], self.layout.layer_names)
        if weights.numel() == 0:
            return tape
        self._bound.params, self._bound.tape = params, tape
        self._bound.anchor, self._bound.records = params.new_zeros((), requires_grad=True), weights.numel()
        outputs = call(self._module, each(x, lambda part: part.flatten(0, 1)))
        losses = self._losses(outputs, y.flatten(0, 1))
        torch.autograd.backward((losses * weights.flatten()).sum())
        return tape

    @contextmanager
    def deferred_updates(self, start: Tensor, params: Tensor, batch: int) -> Iterator[None]:
        """A context in which updates of linear layers are kept as low-rank products."""
        rules = [layer.rule for layer in self._module.modules() if isinstance(layer, _ClientLayer)]
        used = Counter(entry for rule in rules for entry in rule.entries)
        capacities = {
            rule: capacity_for(rule, batch)
            for rule in rules
            if isinstance(rule, LinearRule)
            and rule.kernels
            and used[rule.weight] == 1
            and not params.is_cuda
            and not rule.weight.personal
        }
        clients = len(params)
        self._bound.deferred = {
            rule: DeferredLinearRule(rule, start, clients, rows) for rule, rows in capacities.items() if rows
        }
        try:
            yield
            for rule in self._bound.deferred.values():
                rule.flush(params)
        finally:
            del self._bound.deferred


class LayerTape(list[tuple[Rule, Any, Tensor]]):
    """A tape of each layer's input and the gradient of its output."""

    def __init__(self, weights: Tensor, size: int, layers: list[str]) -> None:
        super().__init__()
        self._weights, self._size, self._layers = weights, size, layers
        self._kept: list[Any] = []

    @torch.no_grad()
    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient."""
        if factors is not None:
            self.accumulate_except(None, into, scale, factors)
            return
        for rule, saved, grad in self:
            rule.accumulate(saved, grad, into, scale)

    @torch.no_grad()
    def accumulate_except(self, left: Left | None, into: Tensor, scale: float, factors: Tensor) -> list[Product]:
        """The same, but for products that are added together with the noise."""
        products = []
        for place, (rule, saved, grad) in enumerate(self):
            mine = factors[place if len(factors) > 1 else 0].to(grad.dtype)
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
        used = [entry for rule, _, _ in self for entry in rule.entries]
        if len(set(used)) < len(used):
            raise ModelError("some parameters are used twice for one record; set engine.batched=false")
        with all_digits(self._weights):
            found = [rule.squares(saved, grad) for rule, saved, grad in self]
        self._kept = [kept for _, kept in found]
        return torch.stack([squares for squares, _ in found]).view(len(self), *self._weights.shape)

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order of `squares`."""
        return [rule.entries[0].name.rpartition(".")[0] for rule, _, _ in self] or self._layers

    @torch.no_grad()
    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0."""
        self[:] = [(rule, finite(saved), finite(grad)) for rule, saved, grad in self]
        self._kept = finite(self._kept)

    def records(self) -> Tensor:
        """The gradients of single records, [K, B, P]."""
        gradients = self._weights.new_zeros(self._weights.numel(), self._size)
        self.accumulate(gradients, 1.0)
        return gradients.view(*self._weights.shape, self._size)


def finite(held: Any) -> Any:
    """What a tape holds, with 0 for every number that is not finite."""
    if isinstance(held, Tensor):
        return torch.nan_to_num(held, nan=0.0, posinf=0.0, neginf=0.0) if held.is_floating_point() else held
    return type(held)(finite(each) for each in held) if type(held) in (tuple, list) else held


class _Taped(torch.autograd.Function):
    """A layer by its rule; the gradient of its parameters is put on the tape rather than computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, rule: Rule, params: Tensor, tape: LayerTape) -> Tensor:
        y, ctx.saved = rule.forward(x.detach(), params)  # saved tensors belong to no graph
        ctx.rule, ctx.params, ctx.tape = rule, params, tape
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rule, saved, params, tape = ctx.rule, ctx.saved, ctx.params, ctx.tape
        del ctx.saved, ctx.params, ctx.tape  # the tape holds them now; the graph must not as well
        tape.append((rule, saved, grad))
        before = rule.input_gradient(saved, grad, params) if ctx.needs_input_grad[0] else None
        return before, None, None, None, None


class _ClientLayer(nn.Module):
    """A layer by its rule. Its parameters have a type and a shape, for models that ask, but no values."""

    def __init__(
        self, layer: nn.Module, rule: Rule, before: Callable[[Tensor], Tensor], bound: threading.local
    ) -> None:
        super().__init__()
        self.training, self.rule, self._before, self._bound = layer.training, rule, before, bound
        for name, parameter in layer.named_parameters(recurse=False):
            setattr(self, name, torch.empty_like(parameter, device="meta", requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        bound = self._bound
        if len(x) == 1:  # the same for all records, such as positions
            x = x.expand(bound.records, *x.shape[1:])
        rule = getattr(bound, "deferred", {}).get(self.rule, self.rule)
        y: Tensor = _Taped.apply(self._before(x), bound.anchor, rule, bound.params, bound.tape)  # type: ignore[no-untyped-call]
        return y


def _with_rules(module: nn.Module, layout: Layout, bound: threading.local, kernels: bool) -> nn.Module:
    entries = {entry.name: entry for entry in layout.entries}
    by_id = {id(p): entries[name] for name, p in module.named_parameters() if name in entries}
    if found := rule_for(module, by_id, kernels):
        return _ClientLayer(module, *found, bound)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if found := rule_for(child, by_id, kernels):
                setattr(parent, name, _ClientLayer(child, *found, bound))
            elif kernels and can_pool(child):
                setattr(parent, name, MaxPool(child))
    return module


def rules_cover(module: nn.Module, layout: Layout) -> bool:
    """Whether every trained parameter is in a layer that has a rule, and no layer mixes records or is random."""
    entries = {entry.name: entry for entry in layout.entries}
    named = {name: p for name, p in module.named_parameters() if name in entries}
    by_id = {id(p): entries[name] for name, p in named.items()}
    if any(_mixes_or_draws(child) for child in module.modules()):
        return False
    ruled = [child for child in module.modules() if rule_for(child, by_id)]
    return {id(p) for child in ruled for p in child.parameters(recurse=False) if p.requires_grad} == set(by_id)


def _mixes_or_draws(layer: nn.Module) -> bool:
    """Layers in eval mode do neither."""
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.training and layer.p > 0
    return isinstance(layer, nn.modules.batchnorm._NormBase) and (layer.training or layer.running_mean is None)
