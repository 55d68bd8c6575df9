"""The gradients of many clients at once equal those of one client after the other."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.gradients import Layout, network
from shoal.gradients.batched import BatchedNetwork
from shoal.gradients.layers.affine import AffineRule
from shoal.gradients.sequential import SequentialNetwork
from support.layers import convolutions


def gradients(net, params, x, y, weights):
    into = torch.zeros_like(params)
    net.backward(params, x, y, weights).accumulate(into, 1.0)
    return into


def assert_both_ways_agree(module, x, classes, clients):
    """In float64, for clients with different parameters, weights and some empty places."""
    module = module.double()
    fast, apart = network(module), SequentialNetwork(module)
    assert isinstance(fast, BatchedNetwork)
    start = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    params = torch.stack([start * (1 + 0.1 * k) for k in range(clients)])
    y = torch.randint(0, classes, x.shape[:2])
    weights = torch.rand(x.shape[:2], dtype=torch.float64) * (torch.rand(x.shape[:2]) > 0.2)
    expected = gradients(apart, params, x, y, weights)
    torch.testing.assert_close(gradients(fast, params, x, y, weights), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(convolutions(), st.integers(1, 3), st.integers(1, 4), st.integers(8, 11), st.integers(8, 11))
def test_random_convolutions(conv, clients, batch, high, wide):
    torch.manual_seed(0)
    x = torch.rand(clients, batch, conv.in_channels, high, wide, dtype=torch.float64)
    first = nn.Conv2d(conv.in_channels, conv.in_channels, 1)
    features = conv(torch.rand(1, conv.in_channels, high, wide)).numel()
    module = nn.Sequential(first, nn.Tanh(), conv, nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))
    assert_both_ways_agree(module, x, 3, clients)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("clients", [1, 3])
def test_every_kind_of_layer(clients, batch):
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.GroupNorm(3, 6),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.LayerNorm([6, 4, 4]),
        nn.AvgPool2d(2),
        nn.Flatten(2),
        nn.Linear(4, 5, bias=False),
        nn.LayerNorm(5),
        nn.Flatten(),
        nn.Linear(30, 4),
    )
    x = torch.rand(clients, batch, 2, 8, 8, dtype=torch.float64)
    assert_both_ways_agree(module, x, 4, clients)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=0)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.words(x.long()).mean(1))


def test_embedding_with_padding():
    x = torch.randint(0, 7, (2, 5, 6)).double()
    assert_both_ways_agree(Words(), x, 3, 2)


def test_an_empty_batch_gives_a_zero_gradient():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
    net = network(module)
    params = torch.stack([net.layout.flatten(module)] * 2)
    nothing = torch.zeros(2, 3)
    found = gradients(net, params, torch.rand(2, 3, 1, 8, 8), nothing.long(), nothing)
    assert torch.equal(found, torch.zeros_like(params))


class MixesExamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x - x.mean(0))


class ReachesIntoALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return x @ self.layer.weight.T


@pytest.mark.parametrize(("model", "way"), [(MixesExamples, "sequential"), (ReachesIntoALayer, "vmap")])
def test_a_model_that_rules_would_train_wrongly_goes_another_way(model, way):
    """Padding has a place in every batch, which a model that mixes records must not see."""
    assert network(model(), torch.rand(5, 4)).way == way


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4), nn.Dropout(0.5), nn.LSTM(4, 4, proj_size=2)],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_without_a_rule_are_trained_one_client_after_the_other(layer):
    assert not network(nn.Sequential(layer, nn.Linear(4, 2))).batched


def test_running_statistics_travel_with_the_parameters_of_each_client():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    net = network(module)
    params = torch.stack([net.layout.flatten(module)] * 2)
    x = torch.stack([torch.zeros(3, 4), torch.ones(3, 4)])
    net.backward(params, x, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3))
    means = net.layout.views(params[0])["0.running_mean"], net.layout.views(params[1])["0.running_mean"]
    torch.testing.assert_close(means[0], torch.zeros(4))
    torch.testing.assert_close(means[1], torch.full((4,), 0.1))


def test_a_vector_is_written_back_to_the_model_it_came_from():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    layout = Layout.of(module)
    vector = torch.arange(float(layout.size))
    layout.load(module, vector)
    assert torch.equal(layout.flatten(module), vector)


@pytest.mark.parametrize("word", [-1, 7])
def test_a_word_beyond_its_table_does_not_reach_that_of_another_client(word):
    module = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(4, 2))
    many = network(module)
    assert many.batched
    x = torch.tensor([[[1]], [[2]], [[3]]])
    x[1] = word
    params = many.layout.flatten(module).expand(3, -1)
    with pytest.raises(RuntimeError, match="out of range"):
        many.backward(params, x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


class Keeps(nn.Module):
    """Keeps what it computes; two threads wait for each other in between."""

    both: threading.Barrier | None = None

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        self.kept = self.first(x).tanh()
        if Keeps.both is not None:
            Keeps.both.wait(60)
        return self.last(self.kept)


@pytest.mark.parametrize("per_record", [False, True])
def test_a_model_that_keeps_what_it_computes_keeps_it_for_each_thread(monkeypatch, per_record):
    torch.manual_seed(0)
    module, x = Keeps(), torch.rand(2, 1, 3, 4)
    net = network(module, x[0, 0], per_record=per_record)
    assert net.way == "rules"
    params, y = net.layout.flatten(module).unsqueeze(0), torch.zeros(1, 3, dtype=torch.int64)

    def gradient(own):
        found = torch.zeros_like(params)
        net.backward(params, own, y, torch.ones(1, 3)).accumulate(found, 1.0)
        return found

    alone = [gradient(own) for own in x]
    monkeypatch.setattr(Keeps, "both", threading.Barrier(2))
    with ThreadPoolExecutor(2) as threads:
        assert all(map(torch.equal, threads.map(gradient, x), alone))


class Checkpointed(nn.Module):
    """Runs a layer again in the backward pass instead of keeping what it computed."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x).tanh()
        if self.reentrant is None:
            return self.last(self.middle(x).tanh())
        return self.last(checkpoint(lambda h: self.middle(h).tanh(), x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["rules", "sequential"])
@pytest.mark.parametrize("per_record", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # while rows are counted
def test_checkpointed_layers(reentrant, way, per_record):
    torch.manual_seed(0)
    plain = Checkpointed(None).double()
    module = Checkpointed(reentrant).double()
    module.load_state_dict(plain.state_dict())
    x, y = torch.rand(2, 3, 4, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.int64)
    net, expected = network(module, x[0], way=way, per_record=per_record), SequentialNetwork(plain)
    params = torch.stack([net.layout.flatten(module) * scale for scale in (0.8, 1.3)])  # not those of the module
    weights = torch.ones(2, 3, dtype=torch.float64)
    torch.testing.assert_close(*(gradients(each, params, x, y, weights) for each in (net, expected)))


@pytest.mark.parametrize("first", [1, -1, -2])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_scale_and_shift_take_an_input_in_any_order_in_memory(first, order):
    x = torch.randn(12, 5, 6).permute(order).contiguous().permute(*map(order.index, range(3)))
    layer = nn.GroupNorm(1, 5) if first == 1 else nn.LayerNorm((5, 6)[first:])
    weight, bias = Layout.of(layer).entries
    params = torch.randn(3, bias.stop)
    y, _ = AffineRule(first, weight, bias).forward(x, params)
    shape = (5, 1) if first == 1 else (5, 6)[first:]
    scale, shift = (
        entry.of(params).repeat_interleave(4, 0).view(12, *[1] * (2 - len(shape)), *shape) for entry in (weight, bias)
    )
    torch.testing.assert_close(y, x * scale + shift)
