"""Recurrent layers, nn.RNN, nn.LSTM and nn.GRU, for many clients at once.

The inputs of all time steps are multiplied by their weights at once. What is left of a step is the product of the
hidden states, one for all clients, and the pointwise cell. The backward pass gives the gradients of what enters the
cell. With the inputs, and with the hidden states before each step, these are the gradients of the weights, as in a
linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shoal.errors import ModelError
from shoal.gradients.layers.client_layer import ClientLayer, Taped
from shoal.gradients.layers.linear import outputs
from shoal.gradients.layers.recurrent_cells import Cell, GRUCell, LSTMCell, RNNCell, Run, steps
from shoal.gradients.layers.recurrent_cuda import FusedGRUCell, FusedLSTMCell
from shoal.gradients.layers.rule import Rule, add_kept, keeps, product_squares, squared, trained, weighed
from shoal.gradients.layout import Entry
from shoal.mechanisms.update_clipping import summed_products
from shoal.precision import without_autocast

Saved = tuple[Tensor, ...]
States = tuple[Tensor, Tensor]


class Weights(NamedTuple):
    """The weights of inputs or of hidden states, and their bias."""

    weight: Entry
    bias: Entry | None


class SequenceRule(Rule):
    """Weights of every time step, from rows [N, T, in] for each of them and the same gradients [N, T, out]."""

    def __init__(self, *parts: Weights) -> None:
        self.parts, self.entries = parts, trained(*(entry for part in parts for entry in part))

    def forward(self, x: Tensor, params: Tensor) -> tuple[Tensor, Saved]:
        """Never asked for: the layer runs all steps itself."""
        raise AssertionError("the hidden states depend on one another")

    def input_gradient(self, saved: Saved, grad: Tensor, params: Tensor) -> Tensor:
        """Never asked for, either."""
        raise AssertionError("the hidden states depend on one another")

    def accumulate(self, saved: Saved, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        grads = _in_rows(grad, len(into))
        biases = [part.bias for part in self.parts if part.bias is not None]
        total = grads.sum(1) if biases else grads
        for part, rows in zip(self.parts, saved, strict=True):
            found = torch.bmm(grads.transpose(1, 2), _in_rows(rows, len(into)))
            part.weight.of(into).add_(found, alpha=scale)  # baddbmm_ would go from client to client on a CPU
        for bias in biases:
            bias.of(into).add_(total, alpha=scale)

    def accumulate_weighted(
        self, saved: Saved, kept: list[Tensor] | None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        if kept is not None:
            add_kept(kept, self.entries, factors, into, scale)
            return
        grads, inputs = (_in_rows(held, len(into)) for held in (weighed(grad, factors), self._inputs(saved)))
        total = summed_products(grads, inputs, grad.shape[1])
        weights = [part.weight for part in self.parts]
        biases = [part.bias for part in self.parts if part.bias is not None]
        found = torch.split(total, [entry.shape[1] for entry in weights] + [1] * len(biases), 2)
        for entry, part in zip(weights + biases, found, strict=True):
            entry.of(into).add_(part.view_as(entry.of(into)), alpha=scale)

    def squares(self, saved: Saved, grad: Tensor) -> tuple[Tensor, list[Tensor] | None]:
        """The squared norm of every gradient, in float64."""
        _, positions, outs = grad.shape
        if not all(keeps(positions, outs, rows.shape[2], grad) for rows in saved):
            return product_squares(self._inputs(saved), grad, False), None
        kept = []
        for part, rows in zip(self.parts, saved, strict=True):
            kept.append(torch.bmm(grad.transpose(1, 2), rows).flatten(1))
            if part.bias is not None:
                kept.append(grad.sum(1))
        return sum((squared(gradients) for gradients in kept[1:]), squared(kept[0])), kept

    def _inputs(self, saved: Saved) -> Tensor:
        """All that the gate gradients are multiplied by: the rows, and 1 for each bias."""
        biases = sum(part.bias is not None for part in self.parts)
        return torch.cat([*saved, saved[0].new_ones(1).expand(*saved[0].shape[:2], biases)], 2)


def _in_rows(held: Tensor, count: int) -> Tensor:
    """From [N, T, ...] to the positions of this many clients, or records."""
    return held.reshape(count, -1, held.shape[2])


class Direction(NamedTuple):
    """One direction of one layer; both of its weights have the same gradients, or each has a rule."""

    cell: Cell
    inputs: Weights
    hidden: Weights
    rules: tuple[SequenceRule, ...]
    backwards: bool

    @classmethod
    def of(cls, cell: Cell, inputs: Weights, hidden: Weights, backwards: bool) -> Direction:
        """The direction with these weights."""
        rules = (SequenceRule(inputs, hidden),) if cell.adds else (SequenceRule(inputs), SequenceRule(hidden))
        return cls(cell, inputs, hidden, rules, backwards)


class _Recurrence(torch.autograd.Function):
    """All hidden states [N, T, H] of one direction, and an LSTM's last cell; gradients are put on the tape."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h: Tensor | None,
        c: Tensor | None,
        anchor: Tensor,
        way: Direction,
        params: Tensor,
        tape: list[Any],
    ) -> tuple[Tensor, Tensor]:
        x = x.detach().contiguous()
        run = _begin(x, h, c, way, params)
        weight = way.hidden.weight.of(params).transpose(1, 2).contiguous()
        bias = None if way.hidden.bias is None else way.hidden.bias.of(params).unsqueeze(1)
        for step in run.order:
            before, inner = run.states[:, :, step.before], run.inner[:, :, step.time]
            if way.cell.adds:
                inner.baddbmm_(before, weight)
            elif bias is None:
                torch.bmm(before, weight, out=inner)
            else:
                torch.baddbmm(bias, before, weight, out=inner)
            way.cell.forward(run, step)
        ctx.saved, ctx.way, ctx.params, ctx.tape = (x, run), way, params, tape
        ctx.set_materialize_grads(False)
        after = run.states[:, :, :-1] if way.backwards else run.states[:, :, 1:]
        return after.flatten(0, 1).clone(), run.cells[:, :, run.order[-1].after].flatten(0, 1).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_cell: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, run), way, params, tape = ctx.saved, ctx.way, ctx.params, ctx.tape
        del ctx.saved, ctx.params, ctx.tape  # the tape holds them now; the graph must not as well
        weight = way.hidden.weight.of(params)
        rows = (run.states[:, :, 1:] if way.backwards else run.states[:, :, :-1]).flatten(0, 1)
        of_state, carried = (torch.zeros_like(held[:, :, 0]) for held in (run.states, run.cells))
        if of_cell is not None:
            carried += of_cell.view_as(carried)
        for step in reversed(run.order):
            if grad is not None:
                of_state += grad[:, step.time].view_as(of_state)
            past = way.cell.backward(run, step, of_state, carried)
            gates = run.inner[:, :, step.time]
            of_state = torch.bmm(gates, weight) if past is None else past.baddbmm_(gates, weight)
        held = ((x, rows),) if way.cell.adds else ((x,), (rows,))
        grads = run.given.flatten(0, 1), run.inner.flatten(0, 1)
        tape.extend(zip(way.rules, held, grads, strict=False))
        needs_x, needs_h, needs_c = ctx.needs_input_grad[:3]
        return (
            torch.bmm(run.given.flatten(1, 2), way.inputs.weight.of(params)).view(x.shape) if needs_x else None,
            of_state.flatten(0, 1) if needs_h else None,
            carried.flatten(0, 1) if needs_c else None,
            *[None] * 4,
        )


def _begin(x: Tensor, h: Tensor | None, c: Tensor | None, way: Direction, params: Tensor) -> Run:
    """The initial states, and what the inputs contribute, with the biases."""
    clients, length, (gates, size) = len(params), x.shape[1], way.hidden.weight.shape
    bias = None if way.inputs.bias is None else way.inputs.bias.of(params)
    if bias is not None and way.cell.adds:
        assert way.hidden.bias is not None
        bias = bias + way.hidden.bias.of(params)
    rows = x.view(clients, -1, x.shape[2])
    given = outputs(rows, way.inputs.weight.of(params), bias).view(clients, -1, length, gates)
    first = length if way.backwards else 0
    states = x.new_empty(*given.shape[:2], length + 1, size)
    states[:, :, first] = 0 if h is None else h.view_as(states[:, :, first])
    cells = torch.empty_like(states if isinstance(way.cell, LSTMCell) else states[..., :0])
    cells[:, :, first] = 0 if c is None else c.view_as(cells[:, :, first])
    inner = given if way.cell.adds else torch.empty_like(given)
    return Run(steps(length, way.backwards), states, given, inner, cells)


class RecurrentLayer(ClientLayer):
    """A recurrent layer with its sizes and settings, for models that ask."""

    dropout: float

    def __init__(self, module: nn.RNNBase, ways: Sequence[Direction], taped: Taped) -> None:
        super().__init__(module, tuple(rule for way in ways for rule in way.rules))
        self._ways, self._taped = ways, taped
        for name in module.__constants__:
            setattr(self, name, getattr(module, name))

    def flatten_parameters(self) -> None:
        """Nothing to do."""

    def forward(self, x: Tensor, hx: Tensor | States | None = None) -> tuple[Tensor, Tensor | States]:
        """The output and the last states, as PyTorch gives them."""
        x = self._by_record(x)
        h, c = hx if isinstance(hx, tuple) else (hx, None)
        many = 2 if self.bidirectional else 1
        last_h, last_c = [], []
        for layer in range(0, len(self._ways), many):
            found = []
            for place in range(layer, layer + many):
                states, cell = self._run(self._ways[place], x, *(s if s is None else s[place] for s in (h, c)))
                found.append(states)
                last_h.append(states[:, 0 if self._ways[place].backwards else -1])
                last_c.append(cell)
            x = torch.cat(found, -1) if many > 1 else found[0]
            if layer + many < len(self._ways):
                x = F.dropout(x, self.dropout, self.training)
        last = torch.stack(last_h)
        y = x if self.batch_first else x.transpose(0, 1)
        return y, (last, torch.stack(last_c)) if self.mode == "LSTM" else last

    def _by_record(self, x: Tensor) -> Tensor:
        """From what PyTorch takes to [N, T, in]."""
        records = self._taped.records
        if isinstance(x, PackedSequence) or x.dim() != 3 or x.shape[0 if self.batch_first else 1] != records:
            raise ModelError("a recurrent layer must get one padded sequence per record; set engine.way=sequential")
        return x if self.batch_first else x.transpose(0, 1)

    def _run(self, way: Direction, x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor]:
        taped = self._taped
        given = [s if s is None else s.to(taped.params.dtype) for s in (x, h, c)]
        with without_autocast(taped.params):
            found = _Recurrence.apply(*given, taped.anchor, way, taped.params, taped.tape)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor], found)


def recurrent_layer(
    module: nn.Module, entries: dict[int, Entry], taped: Taped, kernels: bool = True
) -> RecurrentLayer | None:
    """What replaces a recurrent layer, or None where no rule is certain to be correct."""
    if type(module) not in (nn.RNN, nn.LSTM, nn.GRU) or module._forward_hooks or module._forward_pre_hooks:
        return None
    assert isinstance(module, nn.RNNBase)
    own = {name: entries.get(id(p)) for name, p in module.named_parameters(recurse=False)}
    if module.proj_size or None in own.values():
        return None
    ways, cell = [], _cell(module.mode, kernels)
    for layer in range(module.num_layers):
        for end in ("", "_reverse")[: 2 if module.bidirectional else 1]:
            inputs, hidden = (
                Weights(cast(Entry, own[f"weight_{part}_l{layer}{end}"]), own.get(f"bias_{part}_l{layer}{end}"))
                for part in ("ih", "hh")
            )
            ways.append(Direction.of(cell, inputs, hidden, bool(end)))
    return RecurrentLayer(module, ways, taped)


def _cell(mode: str, kernels: bool) -> Cell:
    """The cell of a layer of this mode, by the fastest kernels or by plain operations."""
    if mode == "LSTM":
        return FusedLSTMCell() if kernels else LSTMCell()
    if mode == "GRU":
        return FusedGRUCell() if kernels else GRUCell()
    return RNNCell(mode == "RNN_RELU")
