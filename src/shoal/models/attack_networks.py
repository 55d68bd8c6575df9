"""The networks that gradient-leakage attacks are run on: Wei et al. (2023), DLG (Zhu et al. 2019), one for tables.

5x5 convolutions of 12 channels with sigmoids, no pooling, so that the gradient is smooth in the input;
weights and biases uniform in (-0.5, 0.5), never trained. For tables the paper states no network: two hidden layers
as in its training, with sigmoids, are ours.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from shoal.models.basic_networks import hidden
from shoal.models.entry import Network, Shape, flat, size


def leaky(strides: tuple[int, ...], shape: Shape, classes: int) -> nn.Module:
    """One convolution and sigmoid a stride, then one linear layer: 588-10 on 28x28, 768-10 on 32x32."""
    layers: list[nn.Module] = []
    channels = shape[0]
    for stride in strides:
        layers += [nn.Conv2d(channels, 12, 5, stride=stride, padding=2), nn.Sigmoid()]
        channels = 12
    trunk = nn.Sequential(*layers, nn.Flatten())
    return _uniform(nn.Sequential(*trunk, nn.Linear(flat(trunk, shape), classes)))


def leaky_mlp(shape: Shape, classes: int) -> nn.Module:
    """64 and 32 hidden, with sigmoids."""
    return _uniform(
        nn.Sequential(
            nn.Flatten(),
            nn.Linear(size(shape), 64),
            nn.Sigmoid(),
            nn.Linear(64, 32),
            nn.Sigmoid(),
            nn.Linear(32, classes),
        )
    )


def _uniform(model: nn.Sequential) -> nn.Sequential:
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


NETWORKS = (
    Network(
        "attack-cnn", "Wei et al. (2023)", "four convolutions with sigmoids", partial(leaky, (2, 2, 1, 1)), least=1
    ),
    Network("dlg-cnn", "Wei et al. (2023)", "DLG's original, three of them", partial(leaky, (2, 2, 1)), least=1),
    Network("attack-mlp", "", "64 and 32 hidden with sigmoids, for attacks on tables", leaky_mlp),
    Network(
        "imprint-mlp", "", "one hidden layer of 1,024, for a malicious server's weights", partial(hidden, (1024,))
    ),
)
