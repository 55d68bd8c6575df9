"""Layers that see something else than one row for each record: positions, records' words one below the other."""

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.gradients import network
from shoal.gradients.batched import BatchedNetwork
from shoal.gradients.layers import rules
from shoal.gradients.layers.affine import AffineRule
from shoal.gradients.layout import Layout
from shoal.gradients.sequential import RecordNetwork


class Positions(nn.Module):
    """Adds an embedding of the positions, in one of the forms that people write."""

    def __init__(self, form):
        super().__init__()
        self.form, self.words, self.places = form, nn.Embedding(5, 4), nn.Embedding(9, 4)
        self.scores = nn.Linear(4, 3)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        if self.form == "[1, T]":
            places = places.unsqueeze(0)
        elif self.form == "[N, T]":
            places = places.expand_as(x)
        h = torch.tanh(self.words(x) + self.places(places))
        if self.form == "[N T, D]":
            return self.scores(h.reshape(-1, 4)).view(len(x), -1, 3).mean(1)
        return self.scores(h).mean(1)


@pytest.mark.parametrize("form", ["[T]", "[1, T]", "[N, T]", "[N T, D]"])
@pytest.mark.parametrize(("clients", "batch", "length"), [(2, 3, 6), (2, 3, 4), (3, 2, 3), (1, 1, 5), (1, 4, 2)])
def test_the_same_input_for_all_records_and_rows_below_each_other(form, clients, batch, length):
    """Also where there are as many positions as records, which would look alike."""
    torch.manual_seed(0)
    model = Positions(form).double()
    x = torch.randint(5, (clients, batch, length))
    y, weights = torch.zeros(clients, batch, dtype=torch.int64), torch.rand(clients, batch, dtype=torch.float64)
    fast = network(model, torch.randint(5, (3, length)), per_record=True)
    assert fast.batched
    slow = RecordNetwork(model)
    params = torch.rand(clients, fast.layout.size, dtype=torch.float64)
    found = []
    for net in (fast, slow):
        tape = net.backward(params, x, y, weights)
        total = torch.zeros_like(params)
        tape.accumulate(total, 1.0)
        found.append((total, tape.squares().sum(0)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


class Unlike(nn.Module):
    """A layer that gets every second record only."""

    def __init__(self):
        super().__init__()
        self.layer, self.scores = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.scores(torch.cat([self.layer(x[::2]), x[1::2]]))


def test_rows_that_do_not_follow_the_records_are_never_batched():
    assert network(Unlike(), torch.rand(3, 4)).way != "rules"


class OneMore(nn.Module):
    """A layer that gets one more row than there are records, whatever their number."""

    def __init__(self):
        super().__init__()
        self.layer, self.scores = nn.GroupNorm(1, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.scores(self.layer(torch.cat([x[:1], x]))[:-1])


class FitsAlways(AffineRule):
    def fits(self, x, params):
        return True

    def forward(self, x, params):
        y, saved = super().forward(x, params)
        return y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y, saved


def special(_, rule):
    return FitsAlways(1, rule.weight, rule.bias) if type(rule) is AffineRule else None


@pytest.mark.parametrize("chosen", [special, lambda *_: None], ids=["special", "plain"])
def test_rows_are_counted_by_rules_for_some_inputs_too(chosen, monkeypatch):
    monkeypatch.setattr(rules, "_special", chosen)
    model = OneMore()
    fast = BatchedNetwork(model, Layout.of(model), sample=torch.rand(1, 4))
    params = fast.layout.flatten(model).unsqueeze(0)
    with pytest.raises(ModelError, match="layer gets 4 rows for 3 records"):
        fast.backward(params, torch.rand(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3))


class Viewed(nn.Module):
    """The scores of pictures, which are put in rows by one of the ways that people use."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.layer, self.scores = rows, nn.GroupNorm(1, 4), nn.Linear(36, 3)

    def forward(self, x):
        return self.scores(self.rows(torch.relu(self.layer(x))))


@pytest.mark.parametrize(
    ("rows", "last"), [(lambda x: x.flatten(1), True), (lambda x: x.view(len(x), -1), False)], ids=["any", "view"]
)
def test_channels_are_last_only_where_the_models_code_takes_them_so(rows, last, monkeypatch):
    monkeypatch.setattr(rules, "_special", special)
    model = Viewed(rows)
    fast = BatchedNetwork(model, Layout.of(model), sample=torch.rand(2, 4, 3, 3))
    params, y = fast.layout.flatten(model).unsqueeze(0), torch.zeros(1, 2, dtype=torch.int64)
    tape = fast.backward(params, torch.rand(1, 2, 4, 3, 3), y, torch.ones(1, 2))
    assert [type(rule) is FitsAlways for rule, _, _ in tape] == [False, last]
