"""Plain networks that come from no paper: softmax regression, and small ones for 8x8 digits."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import nn

from shoal.models.entry import Network, Shape, flat, size


def mlp(*sizes: int) -> nn.Sequential:
    """A stack of linear layers with ReLU between them: mlp(784, 1000, 10)."""
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def hidden(widths: tuple[int, ...], shape: Shape, classes: int) -> nn.Module:
    """`mlp` with hidden layers of these widths."""
    return mlp(size(shape), *widths, classes)


def convolutions(kernel: int, *channels: int) -> nn.Sequential:
    """Convolutions with `same` padding, pooling and ReLU behind each: convolutions(5, 1, 32, 64)."""
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(channels):
        layers += [nn.Conv2d(n_in, n_out, kernel, padding=kernel // 2), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten())


def linear(shape: Shape, classes: int) -> nn.Module:
    """Softmax regression. It starts at zero: the loss is convex, and a random start would only be noise."""
    layer = nn.Linear(size(shape), classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def linear_without_bias(shape: Shape, classes: int) -> nn.Module:
    """Softmax regression without a bias.

    Clients with few classes all pull hard at the bias, which takes up their clip norm and says little of a picture.
    """
    layer = nn.Linear(size(shape), classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(nn.Flatten(), layer)


def digits_cnn(shape: Shape, classes: int) -> nn.Module:
    """Two 3x3 convolutions with pooling and one linear layer: 6,090 parameters on 8x8 digits."""
    trunk = convolutions(3, shape[0], 16, 32)
    return nn.Sequential(*trunk, nn.Linear(flat(trunk, shape), classes))


NETWORKS = (
    Network("linear", "", "softmax regression, started at zero", linear),
    Network("linear-without-bias", "", "the same without a bias, for clients with few classes", linear_without_bias),
    Network("digits-mlp", "", "one hidden layer of 64", partial(hidden, (64,))),
    Network("digits-cnn", "", "two small convolutions, for 8x8 digits", digits_cnn, least=4),
)
