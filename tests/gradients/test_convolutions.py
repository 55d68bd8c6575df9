"""Convolutions of every kind, and networks of them as people write them, by their rules."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.gradients import network
from shoal.gradients.batched import BatchedNetwork, finite
from shoal.gradients.layers import convolution_library, record_convolution_cuda
from shoal.gradients.layers.convolution_cuda import TritonConv2dRule
from shoal.gradients.layers.convolution_library import LibraryConvolutionRule
from shoal.gradients.layers.record_convolution_cuda import RecordConvolutionRule
from shoal.gradients.layers.rule import few_positions
from shoal.gradients.layers.rules import rule_for
from shoal.gradients.layout import Layout
from shoal.gradients.sequential import RecordNetwork, SequentialNetwork
from shoal.models import StandardisedConv2d
from support.resnet import ResNet

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@st.composite
def convolutions(draw):
    """A convolution of any kind, and the size of its input."""
    dims, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3]))
    each = st.lists(st.integers(1, 3), min_size=dims, max_size=dims)
    kernel, stride, dilation, more = draw(each), draw(each), draw(each), draw(each)
    ins, outs = groups * draw(st.sampled_from([1, 2, 5])), groups * draw(st.sampled_from([1, 3]))
    options = {"dilation": dilation, "groups": groups, "bias": draw(st.booleans())}
    if draw(st.booleans()):
        rest = [min(draw(st.integers(0, 1)), step - 1) for step in stride]
        size = [2 + extra for extra in more]
        return TRANSPOSED[dims](ins, outs, kernel, stride, draw(st.integers(0, 1)), rest, **options), size
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    same = stride == [1] * dims and draw(st.booleans())
    padding = draw(st.integers(0, 2))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if mode != "zeros":
        least = [max(far, padding) for far in reach]
    else:
        least = [0 if same else max(far - 2 * padding, 0) for far in reach]
    size = [low + extra for low, extra in zip(least, more, strict=True)]
    padding = "same" if same else padding
    kind = StandardisedConv2d if dims == 2 and draw(st.booleans()) else PLAIN[dims]
    return kind(ins, outs, kernel, stride, padding, padding_mode=mode, **options), size


def everything(module, x, upstream, clients, make=None):
    """What a rule gives for clients with parameters of their own: output, gradients, squares and sums."""
    layout = Layout.of(module)
    entries = {id(p): entry for p, entry in zip(module.parameters(), layout.entries, strict=True)}
    weight, bias = [*layout.entries, None][:2]
    rule, before = (make(module, weight, bias), torch.Tensor.detach) if make else rule_for(module, entries)
    start = layout.flatten(module)
    params = torch.stack([start * (1 + 0.1 * k) for k in range(clients)])
    x = x.detach().requires_grad_()
    padded = before(x)
    y, saved = rule.forward(padded.detach(), params)
    grad = upstream(y)
    into_x = rule.input_gradient(saved, grad, params)
    if padded.requires_grad and padded is not x:
        (into_x,) = torch.autograd.grad(padded, x, into_x)
    sums, weighted = torch.zeros_like(params), torch.zeros_like(params)
    records = params.new_zeros(len(x), layout.size)
    factors = torch.linspace(0.2, 1.5, len(x), dtype=x.dtype, device=x.device).view(clients, -1)
    rule.accumulate(saved, grad, sums, 0.5)
    rule.accumulate(saved, grad, records, 1.0)
    squares, kept = rule.squares(saved, grad)
    rule.accumulate_weighted(saved, kept, grad, factors, weighted, -2.0)
    return rule, params, (y, into_x, sums, records, squares, weighted), factors


def plainly(module, params, x, upstream, factors):
    """The same, record by record, by autograd."""
    layout = Layout.of(module)
    outputs, into_x, records = [], [], []
    for record, vector in zip(x, params.repeat_interleave(len(x) // len(params), 0), strict=True):
        vector, record = vector.detach().requires_grad_(), record.detach().unsqueeze(0).requires_grad_()
        y = torch.func.functional_call(module, layout.views(vector), record)
        found = torch.autograd.grad(y, [record, vector], upstream(y.detach()))
        outputs.append(y.detach())
        into_x.append(found[0])
        records.append(found[1])
    records = torch.stack(records)
    each = records.view(*factors.shape, -1)
    weighted = -2.0 * (each * factors.unsqueeze(2)).sum(1)
    return torch.cat(outputs), torch.cat(into_x), 0.5 * each.sum(1), records, records.square().sum(1), weighted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(convolutions(), st.integers(1, 3), st.integers(1, 3))
def test_every_kind_gives_what_autograd_gives(drawn, clients, batch):
    torch.manual_seed(0)
    module, size = drawn
    module = module.double()
    x = torch.randn(clients * batch, module.in_channels, *size, dtype=torch.float64)
    _, params, found, factors = everything(module, x, torch.sin, clients)
    for ours, theirs in zip(found, plainly(module, params, x, torch.sin, factors), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_standardised_weights_too_long_for_float32_leave_gradients_as_they_are_beside_a_nan():
    """The squares of weights of 1e20 overflow; a record that is left out changes no other one's gradient."""
    torch.manual_seed(0)
    module = StandardisedConv2d(3, 4, 3)
    torch.nn.init.normal_(module.weight, std=1e20)
    layout = Layout.of(module)
    entries = {id(p): entry for p, entry in zip(module.parameters(), layout.entries, strict=True)}
    rule, _ = rule_for(module, entries)
    y, saved = rule.forward(torch.randn(2, 3, 5, 5), layout.flatten(module).unsqueeze(0))
    records = torch.zeros(2, 2, layout.size)
    for into, held in zip(records, (saved, finite(saved)), strict=True):
        rule.accumulate(held, torch.ones_like(y), into, 1.0)
    assert records.isfinite().all()
    assert torch.equal(*records)


WAYS = {
    "few positions": (nn.Conv2d(20, 30, 3, padding=1, bias=True), (20, 2, 3)),
    "few positions of groups": (nn.Conv2d(20, 40, 3, groups=2), (20, 4, 4)),
    "few positions, transposed": (nn.ConvTranspose2d(20, 30, 3), (20, 2, 2)),
    "few positions, output padding over the stride": (
        nn.ConvTranspose2d(20, 30, 3, dilation=2, output_padding=1),
        (20, 2, 2),
    ),
    "few positions of a sequence": (nn.Conv1d(16, 16, 5, padding=2), (16, 4)),
    "few positions of a volume": (nn.Conv3d(16, 12, 2), (16, 2, 3, 2)),
    "one position": (nn.Conv2d(20, 30, 3, padding=1), (20, 1, 1)),
    "one position of two": (nn.Conv2d(20, 30, 3, stride=2, padding=1), (20, 2, 2)),
    "depthwise": (nn.Conv2d(12, 12, 3, padding=1, groups=12), (12, 6, 6)),
    "depthwise with a multiplier": (nn.Conv2d(6, 12, 3, groups=6), (6, 6, 6)),
    "many positions": (nn.Conv2d(20, 6, 3, padding=1), (20, 9, 9)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("batch", [1, 130])
def test_every_way_to_find_the_norms(name, batch):
    torch.manual_seed(0)
    module, shape = WAYS[name]
    module = module.double()
    x = torch.randn(2 * batch, *shape, dtype=torch.float64)
    rule, params, found, factors = everything(module, x, torch.sin, 2)
    assert isinstance(rule, LibraryConvolutionRule)
    for ours, theirs in zip(found, plainly(module, params, x, torch.sin, factors), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


SMALL = {
    "one pixel": (nn.Conv2d(20, 30, 3, padding=1), (20, 1, 1)),
    "one pixel of four": (nn.Conv2d(20, 30, 3, stride=2, padding=1, bias=False), (20, 2, 2)),
    "one row": (nn.Conv2d(6, 8, 5, padding=2), (6, 1, 4)),
    "a few": (nn.Conv2d(20, 30, 3, padding=1), (20, 2, 3)),
    "uneven": (nn.Conv2d(6, 8, 4, padding="same"), (6, 2, 2)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", SMALL)
def test_small_maps_by_the_rule_of_cuda(name):
    """They need none of its kernels."""
    torch.manual_seed(0)
    module, shape = SMALL[name]
    x = torch.randn(6, *shape, dtype=torch.float64)
    _, params, found, factors = everything(module.double(), x, torch.sin, 2, TritonConv2dRule)
    for ours, theirs in zip(found, plainly(module, params, x, torch.sin, factors), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_norms_of_wide_layers_by_the_rule_of_cuda():
    """Their records' gradients are not made: a ResNet-18 has 11 million numbers for each record."""
    torch.manual_seed(0)
    module, x, grad = nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.randn(4, 64, 5, 5), torch.randn(4, 64, 5, 5)
    layout = Layout.of(module)
    rule = TritonConv2dRule(module, layout.entries[0], None)
    squares, kept = rule.squares(x, grad)
    assert kept == (None, None)
    assert rule.product(x, kept, grad, torch.ones(1, 4), 1.0) is None
    into, factors = torch.zeros(1, layout.size), torch.rand(1, 4)
    rule.accumulate_weighted(x, kept, grad, factors, into, 1.0)
    records = rule._library._gradients(x, grad, 4)
    assert (squares >= records.double().square().sum(1) * (1 - 1e-6)).all()
    torch.testing.assert_close(squares, records.double().square().sum(1), rtol=0.01, atol=0)
    torch.testing.assert_close(into, factors @ records, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_on_cuda(name, kind, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    module, shape = WAYS[name]
    x = torch.randn(6, *shape, dtype=torch.float64)
    wide = everything(module.double(), x, torch.sin, 2)[2]
    found = everything(copy.deepcopy(module).to("cuda", kind), x.to("cuda", kind), torch.sin, 2)[2]
    for ours, theirs in zip(found, wide, strict=True):
        exact = kind == torch.float64
        error = 1e-9 if exact else 1e-3
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=error if exact else 0.02, atol=error)


@pytest.mark.parametrize("name", WAYS)
def test_in_float32_a_norm_is_never_below_that_of_the_gradient_that_is_added(name):
    torch.manual_seed(0)
    module, shape = WAYS[name]
    x = torch.randn(16, *shape)
    wide = everything(module.double(), x.double(), torch.sin, 16)[2]
    _, _, found, factors = everything(module.float(), x, torch.sin, 16)
    added = (found[5].double() / (2 * factors)).square().sum(1)  # every record is alone with its client
    assert (found[4] >= added * (1 - 1e-6)).all()
    torch.testing.assert_close(found[4], wide[4], rtol=0.02, atol=0)


def test_gradients_of_records_are_made_only_where_they_are_small():
    """A ResNet-18's widest layer: products of its 16 positions instead of 2.4 million numbers a record."""
    assert all(few_positions(*sizes) for sizes in [(16, 512, 4608), (64, 256, 2304)])
    assert not any(few_positions(*sizes) for sizes in [(1024, 64, 576), (256, 64, 147), (1, 1, 9)])
    module = nn.Conv2d(64, 64, 3, padding=1)
    _, kept = _squares(module, torch.randn(2, 64, 4, 4))
    assert kept[0] is None
    assert kept[1].shape == (2, 64)


def _squares(module, x):
    layout = Layout.of(module)
    entries = {id(p): entry for p, entry in zip(module.parameters(), layout.entries, strict=True)}
    rule, _ = rule_for(module, entries)
    y, saved = rule.forward(x, layout.flatten(module)[None])
    return rule.squares(saved, y)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("most", [1, 2**28])
def test_gradients_of_records_by_products_are_the_librarys(name, most, monkeypatch):
    """The ways of CUDA and of a CPU, whatever is unfolded at a time."""
    monkeypatch.setattr(convolution_library, "MOST", most)
    monkeypatch.setattr(convolution_library, "CACHED", most)
    module, shape = WAYS[name]
    layout = Layout.of(module.double())
    rule = LibraryConvolutionRule(module, *layout.entries)
    y, (x, _) = rule.forward(torch.rand(3, *shape, dtype=torch.float64), layout.flatten(module)[None])
    wanted, images = rule._gradients(x, y, 3), rule._exchanged(x, y)
    torch.testing.assert_close(rule._products(*images), wanted, **CLOSE)
    torch.testing.assert_close(rule._products_last(*images).transpose(2, 3).reshape(3, -1), wanted, **CLOSE)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_taps_that_see_only_padding_are_left_out_and_stay_as_they_are(size):
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, 5, padding=2, bias=False).double()
    layout = Layout.of(module)
    rule = LibraryConvolutionRule(module, layout.entries[0], None)
    _, (_, weights) = rule.forward(torch.randn(2, 3, size, size, dtype=torch.float64), layout.flatten(module)[None])
    assert weights.shape[3:] == (min(5, 2 * size - 1),) * 2


# --- networks


class Separable(nn.Module):
    """A block of MobileNet: each channel alone, then all of them, in place."""

    def __init__(self, ins, outs, stride):
        super().__init__()
        self.depthwise = nn.Conv2d(ins, ins, 3, stride, 1, groups=ins, bias=False)
        self.pointwise = nn.Conv2d(ins, outs, 1, bias=False)
        self.norms, self.act = nn.ModuleList([nn.GroupNorm(2, ins), nn.GroupNorm(2, outs)]), nn.ReLU6(inplace=True)

    def forward(self, x):
        x = self.act(self.norms[0](self.depthwise(x)))
        return self.act(self.norms[1](self.pointwise(x)))


def mobile():
    layers = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.GroupNorm(2, 8), nn.ReLU6(inplace=True)]
    layers += [Separable(8, 12, 1), Separable(12, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(*layers)


def sequences():
    layers = [nn.Conv1d(4, 8, 5, padding=2), nn.ReLU(inplace=True), nn.Conv1d(8, 8, 3, 2, dilation=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 10))


def decoder():
    layers = [nn.Conv2d(3, 6, 4, 2, 1, padding_mode="reflect"), nn.ReLU(inplace=True)]
    layers += [nn.ConvTranspose2d(6, 4, 4, 2, 1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))


def volumes():
    layers = [nn.Conv3d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool3d(2)]
    return nn.Sequential(*layers, nn.Conv3d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(6, 10))


NETWORKS = {
    "resnet": (lambda: ResNet(8, 2), (3, 32, 32)),
    "mobile": (mobile, (3, 12, 12)),
    "sequences": (sequences, (4, 20)),
    "decoder": (decoder, (3, 8, 8)),
    "volumes": (volumes, (1, 4, 4, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks_are_batched_and_agree_at_both_levels(name):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    module = make().double()
    sample = torch.rand(2, *shape)
    for per_record, slow in ((False, SequentialNetwork), (True, RecordNetwork)):
        fast, plain = network(module, sample, per_record=per_record), slow(module)
        assert isinstance(fast, BatchedNetwork)
        start = fast.layout.flatten(module)
        params = torch.stack([start, 1.1 * start])
        for batch in (0, 1, 3):
            x, y = torch.rand(2, batch, *shape, dtype=torch.float64), torch.randint(0, 10, (2, batch))
            weights, factors = (torch.rand(*of, batch, dtype=torch.float64) for of in ((2,), (1, 2)))
            ours, theirs = (way.backward(params, x, y, weights) for way in (fast, plain))
            sums = [torch.zeros_like(params), torch.zeros_like(params)]
            ours.accumulate(sums[0], 1.0, *([factors] if per_record else []))
            theirs.accumulate(sums[1], 1.0, *([factors] if per_record else []))
            torch.testing.assert_close(*sums, rtol=1e-9, atol=1e-11)
            if per_record:
                torch.testing.assert_close(ours.squares().sum(0), theirs.squares().sum(0), rtol=1e-9, atol=1e-15)


@pytest.mark.slow
def test_resnet_18_is_batched():
    """Every block of it, with an eighth of its channels."""
    with torch.device("meta"):
        assert sum(p.numel() for p in ResNet().parameters()) == 11_181_642
    assert network(ResNet(channels=8), torch.rand(1, 3, 32, 32)).way == "rules"


class ChangesItsInput(nn.Module):
    """Changes in place what a layer has seen: PyTorch refuses such a model, as it could not have its gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 10)

    def forward(self, x):
        x = self.first(x)
        y = self.second(x)
        x.mul_(2.0)
        return self.last(x + y)


@pytest.mark.parametrize("per_record", [False, True])
def test_what_a_layer_has_seen_is_not_changed_unnoticed(per_record):
    module, x = ChangesItsInput(), torch.rand(2, 4)
    fast = BatchedNetwork(module, Layout.of(module))
    params = fast.layout.flatten(module).repeat(2, 1)
    with pytest.raises(RuntimeError, match="input of layer second was changed in place"):
        fast.backward(params, x.unsqueeze(1), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        F.cross_entropy(module(x), torch.zeros(2, dtype=torch.int64)).backward()
    assert network(module, x, per_record=per_record).way != "rules"


@pytest.mark.parametrize(("records", "padding", "fits"), [(2**20, 5, True), (2**22, 5, False), (2**22, 0, True)])
def test_the_kernel_for_records_never_indexes_more_outputs_than_it_can(records, padding, fits, monkeypatch):
    """With much padding they are more than the inputs; what is too large is left to the other kernels."""
    monkeypatch.setattr(record_convolution_cuda, "triton", object())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    conv = nn.Conv2d(1, 8, 1, padding=padding)
    rule = RecordConvolutionRule(conv, *Layout.of(conv).entries)
    with FakeTensorMode():  # without memory, and without a GPU
        x, params = torch.empty(records, 1, 2, 2, device="cuda"), torch.empty(1, 16, device="cuda")
    assert rule.fits(x, params) == fits
