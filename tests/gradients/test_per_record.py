"""Norms and weighted sums of examples' gradients, without these gradients, equal those that torch.func makes."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.errors import ModelError
from shoal.gradients import network
from shoal.gradients.batched import BatchedNetwork
from shoal.gradients.layers.rule import product_squares
from shoal.gradients.layers.rules import rule_for
from shoal.gradients.layout import Layout
from shoal.gradients.sequential import RecordNetwork
from shoal.gradients.tapes import GradientTape
from shoal.mechanisms.coordinate_clipping import AdaClip
from shoal.models import build
from support.layers import OF_NUMBERS, convolutions
from support.small_federation import one_thread

CLOSE = {"rtol": 1e-9, "atol": 1e-13}


def both_ways(module, x, classes=3, *, clients=None):
    """The tapes of both ways in float64, for clients with parameters of their own and some empty places."""
    module = module.double()
    fast, slow = network(module, per_record=True), RecordNetwork(module)
    assert isinstance(fast, BatchedNetwork)
    start = fast.layout.flatten(module)
    params = torch.stack([start * (1 + 0.1 * k) for k in range(len(x))])
    y = torch.randint(0, classes, x.shape[:2])
    mask = (torch.rand(x.shape[:2]) > 0.2).double()
    return params, *(way.backward(params, x, y, mask) for way in (fast, slow))


def assert_agree(module, x, classes=3):
    params, fast, slow = both_ways(module, x, classes)
    squares = fast.squares()
    order = [slow.layers.index(name) for name in fast.layers]  # the tape runs backwards, the layout forwards
    torch.testing.assert_close(squares, slow.squares()[order], **CLOSE)
    torch.testing.assert_close(fast.records(), slow.records(), **CLOSE)
    for layers in (1, len(squares)):
        factors = torch.rand(layers, *x.shape[:2], dtype=torch.float64)
        sums = [torch.zeros_like(params), torch.zeros_like(params)]
        fast.accumulate(sums[0], 0.7, factors)
        weights = factors if layers == 1 else torch.empty_like(factors).index_copy_(0, torch.tensor(order), factors)
        slow.accumulate(sums[1], 0.7, weights)
        torch.testing.assert_close(sums[0], sums[1], **CLOSE)


@pytest.mark.parametrize("offset", [1.0, 255.0, 1e3, 1e4])
@pytest.mark.parametrize("grain", [0.0, 1.0])
def test_a_norm_is_not_too_small_where_products_cancel(offset, grain):
    """A bright, nearly constant picture before a normalisation: each layer's norm is what clips by layers go by."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 6), nn.GroupNorm(8, 8), nn.GELU(), nn.Flatten(), nn.Linear(72, 10)
    module = nn.Sequential(*layers)
    x = offset * torch.rand(1, 200, 1, 1, 1) + grain * torch.rand(1, 200, 3, 8, 8)
    x, y, mask = x.expand(1, 200, 3, 8, 8), torch.zeros(1, 200, dtype=torch.int64), torch.ones(1, 200)
    fast = network(module, per_record=True)
    assert isinstance(fast, BatchedNetwork)
    tape = fast.backward(fast.layout.flatten(module).unsqueeze(0), x, y, mask)
    found, made = tape.squares().flip(0), tape.records().double()  # the tape runs backwards
    true = torch.stack([made[..., layer].square().sum(2) for layer in fast.layout.layers])
    assert (found >= 0.99999 * true).all()  # nor is NaN
    if offset == grain:
        assert (found <= 1.02 * true).all()


@pytest.mark.parametrize("apart", [0.008, 0.012])
@pytest.mark.parametrize("turned", [False, True])
def test_nor_where_products_are_long_sums(apart, turned):
    """Two positions that nearly cancel, of many inputs, or of many outputs: float32 loses digits on the way."""
    width = 100_000
    for start in torch.linspace(0.3, 1.7, 60).tolist():
        long = torch.tensor([[[start], [start * (1 + apart)]]]).expand(1, 2, width).contiguous()
        short = torch.tensor([[[1.0], [-1.0]]])
        true = width * float(long[0, 0, 0].double() - long[0, 1, 0].double()) ** 2
        assert float(product_squares(*((short, long) if turned else (long, short)), False)) >= true


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=20, deadline=None, derandomize=True)
@given(convolutions(), st.integers(1, 3), st.integers(0, 4), st.integers(4, 11), st.integers(4, 11))
def test_random_convolutions(conv, clients, batch, high, wide):
    torch.manual_seed(0)
    needed = [d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    high, wide = max(high, needed[0]), max(wide, needed[1])
    x = torch.rand(clients, batch, conv.in_channels, high, wide, dtype=torch.float64)
    features = conv(torch.rand(1, conv.in_channels, high, wide)).numel()
    module = nn.Sequential(nn.Conv2d(conv.in_channels, conv.in_channels, 1), nn.Tanh(), conv, nn.Tanh())
    assert_agree(module.extend([nn.Flatten(), nn.Linear(features, 3)]), x)


@st.composite
def networks(draw):
    """Linear layers on sequences or vectors, with norms between them, with and without biases and frozen weights."""
    positions = draw(st.sampled_from([1, 3, 30]))
    width = draw(st.sampled_from([4, 6]))
    layers = [nn.Embedding(5, width, padding_idx=draw(st.sampled_from([None, 0])))]
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["linear", "layer norm", "group norm", "bias only"]))
        if kind == "linear":
            layers += [nn.Linear(width, width, bias=draw(st.booleans())), nn.Tanh()]
        elif kind == "layer norm":
            layers += [nn.LayerNorm(draw(st.sampled_from([width, (positions, width)])))]
        elif kind == "group norm":
            layers += [Swapped(nn.GroupNorm(2, width))]
        else:
            layers += [nn.Linear(width, width), nn.Tanh()]
            layers[-2].weight.requires_grad_(False)
    return positions, nn.Sequential(*layers, nn.Flatten(), nn.Linear(positions * width, 3))


class Swapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(networks(), st.integers(1, 3), st.sampled_from([0, 1, 4]))
def test_random_networks_on_words(drawn, clients, batch):
    torch.manual_seed(0)
    positions, module = drawn
    for layer in module.modules():  # they were drawn before the seed was set
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    assert_agree(module, torch.randint(0, 5, (clients, batch, positions)))


def test_bias_only_convolutions():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    module[0].weight.requires_grad_(False)
    module[4].requires_grad_(False)
    assert_agree(module, torch.rand(2, 3, 1, 8, 8, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_the_papers_networks(name):
    torch.manual_seed(0)
    for candidate in [(1, 28, 28), (3, 32, 32), (81, 7, 7), (243, 8, 8), (105,), (30,)]:
        try:
            module = build(name, candidate, 3, seed=1)
        except ModelError:
            continue
        break
    params, fast, slow = both_ways(module, torch.rand(2, 2, *candidate, dtype=torch.float64))
    torch.testing.assert_close(fast.squares().sum(0), slow.squares().sum(0), **CLOSE)
    sums = [torch.zeros_like(params), torch.zeros_like(params)]
    factors = torch.rand(1, 2, 2, dtype=torch.float64)
    for total, tape in zip(sums, (fast, slow), strict=True):
        tape.accumulate(total, 1.0, factors)
    torch.testing.assert_close(*sums, **CLOSE)


def test_in_float32_norms_are_right_to_a_few_digits_of_the_last():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 64, 5), nn.Flatten())
    module.append(nn.Linear(64 * 100, 3))
    x, y, mask = torch.rand(2, 3, 1, 14, 14), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
    wide = copy.deepcopy(module).double()
    found, exact = (
        network(net, per_record=True).backward(
            torch.nn.utils.parameters_to_vector(net.parameters()).detach().repeat(2, 1), x.to(d), y, mask.to(d)
        ).squares().sum(0).double()
        for net, d in ((module, torch.float32), (wide, torch.float64))
    )  # fmt: skip
    torch.testing.assert_close(found, exact, rtol=3e-5, atol=0)


# --- models that rules do not cover


class Multiplies(nn.Module):
    """A layer that nobody knows."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[0.5, 2.0], [1.0, 0.1]]))

    def forward(self, x):
        return x @ self.matrix


class HiddenMixing(nn.Module):
    """Examples are mixed before a last layer that starts at 0: at the start no gradient shows it."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(2, 2), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        inner = self.inner(x)
        return self.last(inner * (1 + inner.sum(0)) - inner.detach() * inner.detach().sum(0))


class Unvmappable(Multiplies):
    """Python control flow on values, which vmap refuses."""

    def forward(self, x):
        return super().forward(x if float(x.detach().sum()) > -1e9 else -x)


@pytest.mark.parametrize("make", [Multiplies, Unvmappable])
@pytest.mark.parametrize("way", ["auto", "sequential"])
def test_what_rules_do_not_cover_goes_another_way(make, way):
    torch.manual_seed(0)
    module = nn.Sequential(make(), nn.Linear(2, 3))
    net = network(module, torch.rand(3, 2), per_record=True, way=way)
    assert net.way == ("sequential" if make is Unvmappable or way == "sequential" else "vmap")
    start = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    x, y = torch.rand(1, 4, 2), torch.tensor([[0, 1, 2, 0]])
    tape = net.backward(start[None], x, y, torch.ones(1, 4))
    for b in range(4):
        loss = nn.functional.cross_entropy(module(x[0, b : b + 1]), y[0, b : b + 1])
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        torch.testing.assert_close(tape.records()[0, b], wanted)
        torch.testing.assert_close(tape.squares().sum(0)[0, b].float(), wanted.square().sum())


def test_nor_does_a_model_that_mixes_examples_before_a_layer_that_starts_at_zero():
    assert network(HiddenMixing(), torch.rand(3, 2), per_record=True).way != "rules"


def test_products_left_to_whoever_adds_noise_belong_to_no_graph():
    module = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    net = network(module, per_record=True)
    params, y = net.layout.flatten(module)[None], torch.zeros(1, 5, dtype=torch.int64)
    tape = net.backward(params, torch.rand(1, 5, 2), y, torch.ones(1, 5))
    products = tape.accumulate_except(lambda product: True, torch.zeros_like(params), 1.0, torch.ones(1, 1, 5))
    assert len(products) == 2
    assert not any(part.requires_grad for product in products for part in (product.rows, product.grads))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("side", [5, 28])
def test_on_cuda_a_norm_is_that_of_the_gradient_that_is_added_even_where_products_may_be_rough(side):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Flatten(), nn.Linear(32 * side**2, 3)).cuda()
    fast = network(module, per_record=True)
    params = fast.layout.flatten(module).unsqueeze(0)
    x, y = torch.randn(1, 1, 16, side, side, device="cuda"), torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    tape = fast.backward(params, x, y, torch.ones(1, 1, device="cuda"))
    total = torch.zeros_like(params)
    tape.accumulate(total, 1.0, torch.ones(1, 1, 1, device="cuda"))
    norm, added = tape.squares().sum().sqrt(), total.double().norm()
    assert added * (1 - 2e-6) <= norm <= added * 1.001  # above it where it comes from other products


# --- sums over many records


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("side", [5, 9])
def test_many_records_are_summed_in_pieces(side, kernels):
    torch.manual_seed(0)
    layers = nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(2), MeanOfWords()
    module = nn.Sequential(*layers).double()
    params = torch.stack([Layout.of(module).flatten(module) * (1 + k) for k in range(2)])
    x, y = torch.rand(2, 300, 6, side, side, dtype=torch.float64), torch.zeros(2, 300, dtype=torch.int64)
    factors, sums = torch.rand(1, 2, 300, dtype=torch.float64), []
    for way in (network(module, per_record=True, kernels=kernels), RecordNetwork(module)):
        tape, total = way.backward(params, x, y, torch.ones(2, 300).double()), torch.zeros_like(params)
        tape.squares()
        tape.accumulate(total, 0.7, factors)
        sums.append(total)
    torch.testing.assert_close(*sums, **CLOSE)


class MeanOfWords(nn.Module):
    """A linear layer at every position of [N, 4, T]."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).mean(1)


def moved_by_one_record(added, count):
    """By how much the sum of numbers of 1 at most moves with the first: all that follow are rounded another way."""
    numbers, half = torch.ones(count), count // 2
    unit = half * 2.0**-23
    numbers[half::2], numbers[half + 1 :: 2] = 0.51 * unit, -0.49 * unit
    without = numbers.clone()
    without[0] = 0
    return abs(float(added(numbers)) - float(added(without)))


def by_rule(layer, shape, kind=torch.float32):
    """The first number that a layer's rule adds, for inputs of 1 and these gradients."""
    layout = Layout.of(layer)
    entries = {id(p): entry for p, entry in zip(layer.parameters(), layout.entries, strict=True)}
    rule, _ = rule_for(layer, entries)

    def added(numbers, into=None):
        x = (
            torch.ones(len(numbers), *shape)
            if kind.is_floating_point
            else torch.zeros(len(numbers), *shape, dtype=kind)
        )
        into = torch.zeros(1, layout.size) if into is None else into
        params = layout.flatten(layer)[None].detach()
        with torch.no_grad():
            y, saved = rule.forward(x, params)
            grad = torch.zeros_like(y)
            grad.view(len(numbers), -1)[:, 0] = numbers
            kept = rule.squares(saved, grad)[1]
            rule.accumulate_weighted(saved, kept, grad, torch.ones(1, len(numbers), dtype=into.dtype), into, 1.0)
        return into[0, 0]

    return added


def by_tape(numbers, into=None):
    into = torch.zeros(1, 2) if into is None else into
    gradients = numbers.view(1, -1, 1).expand(1, len(numbers), 2)
    GradientTape.of(Layout.of(nn.Linear(1, 1)), gradients).accumulate(into, 1.0, torch.ones(1, 1, len(numbers)))
    return into[0, 0]


def by_adaclip(numbers, into=None):
    clip = AdaClip(h1=1.0, h2=1.0)
    at = clip.start(torch.zeros(1, 1))
    mask = torch.ones(1, len(numbers), dtype=None if into is None else into.dtype)
    found = clip.clipped_sum(at, numbers.view(1, -1, 1) / 2, mask) * 2
    return found if into is None else into.add_(found)[0, 0]


def in_pieces(added):
    """The same in micro-batches, each added to one sum in float64."""

    def summed(numbers):
        into = torch.zeros(1, 128, dtype=torch.float64)
        for piece in numbers.split(64):
            found = added(piece, into)
        return found

    return summed


LONG_SUMS = {
    "linear": by_rule(nn.Linear(2, 2), (2,)),
    "normalisation": by_rule(nn.LayerNorm(2), (2,)),
    "embedding": by_rule(nn.Embedding(4, 2), (1,), torch.int64),
    "convolution": by_rule(nn.Conv2d(6, 2, 3), (6, 3, 3)),
    "torch.func": by_tape,
    "adaclip": by_adaclip,
}
LONG_SUMS |= {f"{way}, in pieces": in_pieces(added) for way, added in LONG_SUMS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", LONG_SUMS)
def test_one_record_moves_the_sum_of_a_large_batch_by_no_more_than_its_clip(way):
    assert 0.99 <= moved_by_one_record(LONG_SUMS[way], 32768) <= 1.01


@pytest.mark.slow
@pytest.mark.parametrize("way", LONG_SUMS)
def test_a_record_that_is_not_drawn_moves_the_sum_by_no_more_than_is_charged(way):
    """All that follow it take other places then, and so do the ends of every piece: the worst of all places."""
    count, added = 32768, LONG_SUMS[way]
    numbers = torch.ones(count // 128, 128)
    numbers[:, 64::2], numbers[:, 65::2] = 0.51 * 2.0**-17, -0.49 * 2.0**-17
    moved = abs(float(added(numbers.flatten())) - float(added(numbers.flatten()[1:])))
    assert moved <= 1 + 2.0**-9 + count * 2.0**-23


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (nn.Linear(64, 48), (3, 64), False),
        (nn.Conv2d(6, 20, 3, bias=False), (6, 5, 4), False),
        (nn.Embedding(2, 3), (5,), True),
    ],
)
def test_positions_of_a_record_which_may_cancel_are_added_in_float64_and_rounded_once(layer, shape, words):
    torch.manual_seed(0)
    layout = Layout.of(layer)
    entries = {id(p): entry for p, entry in zip(layer.parameters(), layout.entries, strict=True)}
    rule, _ = rule_for(layer, entries)
    x = torch.randint(2, (9, *shape)) if words else torch.randn(9, *shape)
    sums = []
    with torch.no_grad():
        grad = torch.randn_like(rule.forward(x, layout.flatten(layer)[None])[0])
        for kind in (torch.float32, torch.float64):
            into, params = torch.zeros(1, layout.size, dtype=kind), layout.flatten(layer)[None].to(kind)
            _, saved = rule.forward(x if words else x.to(kind), params)
            kept, factors = rule.squares(saved, grad.to(kind))[1], torch.ones(1, 9, dtype=kind)
            assert rule.product(saved, kept, grad.to(kind), factors, 0.3) is None
            rule.accumulate_weighted(saved, kept, grad.to(kind), factors, into, 0.3)
            sums.append(into)
    assert torch.equal(sums[0], sums[1].float())


@pytest.mark.parametrize("layer", [nn.Linear(9, 8), nn.LSTM(9, 8, batch_first=True)], ids=["linear", "lstm"])
def test_a_gradient_that_is_kept_has_the_norm_of_what_is_added(layer):
    """Also where positions cancel, and what is left is rounding."""
    torch.manual_seed(0)

    class Cancels(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            y = self.layer(x)
            y = y[0] if isinstance(y, tuple) else y
            return (y * torch.tensor([1.0, -1.0] * 3)[:, None]).sum(1)

    module, x = Cancels(), 100 * torch.rand(1, 4, 1, 9).expand(-1, -1, 6, -1)
    net = network(module, per_record=True)
    assert isinstance(net, BatchedNetwork)
    params = net.layout.flatten(module).unsqueeze(0)
    tape = net.backward(params, x, torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4))
    norms = tape.squares().sum(0).sqrt()
    for record in range(4):
        into, only = torch.zeros_like(params), torch.nn.functional.one_hot(torch.tensor([record]), 4)
        tape.accumulate(into, 1.0, only.float().unsqueeze(0))
        assert float(into.double().norm()) <= float(norms[0, record]) * (1 + 1e-6)


@pytest.mark.parametrize("width", [16, 63, 163])
@pytest.mark.parametrize("kind", ["linear", "convolutions", "positions"])
def test_in_a_batch_of_one_width_a_gradient_does_not_depend_on_its_place_nor_on_its_neighbours(kind, width):
    """To the last digit, with these layers and widths.

    Secure mode does not rest on it: with others a last digit can depend on the place, so that there records lie in
    random places of a batch (batch_plan.planned).
    """
    torch.manual_seed(0)
    shape = {"linear": (784,), "convolutions": (1, 28, 28), "positions": (20, 32)}[kind]
    layers = {
        "linear": [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)],
        "convolutions": [nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.ReLU(),
                         nn.Linear(256, 10)],
        "positions": [nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 40), nn.Flatten(), nn.Linear(800, 10)],
    }  # fmt: skip
    module = nn.Sequential(*layers[kind])
    net = network(module, per_record=True)
    x, y = torch.randn(width + 1, *shape), torch.randint(10, (width + 1,))
    with one_thread():  # as in secure mode
        here, shifted = (
            net.backward(
                net.layout.flatten(module)[None], x[None, rows], y[None, rows], torch.ones(1, width)
            ).squares()
            for rows in (slice(0, width), slice(1, width + 1))
        )
    assert torch.equal(here[..., 1:], shifted[..., :-1])


@pytest.mark.parametrize("per_record", [False, True])
def test_a_forward_pass_that_rewrites_its_weights_leaves_the_clients_parameters_alone(per_record):
    model = nn.Sequential(nn.Embedding(11, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3))
    slow = network(model, torch.zeros(3, 3, dtype=torch.int64), per_record=per_record)
    params = slow.layout.flatten(model).repeat(2, 1)
    before, words = params.clone(), torch.tensor([[[1, 2, 3]], [[4, 5, 6]]])
    slow.backward(params, words, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    assert torch.equal(params, before)


@pytest.mark.parametrize("alike", [False, True], ids=["any", "cancelling"])
@pytest.mark.parametrize("width", [1000, 1025, 50_000])
def test_the_norm_of_a_wide_layer_is_above_the_true_one_by_little(width, alike):
    """As of a vocabulary of 50,000 words: a sum of so many products would be off by half a percent of their sizes."""
    torch.manual_seed(0)
    x, grad = torch.randn(3, 8, 64), torch.randn(3, 8, width)
    if alike:  # positions whose gradients cancel but for a little
        x, grad[:, 1::2] = x[:, :1].expand(-1, 8, -1), -grad[:, ::2] * (1 + 1e-3)
    products = torch.bmm(grad.double().transpose(1, 2), x.double())
    true, sizes = products.flatten(1).square().sum(1), (x.norm(dim=2) * grad.norm(dim=2)).double().sum(1).square()
    found = product_squares(x, grad, False)
    assert (found >= true).all()
    assert (found - true <= 4e-4 * sizes).all()
