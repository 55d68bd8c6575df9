"""What every way of computing gradients offers: a network of many clients, and the tape of a backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from shoal.gradients.layout import Layout
from shoal.inputs import Inputs
from shoal.mechanisms.sanitiser import Gradients


class Tape(Protocol):
    """What a backward pass recorded: the gradient of each client's loss, not yet written anywhere."""

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""


class RecordTape(Gradients, Tape, Protocol):
    """The gradients of each client's records, not yet written, nor even computed."""

    def records(self, views: int = 1) -> Tensor:
        """The gradients themselves, [K, B, P]; of this many rows each where a record has several views."""

    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0, once the norms are known, so that such records can be left out."""


class Network(Protocol):
    """A model with one parameter vector [P] per client.

    Attributes:
        layout: Where each parameter lies in the vector.
        way: How gradients are computed.
        because: Why not by rules; empty where they are.
        batched: Many clients at once, in several threads if need be; otherwise one after the other.
        draws: Whether a pass may draw random numbers, which then depend on who is trained before.
        drops: Whether a pass needs a seed for each record: dropout draws nothing else.
        recordable: Whether a step can be recorded as a CUDA graph: what it does depends on no value.
    """

    layout: Layout
    way: str
    because: str
    batched: bool
    draws: bool

    @property
    def drops(self) -> bool: ...

    @property
    def recordable(self) -> bool: ...

    def backward(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor, seeds: Tensor | None = None) -> Tape:
        """The gradient of sum_b weights[k, b] loss(params[k]; x[k, b], y[k, b]), for every client k.

        Args:
            params: One vector per client, [K, P].
            x: Inputs, [K, B, ...], one tensor or several by name.
            y: Targets, [K, B, ...].
            weights: Weights of the records, [K, B]; 0 for padding.
            seeds: Decide what dropout drops of each record, [K, B]; may be missing where it `drops` nothing.

        Returns:
            A tape, from which the gradient can be added anywhere.
        """

    def losses(self, params: Tensor, x: Inputs, y: Tensor) -> Tensor:
        """The loss of every record [K, B] in eval mode, for clients with parameters [K, P]; without gradients."""

    def deferred_updates(self, start: Tensor, params: Tensor, batch: int) -> AbstractContextManager[None]:
        """While it is open, updates of `params` may be deferred where that is faster.

        Args:
            start: The parameters that all clients begin with: all [P], or the first, before personal ones.
            params: The clients' parameters, [K, P]; whole again when the context is left.
            batch: Records of one client in a step.
        """
