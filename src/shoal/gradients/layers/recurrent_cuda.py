"""The cells of LSTM and GRU on CUDA: one kernel for a step, and one for its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.gradients.layers.recurrent_cells import GRUCell, LSTMCell, Run, Step
from shoal.kernels import tl, triton

BLOCK = 256  # numbers per program


class FusedLSTMCell(LSTMCell):
    """For float32 on CUDA; others use plain operations."""

    def forward(self, run: Run, step: Step) -> None:
        """The state after the step."""
        if not fits(run):
            return super().forward(run, step)
        before, after = run.cells[:, :, step.before], run.cells[:, :, step.after]
        _lstm[_grid(after)](
            run.given[:, :, step.time], before, after, run.states[:, :, step.after], *_sizes(run), BLOCK
        )

    def backward(self, run: Run, step: Step, grad: Tensor, carried: Tensor) -> None:
        """The gradients of what enters it."""
        if not fits(run):
            return super().backward(run, step, grad, carried)
        before, after = run.cells[:, :, step.before], run.cells[:, :, step.after]
        _lstm_back[_grid(after)](run.given[:, :, step.time], before, after, grad, carried, *_sizes(run), BLOCK)


class FusedGRUCell(GRUCell):
    """For float32 on CUDA; others use plain operations."""

    def forward(self, run: Run, step: Step) -> None:
        """The state after the step."""
        if not fits(run):
            return super().forward(run, step)
        given, inner = run.given[:, :, step.time], run.inner[:, :, step.time]
        before, after = run.states[:, :, step.before], run.states[:, :, step.after]
        _gru[_grid(after)](given, inner, before, after, *_sizes(run), BLOCK)

    def backward(self, run: Run, step: Step, grad: Tensor, carried: Tensor) -> Tensor:
        """The gradients of what enters it."""
        if not fits(run):
            return super().backward(run, step, grad, carried)
        given, inner, before = run.given[:, :, step.time], run.inner[:, :, step.time], run.states[:, :, step.before]
        _gru_back[_grid(before)](given, inner, before, grad, *_sizes(run), BLOCK)
        return grad


def fits(run: Run) -> bool:
    """Can the kernels be used?"""
    return triton is not None and run.given.is_cuda and run.given.dtype == torch.float32


def _grid(state: Tensor) -> tuple[int]:
    return (triton.cdiv(state.numel(), BLOCK),)


def _sizes(run: Run) -> tuple[int, int, int, int]:
    """The numbers of all states of a step, from record to record in the gates and in the states, and of a state."""
    return run.states[:, :, 0].numel(), run.given.stride(1), run.states.stride(1), run.states.shape[3]


if triton is not None:

    @triton.jit
    def _tanh(x):
        """To float32's last digits, also near 0."""
        far = tl.abs(x)
        left, near = tl.exp(-2 * far), tl.minimum(far, 0.1)
        square = near * near
        small = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
        return tl.where(far < 0.1, small, tl.where(x < 0, -1.0, 1.0) * (1 - left) / (1 + left))

    @triton.jit
    def _sigmoid(x):
        return 1 / (1 + tl.exp(-x))

    @triton.jit
    def _places(count, of_gates, of_states, H: tl.constexpr, BLOCK: tl.constexpr):
        """The places of numbers, in all and in states and gates that are further apart; which of them there are."""
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        record, own = (place // H).to(tl.int64), place % H
        return place, record * of_states + own, record * of_gates + own, place < count

    @triton.jit
    def _lstm(
        gates, before, after, h, count, of_gates, of_states, H: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """c <- f c + i g;  h <- o tanh(c); the gates are written where what enters them was."""
        _, state, gate, there = _places(count, of_gates, of_states, H, BLOCK)
        i = _sigmoid(tl.load(gates + gate, mask=there))
        f = _sigmoid(tl.load(gates + gate + H, mask=there))
        g = _tanh(tl.load(gates + gate + 2 * H, mask=there))
        o = _sigmoid(tl.load(gates + gate + 3 * H, mask=there))
        c = f * tl.load(before + state, mask=there) + i * g
        tl.store(gates + gate, i, mask=there)
        tl.store(gates + gate + H, f, mask=there)
        tl.store(gates + gate + 2 * H, g, mask=there)
        tl.store(gates + gate + 3 * H, o, mask=there)
        tl.store(after + state, c, mask=there)
        tl.store(h + state, o * _tanh(c), mask=there)

    @triton.jit
    def _lstm_back(
        gates, before, after, grad, carried, count, of_gates, of_states, H: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """The gradients of what enters the gates, in their place, and that of c, from after the step to before it."""
        place, state, gate, there = _places(count, of_gates, of_states, H, BLOCK)
        i, f = tl.load(gates + gate, mask=there), tl.load(gates + gate + H, mask=there)
        g, o = tl.load(gates + gate + 2 * H, mask=there), tl.load(gates + gate + 3 * H, mask=there)
        out = _tanh(tl.load(after + state, mask=there))
        of_h = tl.load(grad + place, mask=there)
        of_c = tl.load(carried + place, mask=there) + of_h * o * (1 - out * out)
        tl.store(gates + gate, of_c * g * i * (1 - i), mask=there)
        tl.store(gates + gate + H, of_c * tl.load(before + state, mask=there) * f * (1 - f), mask=there)
        tl.store(gates + gate + 2 * H, of_c * i * (1 - g * g), mask=there)
        tl.store(gates + gate + 3 * H, of_h * out * o * (1 - o), mask=there)
        tl.store(carried + place, of_c * f, mask=there)

    @triton.jit
    def _gru(
        given, inner, before, after, count, of_gates, of_states, H: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """h <- (1 - z) n + z h; the gates are written where what the inputs contribute to them was."""
        _, state, gate, there = _places(count, of_gates, of_states, H, BLOCK)
        r = _sigmoid(tl.load(given + gate, mask=there) + tl.load(inner + gate, mask=there))
        z = _sigmoid(tl.load(given + gate + H, mask=there) + tl.load(inner + gate + H, mask=there))
        n = tl.load(given + gate + 2 * H, mask=there) + r * tl.load(inner + gate + 2 * H, mask=there)
        n = _tanh(n)
        tl.store(given + gate, r, mask=there)
        tl.store(given + gate + H, z, mask=there)
        tl.store(given + gate + 2 * H, n, mask=there)
        tl.store(after + state, n + z * (tl.load(before + state, mask=there) - n), mask=there)

    @triton.jit
    def _gru_back(
        given, inner, before, grad, count, of_gates, of_states, H: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """The gradients of what enters the gates, in their places, and z grad in the place of grad."""
        place, state, gate, there = _places(count, of_gates, of_states, H, BLOCK)
        r, z = tl.load(given + gate, mask=there), tl.load(given + gate + H, mask=there)
        n, inner_n = tl.load(given + gate + 2 * H, mask=there), tl.load(inner + gate + 2 * H, mask=there)
        of_h = tl.load(grad + place, mask=there)
        of_n = of_h * (1 - z) * (1 - n * n)
        of_r = of_n * inner_n * r * (1 - r)
        of_z = of_h * (tl.load(before + state, mask=there) - n) * z * (1 - z)
        tl.store(given + gate, of_r, mask=there)
        tl.store(given + gate + H, of_z, mask=there)
        tl.store(given + gate + 2 * H, of_n, mask=there)
        tl.store(inner + gate, of_r, mask=there)
        tl.store(inner + gate + H, of_z, mask=there)
        tl.store(inner + gate + 2 * H, of_n * r, mask=there)
        tl.store(grad + place, of_h * z, mask=there)
