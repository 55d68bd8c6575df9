"""Normalisations and small layers of PyTorch that are made of other layers' rules."""

from itertools import product

import pytest
import torch
from torch import nn

from shoal.gradients import network
from support.both_ways import assert_both_ways_agree

CHANNELS = 4


class Within(nn.Module):
    """A layer on [N, C, ...] between two others."""

    def __init__(self, layer, last=False):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.layer, self.head = nn.Linear(CHANNELS, CHANNELS), layer, nn.Linear(CHANNELS, 3)
        self.last = last

    def forward(self, x):
        x = torch.tanh(self.first(x))
        y = self.layer(x if self.last else x.movedim(-1, 1).contiguous()).square()
        return self.head(y if y.dim() == 2 else y.mean(1) if self.last else y.flatten(2).mean(2))


LAYERS = {
    "RMSNorm": (lambda: nn.RMSNorm(CHANNELS), (5,), True),
    "RMSNorm with eps": (lambda: nn.RMSNorm([5, CHANNELS], eps=0.1), (5,), True),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(CHANNELS, affine=True), (5,), False),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(CHANNELS, affine=True, eps=0.1), (5, 3), False),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(CHANNELS, affine=True), (2, 3, 2), False),
    "InstanceNorm without parameters": (lambda: nn.InstanceNorm2d(CHANNELS), (5, 3), False),
    "PReLU": (lambda: nn.PReLU(), (5,), False),
    "PReLU of channels": (lambda: nn.PReLU(CHANNELS), (5, 3), False),
    "PReLU of vectors": (lambda: nn.PReLU(CHANNELS), (), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_channels(name):
    torch.manual_seed(0)
    make, shape, last = LAYERS[name]
    x = torch.randn(3, 4, *shape, CHANNELS, dtype=torch.float64)
    assert_both_ways_agree(Within(make(), last), x, sizes=product([1, 2, 3], [0, 1, 4]))


def test_the_slope_of_prelu_at_0_is_that_of_pytorch():
    class Zeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act, self.head = nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.act(self.first(x) * 0.0 + x))

    assert_both_ways_agree(Zeros(), torch.zeros(2, 3, 4, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(), (5,)])
@pytest.mark.parametrize("bias", [True, False])
def test_bilinear(shape, bias):
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 2)
            self.pairs, self.head = nn.Bilinear(3, 2, 4, bias=bias), nn.Linear(4, 3)

        def forward(self, x):
            y = torch.tanh(self.pairs(self.one(x), self.other(x)))
            return self.head(y.mean(1) if y.dim() > 2 else y)

    torch.manual_seed(0)
    x = torch.randn(2, 4, *shape, 4, dtype=torch.float64)
    assert_both_ways_agree(Pairs(), x, sizes=[(2, 0), (2, 1), (2, 4)])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_words(mode):
    torch.manual_seed(0)
    module = nn.Sequential(nn.EmbeddingBag(7, 4, mode=mode), nn.Tanh(), nn.Linear(4, 3))
    assert_both_ways_agree(module, torch.randint(0, 7, (2, 4, 5)), sizes=[(2, 0), (2, 1), (2, 4)])


@pytest.mark.parametrize(
    "layer",
    [
        nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
        nn.EmbeddingBag(7, 4, mode="max"),
        nn.EmbeddingBag(7, 4, padding_idx=0),
    ],
    ids=["statistics", "maximum", "padding"],
)
def test_unusual_ones_have_no_rule(layer):
    assert network(nn.Sequential(layer, nn.Linear(4, 3))).way != "rules"


def test_an_embedding_bag_of_another_use_goes_one_client_after_the_other():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(7, 4, mode="sum"), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.words(x, per_sample_weights=torch.ones_like(x, dtype=self.words.weight.dtype)))

    assert network(Weighted(), torch.randint(0, 7, (3, 5))).way != "rules"
