"""A layer in which every client has parameters of its own, and the tape on which their gradients are put."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.calling import call
from shoal.errors import ModelError
from shoal.gradients.dropout import places_of
from shoal.gradients.layers.rule import Rule
from shoal.gradients.layout import Entry
from shoal.inputs import Inputs, joined, take
from shoal.precision import without_autocast


class Taped:
    """Runs layers by their rules, for the clients whose parameters are bound to it.

    `params` [K, P] are the clients' parameters. `tape` gets (rule, saved, gradient of the output) of each layer in
    the backward pass. `records` is K times the batch. `deferred` says which rules are replaced for now. `rows` is how
    many rows each layer gets for one record, where that is known; 0 if its input is the same for all records, such as
    positions [T]. That is found out once, since a batch of T records would hide it; so are the `places` of records in
    draws of dropout (`dropout.places_of`), and whether the model takes pictures with the channels `last` in memory,
    which its code may not `view` as rows.
    """

    params: Tensor
    tape: list[tuple[Rule, Any, Tensor]]
    records: int
    _short: Tensor | None

    def __init__(self) -> None:
        self.rows: dict[Rule, int] = {}
        self.deferred: dict[Rule, Any] = {}
        self.places: list[int] | None = None
        self.last = False
        self.watched: dict[Rule, list[int]] | None = None

    def bind(self, params: Tensor, tape: list[tuple[Rule, Any, Tensor]], records: int) -> None:
        """Run with these parameters from now on."""
        self.params, self.tape, self.records, self._short = params, tape, records, None
        self.anchor = params.new_zeros((), requires_grad=True)

    def __call__(self, rule: Rule, x: Tensor) -> Tensor:
        """The output of a layer by its rule."""
        if self.watched is not None:  # of one client, to which all rows belong
            self.watched.setdefault(rule, []).append(len(x))
            return self._run(rule, x)
        rows = self.rows.get(rule)
        if len(x) == 1:
            return self._run(rule, x.expand(self.records, *x.shape[1:]))
        if rows == 0:
            return self._run(rule, x.expand(self.records, *x.shape))
        if rows is not None and len(x) != rows * self.records:
            raise ModelError(
                f"layer {rule.layer} gets {len(x)} rows for {self.records} records, not {rows} for each; "
                "set engine.way=sequential"
            )
        if rows is not None and rows > 1 and rule.positions:
            return self._run(rule, x.reshape(self.records, rows, *x.shape[1:])).flatten(0, 1)
        return self._run(rule, x)

    def _run(self, rule: Rule, x: Tensor) -> Tensor:
        rule, params = self.deferred.get(rule, rule), self.params
        if torch.is_autocast_enabled(x.device.type):
            params = self._shortened(torch.get_autocast_dtype(x.device.type)) if rule.products else params
            x = x.to(params.dtype) if x.is_floating_point() else x
        with without_autocast(x):
            y: Tensor = _Layer.apply(x, self.anchor, rule, params, self.tape)  # type: ignore[no-untyped-call]
        return y

    def _shortened(self, dtype: torch.dtype) -> Tensor:
        """The parameters in the type of autocast, for layers that are products."""
        if self._short is None:
            self._short = self.params.to(dtype)
        return self._short

    def watch(self, module: nn.Module, params: Tensor, sample: Inputs) -> None:
        """Find out how many rows each layer gets for one record, from one client with one record and with two."""
        sample = joined(sample, sample)

        def run(records: int) -> None:
            self.bind(params.unsqueeze(0), [], records)
            call(module, take(sample, slice(records)))

        for self.last in (True, False):
            self.watched = {}
            try:
                self.places = places_of(run, params.device)
                break
            except Exception:  # a fault of the model itself comes up again where it is trained
                self.watched = {}
        for rule, rows in (self.watched or {}).items():
            calls = len(rows) // 2
            more = {two - one for one, two in zip(rows[:calls], rows[calls:], strict=True)}
            self.rows[rule] = more.pop() if len(more) == 1 else -1  # nothing fits -1
        self.watched = None


class _Layer(torch.autograd.Function):
    """A layer by its rule; the gradient of its parameters is put on the tape rather than computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, rule: Rule, params: Tensor, tape: list[Any]) -> Tensor:
        y, ctx.saved = rule.forward(x.detach(), params)  # saved tensors belong to no graph
        ctx.rule, ctx.params, ctx.tape, ctx.versions = rule, params, tape, _versions(ctx.saved)
        return y.data  # no view, which autograd would not let the model change in place, as ReLU(inplace=True) does

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rule, saved, params, tape = ctx.rule, ctx.saved, ctx.params, ctx.tape
        if _versions(saved) != ctx.versions:
            raise RuntimeError(f"the input of layer {rule.layer} was changed in place, and its gradient needs it")
        del ctx.saved, ctx.params, ctx.tape  # the tape holds them now; the graph must not as well
        tape.append((rule, saved, grad))
        before = rule.input_gradient(saved, grad, params) if ctx.needs_input_grad[0] else None
        return before, None, None, None, None


def _versions(saved: Any) -> list[int]:
    """How often each saved tensor, or one that it shares memory with, was changed in place."""
    if isinstance(saved, Tensor):
        return [saved._version]
    return [n for each in saved for n in _versions(each)] if isinstance(saved, tuple | list) else []


class ClientLayer(nn.Module):
    """What replaces a layer: `rules` are those of all its parameters, `entries` their places if not the rules' own.

    Its parameters have a type and a shape, for models that ask, but no values; its options are as they were.
    """

    def __init__(self, layer: nn.Module, rules: tuple[Rule, ...], entries: tuple[Entry, ...] = ()) -> None:
        super().__init__()
        options = {name: value for name, value in vars(layer).items() if isinstance(value, int | float | str | tuple)}
        self.__dict__.update({name: value for name, value in options.items() if not name.startswith("_")})
        self.rules = rules
        self.entries = entries or tuple(entry for rule in rules for entry in rule.entries)
        for name, parameter in layer._parameters.items():
            shape = None if parameter is None else torch.empty_like(parameter, device="meta", requires_grad=False)
            setattr(self, name, shape)


class RuledLayer(ClientLayer):
    """A layer of one rule, and what comes `before` it: a normalisation without parameters."""

    def __init__(self, layer: nn.Module, rule: Rule, before: Callable[[Tensor], Tensor], taped: Taped) -> None:
        super().__init__(layer, (rule,))
        self.rule, self._before, self._taped = rule, before, taped

    def forward(self, x: Tensor) -> Tensor:
        """The output, with each client's own parameters for its records."""
        return self._taped(self.rule, self._before(x))


class SpecialRule(Rule, Protocol):
    """A rule for some inputs alone."""

    def fits(self, x: Tensor, params: Tensor) -> bool:
        """Can it, for these inputs and the clients' parameters?"""


class SpecialLayer(RuledLayer):
    """A layer by a rule for some inputs where they fit, else by the one for all.

    Its output is pictures, with the channels last in memory.
    """

    def __init__(
        self, layer: nn.Module, rule: Rule, before: Callable[[Tensor], Tensor], taped: Taped, special: SpecialRule
    ) -> None:
        super().__init__(layer, rule, before, taped)
        self.special = special

    def forward(self, x: Tensor) -> Tensor:
        """The output, with each client's own parameters for its records."""
        taped = self._taped
        if taped.watched is not None:
            y = super().forward(x)
            return y.contiguous(memory_format=torch.channels_last) if taped.last and y.dim() == 4 else y
        a_row_each = taped.rows.get(self.rule) == 1 and len(x) == taped.records
        if not taped.last or not a_row_each or not self.special.fits(x, taped.params):
            return super().forward(x)
        with nullcontext() if self.special.products else without_autocast(x):
            return taped(self.special, x)
