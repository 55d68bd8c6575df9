"""On CUDA a recorded step gives what the step itself gives, and none is used with another round's numbers."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import MaxClip, RecordClip
from shoal.mechanisms.sampling import Clients
from shoal.random.streams import Streams
from shoal.training import cuda_graphs
from shoal.training.engine_settings import Settings
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate
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
def test_our_kernels_give_what_plain_products_give(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    found = []
    for kernels in (True, False):
        torch.manual_seed(0)
        first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)  # 64 positions, and 16
        module = nn.Sequential(first, nn.MaxPool2d(2), nn.ReLU(), second, nn.Flatten(), nn.Linear(96, 10))
        settings = Settings("cuda", kernels=kernels)
        sim = simulate(small(name), module, digits(), parted(), rounds=4, streams=Streams(5), settings=settings)
        found.append(played(sim))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
