"""engine.precision: fewer digits in the model, and never in what a clip or the noise is made of."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.config import configure
from shoal.errors import ConfigError
from shoal.gradients.batched import BatchedNetwork
from shoal.gradients.layout import Layout
from shoal.mechanisms.correlated import Correlated
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.update_clipping import shrinking
from shoal.precision import autocast, computing
from shoal.random.streams import Streams
from shoal.training.engine_settings import Settings
from shoal.training.local_training import train
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate
from shoal.training.workers import Workers
from support.layers import convolutions
from support.small_federation import ROUNDS, digits, parted, small

CLIENTS, FIRST = np.arange(4), RoundIndex(0, ROUNDS)
RECORD = replace(small("dp-sgd"), per_record=RecordClip(0.5), per_step=StepNoise(0.0))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 6), nn.Flatten(), nn.Linear(8, 10)
    )


def updates(record, precision, **how):
    sim = simulate(
        record, convolutional(), digits(), parted(), rounds=ROUNDS, streams=Streams(5),
        settings=Settings(how.pop("device", "cpu"), threads=1, precision=precision, **how),
    )  # fmt: skip
    with computing(precision):
        found = train(sim.cohort, sim.params, CLIENTS, FIRST, {})[0]
    assert found.dtype == torch.float32
    return found.cpu()


def apart(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def tape_of(module, x, precision="bf16", classes=3):
    """The tape of the records [B, ...] of one client."""
    net = BatchedNetwork(module, Layout.of(module), sample=x)  # as in training, where it knows the rows of a record
    params, y = net.layout.flatten(module).unsqueeze(0), torch.arange(len(x), device=x.device) % classes
    with computing(precision), autocast(precision, params):
        return net.backward(params, x[None], y[None], torch.ones(1, len(x), device=x.device))


def assert_clip_holds(tape, size, clip, device="cpu"):
    """What is added of each record alone, in float64, against its norm and its clip."""
    squares = tape.squares()
    norms = squares.sum(0).sqrt()
    factors = shrinking(norms, clip)
    for b in norms[0].isfinite().nonzero().flatten().tolist():  # the others are left out
        alone = torch.zeros_like(factors)
        alone[0, b] = 1.0
        added = torch.zeros(1, size, device=device)
        tape.accumulate(added, 1.0, alone.unsqueeze(0))
        assert float(added.double().norm()) <= float(norms[0, b]) * (1 + 2.0**-17)
        clipped = torch.zeros(1, size, device=device)
        tape.accumulate(clipped, 1.0, (alone * factors).unsqueeze(0))
        assert float(clipped.double().norm()) <= clip


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(convolutions(), st.integers(1, 3), st.integers(4, 9), st.integers(4, 9), st.floats(-3, 6), st.booleans())
def test_in_bf16_no_convolution_leaves_longer_than_its_clip(device, conv, batch, high, wide, size, constant):
    torch.manual_seed(0)
    needed = [d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    high, wide = max(high, needed[0]), max(wide, needed[1])
    x = torch.rand(batch, conv.in_channels, high, wide)
    if constant:  # before a normalisation its products cancel
        x = x[:, :, :1, :1].expand_as(x)
    features = conv(x[:1]).numel()
    module = nn.Sequential(conv, nn.GroupNorm(1, conv.out_channels), nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))
    module, x = module.to(device), (x * 10**size).to(device)
    tape = tape_of(module, x)
    assert_clip_holds(tape, sum(p.numel() for p in module.parameters()), 0.1, device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 19, 30]), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.floats(-35, 35),
    st.sampled_from([1e-3, 1.0]),
)  # fmt: skip
def test_nor_does_a_linear_layer_on_vectors_or_sequences(device, positions, ins, outs, bias, size, clip):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(ins, outs, bias=bias), nn.Tanh(), nn.Flatten(), nn.Linear(outs * positions, 3))
    x = 10**size * torch.randn(3, positions, ins)
    module, x = module.to(device), x.to(device)
    assert_clip_holds(tape_of(module, x), sum(p.numel() for p in module.parameters()), clip, device)


class Sequences(nn.Module):
    """The last output of a layer on sequences."""

    def __init__(self, layer, wide):
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(6, 6), layer, nn.Linear(wide, 3)

    def forward(self, x):
        found = self.layer(self.before(x))
        return self.after((found[0] if isinstance(found, tuple) else found)[:, -1])


LAYERS = {
    "attention": lambda: Sequences(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), 6),
    "LSTM": lambda: Sequences(nn.LSTM(6, 5, batch_first=True, bidirectional=True), 10),
    "GRU": lambda: Sequences(nn.GRU(6, 5, num_layers=2, batch_first=True), 5),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("positions", [1, 7, 40])
def test_nor_do_layers_on_sequences(name, positions, device):
    torch.manual_seed(0)
    module, x = LAYERS[name]().to(device), torch.randn(4, positions, 6).to(device)
    size = sum(p.numel() for p in module.parameters())
    assert_clip_holds(tape_of(module, x), size, 0.1, device)
    norms = [tape_of(module, x, precision).squares().sum(0).sqrt() for precision in ("bf16", "float32")]
    assert 1e-5 < apart(*norms) < 0.1


class Tied(nn.Module):
    """Words, whose table is the head's as well."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(torch.tanh(self.words(x).sum(1)))


class Again(nn.Module):
    """A layer that is called twice, with one between that is not."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.between, self.head = layer, nn.GroupNorm(1, 3), nn.Linear(3 * 6 * 6, 3)

    def forward(self, x):
        return self.head(self.layer(torch.tanh(self.between(self.layer(x)))).flatten(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [Tied, lambda: Again(nn.Conv2d(3, 3, 3, padding=1))], ids=["tied", "again"])
def test_nor_do_layers_with_parameters_in_common(make, device):
    torch.manual_seed(0)
    module = make().to(device)
    x = torch.randint(0, 9, (4, 5)) if isinstance(module, Tied) else torch.randn(4, 3, 6, 6)
    tape = tape_of(module, x.to(device))
    assert_clip_holds(tape, sum(p.numel() for p in module.parameters()), 0.1, device)


COMMON = {"tied": Tied, "again": lambda: Again(nn.Conv2d(3, 3, 3, padding=1)), "convolutions": convolutional}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", [*LAYERS, *COMMON])
def test_every_rule_adds_to_a_sum_in_float64(name, precision):
    """As the pieces of a large batch do."""
    torch.manual_seed(0)
    module = (LAYERS | COMMON)[name]()
    shapes = {"tied": (4, 5), "again": (4, 3, 6, 6), "convolutions": (4, 1, 8, 8)}
    x = torch.randint(0, 9, shapes["tied"]) if name == "tied" else torch.randn(shapes.get(name, (4, 7, 6)))
    tape = tape_of(module, x, precision)
    size = sum(p.numel() for p in module.parameters())
    factors = shrinking(tape.squares().sum(0, keepdim=True).sqrt(), 0.1)
    found, wanted = torch.zeros(1, size, dtype=torch.float64), torch.zeros(1, size)
    tape.accumulate(found, 1.0, factors)
    tape.accumulate(wanted, 1.0, factors)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-5, atol=1e-7)
    assert not torch.equal(found, wanted.double())


def test_products_are_in_bf16_and_all_that_is_clipped_is_not():
    module = convolutional()
    tape = tape_of(module, digits().train_x[:4], classes=10)
    kinds = {type(rule).__name__.replace("Thin", "").replace("Library", ""): grad.dtype for rule, _, grad in tape}
    assert kinds["LinearRule"] == kinds["Conv2dRule"] == torch.bfloat16
    assert kinds["AffineRule"] == torch.float32
    assert tape.squares().dtype == torch.float64
    assert tape.records().dtype == torch.float32


@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
@pytest.mark.parametrize(
    "record",
    [RECORD, small("fedavg"), replace(small("adaclip"), per_step=StepNoise(0.0))],
    ids=lambda record: record.name,
)
def test_bf16_gives_nearly_the_update_of_float32_and_not_the_same(record, way):
    wanted = updates(record, "float32", way=way)
    found = updates(record, "bf16", way=way)
    assert 1e-4 < apart(found, wanted) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("record", [RECORD, small("fedavg")], ids=lambda record: record.name)
def test_pieces_and_views_are_in_bf16_as_well(record):
    record = replace(record, records=replace(record.records, augmentations=2))
    wanted = updates(record, "bf16")
    assert apart(updates(record, "bf16", micro_batch=2), wanted) < 1e-2  # other shapes, other roundings
    assert 1e-4 < apart(updates(record, "float32"), wanted) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["auto", "tf32"])
def test_on_a_cpu_nothing_but_bf16_has_fewer_digits(precision):
    assert torch.equal(updates(RECORD, precision), updates(RECORD, "float32"))


@pytest.fixture
def switches():
    """PyTorch's switches, as somebody else has set them."""
    torch.set_float32_matmul_precision("medium")
    yield torch.get_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("precision", ["auto", "float32", "tf32", "bf16"])
@pytest.mark.parametrize("before", [True, False])
def test_pytorchs_switches_decide_nothing_and_are_as_before_afterwards(precision, before, switches):
    torch.backends.cudnn.allow_tf32 = before
    workers = Workers(torch.device("cpu"), 1, precision=precision)
    seen = list(workers.map(lambda _: (switches(), torch.backends.cudnn.allow_tf32), [0]))
    assert seen == [("highest", precision != "float32")]
    assert (switches(), torch.backends.cudnn.allow_tf32) == ("medium", before)


@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_nor_does_a_callers_autocast(precision, way):
    """It would shorten the products that norms are made of: a record was clipped to 1.006 times the bound."""
    wanted = updates(RECORD, precision, way=way)
    with torch.autocast("cpu", torch.bfloat16):
        found = updates(RECORD, precision, way=way)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found, wanted)


def test_nor_in_an_audit_which_calls_the_steps_and_rounds_themselves():
    """Outside of `computing`: a caller's autocast would shorten correlated noise too."""
    correlated = replace(small("dp-ftrl"), per_round=Correlated(1.0, bands=4))
    found = []
    for shortened in (False, True):
        sim, other = (
            simulate(
                record, convolutional(), digits(), parted(), rounds=ROUNDS, streams=Streams(5),
                settings=Settings("cpu", threads=1),
            )
            for record in (RECORD, correlated)
        )  # fmt: skip
        params, state = other.params, {}
        with torch.autocast("cpu", torch.bfloat16, enabled=shortened):
            steps = train(sim.cohort, sim.params, CLIENTS, FIRST, {})[0]
            for t in range(2):
                params, state, _ = run_round(other.cohort, params, state, RoundIndex(t, ROUNDS))
        found.append((steps, params))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("precision", "has"), [("bf16", False), ("bf16", True), ("float32", False)])
def test_onednn_is_not_asked_for_bf16_that_it_does_not_have(precision, has, monkeypatch):
    """PyTorch would ask it for every product, and warn with a stack of C++."""
    monkeypatch.setattr("shoal.precision._onednn_has_bf16", lambda: has)
    before = torch.backends.mkldnn.enabled
    with computing(precision):
        assert torch.backends.mkldnn.enabled == (before and (precision != "bf16" or has))
    assert torch.backends.mkldnn.enabled == before


def test_switches_are_as_before_where_setting_them_fails(monkeypatch):
    def fails():
        raise RuntimeError("cannot be asked")

    monkeypatch.setattr("shoal.precision._onednn_has_bf16", fails)
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = False
        with pytest.raises(RuntimeError, match="cannot be asked"), computing("bf16"):
            raise AssertionError("it is not entered")
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("medium", False)
    finally:
        torch.backends.cudnn.allow_tf32 = before
        torch.set_float32_matmul_precision("highest")


def each_switch():
    mkldnn, cudnn = torch.backends.mkldnn, torch.backends.cudnn
    return [torch.backends.cuda.matmul, mkldnn.matmul, mkldnn.conv, cudnn.conv, cudnn.rnn]


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="needs PyTorch's newer switches")
@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_nor_do_its_newer_switches(place, precision, switches):
    untouched = [switch.fp32_precision for switch in each_switch()]
    each_switch()[place].fp32_precision = "ieee"
    before, short = [switch.fp32_precision for switch in each_switch()], precision == "auto"
    with computing(precision):
        assert switches() == "highest"
        assert torch.backends.cudnn.allow_tf32 == short
        inside = [switch.fp32_precision for switch in each_switch()]
    assert inside == ["ieee"] * 3 + ["tf32" if short else "ieee"] * 2
    assert [switch.fp32_precision for switch in each_switch()] == before
    each_switch()[place].fp32_precision = untouched[place]


def test_another_word_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"engine.precision.*'fp16'.*bf16"):
        configure({"algorithm": "fedavg", "engine.precision": "fp16"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("record", [RECORD, small("fedavg")], ids=lambda record: record.name)
def test_on_cuda_each_word_means_its_digits(record, kernels):
    wanted = updates(record, "float32")
    far = {
        precision: apart(updates(record, precision, device="cuda", kernels=kernels), wanted)
        for precision in ("float32", "tf32", "bf16")
    }
    assert far["float32"] < 1e-4
    assert 1e-6 < far["tf32"] < 1e-2
    assert 1e-4 < far["bf16"] < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("record", [RECORD, small("dp-sgd"), small("fedavg")], ids=["silent", "noisy", "fedavg"])
def test_recorded_steps_have_the_same_digits(record, precision):
    found = []
    for graphs in (True, False):
        sim = simulate(
            record, convolutional(), digits(), parted(), rounds=ROUNDS, streams=Streams(5),
            settings=Settings("cuda", graphs=graphs, precision=precision),
        )  # fmt: skip
        params, state = sim.params, {}
        for t in range(ROUNDS):
            params, state, _ = run_round(sim.cohort, params, state, RoundIndex(t, ROUNDS))
        found.append(params.cpu())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
