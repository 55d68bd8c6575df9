"""The kernels of layers on CUDA against plain products. They run on a GPU, or anywhere under Triton's interpreter:
pip install triton; TRITON_INTERPRET=1 pytest tests/gradients/test_kernels_cuda.py
"""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.gradients import network
from shoal.gradients.batched import BatchedNetwork
from shoal.gradients.layers import products_cuda, record_convolution_cuda, recurrent_cuda
from shoal.gradients.layers.convolution import Conv2dRule
from shoal.gradients.layers.convolution_cuda import TritonConv2dRule
from shoal.gradients.layers.group_norm_cuda import GroupNormRule
from shoal.gradients.layers.linear import LinearRule, TransposedLinearRule
from shoal.gradients.layers.pooling_cuda import Pooled, can_pool
from shoal.gradients.layers.products_cuda import GRADIENTS, OUTPUTS, error_bound, launch
from shoal.gradients.layers.record_convolution_cuda import RecordConvolutionRule
from shoal.gradients.layers.standardised import StandardisedRule
from shoal.gradients.layers.standardised_cuda import add_mapped
from shoal.gradients.layout import Layout
from shoal.kernels import triton
from shoal.standardised_convolution import LEAST, before_standardising, standardised

GPU = torch.cuda.is_available()
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not GPU and not INTERPRETED, reason="needs a GPU, or Triton's interpreter")
DEVICE = "cuda" if GPU else "cpu"
CLIENTS, BATCH = 3, 4

CONVOLUTIONS = [
    nn.Conv2d(1, 3, 5, padding=2),
    nn.Conv2d(3, 20, 3),
    nn.Conv2d(17, 5, (3, 2), stride=(2, 1), padding=(1, 0)),
    nn.Conv2d(4, 8, 3, dilation=2, padding="same"),
    nn.Conv2d(4, 80, 1, bias=False),
    nn.Conv2d(2, 4, 4, padding="same"),
    nn.Conv2d(2, 4, 3, stride=3),
]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)


def assert_alike(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("library", [False, True])
def test_a_convolution(conv, library):
    conv = copy.deepcopy(conv).to(DEVICE)
    entries = Layout.of(conv).entries
    weight, bias = entries[0], entries[1] if conv.bias is not None else None
    params = torch.randn(
        CLIENTS, entries[-1].stop + 5, device=DEVICE
    )  # rows that are further apart than they are long
    x = torch.randn(CLIENTS * BATCH, conv.in_channels, 16, 18, device=DEVICE)
    factors = torch.rand(CLIENTS, BATCH, device=DEVICE)
    found = []
    ours = TritonConv2dRule(conv, weight, bias)
    ours.even &= library
    for rule in (ours, Conv2dRule(conv, weight, bias)):
        y, saved = rule.forward(x, params)
        assert isinstance(saved, torch.Tensor) == isinstance(rule, TritonConv2dRule)
        grad = torch.sin(y)
        sums, records, weighted = (torch.ones(rows, params.shape[1], device=DEVICE) for rows in (3, 12, 3))
        rule.accumulate(saved, grad, sums, 0.5)
        rule.accumulate(saved, grad, records, 1.0)
        squares, kept = rule.squares(saved, grad)
        rule.accumulate_weighted(saved, kept, grad, factors, weighted, -0.5)
        found.append([y, rule.input_gradient(saved, grad, params), sums, records, squares, weighted])
    for ours, theirs in zip(*found, strict=True):
        assert_alike(ours, theirs)
    records, squares = found[0][3] - 1, found[0][4]
    assert_alike(squares.float(), records.square().sum(1))


def test_a_convolution_leaves_its_weighted_sum_as_a_product_to_whoever_adds_noise():
    conv = nn.Conv2d(3, 20, 3).to(DEVICE)
    weight, bias = Layout.of(conv).entries
    rule = TritonConv2dRule(conv, weight, bias)
    params = torch.randn(CLIENTS, bias.stop, device=DEVICE)
    y, saved = rule.forward(torch.randn(CLIENTS * BATCH, 3, 9, 9, device=DEVICE), params)
    _, kept = rule.squares(saved, y)
    factors = torch.rand(CLIENTS, BATCH, device=DEVICE)
    into = torch.zeros_like(params)
    rule.accumulate_weighted(saved, kept, y, factors, into, -0.5)
    product = rule.product(saved, kept, y, factors, -0.5)
    assert_alike(product.scale * torch.bmm(product.grads.transpose(1, 2), product.rows).squeeze(1), into)
    assert product.start == weight.start


@pytest.mark.parametrize("window", [(2, 2), (3, 2)])
def test_max_pooling_where_numbers_are_equal_or_missing(window):
    x = torch.randint(0, 3, (5, 3, 13, 14), device=DEVICE).float()
    x[1, 1, 4:6, 3:6] = torch.nan
    found = []
    for pool in (lambda x: Pooled.apply(x, window), nn.MaxPool2d(window)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf)
        y.backward(torch.arange(y.numel(), device=DEVICE).view(y.shape).float())
        found.append((y.detach(), leaf.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_only_windows_that_do_not_overlap_are_pooled_so():
    assert can_pool(nn.MaxPool2d(2))
    others = [nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(12)]
    for other in (*others, nn.AvgPool2d(2)):
        assert not can_pool(other)


class Recurrent(nn.Module):
    def __init__(self, kind, size):
        super().__init__()
        self.layer, self.scores = kind(3, size, 2, bidirectional=True), nn.Linear(2 * size, 5)

    def forward(self, x):
        y, last = self.layer(x.transpose(0, 1))
        return self.scores(y[-1] + last[-1][0].repeat(1, 2))


@pytest.mark.parametrize("size", [4, 37])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer(kind, size, monkeypatch):
    module = Recurrent(kind, size).to(DEVICE)
    x = torch.randn(CLIENTS, BATCH, 6, 3, device=DEVICE)
    y, weights = torch.randint(5, (CLIENTS, BATCH), device=DEVICE), torch.rand(CLIENTS, BATCH, device=DEVICE)
    used, found = [], []
    monkeypatch.setattr(recurrent_cuda, "fits", lambda run: used.append(run) is None)
    for kernels in (True, False):
        net = network(module, per_record=True, kernels=kernels)
        params = torch.stack([net.layout.flatten(module) * (1 + 0.1 * k) for k in range(CLIENTS)])
        tape = net.backward(params, x, y, weights)
        found.append([tape.records(), tape.squares().float()])
    assert len(used) == 2 * 2 * 2 * 6  # layers, directions, forwards and backwards, steps
    for ours, theirs in zip(*found, strict=True):
        assert_alike(ours, theirs)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 0.1, 1.0, 30.0, 1e30])
def test_its_tanh_is_right_to_the_last_digits(scale):
    x = torch.cat([torch.randn(500), torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])]).to(DEVICE)
    given = torch.cat([torch.zeros(1, len(x), 1, 2, device=DEVICE), (x * scale).view(1, -1, 1, 1)], 3)
    states = torch.zeros(1, len(x), 2, 1, device=DEVICE)
    run = recurrent_cuda.Run([], states, given, torch.zeros_like(given), states[..., :0])
    recurrent_cuda._gru[recurrent_cuda._grid(states[:, :, 0])](
        given[:, :, 0],
        run.inner[:, :, 0],
        states[:, :, 0],
        states[:, :, 1],
        *recurrent_cuda._sizes(run),
        recurrent_cuda.BLOCK,
    )
    torch.testing.assert_close(given[0, :, 0, 2], torch.tanh(x * scale), rtol=1e-6, atol=0, equal_nan=True)


RECORDS = [
    nn.Conv2d(3, 16, 3, padding=1, bias=False),
    nn.Conv2d(16, 40, 3, stride=2, padding=1),
    nn.Conv2d(5, 7, (1, 3), dilation=2, padding=(0, 1)),
    nn.Conv2d(130, 20, 1, stride=2),
    nn.Conv2d(5, 7, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(1, 2)),
    nn.Conv2d(3, 130, 1),
]
SHORT = torch.bfloat16 if GPU else torch.float32  # the interpreter has no products in bfloat16


@pytest.fixture(params=[0, record_convolution_cuda.ENOUGH])
def enough(request, monkeypatch):
    """Programs that are enough: with 0 one of them adds up all records of a group, or all views of a record."""
    monkeypatch.setattr(record_convolution_cuda, "ENOUGH", request.param)


@pytest.mark.parametrize("conv", RECORDS, ids=str)
def test_gradients_of_the_records_of_one_client_and_of_their_views(conv, enough):
    conv = copy.deepcopy(conv).to(DEVICE)
    entries = Layout.of(conv).entries
    weight, bias = entries[0], entries[1] if conv.bias is not None else None
    params = conv.weight.detach().new_ones(1, entries[-1].stop)
    x = torch.randn(6, conv.in_channels, 5, 6, device=DEVICE).to(SHORT)
    rule, plain = RecordConvolutionRule(conv, weight, bias), Conv2dRule(conv, weight, bias)
    y, saved = rule.forward(x, params.to(SHORT))
    grad = torch.sin(y.float()).to(SHORT)
    _, rows = plain.forward(x.float(), params)
    for records in (1, 2, 6):
        ours, theirs = (torch.ones(records, params.shape[1], device=DEVICE) for _ in range(2))
        rule.accumulate(saved, grad, ours, 0.5)
        plain.accumulate(rows, grad.float(), theirs, 0.5)
        assert_alike(ours, theirs)
    squares, kept = rule.squares(saved, grad)
    of_each = ours.zero_()
    rule.accumulate(saved, grad, of_each, 1.0)
    true = of_each.square().sum(1)
    assert bool(((squares > 0.9999 * true) & (squares < 1.002 * true)).all())  # products of pairs are above it
    factors, weighted = torch.rand(1, 6, device=DEVICE), torch.zeros_like(params)
    rule.accumulate_weighted(saved, kept, grad, factors, weighted, -0.5)
    assert_alike(weighted, -0.5 * factors @ of_each)


@pytest.mark.parametrize("conv", RECORDS[:2], ids=str)
def test_gradients_of_the_standardised_weights_of_one_client(conv, enough):
    conv = copy.deepcopy(conv).to(DEVICE)
    entries = Layout.of(conv).entries
    weight, bias = entries[0], entries[1] if conv.bias is not None else None
    params = torch.randn(1, entries[-1].stop, device=DEVICE).to(SHORT)
    x = torch.randn(6, conv.in_channels, 5, 6, device=DEVICE).to(SHORT)
    rules = (RecordConvolutionRule, Conv2dRule)
    rule, plain = (StandardisedRule(of(conv, weight, bias), weight, bias) for of in rules)
    y, saved = rule.forward(x, params)
    grad = torch.sin(y.float()).to(SHORT)
    _, rows = plain.forward(x.float(), params.float())
    for records in (1, 2, 6):
        ours, theirs = (torch.ones(records, params.shape[1], device=DEVICE) for _ in range(2))
        rule.accumulate(saved, grad, ours, 0.5)
        plain.accumulate(rows, grad.float(), theirs, 0.5)
        assert_alike(ours, theirs)


@pytest.mark.parametrize(("channels", "groups", "side"), [(16, 16, 5), (64, 16, 9), (8, 1, 33)])
@pytest.mark.parametrize("shift", [True, False])
def test_group_norm_of_one_client_and_the_gradients_of_its_records(channels, groups, side, shift):
    norm = nn.GroupNorm(groups, channels).to(DEVICE)
    entries = Layout.of(norm).entries
    rule = GroupNormRule(norm, entries[0], entries[1] if shift else None)
    params = torch.randn(1, entries[-1].stop, device=DEVICE)
    x = (3 * torch.randn(6, channels, side, side, device=DEVICE) + 5).to(SHORT)
    y, saved = rule.forward(x, params)
    leaf = x.float().requires_grad_()
    normal = nn.functional.group_norm(leaf, groups)
    weight, bias = (entry.of(params)[0].view(1, -1, 1, 1) for entry in entries)
    plain = normal * weight + (bias if shift else 0)
    grad = torch.randn_like(plain).to(SHORT)
    plain.backward(grad.float())
    near = {"rtol": 0.01, "atol": 0.02} if GPU else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y.float(), plain.detach(), **near)
    squares, kept = rule.squares(saved, grad)  # before anybody asks for the gradient of the input
    torch.testing.assert_close(rule.input_gradient(saved, grad, params).float(), leaf.grad, **near)
    of_each = torch.cat([(grad.float() * normal.detach()).sum((2, 3)), grad.float().sum((2, 3))], 1)[
        :, : rule_size(rule)
    ]
    assert_alike(squares.float(), of_each.square().sum(1))
    into, weighted = torch.ones(3, params.shape[1], device=DEVICE), torch.zeros_like(params)
    rule.accumulate(saved, grad, into, 0.5)
    assert_alike(into[:, : rule_size(rule)], 1 + 0.5 * of_each.view(3, 2, -1).sum(1))
    factors = torch.rand(1, 6, device=DEVICE)
    rule.accumulate_weighted(saved, kept, grad, factors, weighted, 2.0)
    assert_alike(weighted[:, : rule_size(rule)], 2 * factors @ of_each)


def rule_size(rule):
    return sum(entry.stop - entry.start for entry in rule.entries)


@pytest.mark.parametrize(("outputs", "inputs", "taps"), [(1, 1, 0), (16, 27, 0), (5, 576, 9), (3, 2304, 9)])
def test_gradients_of_standardised_weights_are_mapped_back_for_every_record_of_every_client(outputs, inputs, taps):
    """Also where the taps of a kernel come before its channels."""
    raw = torch.randn(CLIENTS, outputs, inputs, device=DEVICE)
    raw[1, 0] = LEAST / 100 / inputs  # weights whose norm is below the least
    weights, norms = standardised(raw)
    rows, size = CLIENTS * BATCH, outputs * inputs
    wide = torch.randn(rows, size + 7, device=DEVICE)
    gradients = wide[:, :size]
    into = torch.ones(rows, size + 12, device=DEVICE)
    given = gradients
    if taps:
        given = gradients.reshape(rows, outputs, inputs // taps, taps).transpose(2, 3).contiguous()
    add_mapped(given, weights, norms, into, 3, 0.5)
    shape = (CLIENTS, BATCH, outputs, inputs)
    theirs = before_standardising(gradients.reshape(shape), weights.unsqueeze(1), norms.unsqueeze(1))
    ours = (into[:, 3 : 3 + size].reshape(shape) - 1) * 2
    assert_alike(ours * norms.unsqueeze(1), theirs * norms.unsqueeze(1))
    assert (into[:, :3] == 1).all()
    assert (into[:, 3 + size :] == 1).all()


@pytest.fixture
def tensor_cores(monkeypatch):
    """Products of the first 11 digits alone, which the interpreter would compute from all of them."""
    if GPU:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    whole = InterpreterBuilder.create_dot

    def short(handle):
        return TensorHandle((handle.data.view("uint32") & 0xFFFFE000).view("float32"), handle.dtype)

    def create_dot(self, a, b, total, *precision):
        return whole(self, short(a), short(b), total, *precision)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def laid_out(shape, transposed, make):
    """Numbers of this shape, the last but one dimension next to each other in memory where that is asked for."""
    return make(shape[0], shape[2], shape[1]).transpose(1, 2) if transposed else make(*shape)


def far_apart(*shape):
    return torch.randn(shape, device=DEVICE) * torch.randint(-20, 20, shape, device=DEVICE).double().exp2().float()


NUMBERS = {
    "normal": lambda *shape: torch.randn(shape, device=DEVICE),
    "positive": lambda *shape: 1 + torch.rand(shape, device=DEVICE),
    "far apart": far_apart,
    "digits that are dropped": lambda *shape: torch.full(shape, 1 + 2**-11 - 2**-23, device=DEVICE),
}


def assert_within_bound(found, left, right):
    left, right = left.double(), right.double()
    assert bool(((found - left @ right).abs() <= error_bound(left.shape[2]) * (left.abs() @ right.abs())).all())


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("make", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(70, 40, 50), (5, 130, 3), (64, 32, 1024)])
def test_products_of_tensor_cores_have_the_errors_of_float32(rows, columns, depth, make):
    for tile in (OUTPUTS, GRADIENTS):
        for transposed in ((False, False), (True, False), (False, True), (True, True)):
            left = laid_out((2, rows, depth), transposed[0], make)
            right = laid_out((2, depth, columns), transposed[1], make)
            found = left.new_empty(2, rows, columns)
            launch(tile, found, left, right, None, 1.0)
            assert_within_bound(found, left, right)


@pytest.mark.usefixtures("tensor_cores")
def test_the_bound_is_too_narrow_for_tf32():
    left, right = (torch.randn(shape, device=DEVICE) for shape in ((2, 64, 50), (2, 50, 40)))
    short = [(x.view(torch.int32) & -0x2000).view(torch.float32) for x in (left, right)]
    with pytest.raises(AssertionError):
        assert_within_bound(torch.bmm(*short), left, right)


@pytest.mark.parametrize("tile", [OUTPUTS, GRADIENTS])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_added_to_what_is_there_or_to_a_bias(tile, transposed):
    left, right = torch.randn(2, 70, 50, device=DEVICE), laid_out((2, 50, 40), transposed, NUMBERS["normal"])
    whole = torch.randn(2, 75, 48, device=DEVICE)
    into, before = whole[:, 2:72, 4:44], whole.clone()
    launch(tile, into, left, right, into, -0.5)
    torch.testing.assert_close(into, before[:, 2:72, 4:44] - 0.5 * left @ right, rtol=1e-5, atol=1e-4)
    into.copy_(before[:, 2:72, 4:44])
    assert torch.equal(whole, before)  # nothing was written beside it
    bias = torch.randn(2, 1, 45, device=DEVICE)[:, :, :40].expand(2, 70, 40)
    launch(tile, into, left, right, bias, 1.0)
    torch.testing.assert_close(into, bias + left @ right, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("size", [2.0**-126, 2.0**-113, 2.0**-60, 2.0**100])
def test_products_of_tiny_and_huge_numbers(size):
    """Tensor cores have no digits below 2^-136: of numbers below 2^-113 those are lost beside the bound."""
    left = (1 + torch.rand(2, 40, 50, device=DEVICE)) * size
    right = torch.randn(2, 50, 40, device=DEVICE).clamp(-3, 3) / size  # 4 / 2^-126 is infinite
    found, wanted = left.new_empty(2, 40, 40), left.double() @ right.double()
    launch(OUTPUTS, found, left, right, None, 1.0)
    lost = 2.0**-136 / size if size < 2.0**-113 else 0.0
    allowed = (error_bound(50) + lost) * (left.double().abs() @ right.double().abs())
    assert bool(((found - wanted).abs() <= allowed).all())


NOT_FINITE = {"inf": 0x7F800000, "-inf": 0xFF800000, "nan": 0x7FC00000, "nan of CUDA": 0x7FFFFFFF, "-nan": 0xFFFFFFFF}
NOT_FINITE |= {"smallest nan": 0x7F800001, "largest float": 0x7F7FFFFF, "2^128 - 2^116": 0x7F7FF000}


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bits", NOT_FINITE.values(), ids=NOT_FINITE)
@pytest.mark.parametrize("factor", [0, 1])
def test_a_product_of_what_is_not_finite_is_nan_and_others_are_not(bits, factor):
    factors = torch.ones(1, 40, 40, device=DEVICE), torch.ones(1, 40, 40, device=DEVICE)
    place = (0, 1, 7) if factor == 0 else (0, 7, 1)
    factors[factor].view(torch.int32)[place] = bits - (bits >> 31 << 32)
    found = torch.empty(1, 40, 40, device=DEVICE)
    launch(OUTPUTS, found, *factors, None, 1.0)
    reached = torch.zeros(40, 40, dtype=torch.bool)
    (reached if factor == 0 else reached.T)[1] = True
    assert torch.equal(found[0].isnan().cpu(), reached)
    assert (found[0].cpu()[~reached] == 40).all()


@pytest.mark.parametrize("kind", [LinearRule, TransposedLinearRule])
def test_linear_layers_by_tensor_cores_and_clipped_records_without(kind, monkeypatch):
    layer = nn.Linear(12, 20).to(DEVICE)
    weight, bias = Layout.of(layer).entries
    if kind is TransposedLinearRule:
        weight = replace(weight, shape=torch.Size((12, 20)))
    params = torch.randn(CLIENTS, bias.stop + 3, device=DEVICE)
    x, grad = torch.randn(CLIENTS * BATCH, 6, 12, device=DEVICE), torch.randn(CLIENTS * BATCH, 6, 20, device=DEVICE)
    used, found = [], []
    monkeypatch.setattr(products_cuda, "_suits", lambda *given: used.append(given) or True)
    for kernels in (True, False):
        rule, into = kind(weight, bias, kernels), torch.ones_like(params)
        y, saved = rule.forward(x, params)
        rule.accumulate(saved, grad, into, -0.5)
        found.append([y, rule.input_gradient(saved, grad, params), into])
    assert len(used) == 3
    for ours, theirs in zip(*found, strict=True):
        assert_alike(ours, theirs)
    factors = torch.rand(CLIENTS, BATCH, device=DEVICE)
    for positions in (1, 6):
        rule = kind(weight, bias)
        _, kept = rule.squares(x[:, :positions], grad[:, :positions])
        rule.accumulate_weighted(x[:, :positions].contiguous(), kept, grad[:, :positions], factors, into, 1.0)
    assert len(used) == 3


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_models_with_convolutions_are_faster_for_one_client():
    for layer, faster in ((nn.Conv2d(3, 4, 3), True), (nn.GroupNorm(1, 3), False)):
        model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2)).to(DEVICE)
        x = torch.rand(1, 3, 6, 6, device=DEVICE)
        model(x)
        assert BatchedNetwork(model, Layout.of(model), sample=x).faster_for_one == faster
