"""What is done otherwise on a CPU, for speed, gives the same: convolutions and deferred updates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.gradients import Layout, network
from shoal.gradients.layers.convolution import Conv2dRule
from shoal.gradients.layers.convolutions import convolution_rule
from shoal.gradients.layers.linear import outputs
from shoal.models import build
from support.layers import convolutions


def everything(rule, x, params, upstream, factors):
    """All that a rule gives."""
    y, saved = rule.forward(x, params)
    grad = upstream(y)
    plain, weighted = torch.zeros_like(params), torch.zeros_like(params)
    records = params.new_zeros(len(x), params.shape[1])
    into_x = rule.input_gradient(saved, grad, params)
    rule.accumulate(saved, grad, plain, 0.5)
    rule.accumulate(saved, grad, records, 1.0)
    squares, kept = rule.squares(saved, grad)
    rule.accumulate_weighted(saved, kept, grad, factors, weighted, 2.0)
    return y, into_x, plain, records, squares, weighted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(convolutions(), st.integers(1, 3), st.integers(1, 4), st.integers(5, 9), st.integers(5, 9))
def test_the_rules_of_a_cpu_give_what_the_rule_of_a_gpu_gives(conv, clients, batch, high, wide):
    torch.manual_seed(0)
    conv = conv.double()
    entries = Layout.of(conv).entries
    weight, bias = entries[0], entries[1] if conv.bias is not None else None
    size = entries[-1].stop
    params = torch.rand(clients, size, dtype=torch.float64)
    x = torch.rand(clients * batch, conv.in_channels, high + 4, wide + 4, dtype=torch.float64)
    factors = torch.rand(clients, batch, dtype=torch.float64)
    x.requires_grad_()
    rule, padded = convolution_rule(conv, weight, bias, kernels=True)
    before = padded(x)
    ours = everything(rule, before.detach(), params, torch.sin, factors)
    theirs = everything(Conv2dRule(conv, weight, bias), x.detach(), params, torch.sin, factors)
    (into_x,) = torch.autograd.grad(before, x, ours[1]) if before is not x else ours[1:2]
    for mine, plain in zip((ours[0], into_x, *ours[2:]), theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("outs", [3, 500])
@pytest.mark.parametrize("batch", [1, 8, 10, 32, 33])
def test_a_linear_layer_gives_the_same_in_whichever_order_it_multiplies(batch, outs, biased):
    torch.manual_seed(0)
    rows, weights = torch.rand(2, batch, 600, dtype=torch.float64), torch.rand(2, outs, 600, dtype=torch.float64)
    bias = torch.rand(2, outs, dtype=torch.float64) if biased else None
    found = outputs(rows, weights, bias)
    singly = torch.stack(
        [nn.functional.linear(rows[k], weights[k], None if bias is None else bias[k]) for k in (0, 1)]
    )
    assert found.is_contiguous()
    torch.testing.assert_close(found, singly)


class Tied(nn.Module):
    """Two layers with the same weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(60, 60), nn.Linear(60, 60), nn.Linear(60, 10)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1)[:, :60])))))


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: build("thesis-mlp", (1, 28, 28), 10, seed=0), Tied], ids=["mlp", "tied"])
@pytest.mark.parametrize(("steps", "batch"), [(1, 5), (4, 5), (13, 20)])
def test_deferred_updates_are_all_applied(make, steps, batch):
    """13 steps of 20 are more than a layer of 784 x 1000 may defer, so that it is updated on the way as well."""
    torch.manual_seed(0)
    module = make().double()
    net = network(module)
    assert net.batched
    x, y = torch.rand(steps, 2, batch, 1, 28, 28, dtype=torch.float64), torch.randint(0, 10, (steps, 2, batch))
    weights = torch.tensor([[1 / batch] * batch, [0.5, 0.5] + [0] * (batch - 2)], dtype=torch.float64)
    start = net.layout.flatten(module)
    at_once, deferred = start.repeat(2, 1), start.repeat(2, 1)
    for t in range(steps):
        net.backward(at_once, x[t], y[t], weights).accumulate(at_once, -0.1)
    with net.deferred_updates(start, deferred, batch):
        for t in range(steps):
            net.backward(deferred, x[t], y[t], weights).accumulate(deferred, -0.1)
    torch.testing.assert_close(deferred, at_once, rtol=1e-9, atol=1e-11)


def test_a_step_of_few_records_does_not_touch_great_weights_before_the_end():
    module = build("thesis-mlp", (1, 28, 28), 10, seed=0)
    net = network(module)
    start = net.layout.flatten(module)
    params = start.repeat(2, 1)
    first = net.layout.entries[0].of(params).clone()
    with net.deferred_updates(start, params, 5):
        net.backward(params, torch.rand(2, 5, 1, 28, 28), torch.zeros(2, 5).long(), torch.ones(2, 5)).accumulate(
            params, -0.1
        )
        assert torch.equal(net.layout.entries[0].of(params), first)
    assert not torch.equal(net.layout.entries[0].of(params), first)
