"""The networks that gradient-leakage attacks are run on: 004's, and DLG's original (Zhu et al. 2019).

5x5 convolutions of 12 channels with sigmoids, no pooling, so that the gradient is smooth in the input;
weights and biases uniform in (-.5, .5), never trained.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from shoal.models.network import Network, Shape, flat


def leaky(strides: tuple[int, ...], shape: Shape, classes: int) -> nn.Module:
    """One convolution and sigmoid a stride, then one linear layer: 588-10 on 28x28, 768-10 on 32x32."""
    layers: list[nn.Module] = []
    channels = shape[0]
    for stride in strides:
        layers += [nn.Conv2d(channels, 12, 5, stride=stride, padding=2), nn.Sigmoid()]
        channels = 12
    trunk = nn.Sequential(*layers, nn.Flatten())
    model = nn.Sequential(*trunk, nn.Linear(flat(trunk, shape), classes))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


NETWORKS = (
    Network("attack-cnn", "004", "four convolutions with sigmoids", partial(leaky, (2, 2, 1, 1)), least=1),
    Network("dlg-cnn", "004", "DLG's original, three of them", partial(leaky, (2, 2, 1)), least=1),
)
