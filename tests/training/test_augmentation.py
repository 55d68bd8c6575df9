"""Views of pictures: averaged before the clip, drawn from the client's own stream."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.audit.cases import cases
from shoal.errors import ConfigError
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Records
from shoal.random.streams import Streams
from shoal.training.augmentation import CROPS, PADDING, augmented
from shoal.training.batch_plan import planned
from shoal.training.engine_settings import Settings
from shoal.training.local_training import train
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate
from support.small_federation import ROUNDS, digits, parted, small

CLIENTS, VIEWS, FIRST = np.arange(4), 3, RoundIndex(0, ROUNDS)


def viewed(record, views=VIEWS, **changes):
    return replace(record, records=replace(record.records, augmentations=views, **changes))


SILENT = {"per_step": StepNoise(0.0)}
METHODS = {
    "record": replace(small("dp-sgd"), per_record=RecordClip(0.5), **SILENT),
    "record, each layer": replace(small("fed-cdp"), per_record=RecordClip(0.5, "each"), **SILENT),
    "adaclip": replace(small("adaclip"), **SILENT),
    "client": small("fedavg"),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 6), nn.Flatten(), nn.Linear(4, 10)
    )


def simulator(record, model=None, data=None, streams=None, device="cpu", **settings):
    return simulate(
        record, model or network(), data or digits(), parted(), rounds=ROUNDS, streams=streams or Streams(5),
        settings=Settings(device, threads=1, **settings),
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.integers(5, 9), st.integers(5, 9), st.integers(0, 2 * CROPS**2 - 1))
def test_a_view_is_a_crop_of_the_padded_picture_which_may_be_flipped(high, wide, view):
    x = torch.rand(1, 2, 3, high, wide)
    found = augmented(x, torch.full((1, 2, 1), view))
    down, across, flipped = view // 2 // CROPS, view // 2 % CROPS, view % 2
    padded = F.pad(x[0], [PADDING] * 4, mode="reflect")
    wanted = padded[:, :, down : down + high, across : across + wide]
    assert torch.equal(found[0], wanted.flip(-1) if flipped else wanted)


def test_the_views_of_a_record_lie_next_to_each_other():
    x = torch.rand(2, 3, 1, 8, 8)
    views = torch.randint(2 * CROPS**2, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    found = augmented(x, views)
    assert found.shape == (2, 12, 1, 8, 8)
    for k, b, v in np.ndindex(2, 3, 4):
        one = augmented(x[k : k + 1, b : b + 1], views[k : k + 1, b : b + 1, v : v + 1])
        assert torch.equal(found[k, 4 * b + v], one[0, 0])


def by_autograd(record, cohort, params, client):
    """One step of a client on the mean gradient of each record's views, clipped after that."""
    plan = planned(cohort, np.array([client]), FIRST)
    module, total = network(), torch.zeros_like(params)
    cohort.network.layout.load(module, params)
    for row, views in zip(plan.batches[0, 0], plan.views[0, 0], strict=True):
        if row < 0:
            continue
        x, y = cohort.client_data.x[row], cohort.client_data.y[row]
        pictures = augmented(x[None, None], torch.from_numpy(views)[None, None])[0]
        module.zero_grad()
        F.cross_entropy(module(pictures), y.expand(len(pictures))).backward()
        gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
        total += gradient * min(1.0, 0.5 / float(gradient.norm()))
    return -record.local.rate(0, ROUNDS) * total / record.records.batch


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_records_gradient_is_the_mean_over_its_views_and_clipped_after_that(way, micro_batch):
    record = viewed(METHODS["record"])
    record = replace(record, local=replace(record.local, steps=1))
    sim = simulator(record, way=way, micro_batch=micro_batch)
    updates, metrics = train(sim.cohort, sim.params, CLIENTS, FIRST, {})
    for client in CLIENTS:
        wanted = by_autograd(record, sim.cohort, sim.params, client)
        torch.testing.assert_close(updates[client], wanted, rtol=1e-3, atol=1e-6)
    assert metrics.records == float((planned(sim.cohort, CLIENTS, FIRST).batches >= 0).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_one_record_is_one_clip_however_many_views_it_has(name):
    """Batched and sequential, whole and in pieces, the same step."""
    record = viewed(METHODS[name])
    found = [
        train((sim := simulator(record, **how)).cohort, sim.params, CLIENTS, FIRST, {})[0]
        for how in ({}, {"way": "sequential"}, {"micro_batch": 2})
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.floats(-3, 6), st.integers(0, 2**31), st.sampled_from([1e-4, 0.1, 10.0]))
def test_no_record_leaves_longer_than_the_clip(views, size, seed, clip):
    record = replace(viewed(METHODS["record"], views, sampling="fixed-order", batch=1), per_record=RecordClip(clip))
    record = replace(record, local=replace(record.local, steps=1, lr=1.0))
    x = torch.randn(100, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) * 10**size
    sim = simulator(record, data=replace(digits(), train_x=x), streams=Streams(seed))
    updates, _ = train(sim.cohort, torch.zeros_like(sim.params), CLIENTS, FIRST, {})
    assert float(updates.double().norm(dim=1).max()) <= clip * (1 + 1e-6)


def test_views_are_the_clients_own_in_any_chunk_and_other_ones_in_every_step_round_and_attempt():
    cohort = simulator(viewed(METHODS["record"], sampling="fixed-order")).cohort
    whole, alone = planned(cohort, CLIENTS, FIRST), planned(cohort, CLIENTS[2:3], FIRST)
    width = alone.views.shape[2]
    assert (whole.views[:, 2, :width] == alone.views[:, 0]).all()
    rounds = (FIRST, RoundIndex(1, ROUNDS), RoundIndex(0, ROUNDS, 1))
    others = [planned(cohort, CLIENTS, index).views for index in rounds]
    steps = np.concatenate([views.reshape(-1, *views.shape[2:]) for views in others])  # of each client, too
    assert len(np.unique(steps, axis=0)) == len(steps)


@pytest.mark.slow
def test_a_seed_gives_the_same_model_again_and_views_another_one():
    def model(views, seed=5):
        sim = simulator(viewed(small("dp-sgd"), views), streams=Streams(seed))
        return run_round(sim.cohort, sim.params, {}, FIRST)[0]

    assert torch.equal(model(2), model(2))
    assert not torch.allclose(model(2), model(0))
    assert not torch.allclose(model(2), model(2, seed=6))


@pytest.mark.slow
def test_a_run_that_is_resumed_ends_as_if_nothing_had_been(tmp_path):
    given = {"algorithm": "fedavg", "model": "digits-mlp", "rounds": 3, "data.clients": 5, "clients.cohort": 3}
    given |= {"records.augmentations": 2, "engine.micro_batch": 3, "engine.precision": "bf16"}
    given |= {"engine.threads": 1, "engine.device": "cpu"}
    whole, held = shoal.run(given, runs=tmp_path), []
    with pytest.raises(shoal.ShoalError, match="stopped after round 1") as stopped:
        shoal.run(
            given, runs=tmp_path, on_start=lambda config, sim, run: held.append(sim),
            on_round=lambda line: held[0].stop(),
        )  # fmt: skip
    rest = shoal.run(resume=stopped.value.run)
    assert all(torch.equal(rest.model[name], tensor) for name, tensor in whole.model.items())


def test_without_views_no_stream_is_opened(monkeypatch):
    asked, right = [], Streams.generator

    def watched(self, purpose, *numbers):
        asked.append(purpose)
        return right(self, purpose, *numbers)

    sim = simulator(small("dp-sgd"))
    monkeypatch.setattr(Streams, "generator", watched)
    assert planned(sim.cohort, CLIENTS, FIRST).views is None
    assert "augmentations" not in asked


@pytest.mark.parametrize("wrong", [-1, 257])
def test_a_number_of_views_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"records.augmentations must be from 0 to 256, got {wrong}"):
        Records("poisson", augmentations=wrong)


@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 4, 16)])
def test_only_pictures_are_augmented(shape):
    data = digits()
    data = replace(data, train_x=data.train_x.view(100, *shape), test_x=data.test_x.view(-1, *shape))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ConfigError, match=r"records.augmentations 3 needs pictures .*; set it to 0"):
        simulator(viewed(small("fedavg")), model, data)


def test_an_audit_plays_records_that_are_no_pictures():
    assert [case.record.records.augmentations for case in cases(viewed(small("dp-sgd")), None, 1.0)] == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_on_cuda_recorded_or_not(name, graphs):
    found = []
    for device in ("cuda", "cpu"):
        sim = simulator(viewed(METHODS[name]), device=device, graphs=graphs, precision="float32")
        params, state = sim.params, {}
        for t in range(ROUNDS):
            params, state, _ = run_round(sim.cohort, params, state, RoundIndex(t, ROUNDS))
        found.append(params.cpu())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)
