"""A model that many clients train at once: `network(module)` picks the way that is right and fastest.

`Network.backward` runs the model forward and backward for clients with a parameter vector each and returns
a tape; `Tape.accumulate` then adds the gradient to any vectors, so that a plain SGD step needs no gradient
in memory: `tape.accumulate(params, -lr)`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from shoal.gradients.layout import Layout
from shoal.gradients.rules import Rule, rule_for


class Tape(Protocol):
    """The gradient of each client's loss, not yet written anywhere."""

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""


class Network(Protocol):
    """A model whose parameters are one vector [P] a client."""

    layout: Layout
    together: bool

    def backward(self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tape:
        """The gradient of sum_b weights[k, b] loss(params[k]; x[k, b], y[k, b]), for every client k."""


def network(module: nn.Module, sample: Tensor | None = None, *, together: bool = True) -> Network:
    """All clients together where every layer has a rule, else one client after the other.

    With a sample of the input (any few examples) the two ways are compared first, so that a model whose own
    code mixes examples, or reaches into a layer, is never trained wrongly.
    """
    apart = ApartNetwork(module)
    if not together or not _rules_cover(module, apart.layout):
        return apart
    fast = TogetherNetwork(module, apart.layout)
    return fast if sample is None or _agree(fast, apart, module, sample) else apart


def example_losses(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


class TogetherNetwork:
    """Every layer with parameters is replaced by its rule; the model's own code runs as it is."""

    together = True

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self._bound = threading.local()
        self._module = _with_rules(copy.deepcopy(module), layout, self._bound).train()

    def backward(self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> _Records:
        self._bound.params, self._bound.records = params, _Records()
        self._bound.anchor = params.new_zeros((), requires_grad=True)
        logits = self._module(x.flatten(0, 1))
        (example_losses(logits, y.flatten()) * weights.flatten()).sum().backward()
        return self._bound.records


class _Records(list[tuple[Rule, Any, Tensor]]):
    """What each layer saw: its input, and the gradient of its output."""

    @torch.no_grad()
    def accumulate(self, into: Tensor, scale: float) -> None:
        for rule, saved, grad in self:
            rule.accumulate(saved, grad, into, scale)


class _Taped(torch.autograd.Function):
    """A layer by its rule; the gradient of its parameters is put on the tape rather than computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, rule: Rule, params: Tensor, records: _Records) -> Tensor:
        y, ctx.saved = rule.forward(x, params)
        ctx.rule, ctx.params, ctx.records = rule, params, records
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rule, saved, params, records = ctx.rule, ctx.saved, ctx.params, ctx.records
        del ctx.saved, ctx.params, ctx.records  # the tape holds them now; the graph must not as well
        records.append((rule, saved, grad))
        before = rule.input_gradient(saved, grad, params) if ctx.needs_input_grad[0] else None
        return before, None, None, None, None


class _ClientLayer(nn.Module):
    def __init__(self, rule: Rule, before: Callable[[Tensor], Tensor], bound: threading.local) -> None:
        super().__init__()
        self._rule, self._before, self._bound = rule, before, bound

    def forward(self, x: Tensor) -> Tensor:
        bound = self._bound
        return _Taped.apply(self._before(x), bound.anchor, self._rule, bound.params, bound.records)


def _with_rules(module: nn.Module, layout: Layout, bound: threading.local) -> nn.Module:
    entries = {entry.name: entry for entry in layout.entries}
    by_id = {id(p): entries[name] for name, p in module.named_parameters() if name in entries}
    if found := rule_for(module, by_id):
        return _ClientLayer(*found, bound)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if found := rule_for(child, by_id):
                setattr(parent, name, _ClientLayer(*found, bound))
    return module


_MIXES_OR_DRAWS = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


def _rules_cover(module: nn.Module, layout: Layout) -> bool:
    entries = {entry.name: entry for entry in layout.entries}
    named = {name: p for name, p in module.named_parameters() if name in entries}
    by_id = {id(p): entries[name] for name, p in named.items()}
    if any(isinstance(child, _MIXES_OR_DRAWS) for child in module.modules()):
        return False
    covered = {id(p) for child in module.modules() if rule_for(child, by_id) for p in child.parameters(recurse=False)}
    frozen_inside = any(not p.requires_grad for p in module.parameters())
    return not frozen_inside and covered == set(by_id)


class ApartNetwork:
    """One client after the other, by autograd: any model at all, also BatchNorm and Dropout."""

    together = False

    def __init__(self, module: nn.Module) -> None:
        self.layout = Layout.of(module)
        self._module = copy.deepcopy(module).train()

    def backward(self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> _Vectors:
        total = torch.zeros_like(params)
        for k in range(len(params)):
            real = weights[k] > 0
            if real.any():
                self._one(params[k], x[k][real], y[k][real], weights[k][real], total[k])
        return _Vectors(total)

    def _one(self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor, total: Tensor) -> None:
        views = self.layout.views(params)
        trainable = [entry for entry in self.layout.entries if entry.trainable]
        for entry in trainable:
            views[entry.name] = views[entry.name].detach().requires_grad_()
        logits = functional_call(self._module, views, (x,))
        loss = (example_losses(logits, y) * weights).sum()
        grads = torch.autograd.grad(loss, [views[e.name] for e in trainable], allow_unused=True)
        for entry, grad in zip(trainable, grads, strict=True):
            if grad is not None:
                total[entry.start : entry.stop] = grad.reshape(-1)


class _Vectors:
    def __init__(self, vectors: Tensor) -> None:
        self._vectors = vectors

    def accumulate(self, into: Tensor, scale: float) -> None:
        into.add_(self._vectors, alpha=scale)


def _agree(fast: Network, apart: Network, module: nn.Module, sample: Tensor) -> bool:
    """Do both ways give the same gradient, for two clients with different parameters and records?"""
    x = torch.stack([sample, sample[:1].expand_as(sample)])
    start = fast.layout.flatten(module).to(sample.device)
    params = torch.stack([start, 0.9 * start])
    y = torch.zeros(x.shape[:2], dtype=torch.int64, device=sample.device)
    weights = torch.tensor([[1.0], [0.5]], device=sample.device).expand(x.shape[:2])
    found = []
    for way in (fast, apart):
        grads = torch.zeros_like(params)
        try:
            way.backward(params, x, y, weights).accumulate(grads, 1.0)
        except (RuntimeError, AttributeError, TypeError, IndexError):
            return False
        found.append(grads)
    return torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-5 * max(1.0, float(found[1].abs().max())))
