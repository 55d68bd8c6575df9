"""Records whose gradient has no norm: left out one by one, and an update is never without its noise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from shoal.algorithms import algorithm
from shoal.data import ListedPartition
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.training.engine_settings import Settings
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate
from support.small_federation import digits

RECORDS = 20


class Unit(nn.Module):
    """x / |x|: NaN where all is 0, which is what a record is often replaced by."""

    def forward(self, x):
        x = x.flatten(1)
        return x / x.norm(dim=1, keepdim=True)


def simulated(module, x, streams, noise=4.0, way="auto", steps=1):
    data = digits()
    data = replace(data, train_x=x, train_y=data.train_y[: len(x)])
    record = algorithm("dp-sgd")
    record = replace(
        record,
        records=replace(record.records, batch=len(x), sampling="fixed-order"),
        local=replace(record.local, steps=steps),
        per_step=replace(record.per_step, noise_multiplier=noise),
    )
    settings = Settings("cpu", threads=1, way=way)
    part = ListedPartition(np.arange(len(x), dtype=np.int32), np.array([0, len(x)]))
    sim = simulate(record, module, data, part, rounds=1, streams=streams, settings=settings)
    return sim


def update(*given, **changes):
    sim = simulated(*given, **changes)
    return sim.cohort.updates(np.array([0]), sim.params, {}, RoundIndex(0, 1)).updates[0]


def rows():
    return digits().train_x[:RECORDS].clone()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
@pytest.mark.parametrize("streams", [Streams(3), SecureStreams()], ids=["research", "secure"])
def test_a_record_that_is_nan_also_where_it_is_0_does_not_take_the_noise_along(streams, way):
    torch.manual_seed(0)
    module, x = nn.Sequential(Unit(), nn.Linear(64, 10)), rows()
    x[3] = 0
    assert float(update(module, x, streams, way=way).norm()) > 0.05


def test_where_no_record_has_a_norm_there_is_noise_alone():
    module = nn.Sequential(Unit(), nn.Linear(64, 10))
    found = update(module, torch.zeros_like(rows()), Streams(3))
    assert torch.isfinite(found).all()
    assert float(found.std()) > 0


@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
def test_what_is_left_is_the_sum_of_the_others(way):
    """Without noise: the step on 20 records, of which one has no norm, is that of the other 19."""
    torch.manual_seed(0)
    module, x = nn.Sequential(Unit(), nn.Linear(64, 10)), rows()
    x[3] = 0
    found = update(module, x, Streams(3), noise=0.0, way=way)
    others = torch.cat([x[:3], x[4:]])
    data = digits()
    label = data.train_y[:RECORDS]
    sim = simulated(module, others, Streams(3), noise=0.0, way=way)
    federation = sim.cohort.client_data
    federation.y[:] = torch.cat([label[:3], label[4:]])
    left = sim.cohort.updates(np.array([0]), sim.params, {}, RoundIndex(0, 1)).updates[0]
    torch.testing.assert_close(found * RECORDS, left * (RECORDS - 1), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_does_not_draw_anew_for_what_is_left_out():
    """One enormous record, dropped by chance or not: no update may be exactly 0."""
    x = rows()
    x[3, 0, 2, 2] = 3e38
    for seed in range(12):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
        assert float(update(module, x, SecureStreams()).norm()) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("streams", [Streams(3), SecureStreams()], ids=["research", "secure"])
def test_a_great_layer_behind_another_trains(streams):
    """Its inputs have a history of their own; its product is made with the noise."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10)
    )
    found = update(module, rows(), streams, noise=1e-4, steps=2)
    sim = simulated(module, rows(), Streams(0), noise=0.0, steps=2)
    plain = sim.cohort.updates(np.array([0]), sim.params, {}, RoundIndex(0, 1)).updates[0]
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=1e-3)
