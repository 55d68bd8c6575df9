"""Frozen layers and frozen statistics: not in the layout, not clipped, not changed, and in the batched path too."""

import copy

import pytest
import torch
from torch import nn

from shoal.gradients import network
from shoal.gradients.layout import Layout

CLIENTS, RECORDS = 2, 5


def frozen(layer):
    return layer.requires_grad_(False)


def with_statistics(norm):
    """Statistics that are not those of the layer's start."""
    torch.manual_seed(1)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm.eval()


def backbone():
    """A frozen convolution with its normalisation, and a head that is trained."""
    torch.manual_seed(0)
    body = frozen(nn.Sequential(nn.Conv2d(1, 4, 3), with_statistics(nn.BatchNorm2d(4)), nn.ReLU(), nn.Flatten()))
    return nn.Sequential(body, nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))


def trained_norm():
    """A BatchNorm whose statistics are frozen, and whose scale and shift are trained."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), with_statistics(nn.BatchNorm2d(4)), nn.Flatten(), nn.Linear(36, 3))


def flat_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 6), with_statistics(nn.BatchNorm1d(6)), nn.Linear(6, 3))


def last_frozen():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 6), nn.ReLU(), frozen(nn.Linear(6, 3)))


MODELS = [backbone, trained_norm, flat_norm, last_frozen]


def batch():
    torch.manual_seed(2)
    x, y = torch.randn(CLIENTS, RECORDS, 1, 5, 5), torch.randint(0, 3, (CLIENTS, RECORDS))
    return x, y, torch.ones(CLIENTS, RECORDS)


def plain_gradients(module, params, x, y):
    """Every record's gradient by a loop of plain PyTorch, [K, B, P]."""
    layout, rows = Layout.of(module), []
    for k in range(CLIENTS):
        own = copy.deepcopy(module)
        layout.load(own, params[k])
        for b in range(RECORDS):
            own.zero_grad()
            nn.functional.cross_entropy(own(x[k, b : b + 1]), y[k, b : b + 1]).backward()
            grads = [p.grad for p in own.parameters() if p.requires_grad]
            rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows).view(CLIENTS, RECORDS, -1)


@pytest.mark.parametrize("make", MODELS)
def test_what_is_frozen_is_not_in_the_layout(make):
    module = make()
    layout = Layout.of(module)
    wanted = [name for name, p in module.named_parameters() if p.requires_grad]
    assert [entry.name for entry in layout.entries] == wanted
    assert layout.size == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert set(layout.frozen(module)) == set(module.state_dict()) - set(wanted)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
def test_record_gradients_and_norms_are_those_of_a_plain_loop(make, way):
    module = make()
    x, y, weights = batch()
    net = network(module, x[0, :3], y[0, :3], per_record=True, way=way)
    assert net.way == way
    params = torch.stack([Layout.of(module).flatten(module) * (1 + 0.2 * k) for k in range(CLIENTS)])
    tape = net.backward(params, x, y, weights)
    expected = plain_gradients(module, params, x, y)
    torch.testing.assert_close(tape.squares().sum(0), expected.double().square().sum(2), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(tape.records(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
def test_training_leaves_frozen_values_as_they_were(make, way):
    module = make()
    before = {name: tensor.clone() for name, tensor in Layout.of(module).frozen(module).items()}
    x, y, weights = batch()
    net = network(module, x[0, :3], y[0, :3], way=way)
    assert net.way == way
    params = Layout.of(module).flatten(module).expand(CLIENTS, -1).clone()
    for _ in range(2):
        net.backward(params, x, y, weights).accumulate(params, -0.1)
    own = net._own[0] if way == "rules" else net._module
    layers = own.state_dict() | module.state_dict()
    assert all(torch.equal(layers[name], tensor) for name, tensor in before.items())


def test_statistics_that_are_not_frozen_are_sent():
    assert [entry.name for entry in Layout.of(nn.BatchNorm1d(3)).entries if not entry.trainable] == [
        "running_mean",
        "running_var",
    ]


def test_dropout_needs_seeds_only_where_it_draws():
    for dropout, drops in ((nn.Dropout(0.5), True), (nn.Dropout(0.0), False), (nn.Dropout(0.5).eval(), False)):
        module = nn.Sequential(nn.Linear(4, 4), dropout, nn.Linear(4, 2))
        net = network(module, torch.rand(3, 4))
        assert (net.way, net.drops) == ("rules", drops)


class Tied(nn.Module):
    """One matrix, as embedding and as output."""

    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(torch.tanh(self.embedding(x).mean(1)))


class Cube(torch.autograd.Function):
    """x^3, with a gradient written by hand, of which vmap knows nothing."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class OwnGradient(nn.Module):
    def __init__(self, free=False):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.free = nn.Parameter(torch.ones(5)) if free else None  # in no layer, so that no rule covers it

    def forward(self, x):
        y = Cube.apply(self.layer(x))
        return y if self.free is None else y * self.free


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (Tied(), torch.randint(0, 5, (CLIENTS, RECORDS, 3))),
        (OwnGradient(), torch.randn(CLIENTS, RECORDS, 4)),
        (OwnGradient(free=True), torch.randn(CLIENTS, RECORDS, 4)),
    ],
    ids=["tied", "own gradient", "own gradient without rules"],
)
@pytest.mark.parametrize("per_record", [True, False])
def test_tied_weights_and_gradients_of_ones_own(module, x, per_record):
    y = torch.randint(0, 5, (CLIENTS, RECORDS))
    net = network(module, x[0, :3], y[0, :3], per_record=per_record)
    params = torch.stack([net.layout.flatten(module) * (1 + 0.2 * k) for k in range(CLIENTS)])
    tape, expected = net.backward(params, x, y, torch.ones(CLIENTS, RECORDS)), plain_gradients(module, params, x, y)
    if per_record:
        torch.testing.assert_close(tape.records(), expected, rtol=1e-4, atol=1e-5)
    total = torch.zeros_like(params)
    tape.accumulate(total, 1.0)
    torch.testing.assert_close(total, expected.sum(1), rtol=1e-4, atol=1e-5)
