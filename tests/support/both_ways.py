"""Whole models by their rules and one record after another, compared in float64."""

from __future__ import annotations

import torch

from shoal.gradients import network
from shoal.gradients.batched import BatchedNetwork, without_rule
from shoal.gradients.layout import Layout
from shoal.gradients.losses import cross_entropy

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def batched(module, sample, losses=cross_entropy, targets=None, per_record=True):
    """The network of a model whose layers all have rules, as found with a sample."""
    assert without_rule(module, Layout.of(module)) == []
    found = network(module, sample, targets, losses=losses, per_record=per_record)
    assert isinstance(found, BatchedNetwork)
    return found


def assert_both_ways_agree(module, x, y=None, losses=cross_entropy, classes=3, sizes=()):
    """Gradients, norms of each layer and weighted sums, for clients with parameters of their own and empty places.

    Args:
        module: The model; it becomes float64.
        x: Records of every client, [K, B, ...].
        y: Their targets; classes are drawn if not given.
        losses: The loss of each record.
        classes: How many classes the model has.
        sizes: How many clients and records of each are compared; all at once if not given. The model is tried once.
    """
    module = module.double()
    y = torch.randint(0, classes, x.shape[:2]) if y is None else y
    sample = x.flatten(0, 1)[:3] if x.numel() else torch.ones(3, *x.shape[2:], dtype=x.dtype)
    targets = y.flatten(0, 1)[:3] if y.numel() else torch.zeros(3, *y.shape[2:], dtype=y.dtype)
    fast, plain = (batched(module, sample, losses, targets, records) for records in (True, False))
    start = fast.layout.flatten(module)
    start = start + 0.1 * torch.sin(torch.arange(len(start), dtype=torch.float64) * 12.9898)

    # The one to compare with needs no trial, but for where records are in what dropout draws.
    tried = (sample, targets) if fast.drops else ()
    slow, slow_plain = (
        network(module, *tried, losses=losses, per_record=per_record, way="sequential")
        for per_record in (True, False)
    )

    for clients, records in sizes or [x.shape[:2]]:
        params = torch.stack([start * (1 + 0.1 * k) for k in range(clients)])
        mask = (torch.rand(clients, records) > 0.2).double()
        seeds = torch.randint(-(2**62), 2**62, mask.shape)
        given = params, x[:clients, :records], y[:clients, :records], mask, seeds
        assert_sums_agree(params, plain.backward(*given), slow_plain.backward(*given))

        ours, theirs = fast.backward(*given), slow.backward(*given)
        squares = dict(zip(ours.layers, ours.squares(), strict=True))
        expected = dict(zip(theirs.layers, theirs.squares(), strict=True))
        for layer in expected | squares:
            nothing = torch.zeros_like(mask)
            torch.testing.assert_close(squares.get(layer, nothing), expected.get(layer, nothing), **CLOSE)
        torch.testing.assert_close(ours.records(), theirs.records(), **CLOSE)
        factors = torch.rand(1, *mask.shape, dtype=torch.float64)
        assert_sums_agree(params, ours, theirs, factors)
    return fast


def assert_sums_agree(params, ours, theirs, *factors):
    sums = [torch.zeros_like(params), torch.zeros_like(params)]
    for total, tape in zip(sums, (ours, theirs), strict=True):
        tape.accumulate(total, 0.7, *factors)
    torch.testing.assert_close(*sums, **CLOSE)
