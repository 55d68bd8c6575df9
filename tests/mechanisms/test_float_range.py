"""Clipping holds over the whole range of float32: what leaves, measured exactly, is at most the bound.

Numbers are drawn by their exponents, from the least subnormal to the greatest float, alike and mixed, and bounds from
all that can be configured; on a CPU with subnormals kept and with subnormals flushed to 0.
"""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.algorithms import algorithm
from shoal.errors import ConfigError
from shoal.gradients.batched import LayerTape
from shoal.gradients.layers.client_layer import Taped
from shoal.gradients.layers.embedding import EmbeddingRule
from shoal.gradients.layers.parameter import ParameterRule
from shoal.gradients.layers.rules import client_layer, rule_for
from shoal.gradients.layout import Layout
from shoal.gradients.tapes import GradientTape
from shoal.mechanisms.coordinate_clipping import AdaClip, Coordinates
from shoal.mechanisms.record_clipping import MaxClip, QuantileRecordClip, RecordClip
from shoal.mechanisms.schedules import LEAST_SCALE, MOST_SCALE
from shoal.mechanisms.sparsification import Select
from shoal.mechanisms.update_clipping import MARGIN, Clip, MedianClip, NoisyClip, QuantileClip, row_norms
from shoal.training.finite import GREATEST, finite_or_zero
from shoal.training.local_training import Without

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", "cpu, flushed", pytest.param("cuda", marks=needs_gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)

seeds = st.integers(0, 2**32 - 1)
exponents = st.integers(-149, 127)
spans = st.tuples(exponents, exponents).map(sorted)
bounds = st.one_of(st.floats(-12, 12).map(lambda power: 10.0**power), st.sampled_from([LEAST_SCALE, MOST_SCALE]))
many = settings(max_examples=10, deadline=None, derandomize=True)
few = settings(many, max_examples=5)  # where one example is many records of many sizes
RECORDS = 32


def wild(seed, span, rows, *shape):
    """Floats with exponents between two, subnormals included, each with a random sign and all digits.

    Every row has ends of its own within the span, so that there are rows of one size and rows of many.
    """
    random = np.random.default_rng(seed)
    low, high = np.sort(random.integers(span[0], span[1] + 1, (2, rows, *[1] * len(shape))), axis=0)
    sizes = np.ldexp(1 + random.random((rows, *shape)), random.integers(low, high + 1, (rows, *shape)))
    signed = sizes * random.choice([-1.0, 1.0], (rows, *shape))
    return torch.from_numpy(signed.clip(-3.4e38, 3.4e38).astype(np.float32))


def norms_of(rows):
    """In long double, where no square of a float32 is too small or too great."""
    rows = rows.double().cpu().numpy().astype(np.longdouble)
    return np.sqrt((rows**2).sum(axis=-1))


@contextmanager
def on(device):
    """Where numbers lie; subnormals are kept, or flushed to 0."""
    name, _, flushed = device.partition(", ")
    torch.set_flush_denormal(bool(flushed))
    try:
        yield torch.device(name)
    finally:
        torch.set_flush_denormal(False)


# --- whole updates


@on_devices
@given(seeds, spans, st.sampled_from([1, 5, 300]))
@many
def test_a_norm_is_right_for_all_finite_numbers(device, seed, span, size):
    updates = wild(seed, span, RECORDS, size)
    with on(device) as where:
        found = row_norms(updates.to(where)).cpu().numpy()
    lost = np.finfo(np.float32).tiny * math.sqrt(size)  # what is flushed
    assert (np.abs(found - norms_of(updates)) <= MARGIN / 2 * norms_of(updates) + lost).all()


def extreme(share):
    """The bound of an adaptive clip that was driven one way for long."""
    clip, memory = QuantileClip(clip_norm_lr=300.0), {}
    clip.adapt(memory, share)
    return clip.bound(memory, 0, 1, None)


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("clip", [Clip(), NoisyClip(noise_multiplier=0.0), MedianClip(), QuantileClip()])
@given(seeds, spans, bounds)
@many
def test_no_update_leaves_longer_than_the_bound(device, clip, seed, span, bound):
    updates = wild(seed, span, RECORDS, 200)
    with on(device) as where:
        kept, norms, bad = finite_or_zero(updates.to(where))
        if isinstance(clip, MedianClip):
            bound = clip.bound({}, 0, 1, norms)
        elif isinstance(clip, QuantileClip):
            bound = extreme(1e3 if bound < 1 else -1e3)
        left = clip.apply(kept.clone(), norms, bound, 0, 1, np.random.default_rng, {}).cpu()
    assert LEAST_SCALE <= bound <= MOST_SCALE
    assert (norms_of(left) <= bound).all()
    true, flushed = norms_of(updates), np.finfo(np.float32).tiny * 20
    assert (bad.cpu().numpy() == (true > GREATEST)).all() or (np.abs(true / GREATEST - 1) < MARGIN).any()
    there = (true <= GREATEST) & (true < bound * 1e37)  # what is longer has no factor in float32
    assert (norms_of(left) >= np.minimum(true, bound) * (1 - 2 * MARGIN) - flushed)[there].all()
    near = np.abs(true / bound - 1) < 2 * MARGIN
    assert ((norms.cpu().numpy() <= bound) == (true <= bound))[~near & (true <= GREATEST)].all()


@pytest.mark.parametrize("share", [-1e3, 1e3])
def test_an_adaptive_bound_stays_where_clips_may_be(share):
    assert extreme(share) == pytest.approx(MOST_SCALE if share < 0 else LEAST_SCALE, rel=1e-12)
    assert LEAST_SCALE <= extreme(share) <= MOST_SCALE
    assert MedianClip().bound({}, 0, 1, torch.tensor([1e-30, 1e-25])) == LEAST_SCALE
    assert MedianClip().bound({}, 0, 1, torch.tensor([1e25, 1e30])) == MOST_SCALE


@given(seeds, spans, bounds)
@example(0, (0, 10), 0.1)  # float32's nearest is above
@many
def test_no_selected_number_is_above_its_cap(seed, span, cap):
    left = Select(1.0, cap=cap).apply(
        wild(seed, span, 1, 50), torch.ones(1), math.inf, 0, 1, np.random.default_rng, {}
    )
    assert (left.double().abs() <= cap).all()


# --- gradients of records, in every layer's rule


def frozen(module):
    module.weight.requires_grad_(False)
    return module


class Conv1D(nn.Linear):
    """As in `transformers`, by whose name it is known."""

    def __init__(self, ins, outs):
        super().__init__(outs, ins)
        self.bias = nn.Parameter(torch.zeros(outs))


Conv1D.__module__ = "transformers.pytorch_utils"


class Own(nn.Module):
    """A parameter that the model's own code uses."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


class Twice(nn.Module):
    """A layer that is called twice for a record."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer


class Tied(nn.Module):
    """An embedding and a head with the same weights."""

    def __init__(self, words, width, bias):
        super().__init__()
        self.words, self.head = nn.Embedding(words, width, padding_idx=0), nn.Linear(width, words, bias=bias)
        self.head.weight = self.words.weight


LAYERS = {
    "linear": (lambda: nn.Linear(7, 5), (7,)),
    "linear without bias": (lambda: nn.Linear(7, 5, bias=False), (7,)),
    "linear of few words": (lambda: nn.Linear(4, 5), (3, 4)),
    "linear of many words": (lambda: nn.Linear(4, 5), (25, 4)),
    "linear without bias of many words": (lambda: nn.Linear(4, 5, bias=False), (25, 4)),
    "convolution of one channel": (lambda: nn.Conv2d(1, 4, 3), (1, 7, 7)),
    "convolution of few places": (lambda: nn.Conv2d(6, 4, 3), (6, 5, 5)),
    "convolution of many places": (lambda: nn.Conv2d(6, 4, 3, padding=1), (6, 5, 5)),
    "convolution without bias": (lambda: nn.Conv2d(6, 4, 3, bias=False), (6, 5, 5)),
    "convolution with stride": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=2), (6, 9, 9)),
    "convolution of wide few places": (lambda: nn.Conv2d(12, 16, 3, padding=1), (12, 2, 3)),
    "convolution of one place": (lambda: nn.Conv2d(6, 8, 3, padding=1, bias=False), (6, 1, 1)),
    "convolution of a sequence": (lambda: nn.Conv1d(6, 8, 3, dilation=2), (6, 9)),
    "convolution of a volume": (lambda: nn.Conv3d(3, 4, 2), (3, 3, 4, 3)),
    "grouped convolution": (lambda: nn.Conv2d(12, 16, 3, groups=2), (12, 4, 4)),
    "depthwise convolution": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), (6, 4, 4)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 4, 4)),
    "transposed convolution of few places": (lambda: nn.ConvTranspose1d(12, 12, 3), (12, 3)),
    "transposed convolution of one place": (lambda: nn.ConvTranspose2d(12, 12, 3, padding=1, groups=2), (12, 1, 1)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "layer norm": (lambda: nn.LayerNorm(6), (3, 6)),
    "embedding": (lambda: nn.Embedding(5, 4, padding_idx=0), (6,)),
    "bias of a linear layer": (lambda: frozen(nn.Linear(3, 5)), (3, 5)),
    "bias of a convolution": (lambda: frozen(nn.Conv2d(2, 4, 1)), (4, 3, 3)),
    "recurrent LSTM of one word": (lambda: nn.LSTM(4, 3), (1,)),
    "recurrent LSTM of few words": (lambda: nn.LSTM(4, 3), (3,)),
    "recurrent GRU of few words": (lambda: nn.GRU(4, 3), (3,)),
    "recurrent RNN of many words": (lambda: nn.RNN(4, 3), (25,)),
    "recurrent RNN without bias of many words": (lambda: nn.RNN(4, 3, bias=False), (25,)),
    "rms norm": (lambda: nn.RMSNorm(6), (3, 6)),
    "channel norm": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "transposed linear": (lambda: Conv1D(4, 5), (4,)),
    "transposed linear of many words": (lambda: Conv1D(4, 5), (25, 4)),
    "parameter": (lambda: Own(3, 4), ()),
    "parameter used twice": (lambda: Twice(Own(3, 4)), ()),
    "linear called twice": (lambda: Twice(nn.Linear(7, 5)), (7,)),
    "linear of many positions called twice": (lambda: Twice(nn.Linear(4, 5, bias=False)), (25, 4)),
    "embedding called twice": (lambda: Twice(nn.Embedding(5, 4, padding_idx=0)), (6,)),
    "layer norm called twice": (lambda: Twice(nn.LayerNorm(6)), (3, 6)),
    "convolution called twice": (lambda: Twice(nn.Conv2d(6, 4, 3)), (6, 5, 5)),
    "embedding tied to its head": (lambda: Tied(5, 4, bias=False), (3, 4)),
    "embedding tied to a head with a bias": (lambda: Tied(5, 4, bias=True), (3, 4)),
}
# On a CPU only plain convolutions have another rule without kernels.
RULES = [(name, kernels) for name in LAYERS for kernels in (True, False) if kernels or name.startswith("convolution")]
CLIPS = [RecordClip(layers=layers) for layers in ("flat", "split", "each")]
CLIPS += [MaxClip(layers="each"), QuantileRecordClip(layers="flat"), QuantileRecordClip(layers="split")]


@cache
def made(name, where):
    """The layers, their layout and the places of their parameters; none of them is changed."""
    make, _ = LAYERS[name]
    module = nn.Sequential(make(), make(), nn.Linear(3, 2)).to(where)
    layout = Layout.of(module)
    entries = {entry.name: entry for entry in layout.entries}
    return module, layout, {id(p): entries[key] for key, p in module.named_parameters() if key in entries}


def taped(name, where, kernels, draw):
    """A tape of two such layers and a plain one, with inputs and gradients of outputs as `draw` gives them.

    Every record has a client of its own, so that what it adds stands alone.
    """
    (module, layout, by_id), shape = made(name, where), LAYERS[name][1]
    params = torch.zeros(RECORDS, layout.size, device=where)
    tape = LayerTape(torch.ones(RECORDS, 1, device=where), layout.size, layout.layer_names)
    for layer, inputs in zip(module, (shape, shape, (3,)), strict=True):
        if isinstance(layer, nn.RNNBase):
            for rule in client_layer(layer, by_id, Taped(), kernels).rules:
                widths, (outs, *_) = [part.weight.shape[1] for part in rule.parts], rule.entries[0].shape
                x = draw(RECORDS, *inputs, sum(widths)).to(where)
                tape.append((rule, x.split(widths, -1), draw(RECORDS, *inputs, outs).to(where)))
            continue
        for rule in rules_of(layer, by_id, kernels):
            x = draw(RECORDS, *inputs).to(where)
            if isinstance(rule, EmbeddingRule):
                x = x.view(torch.int32).abs() % 5
            y, saved = rule.forward(x, params)
            tape.append((rule, saved, draw(*y.shape).to(where)))
    return tape, params


def rules_of(layer, by_id, kernels):
    """The rules of all uses of a layer's parameters."""
    if isinstance(layer, Twice):
        return 2 * rules_of(layer.layer, by_id, kernels)
    if isinstance(layer, Tied):
        return [rule_for(part, by_id, kernels)[0] for part in (layer.words, layer.head)]
    if isinstance(layer, Own):
        return [ParameterRule(by_id[id(layer.weight)])]
    return [rule_for(layer, by_id, kernels)[0]]


def drawing(seed, given_spans):
    """Tensors with exponents from one span after the other."""
    count = 0

    def draw(*shape):
        nonlocal count
        count += 1
        return wild(seed + count, given_spans[count % len(given_spans)], *shape)

    return draw


def added(tape, clip, bound, params, scale, fused=False):
    """What each record adds, and which are left out."""
    squares = tape.squares()
    factors = clip.factors(squares, params.new_tensor(bound), {})
    into = torch.zeros_like(params)
    if fused:
        from shoal.random.philox import Philox

        source = Philox(torch.arange(len(params), device=params.device))
        products = tape.accumulate_except(source.takes, into, scale, factors)
        source.add(into, torch.zeros(len(params), device=params.device), products=products)
    else:
        tape.accumulate(into, scale, factors)
    return into.cpu(), (~squares.sum(0).isfinite()).flatten().cpu().numpy(), squares


def assert_held(into, out, limit):
    assert torch.isfinite(into[~out]).all()
    assert (norms_of(into[~out]) <= limit).all(), norms_of(into) / limit


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("name", LAYERS)
@given(seeds, st.lists(spans, min_size=6, max_size=6), bounds, st.sampled_from(CLIPS), st.booleans())
@many
def test_no_record_adds_more_than_the_bound_in_any_rule(device, name, seed, given_spans, bound, clip, kernels):
    with on(device) as where:
        tape, params = taped(name, where, kernels, drawing(seed, given_spans))
        into, out, _ = added(tape, clip, bound, params, 1.0)
        assert_held(into, out, bound * clip.excess(len(tape._layers)))
        step = max(1e-18, bound * 1e-6)
        into, out, _ = added(tape, clip, bound, params, -step / bound)
        assert_held(into, out, step * clip.excess(len(tape._layers)))


@on_devices
@pytest.mark.parametrize("name", LAYERS)
def test_nor_where_its_factor_leaves_its_gradient_few_digits(device, name):
    """Long inputs make the factor small: its product with a gradient is subnormal, and may be rounded up."""
    with on(device) as where:
        little, long, short = (-149, -140), (102, 106), (-30, -20)  # those of the first layer count
        tape, params = taped(name, where, True, drawing(7, [little, long, short, little, little, little]))
        into, out, _ = added(tape, RecordClip(), LEAST_SCALE, params, 1.0)
        assert_held(into, out, LEAST_SCALE)


@on_devices
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_record_without_a_finite_norm_adds_nothing(device, kernels, name):
    """Also where its numbers are finite, and their sums are not."""
    with on(device) as where:
        tape, params = taped(name, where, kernels, drawing(7, [(127, 127), (-100, 127)]))
        without = Without(tape, ~tape.squares().sum(0).isfinite())
        into, out, _ = added(without, RecordClip(), 1.0, params, 1.0)
        assert out.any()
        assert not into[out].any()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES[:2])  # sums of a GPU may be in any order
@pytest.mark.parametrize(("name", "kernels"), RULES)
@given(seeds, st.lists(spans, min_size=6, max_size=6), bounds, st.sampled_from([None, 0.0, math.inf, math.nan]))
@example(7, [(127, 127), (-100, 127)], 1.0, None)  # sums that overflow
@few
def test_what_a_record_adds_is_the_same_to_the_last_bit_whatever_the_others_are(
    device, name, kernels, seed, other_spans, bound, filled
):
    """Their numbers change, not how many they are: products of another shape may be summed in another order."""
    found = []
    with on(device) as where:
        for others in (drawing(seed + 100, [(-8, 8)]), drawing(seed, other_spans)):
            own = drawing(seed + 200, [(-8, 8)])

            def draw(rows, *shape, own=own, others=others, wild_ones=bool(found)):
                drawn = filled is None or not wild_ones
                beside = others(rows - 1, *shape) if drawn else torch.full((rows - 1, *shape), filled)
                return torch.cat([own(1, *shape), beside])

            rows, params = taped(name, where, kernels, draw)
            tape = LayerTape(torch.ones(1, RECORDS, device=where), rows._size, rows._layers)  # of one client
            tape[:] = rows
            without = Without(tape, ~tape.squares().sum(0).isfinite())
            factors = RecordClip().factors(without.squares(), params.new_tensor(bound), {})
            factors[..., 1:] = 0
            into = torch.zeros_like(params[:1])
            without.accumulate(into, 1.0, factors)
            found.append((without.squares()[..., 0].cpu(), into.cpu()))
    assert found[0][1].any()
    assert all(map(torch.equal, *found))


@needs_gpu
@pytest.mark.parametrize("name", LAYERS)
@given(seeds, st.lists(spans, min_size=6, max_size=6), bounds, st.sampled_from(CLIPS))
@many
def test_nor_where_products_are_added_with_the_noise(name, seed, given_spans, bound, clip):
    tape, params = taped(name, torch.device("cuda"), True, drawing(seed, given_spans))
    step = max(1e-18, bound * 1e-6)
    into, out, _ = added(tape, clip, bound, params, -step / bound, fused=True)
    assert_held(into, out, step * clip.excess(len(tape._layers)))


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("name", LAYERS)
@given(seeds, st.integers(-25, 25), st.integers(-25, 25), bounds)
@few
def test_records_of_a_usable_size_are_not_shortened_for_nothing(device, name, seed, inputs, grads, bound):
    """Where no square is out of float32's range: a short record stays as it is, a long one reaches the bound."""
    with on(device) as where:
        tape, params = taped(name, where, True, drawing(seed, [(grads, grads + 3), (inputs, inputs + 3)]))
        whole, out, _ = added(tape, RecordClip(), MOST_SCALE, params, 1.0)
        into, _, _ = added(tape, RecordClip(), bound, params, 1.0)
    assert not out.any()
    true = norms_of(whole)
    unclipped = true < MOST_SCALE / 2
    assert (norms_of(into) >= 0.95 * np.minimum(true, bound))[unclipped].all()


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize("name", [name for name in LAYERS if "norm" in name or "words" in name or "place" in name])
@given(seeds, st.integers(-10, 10), st.floats(1e-3, 1e3))
@few
def test_nor_where_the_gradient_cancels(device, name, seed, height, bound):
    """Positions that add up to nothing, 10^8 times as great as the rest of the gradient: what is left is rounding."""
    count = 0

    def draw(*shape):
        nonlocal count
        count += 1
        if count > 4:
            return wild(seed, (-3, 3), *shape)
        if count % 2:
            return torch.ones(shape) * (1 + seed % 7)
        rows = wild(seed + count, (height + 25, height + 27), *shape)
        over = tuple(range(2, len(shape))) if name[0] in "cg" else tuple(range(1, len(shape) - 1))
        return rows - rows.mean(over, keepdim=True)

    with on(device) as where:
        for kernels in (False, True) if where.type == "cuda" or (name, False) in RULES else (True,):
            count = 0
            tape, params = taped(name, where, kernels, draw)
            for clip in CLIPS[:3]:
                into, out, _ = added(tape, clip, bound, params, 1.0)
                assert_held(into, out, bound * clip.excess(len(tape._layers)))


@on_devices
@given(seeds, spans, bounds, st.sampled_from(CLIPS))
@many
def test_nor_does_one_whose_gradient_is_made_by_torch_func(device, seed, span, bound, clip):
    layout = Layout.of(nn.Sequential(nn.Linear(7, 5), nn.LSTM(5, 4)))
    with on(device) as where:
        tape = GradientTape.of(layout, wild(seed, span, RECORDS, 1, layout.size).to(where))
        params = torch.zeros(RECORDS, layout.size, device=where)
        assert_held(*added(tape, clip, bound, params, 1.0)[:2], bound * clip.excess(2))


@on_devices
@given(seeds, spans, spans, bounds, bounds)
@many
def test_adaclip_keeps_every_record_to_1_in_its_coordinates(device, seed, span, around, h1, h2):
    clip = AdaClip(h1=min(h1, h2), h2=max(h1, h2))
    with on(device) as where:
        at = clip.start(torch.zeros(RECORDS, 300, device=where))
        mean = wild(seed + 1, (around[0], min(around[1], 100)) if around[0] <= 100 else (0, 0), RECORDS, 300)
        at = Coordinates(mean.to(where), at.scale)
        into = clip.clipped_sum(at, wild(seed, span, RECORDS, 1, 300).to(where), torch.ones(RECORDS, 1, device=where))
    assert torch.isfinite(into).all()
    assert (norms_of(into) <= 1).all()


@given(seeds, spans, bounds)
@many
def test_the_count_of_short_records_goes_by_the_same_norms(seed, span, bound):
    clip, layout = QuantileRecordClip(), Layout.of(nn.Linear(7, 5))
    rows = wild(seed, span, 1, 6, layout.size)
    squares = GradientTape.of(layout, rows).squares()
    counts = clip.count(squares, torch.ones(1, 6), torch.tensor(bound))
    true = norms_of(rows[0])
    if (np.abs(true / bound - 1) > 2 * MARGIN).all():
        assert float(counts) == (true <= bound).sum() - 3


# --- what is refused


@pytest.mark.parametrize("value", [1e-13, 1e13, 1e-30])
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (Clip, "per_update.clip_norm"),
        (
            lambda value: Clip(f"decay:1:0.5:{value}" if value < 1 else f"linear:1:{value * 2}"),
            "per_update.clip_norm",
        ),
        (NoisyClip, "per_update.clip_norm"),
        (QuantileClip, "per_update.initial_clip_norm"),
        (RecordClip, "per_record.clip_norm"),
        (MaxClip, "per_record.clip_norm"),
        (lambda value: QuantileRecordClip(initial_clip_norm=value), "per_record.initial_clip_norm"),
        (lambda value: AdaClip(h1=value, h2=value), "per_record.h1"),
        (lambda value: AdaClip(h1=1e-3, h2=value), "per_record.h2"),
        (lambda value: Select(cap=value), "per_update.cap"),
        (lambda value: Select(threshold=value), "per_update.threshold"),
        (lambda value: changed(local={"lr": value}), "local.lr"),
        (lambda value: changed(server={"lr": value}), "server.lr"),
    ],
)
def test_a_scale_that_float32_cannot_hold_is_refused_by_name(make, key, value):
    with pytest.raises(ConfigError) as found:
        make(value)
    said = str(found.value)
    assert said.startswith(f"{key} must be")
    assert "from 1e-12 to 1e+12" in said
    assert "\n" not in said


STEP = "local.lr x clip / records.batch must be from 1e-18 to 1e+18"


def changed(name="dp-sgd", **sections):
    record = algorithm(name)
    for section, values in sections.items():
        record = replace(record, **{section: replace(getattr(record, section), **values)})
    return record


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("dp-sgd", {"local": {"lr": 1e-12}, "per_record": {"clip_norm": 1e-11}}, STEP),
        ("dp-sgd", {"local": {"lr": 1e12}, "per_record": {"clip_norm": 1e12}}, STEP),
        ("dp-sgd", {"records": {"batch": 10**30}}, STEP),
        ("quantile-record", {"records": {"batch": 10**30}}, STEP),
        (
            "dp-sgd",
            {"per_step": {"noise_multiplier": 1e-29}, "local": {"lr": 1e-6}},
            "local.lr x per_step.noise_multiplier x clip",
        ),
        (
            "trusted-curator",
            {"per_round": {"noise_multiplier": 1e29}, "per_update": {"clip_norm": 1e6}},
            "per_round.noise_multiplier x the",
        ),
        (
            "fed-sdp",
            {"per_update": {"noise_multiplier": 1e-29, "clip_norm": 1e-6}},
            "per_update.noise_multiplier x per_update.clip_norm must be",
        ),
        ("dp-sgd", {"local": {"lr": "exponential:1:1e-11"}, "per_record": {"clip_norm": 1e-3}}, ""),
    ],
)
def test_products_that_float32_cannot_hold_are_refused_before_the_first_round(name, changes, says):
    record = changed(name, **changes)
    if not says:
        record.refuse_unfit(0, 100, 100)
        return
    with pytest.raises(ConfigError) as found:
        record.refuse_unfit(0, 100, 100)
    assert str(found.value).startswith(says)


@pytest.mark.parametrize("lr", [0.0, "linear:0:0.1", 1e-12, 1e12])
def test_a_learning_rate_may_be_0_or_at_the_ends(lr):
    assert changed(local={"lr": lr}).local.lr == lr
