"""What draws noise for the local steps of many clients: the interface that CPU and CUDA share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Product:
    """scale x grads^T rows [K, out, in], which belongs to the places of a vector from `start` on."""

    start: int
    rows: Tensor
    grads: Tensor
    scale: float


class Normals(Protocol):
    """The noise of K clients over the steps of a round: every call draws new numbers."""

    @property
    def fuses(self) -> bool:
        """May products be added with the noise? It spares a pass over the vectors."""

    def takes(self, product: Product) -> bool:
        """Can this one be added with the noise?"""

    def begin(self, other: Normals) -> None:
        """Draw from another one's streams from now on."""

    def add(self, into: Tensor, scales: Tensor, sums: Tensor | None = None, products: Sequence[Product] = ()) -> None:
        """into[k] += sums[k] + products + scales[k] N(0, 1), as one number, for every client k.

        Where a scale is 0 nothing is drawn, the rest is added all the same. The sums are taken: 0 is left of them.
        """


def between(products: Sequence[Product], size: int) -> Iterator[tuple[int, int]]:
    """The places of a vector that belong to none of the matrices."""
    start = 0
    for product in sorted(products, key=lambda product: product.start):
        if product.start > start:
            yield start, product.start
        start = product.start + product.rows.shape[2] * product.grads.shape[2]
    if size > start:
        yield start, size
