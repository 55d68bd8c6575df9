"""The cells of recurrent layers: what nn.RNN, nn.LSTM and nn.GRU do at one time step, for all clients."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

aten = torch.ops.aten


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

    `given` [K, B, T, gates] is what the inputs, then the hidden states contribute to the gates, then the gates.
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
        gate, h = run.given[:, :, step.time], run.states[:, :, step.after]
        torch.clamp(gate, min=0, out=h) if self.relu else torch.tanh(gate, out=h)

    def backward(self, run: Run, step: Step, grad: Tensor, carried: Tensor) -> None:
        """The gradient of what enters it."""
        gate, h = run.given[:, :, step.time], run.states[:, :, step.after]
        if self.relu:
            aten.threshold_backward.grad_input(grad, h, 0, grad_input=gate)
        else:
            aten.tanh_backward.grad_input(grad, h, grad_input=gate)


class LSTMCell(Cell):
    """i, f, g, o = W x + U h;  c <- sigmoid(f) c + sigmoid(i) tanh(g);  h <- sigmoid(o) tanh(c)."""

    gates = 4

    def forward(self, run: Run, step: Step) -> None:
        """The state after the step."""
        gates, h, c = run.given[:, :, step.time], run.states[:, :, step.after], run.cells[:, :, step.after]
        i, f, g, o = gates.chunk(4, -1)
        gates[..., : 2 * h.shape[-1]].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, run.cells[:, :, step.before], out=c).addcmul_(i, g)
        torch.tanh(c, out=h).mul_(o)

    def backward(self, run: Run, step: Step, grad: Tensor, carried: Tensor) -> None:
        """The gradients of what enters it."""
        i, f, g, o = run.given[:, :, step.time].chunk(4, -1)
        out = torch.tanh(run.cells[:, :, step.after])
        carried.add_(aten.tanh_backward(grad * o, out))
        aten.sigmoid_backward.grad_input(out.mul_(grad), o, grad_input=o)
        of_i, of_f, of_g = carried * g, carried * run.cells[:, :, step.before], carried * i
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
        given, inner, size = run.given[:, :, step.time], run.inner[:, :, step.time], run.states.shape[-1]
        r, z, n = given.chunk(3, -1)
        given[..., : 2 * size].add_(inner[..., : 2 * size]).sigmoid_()
        n.addcmul_(r, inner[..., 2 * size :]).tanh_()
        torch.lerp(n, run.states[:, :, step.before], z, out=run.states[:, :, step.after])

    def backward(self, run: Run, step: Step, grad: Tensor, carried: Tensor) -> Tensor:
        """The gradients of what enters it."""
        given, inner, size = run.given[:, :, step.time], run.inner[:, :, step.time], run.states.shape[-1]
        (r, z, n), inner_n = given.chunk(3, -1), inner[..., 2 * size :]
        past = grad * z
        of_z = (run.states[:, :, step.before] - n).mul_(grad)
        aten.tanh_backward.grad_input(grad - past, n, grad_input=n)
        of_r = n * inner_n
        torch.mul(n, r, out=inner_n)
        aten.sigmoid_backward.grad_input(of_r, r, grad_input=r)
        aten.sigmoid_backward.grad_input(of_z, z, grad_input=z)
        inner[..., : 2 * size] = given[..., : 2 * size]
        return past
