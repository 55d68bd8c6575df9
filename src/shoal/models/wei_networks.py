"""The networks of Wei et al. (2023): Fed-CDP, Fed-alphaCDP.

Pictures: two convolutions and one linear layer without biases, Glorot uniform, as the public code has it
(34,720 parameters on MNIST). Tables: two hidden layers; the paper states no sizes, these are ours.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from shoal.models.basic_networks import hidden
from shoal.models.entry import Network, Shape, flat


def alphacdp_cnn(shape: Shape, classes: int) -> nn.Module:
    """conv 32 3x3, pool 2, conv 64 3x3, pool 2, 1600-10, without padding."""
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, bias=False),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, bias=False),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
    )
    model = nn.Sequential(*trunk, nn.Linear(flat(trunk, shape), classes, bias=False))
    for weight in model.parameters():
        nn.init.xavier_uniform_(weight)
    return model


NETWORKS = (
    Network(
        "alphacdp-cnn", "Wei et al. (2023)", "two convolutions, no biases (34,720 on MNIST)", alphacdp_cnn, least=10
    ),
    Network("adult-mlp", "Wei et al. (2023)", "64 and 32 hidden (8,930 on Adult)", partial(hidden, (64, 32))),
    Network("cancer-mlp", "Wei et al. (2023)", "32 and 16 hidden (1,554 on Cancer)", partial(hidden, (32, 16))),
)
