"""The networks of the thesis (section 4.2): the MLP with 795,010 and the CNN with 1,663,370 parameters.

The CNN is that of McMahan et al. 2017. The text names a ReLU only behind the wide linear layer; as that
paper's code does, there is one behind each convolution too. It stands behind the pooling here, which is the
same function and a quarter of the work.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from shoal.models.basic_networks import convolutions, hidden
from shoal.models.entry import Network, Shape, flat


def thesis_cnn(shape: Shape, classes: int) -> nn.Module:
    """5x5x32, pool, 5x5x64, pool, 512, 10, with `same` padding and biases."""
    trunk = convolutions(5, shape[0], 32, 64)
    return nn.Sequential(*trunk, nn.Linear(flat(trunk, shape), 512), nn.ReLU(), nn.Linear(512, classes))


NETWORKS = (
    Network(
        "thesis-mlp", "Thesis", "one hidden layer of 1000 (795,010 parameters on MNIST)", partial(hidden, (1000,))
    ),
    Network("thesis-cnn", "Thesis", "two 5x5 convolutions (1,663,370 on MNIST)", thesis_cnn, least=4),
)
