"""The papers' networks, the user's own, and the check that a model fits the privacy asked for."""

from shoal.models.build import build, count
from shoal.models.check import check, mixing_layers, replace_batchnorm
from shoal.models.entry import Network
from shoal.models.networks import NETWORKS, auto, names
from shoal.standardised_convolution import StandardisedConv2d

__all__ = [
    "NETWORKS",
    "Network",
    "StandardisedConv2d",
    "auto",
    "build",
    "check",
    "count",
    "mixing_layers",
    "names",
    "replace_batchnorm",
]
