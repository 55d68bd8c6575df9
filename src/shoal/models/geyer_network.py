"""The network of Geyer et al. (2017), as their public code has it: 784-600-100-10 without biases."""

from __future__ import annotations

from torch import nn

from shoal.models.entry import Network, Shape, size


def geyer_mlp(shape: Shape, classes: int) -> nn.Module:
    """ReLU, no biases; weights normal with deviation 1/sqrt(fan_in), cut off at two deviations."""
    layers = [
        nn.Linear(size(shape), 600, bias=False),
        nn.Linear(600, 100, bias=False),
        nn.Linear(100, classes, bias=False),
    ]
    for layer in layers:
        std = layer.in_features**-0.5
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    return nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


NETWORKS = (
    Network("geyer-mlp", "Geyer et al. (2017)", "600 and 100 hidden, no biases (531,400 on MNIST)", geyer_mlp),
)
