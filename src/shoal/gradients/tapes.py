"""Tapes of gradients that have been computed: summed over each client's records, or one for each record."""

from __future__ import annotations

from collections.abc import Sequence

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

    @classmethod
    def of(cls, layout: Layout, gradients: Tensor) -> GradientTape:
        """The tape of gradients [K, B, P]."""
        parts = [(entry, gradients[..., entry.start : entry.stop]) for entry in layout.entries]
        return cls(layout, parts, gradients.new_zeros(gradients.shape[:2]))

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x gradient."""
        for entry, gradients in self._gradients:
            place = into[:, entry.start : entry.stop]
            if factors is None:
                place.add_(gradients.sum(1), alpha=scale)
                continue
            weights = factors[self._place(entry) if len(factors) > 1 else 0].to(into.dtype)
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

    def records(self, views: int = 1) -> Tensor:
        """The gradients of single records, [K, B, P], of this many rows each."""
        clients, rows = self._like.shape
        found = self._like.new_zeros(clients, rows // views, self._size)
        for entry, gradients in self._gradients:
            of_views = gradients.reshape(clients, rows // views, views, -1)
            found[..., entry.start : entry.stop] = of_views.sum(2) if views > 1 else of_views.squeeze(2)
        return found

    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0."""
        self._gradients = [(entry, _finite(gradients)) for entry, gradients in self._gradients]

    def _place(self, entry: Entry) -> int:
        return self.layers.index(layer_of(entry.name))


def _finite(gradients: Tensor) -> Tensor:
    return torch.nan_to_num(gradients, nan=0.0, posinf=0.0, neginf=0.0)
