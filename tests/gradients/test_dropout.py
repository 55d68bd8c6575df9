"""Dropout by seeds: every way drops the same of a record, whatever is beside it, as PyTorch would with that mask."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import ModelError
from shoal.gradients import network
from shoal.gradients.dropout import Dropping, mixed
from support.both_ways import assert_both_ways_agree

LENGTH, WIDTH = 5, 6


class Sequences(nn.Module):
    """A layer over a sequence, with records first or second."""

    def __init__(self, layer, first=True, width=WIDTH, call=lambda layer, x: layer(x)):
        super().__init__()
        self.layer, self.first, self.head, self.call = layer, first, nn.Linear(width, 3), call

    def forward(self, x):
        y = self.call(self.layer, x if self.first else x.transpose(0, 1))
        return self.head((y[0] if isinstance(y, tuple) else y).mean(1 if self.first else 0))


class Pictures(nn.Module):
    """Dropout of channels, of the model's own code, in place, and of whole records."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, 3)
        self.channels, self.inplace = nn.Dropout2d(0.4), nn.Dropout(0.3, inplace=True)

    def forward(self, x):
        x = F.dropout(self.channels(self.first(x)), 0.2, self.training)
        x = x + self.second(x) * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.7)
        return self.head(self.inplace(x.mean((2, 3)) * 1))


def attends(weights):
    return lambda layer, x: layer(x, x, x, need_weights=weights)


def recurrent(kind, first, both=False):
    layer = kind(WIDTH, 4, 3, dropout=0.4, batch_first=first, bidirectional=both)
    return lambda: Sequences(layer, first, 8 if both else 4)


MODELS = {
    "linear": lambda: nn.Sequential(
        nn.Dropout(0.5), nn.Flatten(), nn.Linear(LENGTH * WIDTH, 4), nn.Dropout(), nn.Linear(4, 3)
    ),
    "records second": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Sequences(nn.Dropout(0.4), False)),
    "frozen attention": lambda: Sequences(
        nn.MultiheadAttention(WIDTH, 2, 0.3, batch_first=True).requires_grad_(False), True, WIDTH, attends(True)
    ),
    **{
        f"attention, {'with' if weights else 'no'} weights, {first}": lambda first=first, weights=weights: Sequences(
            nn.MultiheadAttention(WIDTH, 2, 0.3, batch_first=first), first, WIDTH, attends(weights)
        )
        for first in (True, False)
        for weights in (True, False)
    },
    **{
        f"transformer, {first}": lambda first=first: Sequences(
            nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.2, batch_first=first), first
        )
        for first in (True, False)
    },
    "LSTM": recurrent(nn.LSTM, True),
    "LSTM both ways, records second": recurrent(nn.LSTM, False, both=True),
    "GRU": recurrent(nn.GRU, False),
    "RNN": recurrent(nn.RNN, True, both=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_ways_drop_the_same(name):
    torch.manual_seed(0)
    x = torch.randn(2, 4, LENGTH, WIDTH, dtype=torch.float64)
    found = assert_both_ways_agree(MODELS[name](), x, sizes=[(2, 0), (2, 1), (2, 4)])
    assert (found.drops, found.draws) == (True, False)


@pytest.mark.slow
def test_all_ways_drop_the_same_of_pictures():
    torch.manual_seed(0)
    assert_both_ways_agree(Pictures(), torch.randn(2, 3, 2, 5, 5, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("per_record", [False, True])
@pytest.mark.parametrize("name", ["linear", "transformer, False", "attention, with weights, True"])
def test_vmap_does_too(name, per_record):
    torch.manual_seed(0)
    module, x = MODELS[name]().double(), torch.randn(2, 3, LENGTH, WIDTH, dtype=torch.float64)
    found = []
    for way in ("vmap", "sequential"):
        net = network(module, x[0], way=way, per_record=per_record)
        params = net.layout.flatten(module).repeat(2, 1)
        y, weights, seeds = (
            torch.zeros(2, 3, dtype=torch.int64),
            torch.ones(2, 3).double(),
            torch.arange(6).view(2, 3),
        )
        into = torch.zeros_like(params)
        net.backward(params, x, y, weights, seeds).accumulate(into, 1.0)
        found.append(into)
    assert float(found[0].norm()) > 0
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_seeds_decide_and_must_be_given():
    torch.manual_seed(0)
    module, x = MODELS["transformer, True"](), torch.randn(1, 3, LENGTH, WIDTH)
    net = network(module, x[0], per_record=True)
    params, given = (
        net.layout.flatten(module).unsqueeze(0),
        (x, torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3)),
    )
    seeds = torch.tensor([[5, 6, 7]])
    first, again = (net.backward(params, *given, seeds).records() for _ in range(2))
    assert torch.equal(first, again)
    other = net.backward(params, *given, torch.tensor([[5, 6, 8]])).records()
    torch.testing.assert_close(other[:, :2], first[:, :2], rtol=1e-5, atol=1e-7)
    assert float((other - first)[:, 2].norm()) > 0.01 * float(first[:, 2].norm())
    with pytest.raises(AssertionError, match="needs a seed"):
        net.backward(params, *given)


def test_a_records_mask_does_not_depend_on_the_others():
    seeds = mixed(torch.arange(7))
    for shape, place in (((7, 5, 3), 0), ((5, 21), 1), ((2, 3, 14), 2)):
        whole, some = Dropping(seeds, [place, place]), Dropping(seeds[2:4], [place, place])
        rows = shape[place] // 7
        fewer = (*shape[:place], 2 * rows, *shape[place + 1 :])
        for _ in range(2):  # draws
            found, of_some = whole.kept(shape, 0.4), some.kept(fewer, 0.4)
            assert torch.equal(found.narrow(place, 2 * rows, 2 * rows), of_some)


def test_dropped_numbers_are_0_and_the_rest_is_larger():
    x = torch.full((64, 4096), 3.0)
    for p in (0.1, 0.5, 0.9):
        with Dropping(mixed(torch.arange(64)), [0, 0, 0]):
            y = F.dropout(x, p)
            assert torch.equal(F.dropout(x, p, training=False), x)
            assert not F.dropout(x, 1.0).any()
            assert torch.equal(F.dropout(x, 0.0), x)
        kept = y != 0
        torch.testing.assert_close(y[kept], (x / (1 - p))[kept])
        assert abs(float(kept.double().mean()) - (1 - p)) < 6 * math.sqrt(p * (1 - p) / x.numel())


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}])
@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32])
def test_attention_with_nothing_dropped_is_pytorchs(options, kind, monkeypatch):
    torch.manual_seed(0)
    query, key, value = torch.rand(2, 4, 3, 5), *torch.rand(2, 2, 2 if "enable_gqa" in options else 4, 3, 5)
    mask = None if kind is None or "is_causal" in options else (torch.rand(3, 3) > 0.3).to(kind)
    wanted = F.scaled_dot_product_attention(query, key, value, mask, 0.0, **options)
    monkeypatch.setattr(Dropping, "kept", lambda self, shape, p: torch.ones(shape, dtype=torch.bool))
    with Dropping(torch.arange(2), [0]):
        found = F.scaled_dot_product_attention(query, key, value, mask, 0.25, **options)
    torch.testing.assert_close(found * 0.75, wanted)


def test_a_probability_next_to_1_keeps_next_to_nothing():
    for p in (1 - 2.0**-31, 1 - 2.0**-40):
        with Dropping(mixed(torch.arange(64)), [0]):
            assert not F.dropout(torch.ones(64, 1000), p).any()


def test_dropout3d_of_4_dimensions_drops_what_pytorch_drops():
    """All of a row: PyTorch takes the rows for channels of one record."""
    with Dropping(mixed(torch.arange(16)), [0]):
        found = F.dropout3d(torch.ones(16, 5, 2, 2), 0.5).flatten(1)
    assert torch.equal(found, found[:, :1].expand_as(found))
    assert 0 < int(found[:, 0].count_nonzero()) < 16


def test_masks_are_independent():
    """Of records, draws and neighbours: fixed seeds, so that it always gives the same."""
    drawing = Dropping(mixed(torch.arange(256)), [0, 0])
    first, second = (drawing.kept((256, 1024), 0.5).double() - 0.5 for _ in range(2))
    count = first.numel()
    for one, other in ((first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])):
        assert abs(float((one * other).sum()) * 4) < 6 * math.sqrt(count)
    assert float((first.sum(1) * 2).abs().max()) < 6 * math.sqrt(1024)
    assert float((first.sum(0) * 2).abs().max()) < 6 * math.sqrt(256)


class Checkpointed(nn.Module):
    """Dropout that is run again in the backward pass, when its draws have other numbers."""

    again = True

    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last, self.drop = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.5)

    def forward(self, x):
        part = lambda x: self.drop(self.first(x).tanh())  # noqa: E731
        return self.last(checkpoint(part, x, use_reentrant=self.reentrant) if self.again else part(x))


class OneForAll(nn.Module):
    """One mask for the records of a batch: it drops weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return F.linear(x, F.dropout(self.layer.weight, 0.5, self.training), self.layer.bias)


class OfOtherKind(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 3), nn.AlphaDropout(0.5)

    def forward(self, x):
        return self.layer(F.dropout(self.drop(x), 0.5, self.training))


@pytest.mark.parametrize("kind", [Checkpointed, lambda: Checkpointed(True), OneForAll, OfOtherKind])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_seeds_cannot_decide_is_drawn_as_pytorch_draws_it(kind):
    torch.manual_seed(0)
    net = network(kind(), torch.rand(3, 4))
    assert (net.way, net.draws, net.drops) == ("sequential", True, False)


def test_checkpointed_dropout_has_its_true_gradient():
    torch.manual_seed(0)
    module, x, y = Checkpointed(), torch.rand(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64)
    net = network(module, x[0])
    params = net.layout.flatten(module).unsqueeze(0)
    found = torch.zeros_like(params)
    torch.manual_seed(3)
    net.backward(params, x, y, torch.ones(1, 3)).accumulate(found, 1.0)
    module.again = False
    torch.manual_seed(3)
    F.cross_entropy(module(x[0]), y[0], reduction="sum").backward()
    torch.testing.assert_close(found[0], torch.cat([p.grad.flatten() for p in module.parameters()]))


def test_another_shape_than_in_the_trial_is_refused():
    with Dropping(torch.arange(4), [0]), pytest.raises(ModelError, match="dropout of shape"):
        F.dropout(torch.rand(3, 2))
    with Dropping(torch.arange(4), []), pytest.raises(ModelError, match="dropout of shape"):
        F.dropout(torch.rand(4, 2))
