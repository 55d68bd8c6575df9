"""Layers and shapes that tests of gradients and of models share."""

from __future__ import annotations

from hypothesis import strategies as st
from torch import nn

from shoal.models import NETWORKS

OF_NUMBERS = [name for name in NETWORKS if not NETWORKS[name].tokens]
MNIST, SCATTER = (1, 28, 28), (81, 7, 7)


@st.composite
def convolutions(draw):
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    stride = draw(st.sampled_from([1, 2, (1, 2), (2, 1)]))
    dilation = draw(st.sampled_from([1, 2, (2, 1)]))
    same = stride == 1 and draw(st.booleans())
    padding = "same" if same else (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    channels = draw(st.sampled_from([1, 3, 8, 20])), draw(st.sampled_from([2, 6]))
    return nn.Conv2d(*channels, kernel, stride, padding, dilation, bias=draw(st.booleans()))


def home(name):
    """A shape at which the network is at home."""
    if NETWORKS[name].features == "scattering":
        return SCATTER
    return (3, 12, 12) if "cifar" in name else MNIST
