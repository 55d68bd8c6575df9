"""Infer labels from the gradient of the last layer, before any search (iDLG, CPL).

With cross-entropy the gradient of row c is sum_b (p_bc - 1[y_b = c]) h_b/B. One record: where its features h are
positive (sigmoid, ReLU) only the row of its label is negative. A batch of B: row c sums to about
s H (p_c - n_c/B), with n_c the number of labels c. The attacker knows the model, so that p and the features' sum H
come from dummy inputs; s is 1, or what a clip made of it, and is found together with the n_c.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.attacks.attack_recipes import Labels
from shoal.errors import ModelError
from shoal.gradients import Layout

GUESSES = 3  # at the labels of a batch: one for each attempt
SCALES = tuple(0.7**power for power in range(20))  # what a clip may have left of a gradient, to begin with


def infer(way: Labels, gradients: Tensor, module: nn.Module, batch: int, dummies: Tensor) -> Tensor:
    """Infer labels from gradients.

    Args:
        way: From the signs or from the row sums of the last layer.
        gradients: [V, P].
        module: The model.
        batch: B, the records in each gradient.
        dummies: Any inputs, [N, ...].

    Returns:
        Labels [V, guesses, B], the likeliest first: one guess for a single record, GUESSES for a batch.
    """
    name, layer = _last_layer(module)
    entry = next(entry for entry in Layout.of(module).entries if entry.name == f"{name}weight")
    rows = entry.of(gradients)  # [V, classes, features]
    sums = rows.sum(2)
    if batch > 1:
        ratios = sums / _feature_sum(module, layer, dummies)
        expected = _expected(module, dummies)
        return _and_others(_several(ratios, expected, batch), ratios, expected)
    if way == "rows":
        return sums.argmin(1).view(-1, 1, 1)
    # The row with most negative entries; sums only break ties.
    ties = 1e-3 * sums / sums.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return (rows.sign().sum(2) + ties).argmin(1).view(-1, 1, 1)


def _last_layer(module: nn.Module) -> tuple[str, nn.Linear]:
    linear = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    if not linear:
        raise ModelError("labels are read off a last linear layer, and the model has none; use the attack dlg")
    name, layer = linear[-1]
    return (f"{name}." if name else ""), layer


@torch.no_grad()
def _expected(module: nn.Module, dummies: Tensor) -> Tensor:
    """p: what the model says on average, [classes]."""
    expected: Tensor = module(dummies).softmax(1).mean(0)
    return expected


@torch.no_grad()
def _feature_sum(module: nn.Module, layer: nn.Linear, dummies: Tensor) -> float:
    """H: the mean sum of what enters the last layer."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _layer, inputs: seen.append(inputs[0]))
    try:
        module(dummies)
    finally:
        handle.remove()
    total = float(seen[-1].flatten(1).sum(1).mean())
    return total if abs(total) > 1e-6 else 1.0


def _several(ratios: Tensor, expected: Tensor, batch: int) -> Tensor:
    """The labels [V, B] whose counts n and scale s explain ratios = s (p - n/B) best, of a few that were tried."""
    best = torch.full((len(ratios),), torch.inf, device=ratios.device)
    labels = ratios.new_zeros(len(ratios), batch, dtype=torch.int64)
    for first in SCALES:
        scale = ratios.new_full((len(ratios), 1), first)
        for _ in range(3):
            found = _greatest(expected - ratios / scale, batch)
            left, scale = _unexplained(found, ratios, expected)
        better = left < best
        best = torch.where(better, left, best)
        labels = torch.where(better.unsqueeze(1), found, labels)
    return labels


def _unexplained(labels: Tensor, ratios: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """How much of the ratios these labels [V, B] leave unexplained, [V], at their best scale, [V, 1]."""
    counts = torch.zeros_like(ratios).scatter_add_(1, labels, torch.ones_like(labels, dtype=ratios.dtype))
    shape = expected - counts / labels.shape[1]
    scale = (ratios * shape).sum(1) / shape.square().sum(1).clamp(min=1e-30)
    scale = scale.clamp(min=1e-6).unsqueeze(1)
    return (ratios - scale * shape).square().sum(1), scale


def _and_others(labels: Tensor, ratios: Tensor, expected: Tensor) -> Tensor:
    """These labels, then the likeliest that differ from them in one place: [V, guesses, B]."""
    batch, classes = labels.shape[1], ratios.shape[1]
    changed = labels.repeat(batch * classes, 1, 1)
    for place in range(batch):
        these = slice(place * classes, (place + 1) * classes)
        changed[these, :, place] = torch.arange(classes, device=labels.device).unsqueeze(1)
    left = torch.stack([_unexplained(guess, ratios, expected)[0] for guess in changed], dim=1)  # [V, B x classes]
    same = (changed == labels).all(2).T
    earlier = (labels.unsqueeze(2) == labels.unsqueeze(1)).tril(-1).any(2)  # a label that stands there twice
    twice = earlier.repeat_interleave(classes, dim=1)
    order = left.masked_fill(same | twice, torch.inf).argsort(1)[:, : GUESSES - 1]
    others = changed.permute(1, 0, 2).gather(1, order.unsqueeze(2).expand(-1, -1, batch))
    return torch.cat([labels.unsqueeze(1), others], dim=1)


def _greatest(shares: Tensor, batch: int) -> Tensor:
    """B labels [V, B] out of estimated shares [V, classes]: the greatest first, 1/B is taken from it, and so on."""
    left, found = shares.clone(), []
    for _ in range(batch):
        label = left.argmax(1, keepdim=True)
        left.scatter_add_(1, label, torch.full_like(label, -1 / batch, dtype=shares.dtype))
        found.append(label)
    return torch.cat(found, dim=1)
