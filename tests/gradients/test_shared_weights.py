"""A parameter that is used several times for one record: the norm is that of the sum of its gradients."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.gradients.layers.merging import TiedRule
from support.both_ways import CLOSE, assert_both_ways_agree, batched

WORDS, WIDTH = 7, 4


class Again(nn.Module):
    """A layer that is called several times, as in a recurrent cell or a body of shared layers."""

    def __init__(self, layer, times=3):
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.times, self.last = layer, times, nn.Linear(WIDTH, 3)

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return self.last(x.flatten(2).mean(2) if x.dim() == 4 else x if x.dim() == 2 else x.mean(1))


LAYERS = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), (WIDTH,)),
    "linear without bias": (lambda: nn.Linear(WIDTH, WIDTH, bias=False), (5, WIDTH)),
    "linear of many words": (lambda: nn.Linear(WIDTH, WIDTH), (30, WIDTH)),
    "normalisation": (lambda: nn.LayerNorm(WIDTH), (5, WIDTH)),
    "convolution": (lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1), (WIDTH, 6, 6)),
    "convolution of few places": (lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), (WIDTH, 2, 2)),
    "attention": (lambda: Attends(nn.MultiheadAttention(WIDTH, 2, batch_first=True)), (5, WIDTH)),
    "attention to itself and to others": (lambda: AttendsTwice(), (5, WIDTH)),
}


class Attends(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)[0]


class AttendsTwice(nn.Module):
    """One projection at first, three afterwards."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0] + self.attention(x, x[:, :2], x[:, 1:3])[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_called_again(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    x = torch.rand(2, 3, *shape, dtype=torch.float64)
    assert_both_ways_agree(Again(make()), x, sizes=[(2, 0), (2, 1), (2, 3)])


def test_a_recurrent_cell_as_people_write_it():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.words, self.inner, self.last = (
                nn.Embedding(WORDS, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, 3),
            )

        def forward(self, x):
            state = torch.zeros(len(x), WIDTH, dtype=self.words.weight.dtype)
            for word in x.unbind(1):
                state = torch.tanh(self.inner(state) + self.words(word))
            return self.last(state)

    torch.manual_seed(0)
    assert_both_ways_agree(Recurrent(), torch.randint(0, WORDS, (2, 3, 5)))


class Tied(nn.Module):
    """A language model whose head is its embedding, with a bias or without, and an embedding used twice."""

    def __init__(self, bias=False, padding=None, twice=False):
        super().__init__()
        torch.manual_seed(2)
        self.words, self.twice = nn.Embedding(WORDS, WIDTH, padding_idx=padding), twice
        self.positions = nn.Parameter(torch.rand(1, 30, WIDTH))
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.head.weight = self.words.weight

    def forward(self, x):
        h = self.words(x) + self.positions[:, : x.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = h + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        h = h + self.words(x.flip(1)) if self.twice else h
        return self.head(self.norm(h))


def next_word(logits, y):
    """The mean over words; those of -100 count for nothing."""
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.booleans(),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([0, 1, 4]),
    st.sampled_from([1, 3, 12]),
)
def test_an_embedding_tied_to_its_head(bias, padding, twice, clients, batch, length):
    torch.manual_seed(0)
    x = torch.randint(0, WORDS, (clients, batch, length))
    y = torch.where(torch.rand(x.shape) < 0.2, -100, torch.randint(0, WORDS, x.shape))
    assert_both_ways_agree(Tied(bias, padding, twice), x, y, next_word)


@pytest.mark.slow
def test_a_tied_matrix_is_never_made_for_each_record():
    torch.manual_seed(0)
    x = torch.randint(0, WORDS, (2, 3, 5))
    net = batched(Tied(), x[0], next_word, x[0])
    tape = net.backward(net.layout.flatten(Tied())[None].repeat(2, 1), x, x, torch.ones(2, 3))
    tape.squares()
    assert TiedRule in [type(rule) for rule, _, _ in tape]


class TiedLinear(nn.Module):
    """One matrix in two layers with biases of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.one, self.other, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.last(torch.tanh(self.other(torch.tanh(self.one(x)))))


class TiedBiases(nn.Module):
    """Two branches with one bias; the second ends in a layer that starts at 0, as in LoRA."""

    def __init__(self, make=nn.Linear, *options):
        super().__init__()
        torch.manual_seed(2)
        self.one, self.other = make(WIDTH, WIDTH, *options), make(WIDTH, WIDTH, *options)
        self.last, self.up = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3, bias=False)
        self.other.bias = self.one.bias
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        x = x if isinstance(self.one, nn.Linear) or self.one.weight.dim() == 2 else x[:, :, None, None]
        one, other = self.one(x).flatten(1), self.other(x).flatten(1)
        return self.last(one) + self.up(other)


class TiedNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.other.bias = self.one.bias

    def forward(self, x):
        return self.last(torch.tanh(self.other(torch.tanh(self.one(x)))))


@pytest.mark.parametrize(
    "make",
    [TiedLinear, TiedBiases, lambda: TiedBiases(nn.Conv2d, 1), TiedNorms],
    ids=["weights", "biases", "biases of convolutions", "biases of normalisations"],
)
def test_layers_that_share_some_of_their_parameters(make):
    torch.manual_seed(0)
    assert_both_ways_agree(make(), torch.rand(2, 3, WIDTH, dtype=torch.float64))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.last = nn.Linear(200, 200), nn.Linear(200, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


@pytest.mark.slow
def test_updates_of_a_layer_that_is_called_again_may_be_deferred():
    torch.manual_seed(0)
    module = Wide().double()
    net = batched(module, torch.rand(3, 200, dtype=torch.float64), per_record=False)
    start = net.layout.flatten(module)
    x, y = torch.rand(40, 2, 2, 200, dtype=torch.float64), torch.randint(0, 3, (40, 2, 2))
    ways = []
    for defer in (True, False):
        params = start.repeat(2, 1)
        with net.deferred_updates(start, params, 2) if defer else nullcontext():
            for step in range(40):
                net.backward(params, x[step], y[step], torch.ones(2, 2).double()).accumulate(params, -0.1)
        ways.append(params)
    assert (ways[0] - start).abs().max() > 0.01
    torch.testing.assert_close(*ways, **CLOSE)
