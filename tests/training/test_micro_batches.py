"""A batch in pieces (engine.micro_batch) is the batch: records clipped one by one, noise added once."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from shoal.errors import ConfigError, ModelError
from shoal.mechanisms.gaussian import StepNoise
from shoal.mechanisms.record_clipping import MaxClip, RecordClip
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.training import local_training
from shoal.training.engine_settings import Settings
from shoal.training.local_training import train
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.trainer import simulate
from support.small_federation import ROUNDS, digits, parted, simulator, small


class Unit(nn.Module):
    """x / |x|: NaN where all is 0."""

    def forward(self, x):
        x = x.flatten(1)
        return x / x.norm(dim=1, keepdim=True)


CLIENTS = np.arange(4)
POISSON = replace(small("dp-sgd"), per_record=RecordClip(0.5))
METHODS = {
    "dp-sgd, Poisson": POISSON,
    "each layer": replace(POISSON, per_record=RecordClip(0.5, "each")),
    "l2-max": replace(small("fed-cdp"), per_record=MaxClip(1.0)),
    "quantile": small("quantile-record"),
    "adaclip": small("adaclip"),
    "no noise": replace(small("fed-cdp"), per_step=StepNoise(0.0)),
    "fedavg": small("fedavg"),
    "fedprox": small("fedprox"),
    "personal": small("fedper"),
    "adamw": replace(POISSON, local=replace(POISSON.local, optimizer="adamw", lr=0.01)),
    "max_grad_norm": small("fedavg", local=replace(small("fedavg").local, max_grad_norm=0.5)),
}


def trained(record, micro_batch, double=False, **settings):
    """The updates of a chunk of clients, and the metrics of their steps."""
    sim = simulator(record, layers=2, settings=Settings("cpu", threads=1, micro_batch=micro_batch, **settings))
    cohort, params = sim.cohort, sim.params
    if double:
        data = replace(cohort.client_data, x=cohort.client_data.x.double())
        cohort, params = replace(cohort, client_data=data), params.double()
    return train(cohort, params, CLIENTS, RoundIndex(0, ROUNDS), {})


def assert_same(found, wanted, **close):
    torch.testing.assert_close(found[0], wanted[0], **close)
    if wanted[1] is not None:
        torch.testing.assert_close(vars(found[1]), vars(wanted[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
@pytest.mark.parametrize("name", METHODS)
def test_pieces_of_a_batch_give_the_step_of_the_batch(name, way):
    wanted = trained(METHODS[name], None, way=way)
    for micro_batch in (1, 2, 5):
        assert_same(trained(METHODS[name], micro_batch, way=way), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_in_float64_to_nine_digits(name):
    wanted = trained(METHODS[name], None, double=True)
    assert_same(trained(METHODS[name], 2, double=True), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["dp-sgd, Poisson", "adaclip"])
def test_so_do_the_pieces_of_a_batch_that_is_summed_in_float64(name, monkeypatch):
    monkeypatch.setattr(local_training, "PIECE", 1)
    wanted = trained(METHODS[name], None)
    assert_same(trained(METHODS[name], 2), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_convolutions_and_normalisations_too(monkeypatch):
    def updates(micro_batch):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 6), nn.Flatten(), nn.Linear(4, 10)
        )
        sim = simulate(
            POISSON, model, digits(), parted(), rounds=ROUNDS, streams=Streams(1),
            settings=Settings("cpu", threads=1, micro_batch=micro_batch),
        )  # fmt: skip
        assert sim.cohort.network.batched
        return train(sim.cohort, sim.params, CLIENTS, RoundIndex(0, ROUNDS), {})

    wanted = updates(None)
    assert_same(updates(2), wanted, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(local_training, "PIECE", 1)
    assert_same(updates(2), wanted, rtol=1e-5, atol=1e-6)


def watch(monkeypatch, network):
    """How many records of a client it is given, each time."""
    right, widths = network.backward, []

    def watched(params, x, y, weights, seeds):
        widths.append(weights.shape[1])
        return right(params, x, y, weights, seeds)

    monkeypatch.setattr(network, "backward", watched)
    return widths


def test_only_one_piece_is_ever_run(monkeypatch):
    sim = simulator(POISSON, settings=Settings("cpu", threads=1, micro_batch=2))
    widths = watch(monkeypatch, sim.cohort.network)
    run_round(sim.cohort, sim.params, {}, RoundIndex(0, ROUNDS))
    assert max(widths) == 2
    assert widths.count(2) > len(CLIENTS)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [[3], [0, 7, 11]])
@pytest.mark.parametrize("way", ["rules", "vmap", "sequential"])
def test_records_without_a_finite_norm_are_left_out_piece_by_piece(bad, way):
    data = digits()
    x = data.train_x.clone()
    x[bad] = 0.0
    data = replace(data, train_x=x)
    record = replace(POISSON, records=replace(POISSON.records, sampling="fixed-order"))

    def updates(micro_batch):
        torch.manual_seed(0)
        model = nn.Sequential(Unit(), nn.Linear(64, 10))
        settings = Settings("cpu", threads=1, way=way, micro_batch=micro_batch)
        sim = simulate(
            record, model, data, parted(2), rounds=ROUNDS, streams=Streams(1), settings=settings
        )  # fmt: skip
        found, metrics = train(sim.cohort, sim.params, np.arange(2), RoundIndex(0, ROUNDS), {})
        assert found.isfinite().all()
        assert float(metrics.records) == len(x) - len(bad)
        return found, metrics

    assert_same(updates(3), updates(None), rtol=1e-5, atol=1e-6)


def test_in_secure_mode_all_pieces_have_one_public_width(monkeypatch):
    """A record's gradient must not depend, not even in its last digit, on which piece it is in."""
    model, settings = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), Settings("cpu", threads=1, micro_batch=4)
    sim = simulate(POISSON, model, digits(), parted(), rounds=ROUNDS, streams=SecureStreams(), settings=settings)
    widths = watch(monkeypatch, sim.cohort.network)
    for _ in range(3):
        train(sim.cohort, sim.params, CLIENTS[:1], RoundIndex(0, ROUNDS), {})
    assert widths == [4, 4, 4] * (len(widths) // 3)


@pytest.mark.slow
def test_the_memory_of_a_client_is_that_of_a_piece():
    whole, pieces = (
        simulator(POISSON, settings=Settings("cpu", threads=1, micro_batch=size)).cohort.chunker.client_bytes
        for size in (None, 1)
    )
    assert pieces < whole


def test_a_model_that_mixes_records_is_not_run_in_pieces():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    settings = Settings("cpu", threads=1, micro_batch=4)
    with pytest.raises(ConfigError, match=r"engine.micro_batch.*2 \(BatchNorm1d\)"):
        simulate(small("fedavg"), model, digits(), parted(), rounds=ROUNDS, streams=Streams(1), settings=settings)


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1) - x.flatten(1).mean(0))


@pytest.mark.parametrize("way", ["auto", "sequential"])
def test_nor_is_one_whose_own_code_does(way):
    settings = Settings("cpu", threads=1, micro_batch=4, way=way)
    for model in (nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10)), Centred(64, 10)):
        mixes = pytest.raises(ModelError, match=r"engine\.micro_batch needs a model that does not mix")
        with mixes if isinstance(model, Centred) else nullcontext():
            simulate(small("fedavg"), model, digits(), parted(), rounds=ROUNDS, streams=Streams(1), settings=settings)


@pytest.mark.parametrize("wrong", [0, -1])
def test_pieces_hold_at_least_one_record(wrong):
    with pytest.raises(ConfigError, match=f"engine.micro_batch must be > 0, got {wrong}"):
        Settings(micro_batch=wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_on_cuda_recorded_or_not(name, graphs):
    def models(micro_batch):
        settings = Settings("cuda", graphs=graphs, micro_batch=micro_batch)
        sim = simulator(METHODS[name], layers=2, settings=settings)
        params, state = sim.params, {}
        for t in range(ROUNDS):
            params, state, _ = run_round(sim.cohort, params, state, RoundIndex(t, ROUNDS))
        return params

    torch.testing.assert_close(models(2), models(None), rtol=1e-4, atol=1e-5)
