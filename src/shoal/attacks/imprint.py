"""Imprint: a malicious server reads records off the gradient of a fully connected layer (Fowl et al. 2022).

    W_i = v, b_i = -t_i              k equal rows, their thresholds t_1 < ... < t_k quantiles of <v, x>
    d loss/d z_i = g(x) if <v, x> > t_i else 0       since the next layer weighs all rows alike
    x = (dW_i - dW_{i+1})/(db_i - db_{i+1})          where x alone has t_i < <v, x> <= t_{i+1}

The server changes no more than the weights of an agreed network: flat inputs, a linear layer, ReLU, a linear layer.
Quantiles come from held-out records. Clipping only scales g(x), and secure aggregation only adds records: one of n is
alone in its bin with probability (1 - 1/k)^(n - 1). Small rows under a heavy next layer give the first layer nearly
all of the gradient's norm, so that a clip leaves as much of it as can be.

L. Fowl, J. Geiping, W. Czaja, M. Goldblum, T. Goldstein (2022), Robbing the Fed. https://arxiv.org/abs/2110.13057
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.attacks.reconstruct import Found
from shoal.errors import ModelError
from shoal.gradients import Layout
from shoal.random.streams import Streams

SMALL = 1e-3  # the size of the first layer's rows; the next layer's weights are larger by as much


def planted(module: nn.Module, held_out: Tensor, streams: Streams) -> nn.Module:
    """The network with the server's weights in its first two linear layers.

    Args:
        module: The agreed network.
        held_out: Records [N, ...] like the victims', which the server has.
        streams: The source of the direction v.

    Raises:
        ModelError: The network does not begin with a linear layer, ReLU, and a linear layer.
    """
    module = copy.deepcopy(module)
    (_, first), (_, second) = _layers(module)
    rows = held_out.flatten(1).to(first.weight)
    direction = torch.from_numpy(streams.generator("imprint").standard_normal(rows.shape[1], np.float32)).to(rows)
    measured = rows @ direction
    shares = torch.linspace(0, 1, len(first.weight) + 1, device=rows.device)[:-1]
    direction, thresholds = direction / measured.std(), torch.quantile(measured, shares) / measured.std()
    # The lowest threshold lies below every record that may come.
    thresholds[0] = thresholds[0] - (thresholds[-1] - thresholds[0])
    outputs = torch.arange(len(second.weight), device=rows.device)
    weights = (-1.0) ** outputs * (1 + outputs / len(outputs))  # g(x) is far from 0 whatever the label
    with torch.no_grad():
        first.weight.copy_(SMALL * direction.expand_as(first.weight))
        first.bias.copy_(-SMALL * thresholds)
        second.weight.copy_((weights / (SMALL * len(thresholds))).unsqueeze(1).expand_as(second.weight))
        second.bias.zero_()
    return module


def read_off(module: nn.Module, gradients: Tensor, shape: tuple[int, ...], batch: int) -> Found:
    """The records in mean gradients [V, P] over this many records, from the fullest bins."""
    (name, first), (_, second) = _layers(module)
    entries = {entry.name: entry for entry in Layout.of(module).entries}
    weight, bias = (entries[f"{name}.{part}"].of(gradients.double()) for part in ("weight", "bias"))
    weight, bias = (_differences(part) for part in (weight, bias.view(len(gradients), -1)))
    if batch > len(first.weight):
        raise ModelError(f"{batch} records need as many bins, and the first layer has {len(first.weight)} rows")
    fullest = bias.abs().topk(batch, dim=1).indices
    slopes = bias.gather(1, fullest)
    found = weight.gather(1, fullest.unsqueeze(2).expand(-1, -1, weight.shape[2])) / slopes.unsqueeze(2)
    x = torch.nan_to_num(found).clamp(0, 1).to(gradients.dtype).view(len(gradients), batch, *shape)
    nothing = torch.zeros(len(gradients), dtype=torch.int64, device=gradients.device)
    return Found(
        x=x,
        labels=_labels(module, second, x, batch * slopes),
        left=torch.full((len(gradients),), torch.nan, device=gradients.device),
        iterations=nothing + 1,
        restarts=nothing,
        diverged=nothing.bool(),
    )


def first_layer(module: nn.Module, attack: str) -> tuple[str, nn.Linear]:
    """The first layer with its name; a ModelError where it is not linear, with a bias, and followed by ReLU."""
    found = _leaves(module)[:2]
    if len(found) < 2 or not isinstance(found[0][1], nn.Linear) or not isinstance(found[1][1], nn.ReLU):
        raise ModelError(f"{attack} needs a network that begins with a linear layer and ReLU; use model=imprint-mlp")
    if found[0][1].bias is None:
        raise ModelError(f"{attack} needs a first layer with a bias; use model=imprint-mlp")
    return found[0][0], found[0][1]


def _leaves(module: nn.Module) -> list[tuple[str, nn.Module]]:
    found = [(name, child) for name, child in module.named_modules() if not list(child.children())]
    return [each for each in found if not isinstance(each[1], nn.Flatten | nn.Identity)]


def _layers(module: nn.Module) -> tuple[tuple[str, nn.Linear], tuple[str, nn.Linear]]:
    """The first two linear layers with their names."""
    found: list[tuple[str, Any]] = list(_leaves(module))
    kinds = [type(child) for _, child in found[:3]]
    if kinds != [nn.Linear, nn.ReLU, nn.Linear] or found[0][1].bias is None or found[2][1].bias is None:
        raise ModelError(
            "imprint needs a network that begins with a linear layer, ReLU and a linear layer; use model=imprint-mlp"
        )
    return found[0], found[2]


def _differences(rows: Tensor) -> Tensor:
    """Each row less the next, [V, k, ...]; the last as it is."""
    return rows - torch.cat([rows[:, 1:], torch.zeros_like(rows[:, :1])], dim=1)


@torch.no_grad()
def _labels(module: nn.Module, second: nn.Linear, x: Tensor, slopes: Tensor) -> Tensor:
    """The labels [V, B] whose g(x) = <w, p(x)> - w_y is nearest to what was seen; a clip hides its size."""
    weights = second.weight[:, 0]
    expected: Tensor = module(x.flatten(0, 1)).softmax(1).view(*x.shape[:2], -1)
    if expected.shape[-1] != len(weights):  # deeper networks: g(x) says nothing simple of the label
        return expected.argmax(-1)
    each: Tensor = (expected * weights).sum(-1, keepdim=True) - weights
    return (each - slopes.unsqueeze(-1)).abs().argmin(-1)
