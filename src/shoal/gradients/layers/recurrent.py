"""Recurrent layers, nn.RNN, nn.LSTM and nn.GRU, for many clients at once.

The inputs of all time steps are multiplied by their weights at once. What is left of a step is the product of the
hidden states, one for all clients, and the pointwise cell. The backward pass gives the gradients of what enters the
cell. With the inputs, and with the hidden states before each step, these are the gradients of the weights, as in a
linear layer. Tensors are [K, T, B, ...]: the records of a client at one step lie together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shoal.errors import ModelError
from shoal.gradients.layers.client_layer import ClientLayer, Taped
from shoal.gradients.layers.linear import LinearRule, outputs
from shoal.gradients.layout import Entry
from shoal.mechanisms.update_clipping import row_sums, summed_products

aten = torch.ops.aten
States = tuple[Tensor, Tensor]


class SequenceRule(LinearRule):
    """The weights of a product at every time step, from its rows [K, T, B, in] and their gradients [K, T, B, out]."""

    def accumulate(self, saved: Tensor, grad: Tensor, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        if len(into) == len(saved):
            super().accumulate(saved.flatten(1, 2), grad.flatten(1, 2), into, scale)
        else:
            super().accumulate(_by_record(saved), _by_record(grad), into, scale)

    def product(self, saved: Tensor, kept: None, grad: Tensor, factors: Tensor, scale: float) -> None:
        """Positions of a record, which float32 must not sum."""
        return None

    def accumulate_weighted(
        self, saved: Tensor, kept: None, grad: Tensor, factors: Tensor, into: Tensor, scale: float
    ) -> None:
        """into[K, P] += scale x sum_b factors[k, b] gradient[k, b]."""
        grads = (grad * factors[:, None, :, None]).flatten(1, 2)
        self.weight.of(into).add_(summed_products(grads, saved.flatten(1, 2), saved.shape[1]), alpha=scale)
        if self.bias is not None:
            self.bias.of(into).add_(row_sums(grads, saved.shape[1]), alpha=scale)

    def squares(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        """The squared norm of every gradient, in float64."""
        return super().squares(_by_record(saved), _by_record(grad))


def _by_record(held: Tensor) -> Tensor:
    """From [K, T, B, ...] to [N, T, ...]."""
    return held.transpose(1, 2).reshape(-1, held.shape[1], held.shape[3])


class Step(NamedTuple):
    """A time step, and the places of the hidden states before and after it."""

    time: int
    before: int
    after: int


def steps(length: int, backwards: bool) -> list[Step]:
    """The steps in the order of a direction; of the T + 1 states, the initial one is the first or the last."""
    forwards = [Step(t, t, t + 1) for t in range(length)]
    return [Step(t, t + 1, t) for t in reversed(range(length))] if backwards else forwards


class Run(NamedTuple):
    """All that the backward pass needs. Cells overwrite it with the gradients.

    `given` [K, T, B, gates] is what the inputs, then the hidden states contribute to the gates, then the gates.
    `inner` is the hidden states' part of it, where the two are not added. `cells` are an LSTM's, as `states`.
    """

    order: list[Step]
    states: Tensor
    given: Tensor
    inner: Tensor
    cells: Tensor


class Cell(Protocol):
    """What a recurrent layer does at one step."""

    gates: int
    adds: bool = True  # does it add what inputs and hidden states contribute?

    def forward(self, run: Run, step: Step) -> None:
        """The state after the step, from the product of the state before it."""

    def backward(self, run: Run, step: Step, grad: Tensor, carried: Tensor) -> Tensor | None:
        """Put the gradients of the gates in their place, from `grad` of the state after the step.

        `carried` is the gradient of an LSTM's cell, changed in place from after the step to before it. Returns what
        the state before the step adds to the state after it directly.
        """


class RNNCell(Cell):
    """h <- tanh(W x + U h), or relu."""

    gates = 1

    def __init__(self, relu: bool) -> None:
        self.relu = relu

    def forward(self, run: Run, step: Step) -> None:
        """The state after the step."""
        gate, h = run.given[:, step.time], run.states[:, step.after]
        torch.clamp(gate, min=0, out=h) if self.relu else torch.tanh(gate, out=h)

    def backward(self, run: Run, step: Step, grad: Tensor, carried: Tensor) -> None:
        """The gradient of what enters it."""
        gate, h = run.given[:, step.time], run.states[:, step.after]
        if self.relu:
            aten.threshold_backward.grad_input(grad, h, 0, grad_input=gate)
        else:
            aten.tanh_backward.grad_input(grad, h, grad_input=gate)


class LSTMCell(Cell):
    """i, f, g, o = W x + U h;  c <- sigmoid(f) c + sigmoid(i) tanh(g);  h <- sigmoid(o) tanh(c)."""

    gates = 4

    def forward(self, run: Run, step: Step) -> None:
        """The state after the step."""
        gates, h, c = run.given[:, step.time], run.states[:, step.after], run.cells[:, step.after]
        i, f, g, o = gates.chunk(4, -1)
        gates[..., : 2 * h.shape[-1]].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, run.cells[:, step.before], out=c).addcmul_(i, g)
        torch.tanh(c, out=h).mul_(o)

    def backward(self, run: Run, step: Step, grad: Tensor, carried: Tensor) -> None:
        """The gradients of what enters it."""
        i, f, g, o = run.given[:, step.time].chunk(4, -1)
        out = torch.tanh(run.cells[:, step.after])
        carried.add_(aten.tanh_backward(grad * o, out))
        aten.sigmoid_backward.grad_input(out.mul_(grad), o, grad_input=o)
        of_i, of_f, of_g = carried * g, carried * run.cells[:, step.before], carried * i
        carried.mul_(f)
        aten.sigmoid_backward.grad_input(of_i, i, grad_input=i)
        aten.sigmoid_backward.grad_input(of_f, f, grad_input=f)
        aten.tanh_backward.grad_input(of_g, g, grad_input=g)


class GRUCell(Cell):
    """r, z = sigmoid(W x + U h);  n = tanh(W x + r U h);  h <- (1 - z) n + z h."""

    gates = 3
    adds = False

    def forward(self, run: Run, step: Step) -> None:
        """The state after the step."""
        given, inner, size = run.given[:, step.time], run.inner[:, step.time], run.states.shape[-1]
        r, z, n = given.chunk(3, -1)
        given[..., : 2 * size].add_(inner[..., : 2 * size]).sigmoid_()
        n.addcmul_(r, inner[..., 2 * size :]).tanh_()
        torch.lerp(n, run.states[:, step.before], z, out=run.states[:, step.after])

    def backward(self, run: Run, step: Step, grad: Tensor, carried: Tensor) -> Tensor:
        """The gradients of what enters it."""
        given, inner, size = run.given[:, step.time], run.inner[:, step.time], run.states.shape[-1]
        (r, z, n), inner_n = given.chunk(3, -1), inner[..., 2 * size :]
        past = grad * z
        of_z = (run.states[:, step.before] - n).mul_(grad)
        aten.tanh_backward.grad_input(grad - past, n, grad_input=n)
        of_r = n * inner_n
        torch.mul(n, r, out=inner_n)
        aten.sigmoid_backward.grad_input(of_r, r, grad_input=r)
        aten.sigmoid_backward.grad_input(of_z, z, grad_input=z)
        inner[..., : 2 * size] = given[..., : 2 * size]
        return past


class Direction(NamedTuple):
    """One direction of one layer: the rules of its inputs and of its hidden states."""

    cell: Cell
    inputs: SequenceRule
    hidden: SequenceRule
    backwards: bool


class _Recurrence(torch.autograd.Function):
    """All hidden states [K, T, B, H] of one direction, and an LSTM's last cell; gradients are put on the tape."""

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
            before = run.states[:, step.before]
            if way.cell.adds:
                run.given[:, step.time].baddbmm_(before, weight)
            elif bias is None:
                torch.bmm(before, weight, out=run.inner[:, step.time])
            else:
                torch.baddbmm(bias, before, weight, out=run.inner[:, step.time])
            way.cell.forward(run, step)
        ctx.saved, ctx.way, ctx.params, ctx.tape = (x, run), way, params, tape
        ctx.set_materialize_grads(False)
        after = run.states[:, :-1] if way.backwards else run.states[:, 1:]
        return after, run.cells[:, run.order[-1].after].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_cell: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, run), way, params, tape = ctx.saved, ctx.way, ctx.params, ctx.tape
        del ctx.saved, ctx.params, ctx.tape  # the tape holds them now; the graph must not as well
        weight = way.hidden.weight.of(params)
        rows = run.states[:, 1:] if way.backwards else run.states[:, :-1]
        of_state = torch.zeros_like(rows[:, 0])
        carried = run.cells[:, 0].clone().zero_() if of_cell is None else of_cell.clone()
        for step in reversed(run.order):
            if grad is not None:
                of_state += grad[:, step.time]
            past = way.cell.backward(run, step, of_state, carried)
            gates = run.inner[:, step.time]
            of_state = torch.bmm(gates, weight) if past is None else past.baddbmm_(gates, weight)
        tape.append((way.inputs, x, run.given))
        tape.append((way.hidden, rows, run.inner))
        of_x = way.inputs.input_gradient(x, run.given, params) if ctx.needs_input_grad[0] else None
        needs_h, needs_c = ctx.needs_input_grad[1:3]
        return of_x, of_state if needs_h else None, carried if needs_c else None, None, None, None, None


def _begin(x: Tensor, h: Tensor | None, c: Tensor | None, way: Direction, params: Tensor) -> Run:
    """The initial states, and what the inputs contribute, with the biases."""
    clients, length, batch, _ = x.shape
    gates, size = way.hidden.weight.shape
    bias = None if way.inputs.bias is None else way.inputs.bias.of(params)
    if bias is not None and way.cell.adds:
        assert way.hidden.bias is not None
        bias = bias + way.hidden.bias.of(params)
    given = outputs(x.flatten(1, 2), way.inputs.weight.of(params), bias).view(clients, length, batch, gates)
    first = length if way.backwards else 0
    states = x.new_empty(clients, length + 1, batch, size)
    states[:, first] = 0 if h is None else h
    cells = torch.empty_like(states if isinstance(way.cell, LSTMCell) else states[:, :, :, :0])
    cells[:, first] = 0 if c is None else c
    inner = given if way.cell.adds else torch.empty_like(given)
    return Run(steps(length, way.backwards), states, given, inner, cells)


class RecurrentLayer(ClientLayer):
    """A recurrent layer with its sizes and settings, for models that ask."""

    def __init__(self, module: nn.RNNBase, ways: Sequence[Direction], taped: Taped) -> None:
        super().__init__(module, tuple(rule for way in ways for rule in (way.inputs, way.hidden)))
        self._ways, self._taped = ways, taped
        for name in module.__constants__:
            setattr(self, name, getattr(module, name))

    def flatten_parameters(self) -> None:
        """Nothing to do."""

    def forward(self, x: Tensor, hx: Tensor | States | None = None) -> tuple[Tensor, Tensor | States]:
        """The output and the last states, as PyTorch gives them."""
        x = self._by_step(x)
        h, c = hx if isinstance(hx, tuple) else (hx, None)
        many = 2 if self.bidirectional else 1
        last_h, last_c = [], []
        for layer in range(0, len(self._ways), many):
            found = []
            for place in range(layer, layer + many):
                states, cell = self._run(self._ways[place], x, *(s if s is None else s[place] for s in (h, c)))
                found.append(states)
                last_h.append(states[:, 0 if self._ways[place].backwards else -1].flatten(0, 1))
                last_c.append(cell.flatten(0, 1))
            x = torch.cat(found, -1) if many > 1 else found[0]
        y = x.transpose(1, 2).flatten(0, 1) if self.batch_first else x.transpose(0, 1).flatten(1, 2)
        last = torch.stack(last_h)
        return y, (last, torch.stack(last_c)) if self.mode == "LSTM" else last

    def _by_step(self, x: Tensor) -> Tensor:
        """From what PyTorch takes to [K, T, B, in]."""
        taped = self._taped
        if isinstance(x, PackedSequence) or x.dim() != 3 or x.shape[0 if self.batch_first else 1] != taped.records:
            raise ModelError("a recurrent layer must get one padded sequence a record; set engine.batched=false")
        x = x.transpose(0, 1) if self.batch_first else x
        return torch.unflatten(x, 1, (len(taped.params), -1)).transpose(0, 1)

    def _run(self, way: Direction, x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor]:
        taped = self._taped
        shape = len(taped.params), -1
        first = [s if s is None else torch.unflatten(s, 0, shape) for s in (h, c)]
        found = _Recurrence.apply(x, *first, taped.anchor, way, taped.params, taped.tape)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor], found)


def recurrent_layer(module: nn.Module, entries: dict[int, Entry], taped: Taped) -> RecurrentLayer | None:
    """What replaces a recurrent layer, or None where no rule is certain to be correct."""
    if type(module) not in (nn.RNN, nn.LSTM, nn.GRU) or module._forward_hooks or module._forward_pre_hooks:
        return None
    assert isinstance(module, nn.RNNBase)
    own = {name: entries.get(id(p)) for name, p in module.named_parameters(recurse=False)}
    random = module.dropout > 0 and module.training and module.num_layers > 1
    if random or module.proj_size or None in own.values():
        return None
    cells = {"LSTM": LSTMCell(), "GRU": GRUCell(), "RNN_TANH": RNNCell(False), "RNN_RELU": RNNCell(True)}
    ways = []
    for layer in range(module.num_layers):
        for end in ("", "_reverse")[: 2 if module.bidirectional else 1]:
            inputs, hidden = (
                SequenceRule(cast(Entry, own[f"weight_{part}_l{layer}{end}"]), own.get(f"bias_{part}_l{layer}{end}"))
                for part in ("ih", "hh")
            )
            ways.append(Direction(cells[module.mode], inputs, hidden, bool(end)))
    return RecurrentLayer(module, ways, taped)
