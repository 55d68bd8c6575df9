"""The networks of PFL on scattering features (Tramèr & Boneh 2021): SN+Linear and SN+CNN.

The features are public and computed once (shoal.data.features): (81, 7, 7) for 28x28, (243, 8, 8) for
CIFAR-10. GroupNorm has 27 groups and learns a scale and a shift, as in PFL's public code.
"""

from __future__ import annotations

from torch import nn

from shoal.models.entry import Network, Shape, flat, size

GROUPS = 27
GREY = 81  # scattering channels of a picture with one colour channel


def scatter_linear(shape: Shape, classes: int) -> nn.Module:
    """Flatten, GroupNorm(27), Linear."""
    return nn.Sequential(nn.Flatten(), nn.GroupNorm(GROUPS, size(shape)), nn.Linear(size(shape), classes))


def scatter_cnn(shape: Shape, classes: int) -> nn.Module:
    """The small form for grey pictures, the larger one for colour; tanh throughout."""
    return _grey(shape, classes) if shape[0] == GREY else _colour(shape, classes)


def _grey(shape: Shape, classes: int) -> nn.Module:
    """GN, conv 16 3x3 s2, pool 2 s1, conv 32 3x3, pool 2 s1, 128-32-10."""
    trunk = nn.Sequential(
        nn.GroupNorm(GROUPS, shape[0]),
        nn.Conv2d(shape[0], 16, 3, stride=2, padding=1),
        nn.MaxPool2d(2, stride=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.MaxPool2d(2, stride=1),
        nn.Tanh(),
        nn.Flatten(),
    )
    return nn.Sequential(*trunk, nn.Linear(flat(trunk, shape), 32), nn.Tanh(), nn.Linear(32, classes))


def _colour(shape: Shape, classes: int) -> nn.Module:
    """GN, twice conv 64 3x3 and pool 2, 256-10."""
    trunk = nn.Sequential(
        nn.GroupNorm(GROUPS, shape[0]),
        nn.Conv2d(shape[0], 64, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Tanh(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Tanh(),
        nn.Flatten(),
    )
    return nn.Sequential(*trunk, nn.Linear(flat(trunk, shape), classes))


NETWORKS = (
    Network(
        "scatter-linear", "Bhaskar et al. (2025)", "GroupNorm and one linear layer", scatter_linear, 1, "scattering"
    ),
    Network("scatter-cnn", "Bhaskar et al. (2025)", "GroupNorm and two convolutions", scatter_cnn, 5, "scattering"),
)
