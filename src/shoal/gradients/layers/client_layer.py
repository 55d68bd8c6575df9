"""A layer in which every client has parameters of its own, and the tape on which their gradients are put."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.gradients.layers.rule import Rule
from shoal.gradients.layout import Entry


class Taped(threading.local):
    """Runs layers by their rules, for the clients whose parameters are bound to this thread.

    `params` [K, P] are the clients' parameters. `tape` gets (rule, saved, gradient of the output) of each layer in
    the backward pass. `records` is K times the batch. `deferred` says which rules are replaced for now.
    """

    params: Tensor
    tape: list[tuple[Rule, Any, Tensor]]
    records: int

    def __init__(self) -> None:
        self.deferred: dict[Rule, Any] = {}

    def bind(self, params: Tensor, tape: list[tuple[Rule, Any, Tensor]], records: int) -> None:
        """Run with these parameters from now on."""
        self.params, self.tape, self.records = params, tape, records
        self.anchor = params.new_zeros((), requires_grad=True)

    def __call__(self, rule: Rule, x: Tensor) -> Tensor:
        """The output of a layer by its rule."""
        if len(x) == 1:  # the same for all records, such as positions
            x = x.expand(self.records, *x.shape[1:])
        rule = self.deferred.get(rule, rule)
        y: Tensor = _Layer.apply(x, self.anchor, rule, self.params, self.tape)  # type: ignore[no-untyped-call]
        return y


class _Layer(torch.autograd.Function):
    """A layer by its rule; the gradient of its parameters is put on the tape rather than computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, rule: Rule, params: Tensor, tape: list[Any]) -> Tensor:
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


class ClientLayer(nn.Module):
    """What replaces a layer: `rules` are those of all its parameters.

    Its parameters have a type and a shape, for models that ask, but no values; its options are as they were.
    """

    def __init__(self, layer: nn.Module, rules: tuple[Rule, ...]) -> None:
        super().__init__()
        options = {name: value for name, value in vars(layer).items() if isinstance(value, int | float | str | tuple)}
        self.__dict__.update({name: value for name, value in options.items() if not name.startswith("_")})
        self.rules = rules
        for name, parameter in layer._parameters.items():
            shape = None if parameter is None else torch.empty_like(parameter, device="meta", requires_grad=False)
            setattr(self, name, shape)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All the parameters that it trains."""
        return tuple(entry for rule in self.rules for entry in rule.entries)


class RuledLayer(ClientLayer):
    """A layer of one rule, and what comes `before` it: a normalisation without parameters."""

    def __init__(self, layer: nn.Module, rule: Rule, before: Callable[[Tensor], Tensor], taped: Taped) -> None:
        super().__init__(layer, (rule,))
        self.rule, self._before, self._taped = rule, before, taped

    def forward(self, x: Tensor) -> Tensor:
        """The output, with each client's own parameters for its records."""
        return self._taped(self.rule, self._before(x))
