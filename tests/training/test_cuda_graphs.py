"""On CUDA a recorded step gives what the step itself gives, and none is used with another round's numbers."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from shoal.errors import RunError
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import MaxClip, RecordClip
from shoal.mechanisms.sampling import Clients
from shoal.random.streams import Streams
from shoal.training import cuda_graphs
from shoal.training.chunking import _bytes_of_one
from shoal.training.context import stand_ins
from shoal.training.engine_settings import Settings
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate
from shoal.training.trial_step import TrialStep
from support.small_federation import digits, parted, simulator, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


FALLING = replace(small("fed-cdp"), per_record=RecordClip("linear:4:1"), per_step=StepNoise("linear:2:1"))
OTHER = {"optimizer": "adamw", "lr": 0.01, "keep_momentum": True, "weight_decay": 0.1, "max_grad_norm": 0.5}


def models(record, recorded):
    return played(simulator(record, settings=Settings("cuda", graphs=recorded)))


def played(sim):
    params, state, found = sim.params, {}, []
    for t in range(4):
        params, state, _ = run_round(sim.cohort, params, state, RoundIndex(t, 4))
        found.append(params.cpu())
    return torch.stack(found)


@pytest.mark.parametrize(
    "record",
    [
        small("fed-cdp"),
        FALLING,
        replace(FALLING, per_record=MaxClip("linear:4:1")),
        small("fed-alpha-cdp-private"),
        small("adaclip"),
        small("pfl"),
        small("fedavg"),
        small("fedprox"),
        small("fedper"),
        *(replace(record, local=replace(record.local, **OTHER)) for record in (small("fedavg"), small("fedper"))),
        replace(FALLING, local=replace(FALLING.local, optimizer="adamw", weight_decay=0.1, proximal=0.1)),
    ],
    ids=lambda record: record.name,
)
def test_recorded_steps_equal_the_steps(record):
    torch.testing.assert_close(models(record, True), models(record, False), rtol=1e-4, atol=1e-6)


def test_a_single_step_a_round_is_recorded_too():
    one = replace(small("fedavg"), local=replace(small("fedavg").local, steps=1))
    torch.testing.assert_close(models(one, True), models(one, False), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("record", [FALLING, small("fed-alpha-cdp-private")], ids=lambda record: record.name)
def test_a_recording_is_kept_while_clip_and_noise_change(record, monkeypatch):
    made = []
    right = cuda_graphs.Recording.__init__
    monkeypatch.setattr(cuda_graphs.Recording, "__init__", lambda self, *given: made.append(right(self, *given)))
    record = replace(record, clients=Clients("all"), records=replace(record.records, sampling="shuffled"))
    models(record, True)
    assert len(made) == 1


@pytest.mark.parametrize("name", ["fed-cdp", "fedavg"])
def test_our_kernels_give_what_plain_products_give(name):
    found = []
    for kernels in (True, False):
        torch.manual_seed(0)
        first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)  # 64 positions, and 16
        module = nn.Sequential(first, nn.MaxPool2d(2), nn.ReLU(), second, nn.Flatten(), nn.Linear(96, 10))
        settings = Settings("cuda", kernels=kernels, precision="float32")
        sim = simulate(small(name), module, digits(), parted(), rounds=4, streams=Streams(5), settings=settings)
        found.append(played(sim))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


class Scaled(nn.Module):
    """A layer without a rule, and Dropout where wanted."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.scaled, self.last = weight_norm(nn.Linear(64, 8)), nn.Linear(8, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.last(self.dropout(self.scaled(x.flatten(1)).tanh()))


def without_rules(record, way, recorded=True, device="cuda", dropout=0.0):
    if way == "compiled" and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 cannot always compile vmap of grad: FunctionalTensor on its own")
    settings = Settings(device, way=way, graphs=recorded)
    sim = simulate(record, Scaled(dropout), digits(), parted(), rounds=4, streams=Streams(5), settings=settings)
    assert sim.cohort.network.way == way
    assert (sim.cohort.graphs is not None) is (recorded and device == "cuda")
    return played(sim)


QUIET = replace(FALLING, per_step=StepNoise(0.0))  # a CPU and a GPU draw other noise


@pytest.mark.parametrize("way", ["vmap", "compiled", "sequential"])
@pytest.mark.parametrize("record", [small("fedavg"), FALLING], ids=["client", "record"])
def test_models_without_rules_are_recorded_too_and_heed_schedules(record, way):
    torch.testing.assert_close(
        without_rules(record, way), without_rules(record, way, recorded=False), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("way", "dropout"), [("vmap", 0.0), ("compiled", 0.0), ("vmap", 0.5), ("sequential", 0.5)])
@pytest.mark.parametrize("record", [small("fedavg"), QUIET], ids=["client", "record"])
def test_models_without_rules_give_what_a_cpu_gives(record, way, dropout, monkeypatch):
    """Also with dropout, whose masks follow from seeds."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    wanted = without_rules(record, "sequential", device="cpu", dropout=dropout)
    torch.testing.assert_close(without_rules(record, way, dropout=dropout), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("record", [small("fedavg"), QUIET], ids=["client", "record"])
@pytest.mark.parametrize("recorded", [True, False])
def test_dropout_by_rules_is_that_of_a_cpu(record, recorded, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 10))
    found = []
    for settings in (Settings("cuda", graphs=recorded), Settings("cpu", way="sequential")):
        sim = simulate(record, module, digits(), parted(), rounds=4, streams=Streams(5), settings=settings)
        assert sim.cohort.network.drops
        found.append(played(sim).cpu())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_recorded_dropout_draws_what_it_draws_unrecorded():
    found = [without_rules(small("fedavg"), "sequential", recorded, dropout=0.5) for recorded in (True, False)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_the_largest_chunk_fits_the_memory():
    """What the dry run found is what a chunk of many takes, to a quarter."""
    sim = simulator(small("fed-cdp"), layers=3, settings=Settings("cuda"))
    data = sim.cohort.client_data
    step = TrialStep(sim.evaluation.module, stand_ins(data.x), torch.zeros(3, dtype=torch.int64).cuda(), 64, True)
    each, fixed = _bytes_of_one(step, sim.cohort.network)
    assert step.peak_bytes(sim.cohort.network, 64) == pytest.approx(fixed + 64 * each, rel=0.25)


def test_a_chunk_beyond_the_memory_is_halved():
    """A real out-of-memory error: no GPU has so much memory."""
    sim = simulator(small("fedavg"), layers=3, settings=Settings("cuda", graphs=False))
    wanted = played(sim)
    right = sim.cohort.network.backward

    def backward(params, *given):
        torch.empty(2**42, dtype=torch.uint8, device="cuda")
        return right(params, *given)

    sim.cohort.network.backward = backward
    with pytest.raises(RunError, match="a single client does not fit"):
        played(sim)
    sim.cohort.network.backward = lambda params, *given: (backward if len(params) > 1 else right)(params, *given)
    torch.testing.assert_close(played(sim), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "trusted-curator", "quantile"])
def test_a_round_waits_for_the_gpu_once_however_many_chunks_it_has(name):
    sim = simulator(small(name), settings=Settings("cuda"))
    sim.cohort.chunker.largest = 1
    clients = np.arange(6)
    total, state = sim.cohort.sum(clients, sim.params, {}, RoundIndex(0, 2)), {}  # records the step
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # says that it is a prototype
            again = sim.cohort.sum(clients, sim.params, state, RoundIndex(0, 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in waits if "called a synchronizing" in str(each.message)]) <= 1
    assert torch.equal(total.update, again.update)
    assert again.clients == 6
