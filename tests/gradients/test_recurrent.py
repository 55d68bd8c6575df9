"""Recurrent layers of many clients at once give what PyTorch's own give, one client or record after the other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import shoal
from shoal.config import configure
from shoal.errors import ModelError
from shoal.gradients import network
from shoal.gradients.batched import BatchedNetwork
from shoal.gradients.layers.recurrent import RecurrentLayer
from shoal.gradients.sequential import RecordNetwork, SequentialNetwork
from shoal.prepare import prepare
from support.both_ways import assert_both_ways_agree
from support.levels import CLIENT_LEVEL, RECORD_LEVEL

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


class Recurrent(nn.Module):
    """Scores from the outputs, the last states, or both; the initial states may depend on the record."""

    def __init__(self, kind, uses="all", starts=False, **options):
        super().__init__()
        self.first, self.layer = nn.Linear(3, 5), KINDS[kind](5, 4, **options)
        self.scores, self.uses, self.starts = nn.LazyLinear(3), uses, starts
        self(torch.zeros(1, 2, 3))

    def forward(self, x):
        x, layer = torch.tanh(self.first(x.flatten(1, -2))), self.layer
        layer.flatten_parameters()
        many = layer.num_layers * (2 if layer.bidirectional else 1)
        first = x.mean((1, 2)).view(1, -1, 1) + torch.arange(4.0, dtype=x.dtype).expand(many, 1, 4)
        hx = ((first, first.cos()) if layer.mode == "LSTM" else first,) if self.starts else ()
        y, last = layer(x if layer.batch_first else x.transpose(0, 1), *hx)
        y = y if layer.batch_first else y.transpose(0, 1)
        last = last if isinstance(last, tuple) else (last, last)
        states = torch.cat(last, -1).transpose(0, 1).flatten(1)
        parts = {"outputs": [y.cos().mean(1)], "states": [states], "cell": [last[1][-1]]}
        used = parts.get(self.uses) or parts["outputs"] + parts["states"]
        return self.scores(torch.cat(used, -1))


@st.composite
def networks(draw):
    return Recurrent(
        draw(st.sampled_from(list(KINDS))),
        draw(st.sampled_from(["all", "outputs", "states", "cell"])),
        draw(st.booleans()),
        num_layers=draw(st.integers(1, 3)),
        **{name: draw(st.booleans()) for name in ("bias", "batch_first", "bidirectional")},
    ).double()


def batch(module, clients, records, length):
    """For clients with parameters of their own; one record is padding."""
    net = network(module, per_record=True)
    assert isinstance(net, BatchedNetwork)
    start = net.layout.flatten(module)
    params = torch.stack([start * (1 + 0.1 * k) for k in range(clients)])
    x, y = torch.randn(clients, records, length, 3, dtype=start.dtype), torch.randint(3, (clients, records))
    weights = torch.rand(clients, records, dtype=start.dtype)
    weights[:, 1:2] = 0
    return net, params, x, y, weights


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(networks(), st.integers(1, 3), st.integers(0, 4), st.sampled_from([1, 2, 5, 30]))
def test_gradients_norms_and_sums_are_those_of_plain_layers(module, clients, records, length):
    torch.manual_seed(0)
    net, *given_batch = batch(module, clients, records, length)
    params = given_batch[0]
    ours, theirs = (way.backward(*given_batch) for way in (net, RecordNetwork(module)))
    sums = [torch.zeros_like(params), torch.zeros_like(params)]
    for tape, into in zip((ours, theirs), sums, strict=True):
        tape.accumulate(into, 0.7)
    torch.testing.assert_close(*sums, **CLOSE)
    torch.testing.assert_close(ours.records(), theirs.records(), **CLOSE)
    order = [theirs.layers.index(name) for name in ours.layers]
    torch.testing.assert_close(ours.squares(), theirs.squares()[order], **CLOSE)
    factors = torch.rand(1, clients, records, dtype=torch.float64)
    for tape, into in zip((ours, theirs), sums, strict=True):
        tape.accumulate(into, -0.3, factors)
    torch.testing.assert_close(*sums, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_too(kind):
    torch.manual_seed(0)
    module = Recurrent(kind, starts=True, num_layers=2, bidirectional=True)
    net, *given_batch = batch(module, 2, 3, 40)
    sums = []
    for way in (net, SequentialNetwork(module)):
        sums.append(torch.zeros_like(given_batch[0]))
        way.backward(*given_batch).accumulate(sums[-1], 1.0)
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


def test_a_norm_is_not_too_small_in_float32():
    """The same input again and again, with gradients that cancel: what is left is rounding."""
    torch.manual_seed(0)
    module = Recurrent("tanh", "outputs")
    net, params, x, y, weights = batch(module, 2, 50, 30)
    tape = net.backward(params, x[:, :, :1].expand_as(x) * 1e4, y, weights + 0.1)
    found, made = tape.squares(), tape.records().double()
    true = torch.stack([made[..., net.layout.named_layers[name]].square().sum(2) for name in tape.layers])
    assert (found >= 0.99999 * true).all()  # nor is NaN


def layer_of(module):
    (layer,) = (layer for layer in network(module)._own[0].modules() if isinstance(layer, RecurrentLayer))
    return layer


def test_models_can_ask_a_layer_for_its_sizes():
    layer = layer_of(Recurrent("gru", num_layers=2, bidirectional=True))
    assert (layer.input_size, layer.hidden_size, layer.num_layers) == (5, 4, 2)
    assert layer.bidirectional
    assert layer.weight_ih_l1.shape == (12, 8)


REFUSED = {
    "random": lambda: nn.LSTM(3, 4, num_layers=2, dropout=0.5),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "half frozen": lambda: frozen(nn.GRU(3, 4)),
    "hooked": lambda: hooked(nn.GRU(3, 4)),
    "of another class": lambda: type("Own", (nn.LSTM,), {})(3, 4),
}


def frozen(layer):
    layer.bias_ih_l0.requires_grad_(False)
    return layer


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_certain_is_trained_one_client_after_the_other(name):
    assert network(REFUSED[name]()).way != "rules"


def test_dropout_between_layers_is_none_in_eval_mode_or_where_there_is_one_layer():
    assert network(nn.LSTM(3, 4, num_layers=2, dropout=0.5).eval()).way == "rules"
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
        assert network(nn.LSTM(3, 4, dropout=0.5)).way == "rules"


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scores = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        return self.scores(self.layer(pack_padded_sequence(x, lengths, batch_first=True))[1][-1])


class Unbatched(Packed):
    """The records are taken for the time steps of one sequence."""

    def forward(self, x):
        return self.scores(self.layer(x[:, 0])[0])


class TurnedRound(Packed):
    """The time steps are taken for the records."""

    def forward(self, x):
        return self.scores(self.layer(x.transpose(0, 1))[0][-1])


@pytest.mark.parametrize("model", [Packed, Unbatched, TurnedRound])
def test_a_model_with_other_sequences_than_its_records_goes_one_client_after_the_other(model):
    net = network(model(), torch.rand(5, 6, 3))
    assert net.way != "rules"
    with pytest.raises(ModelError, match=r"one padded sequence per record; set engine.way=sequential"):
        network(model()).backward(
            torch.zeros(2, 123), torch.rand(2, 5, 6, 3), torch.zeros(2, 5).long(), torch.ones(2, 5)
        )


@pytest.mark.slow
@pytest.mark.parametrize("config", [CLIENT_LEVEL, RECORD_LEVEL], ids=["client", "record"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_round_moves_the_model_as_one_client_after_the_other_would(kind, config):
    torch.manual_seed(0)
    module, x = Recurrent(kind, batch_first=True), torch.randn(96, 12, 3)
    data = shoal.from_arrays(x.numpy(), np.arange(96) % 3, client=np.arange(96) // 16)
    found = []
    for way in ("rules", "sequential"):
        settings = config | {"rounds": 1, "engine": {"device": "cpu", "threads": 1, "way": way}}
        trainer = prepare(configure(settings), data, module)[1]
        assert trainer.cohort.network.way == way
        trainer.run_round(0)
        found.append(trainer.params)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


class Steps(nn.Module):
    """A cell, or two on top of each other, in a loop of the model's own."""

    def __init__(self, make, given=False):
        super().__init__()
        torch.manual_seed(3)
        self.cells, self.head = nn.ModuleList([make(3, 4), make(4, 4)]), nn.Linear(4, 3)
        self.given, self.two = given, isinstance(self.cells[0], nn.LSTMCell)

    def forward(self, x):
        first = [x.new_full((len(x), 4), 0.3)] * 2
        states = [(tuple(first) if self.two else first[0]) if self.given else None for _ in self.cells]
        for step in x.unbind(1):
            for place, cell in enumerate(self.cells):
                states[place] = cell(step, states[place])
                step = states[place][0] if self.two else states[place]
        return self.head(step)


CELLS = {
    "LSTMCell": nn.LSTMCell,
    "GRUCell": nn.GRUCell,
    "RNNCell": nn.RNNCell,
    "RNNCell with relu": lambda *sizes: nn.RNNCell(*sizes, nonlinearity="relu"),
    "without bias": lambda *sizes: nn.GRUCell(*sizes, bias=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("given", [True, False])
def test_cells_in_a_loop(name, given):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    assert_both_ways_agree(Steps(CELLS[name], given), x, sizes=[(2, 0), (2, 1), (2, 4)])


def test_a_cell_that_is_partly_frozen_or_hooked_has_no_rule():
    for cell in (nn.GRUCell(3, 4), nn.LSTMCell(3, 4)):
        cell.bias_ih.requires_grad_(False)
        assert network(cell).way != "rules"
    assert network(hooked(nn.RNNCell(3, 4))).way != "rules"
