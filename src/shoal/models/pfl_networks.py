"""The convolutional networks of PFL, each with ReLU and with the tempered sigmoid (TS).

PFL: *Optimal Strategies for Federated Learning Maintaining Client Privacy* (anonymous submission).

PFL uses TS with s=2, temp=2, o=1, and 2/(1+exp(-2z)) - 1 is tanh(z). Both activations rise, so that the
max-pooling may come first: the same function with less work.
PFL cites Papernot et al. 2021 for the CNN on 28x28 pictures (26,010 parameters); its public code has a
smaller one (10,650), whose accuracies the published ones fit. Both are here: `papernot-cnn`, `pfl-cnn`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from shoal.models.entry import Network, Shape, flat

Activation = type[nn.Module]
Make = Callable[[Activation, Shape, int], nn.Module]


def papernot_cnn(act: Activation, shape: Shape, classes: int) -> nn.Module:
    """conv 16 8x8 s2 `same`, pool 2 s1, conv 32 4x4 s2, pool 2 s1, 512-32-10."""
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=3),
        nn.MaxPool2d(2, stride=1),
        act(),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.MaxPool2d(2, stride=1),
        act(),
        nn.Flatten(),
    )
    return nn.Sequential(*trunk, nn.Linear(flat(trunk, shape), 32), act(), nn.Linear(32, classes))


def pfl_cnn(act: Activation, shape: Shape, classes: int) -> nn.Module:
    """The code's smaller form: no padding at first, pools with stride 2, 32-32-10, there always ReLU."""
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], 16, 8, stride=2),
        nn.MaxPool2d(2),
        act(),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.MaxPool2d(2),
        act(),
        nn.Flatten(),
    )
    return nn.Sequential(*trunk, nn.Linear(flat(trunk, shape), 32), nn.ReLU(), nn.Linear(32, classes))


def cifar_cnn(act: Activation, shape: Shape, classes: int) -> nn.Module:
    """3x3 convolutions 32,32,pool,64,64,pool,128,128,pool,256,classes and a global average; pools average."""
    layers: list[nn.Module] = []
    channels = shape[0]
    for width in (32, 64, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), act()]
        layers += [nn.Conv2d(width, width, 3, padding=1), act(), nn.AvgPool2d(2)]
        channels = width
    layers += [nn.Conv2d(128, 256, 3, padding=1), act(), nn.Conv2d(256, classes, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _pair(name: str, about: str, make: Make, least: int) -> tuple[Network, Network]:
    return (
        Network(name, "Bhaskar et al. (2025)", f"{about}, ReLU", partial(make, nn.ReLU), least),
        Network(f"{name}-ts", "Bhaskar et al. (2025)", f"{about}, TS (tanh)", partial(make, nn.Tanh), least),
    )


NETWORKS = (
    *_pair("papernot-cnn", "as Papernot et al. have it (26,010 on MNIST)", papernot_cnn, least=14),
    *_pair("pfl-cnn", "smaller, as the code of Bhaskar et al. (2025) has it (10,650 on MNIST)", pfl_cnn, least=22),
    *_pair("pfl-cifar-cnn", "eight 3x3 convolutions (605,226 on CIFAR-10)", cifar_cnn, least=8),
)
