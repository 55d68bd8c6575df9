"""Steps that take the place of another round's have that round's numbers: its clip, its noise, its streams."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import MaxClip, RecordClip
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.training.batch_plan import planned
from shoal.training.engine_settings import Settings
from shoal.training.local_training import _first, train
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate
from support.small_federation import ROUNDS, digits, parted, simulator, small

FALLING = {"per_record": RecordClip("linear:4:1"), "per_step": StepNoise("linear:2:1")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "record",
    [
        small("fed-cdp", **FALLING),
        small("fed-cdp", **FALLING | {"per_record": MaxClip("linear:4:1")}),
        small("fed-cdp", **FALLING | {"per_step": StepNoise(0.0)}),
        small("fed-alpha-cdp-private"),
        small("adaclip"),
    ],
    ids=["falling", "l2-max", "no noise", "quantile", "adaclip"],
)
def test_steps_that_begin_as_another_rounds_play_what_that_round_plays(record):
    sim, clients = simulator(record), np.arange(3)

    def first(t):
        quantile = {"clip": torch.tensor(1.0 / (t + 1))}
        return _first(sim.cohort, sim.params, clients, RoundIndex(t, ROUNDS), quantile)

    plan = planned(sim.cohort, clients, RoundIndex(1, ROUNDS))
    mask = torch.from_numpy(plan.batches >= 0).float()
    inputs = (torch.from_numpy(plan.padded), mask, mask, plan.seeds, torch.ones(len(mask), len(clients)))
    steps, other, wanted, before = first(0), first(3), first(3), first(0)
    assert steps.sanitiser.values == other.sanitiser.values
    steps.begin(other)
    found = steps.run(inputs)
    torch.testing.assert_close(found.client_params, wanted.run(inputs).client_params, rtol=0, atol=0)
    assert not torch.allclose(found.client_params, before.run(inputs).client_params)
    torch.testing.assert_close(vars(found.sanitiser.metrics), vars(wanted.sanitiser.metrics), rtol=0, atol=0)


def test_steps_with_noise_do_not_take_the_place_of_steps_without():
    sims = [simulator(replace(small("fed-cdp"), per_step=StepNoise(noise))) for noise in (0.0, 1.0)]
    none, some = (_first(s.cohort, s.params, np.arange(3), RoundIndex(0, ROUNDS), {}).sanitiser.values for s in sims)
    assert none != some


def test_secure_noise_of_local_steps_is_drawn_on_a_cpu_also_where_there_is_a_gpu(monkeypatch):
    """Else `auto` takes the GPU, and each round is refused after it was charged."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, streams = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), SecureStreams()
    trainer = simulate(
        small("dp-sgd"), model, digits(), parted(4), rounds=ROUNDS, streams=streams, settings=Settings(threads=1)
    )
    assert trainer.params.device.type == trainer.cohort.client_data.device.type == "cpu"


def test_no_record_decides_how_gradients_are_computed():
    """Else one record would change the last digits of all others' gradients, which no noise counts."""
    data, settings = digits(), Settings("cpu", threads=1)
    data = replace(data, train_x=data.train_x.index_fill(0, torch.tensor(0), 1e30))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    trainer = simulate(small("dp-sgd"), model, data, parted(4), rounds=ROUNDS, streams=Streams(1), settings=settings)
    assert trainer.cohort.network.batched


class Looking(nn.Module):
    """Looks at its numbers, which vmap does not allow."""

    def forward(self, x):
        return x if x.ndim and x.isnan().any().item() else x * 1


@pytest.mark.slow
@pytest.mark.parametrize("looks", [False, True], ids=["vmap", "one by one"])
@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9}, {"optimizer": "adamw"}, {"personal": 1, "proximal": 0.5}])
def test_a_record_without_a_finite_gradient_is_trained_with_as_one_whose_gradient_is_0(changes, looks):
    """Bit by bit: with another mask of Dropout, such a record would choose among the models that are released."""
    record = small("dp-sgd")
    record = replace(record, local=replace(record.local, **changes | {"keep_momentum": True}))
    torch.manual_seed(1)
    hidden = [nn.Linear(64, 8, bias=False), nn.Dropout(0.5), *([Looking()] if looks else [])]
    module = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, 10, bias=False))
    found = []
    for value in (0.0, torch.nan, torch.inf):
        sim = simulate(
            record, module, digits(), parted(), rounds=3, streams=Streams(5), settings=Settings("cpu", threads=1)
        )
        x = sim.cohort.client_data.x.clone()
        x[sim.cohort.client_data.records_of(np.array([0]))[0][3]] = value
        cohort, state = replace(sim.cohort, client_data=replace(sim.cohort.client_data, x=x)), {}
        updates = [train(cohort, sim.params, np.array([0]), RoundIndex(t, 3), state)[0] for t in range(3)]
        found.append({"update": torch.cat(updates)} | state)
    assert float(found[0]["update"].norm()) > 0
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)
