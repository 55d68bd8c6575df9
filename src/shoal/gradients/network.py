"""A model that many clients train at once: `network(module)` picks the fastest correct implementation.

`Network.backward` runs the model forward and backward for clients with one parameter vector each and returns
a tape; `Tape.accumulate` then adds the gradient to any vectors, so that a plain SGD step needs no gradient
in memory: `tape.accumulate(params, -lr)`. A tape of `network(module, per_record=True)` also has the norm of
every record's gradient, and can weight the records: clipping needs no gradient of a record in memory either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from shoal.calling import call
from shoal.gradients.batched import BatchedNetwork, kinds_held, without_rule
from shoal.gradients.layers.parameter import Kind, Shape, likely_shapes, only
from shoal.gradients.layout import Layout, Personal
from shoal.gradients.losses import Losses, cross_entropy
from shoal.gradients.sequential import RecordNetwork, SequentialNetwork
from shoal.inputs import Inputs, count, each
from shoal.random.noise_source import Product


class Tape(Protocol):
    """What a backward pass recorded: the gradient of each client's loss, not yet written anywhere."""

    def accumulate(self, into: Tensor, scale: float) -> None:
        """into[K, P] += scale x gradient."""


class RecordTape(Tape, Protocol):
    """The gradients of each client's records, not yet written, nor even computed."""

    def accumulate(self, into: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """into[K, P] += scale x sum_b factors[layer, k, b] gradient[k, b]; factors [1, K, B] are for all layers."""

    def accumulate_except(
        self, left: Callable[[Product], bool], into: Tensor, scale: float, factors: Tensor
    ) -> list[Product]:
        """The same, but for products that are added together with the noise in one pass."""

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order of `squares` and `factors`."""

    def squares(self) -> Tensor:
        """The squared norm of every record's gradient in each layer, [layers, K, B], in float64."""

    def records(self) -> Tensor:
        """The gradients themselves, [K, B, P]."""

    def make_finite(self) -> None:
        """Replace every NaN and Inf by 0, once the norms are known, so that such records can be left out."""


class Network(Protocol):
    """A model with one parameter vector [P] per client."""

    layout: Layout
    batched: bool

    def backward(self, params: Tensor, x: Inputs, y: Tensor, weights: Tensor) -> Tape:
        """The gradient of sum_b weights[k, b] loss(params[k]; x[k, b], y[k, b]), for every client k.

        Args:
            params: One vector per client, [K, P].
            x: Inputs, [K, B, ...], one tensor or several by name.
            y: Targets, [K, B, ...].
            weights: Weights of the records, [K, B]; 0 for padding.

        Returns:
            A tape, from which the gradient can be added anywhere.
        """

    def deferred_updates(self, start: Tensor, params: Tensor, batch: int) -> AbstractContextManager[None]:
        """While it is open, updates of `params` may be deferred where that is faster.

        Args:
            start: The parameters that all clients begin with: all [P], or the first, before personal ones.
            params: The clients' parameters, [K, P]; whole again when the context is left.
            batch: Records of one client in a step.
        """


def network(
    module: nn.Module,
    sample: Inputs | None = None,
    targets: Tensor | None = None,
    *,
    losses: Losses = cross_entropy,
    batched: bool = True,
    per_record: bool = False,
    kernels: bool = True,
    personal: Personal = 0,
) -> Network:
    """Batched over clients where every layer has a rule, else sequential: one client (or record) after another.

    Args:
        module: The model.
        sample: A few inputs. With them both implementations are compared first, so that a model whose own code
            mixes records, or reaches into a layer, is never trained wrongly.
        targets: Their targets; class 0 if not given.
        losses: The loss of each record.
        batched: Whether clients may be batched at all.
        per_record: Whether tapes must have the norm of each record's gradient.
        kernels: Whether layers use the fastest kernels of their device, else plain products.
        personal: The layers that stay with their clients.

    Returns:
        The network; its `batched` says which it is.
    """
    slow = RecordNetwork if per_record else SequentialNetwork
    layout = Layout.of(module, personal)
    if not batched or without_rule(module, layout):
        return slow(module, losses, layout)
    kinds, shapes, shared = kinds_held(module, layout), None, frozenset[str]()
    if sample is not None:
        y = torch.zeros(count(sample), dtype=torch.int64) if targets is None else targets
        shared = _shared_inputs(module, sample)
        shapes = _shapes_held(kinds, partial(_agreeing, sample, y, losses, slow, per_record, shared), module)
    elif not kinds:
        shapes = {}
    if shapes is None:
        return slow(module, losses, layout)
    return BatchedNetwork(module, layout, kernels, losses, shapes, shared)


Shapes = dict[Kind, Shape]


def _shared_inputs(module: nn.Module, sample: Inputs) -> frozenset[str]:
    """The names of embeddings whose input has no dimension for records, such as positions [T]."""
    module, found = copy.deepcopy(module), set()

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args and args[0].dim() == 1 and len(args[0]) != count(sample):
            found.add(name)

    for name, layer in module.named_modules():
        if type(layer) is nn.Embedding:
            layer.register_forward_pre_hook(partial(note, name))
    with suppress(Exception), torch.no_grad():
        call(module, sample)
    return frozenset(found)


def _shapes_held(
    kinds: list[Kind], agreeing: Callable[[nn.Module, Iterable[Shapes]], Shapes | None], module: nn.Module
) -> Shapes | None:
    """The shapes in which the model's own code takes its parameters; None where both implementations disagree."""
    shapes: Shapes = {}
    for kind in kinds:
        found = agreeing(only(module, kind), ({kind: shape} for shape in likely_shapes(kind[1])))
        if found is None:
            return None
        shapes |= found
    return agreeing(module, [shapes])


def _agreeing(
    sample: Inputs,
    targets: Tensor,
    losses: Losses,
    slow: type[SequentialNetwork],
    per_record: bool,
    shared: frozenset[str],
    module: nn.Module,
    ways: Iterable[Shapes],
) -> Shapes | None:
    """The first of these ways for which both implementations give the same gradient for two clients, in float64.

    The weights are perturbed first, since a layer that starts at zero would hide everything before it.
    """
    module, x = copy.deepcopy(module).cpu().double(), each(sample, _of_two_clients)
    layout = Layout.of(module)
    start = layout.flatten(module) + 0.1 * torch.sin(torch.arange(layout.size, dtype=torch.float64) * 12.9898)
    params = torch.stack([start, 0.9 * start])
    y = torch.stack([targets, targets[:1].expand_as(targets)]).cpu()
    weights = torch.tensor([[1.0], [0.5]], dtype=torch.float64).expand(2, len(targets))

    def gradients(way: Network) -> list[Tensor]:
        grads = torch.zeros_like(params)
        tape = way.backward(params, x, y, weights)
        tape.accumulate(grads, 1.0)
        return [grads, cast(RecordTape, tape).squares().sum(0)] if per_record else [grads]

    with suppress(Exception):
        expected = gradients(slow(module, losses))
        for shapes in ways:
            with suppress(Exception):
                found = gradients(BatchedNetwork(module, layout, losses=losses, shapes=shapes, shared=shared))
                if all(_close(ours, theirs) for ours, theirs in zip(found, expected, strict=True)):
                    return shapes
    return None


def _of_two_clients(sample: Tensor) -> Tensor:
    x = torch.stack([sample.cpu(), sample[:1].cpu().expand_as(sample)])
    return x.double() if x.is_floating_point() else x


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9 * max(1.0, float(theirs.abs().max())))
