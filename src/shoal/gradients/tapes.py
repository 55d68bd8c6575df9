"""Tapes of gradients that have been computed: summed over each client's records, or one for each record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.gradients.layout import Entry, Layout, layer_of
from shoal.mechanisms.update_clipping import row_norms, weighed_sum
from shoal.precision import all_digits
from shoal.random.noise_source import Product

Gradients = Sequence[tuple[Entry, Tensor]]
"""The gradient of each tensor of parameters, flat, with a row for each client [K, n], or record [K, B, n]."""


class SumTape:
    """A tape of gradients summed over each client's records; those of several clients may come one by one."""

    def __init__(self, clients: Sequence[tuple[slice, Gradients]]) -> None:
        self._clients = clients

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""
        for rows, gradients in self._clients:
            for entry, gradient in gradients:
                into[rows, entry.start : entry.stop].add_(gradient, alpha=scale)


class GradientTape:
    """A tape of every record's gradient, for K clients with batches of B."""

    def __init__(self, layout: Layout, gradients: Gradients, like: Tensor) -> None:
        """`like`: zeros of shape [K, B]."""
        self.layers, self._size, self._gradients, self._like = layout.layer_names, layout.size, gradients, like

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient."""
        for entry, gradients in self._gradients:
            place = into[:, entry.start : entry.stop]
            if factors is None:
                place.add_(gradients.sum(1), alpha=scale)
                continue
            weights = factors[self._place(entry) if len(factors) > 1 else 0].to(gradients.dtype)
            with all_digits(weights):
                place.add_(weighed_sum(gradients, weights), alpha=scale)

    def accumulate_except(self, left: object, into: Tensor, scale: float, factors: Tensor) -> list[Product]:
        """Leaves no products out."""
        self.accumulate(into, scale, factors)
        return []

    def squares(self) -> Tensor:
        """The squared norm of every gradient, in float64."""
        found = self._like.new_zeros(len(self.layers), *self._like.shape, dtype=torch.float64)
        for entry, gradients in self._gradients:
            found[self._place(entry)] += row_norms(gradients.flatten(0, 1)).square().view(self._like.shape)
        return found

    def records(self) -> Tensor:
        """The gradients of single records, [K, B, P]."""
        found = self._like.new_zeros(*self._like.shape, self._size)
        for entry, gradients in self._gradients:
            found[..., entry.start : entry.stop] = gradients
        return found

    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0."""
        self._gradients = [(entry, _finite(gradients)) for entry, gradients in self._gradients]

    def _place(self, entry: Entry) -> int:
        return self.layers.index(layer_of(entry.name))


class PieceTape:
    """The same without all gradients in memory: a piece of the batch at a time, computed again for the sum.

    A gradient that comes out longer the second time, which no deterministic operation should do, is shortened.
    """

    def __init__(self, layout: Layout, pieces: Sequence[slice], tape_of: Callable[[slice], GradientTape]) -> None:
        """`pieces`: of the batch; `tape_of` gives the same tape of a piece whenever it is called."""
        self.layers, self._pieces, self._tape_of = layout.layer_names, pieces, tape_of
        self._squares, self._finite = torch.cat([tape_of(piece).squares() for piece in pieces], 2), False

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient."""
        total = torch.zeros_like(into, dtype=torch.float64)
        for piece in self._pieces:
            tape = self._tape_of(piece)
            if self._finite:
                tape.make_finite()
            if factors is None:
                tape.accumulate(total, scale)
            else:
                tape.accumulate(total, scale, factors[..., piece] * self._shortened(tape, piece, len(factors)))
        into += total

    def _shortened(self, tape: GradientTape, piece: slice, parts: int) -> Tensor:
        """At most 1: how much longer the gradients were when their norms were taken."""
        before, now = self._squares[..., piece], tape.squares()
        if parts == 1:
            before, now = before.sum(0, keepdim=True), now.sum(0, keepdim=True)
        return torch.where(now > before, (before / now).sqrt(), 1.0)

    def accumulate_except(self, left: object, into: Tensor, scale: float, factors: Tensor) -> list[Product]:
        """Leaves no products out."""
        self.accumulate(into, scale, factors)
        return []

    def squares(self) -> Tensor:
        """The squared norm of every gradient, in float64."""
        return self._squares

    def records(self) -> Tensor:
        """The gradients of single records, [K, B, P]."""
        tapes = [self._tape_of(piece) for piece in self._pieces]
        for tape in tapes if self._finite else ():
            tape.make_finite()
        return torch.cat([tape.records() for tape in tapes], 1)

    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0."""
        self._finite = True


def _finite(gradients: Tensor) -> Tensor:
    return torch.nan_to_num(gradients, nan=0.0, posinf=0.0, neginf=0.0)
