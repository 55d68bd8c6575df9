"""Imprint: a malicious server reads records off a fully connected layer, through clips and sums but not noise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.attacks import Aim, attack, observe, recipe
from shoal.attacks.imprint import planted, read_off
from shoal.attacks.leakage import choose
from shoal.config import configure
from shoal.data import Dataset
from shoal.errors import ConfigError, ModelError
from shoal.models import build
from shoal.random.streams import Streams

STREAMS = Streams(4)
PIXELS = 12


def rows(count, name):
    return torch.from_numpy(STREAMS.generator(name).random((count, PIXELS), dtype=np.float32))


def labels(count, name):
    return torch.from_numpy(STREAMS.generator(name).integers(4, size=count))


@pytest.fixture(scope="module")
def data():
    test = rows(400, "test"), labels(400, "test labels")
    return Dataset("rows", rows(400, "train"), labels(400, "labels"), *test, classes=tuple("abcd"))


def config(name, *changes):
    base = {"algorithm": name, "model": "imprint-mlp", "engine.device": "cpu", "engine.threads": 1}
    return configure(base, changes)


def exact(outcome):
    """Which records [V, B] were read off to the last digits that float32 leaves."""
    apart = (outcome.found.x.unsqueeze(1) - outcome.truth.unsqueeze(2)).square().flatten(3).mean(3).sqrt()
    return apart.amin(2) < 1e-3


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fedavg", ()),
        ("trusted-curator", ("per_update.clip_norm=1e-3",)),
        ("dp-sgd", ("per_record.clip_norm=1e-3", "per_step.noise_multiplier=0")),
    ],
)
def test_just_the_records_alone_in_their_bins_are_read_off_clipped_or_not(data, name, changes):
    settings, aim = config(name, *changes), Aim(0, 4, 16)
    outcome = attack(settings, recipe("imprint"), aim, data)
    streams = Streams(settings.seed)
    module = planted(build("imprint-mlp", (PIXELS,), 4), data.test_x, streams)
    active = (module[1](choose(data, aim, streams, torch.device("cpu")).x) > 0).sum(2)  # which bin a record is in
    alone = (active.unsqueeze(2) == active.unsqueeze(1)).sum(2) == 1
    assert not alone.all()  # else this shows nothing
    assert torch.equal(exact(outcome), alone)
    assert alone.float().mean() > 0.9


def test_labels_follow_from_the_size_of_the_slope(data):
    outcome = attack(config("fedavg"), recipe("imprint"), Aim(0, 4, 4), data)
    whole = exact(outcome).all(1)
    assert whole.sum() >= 3
    assert outcome.quality.label_hit[whole].all()


def test_a_sum_over_sites_hides_no_record_that_is_alone(data):
    secure = config("fedavg", "federation.aggregation=secure")
    outcome = attack(secure, recipe("imprint"), Aim(0, 2, 4, sites=5), data)
    assert outcome.truth.shape == (2, 20, PIXELS)
    assert exact(outcome).float().mean() > 0.9
    row = outcome.row()
    assert (row["records"], row["sites"], row["gradient_left"]) == (4, 5, None)


@pytest.mark.parametrize(
    ("name", "changes", "sites"),
    [
        ("dp-sgd", (), 1),
        ("fed-sdp", ("per_update.at=client",), 1),
        ("distributed-dp-sgd", (), 5),
        ("trusted-curator", ("per_round.at=shared",), 5),
    ],
)
def test_noise_that_the_server_does_not_draw_hides_every_record(data, name, changes, sites):
    outcome = attack(config(name, *changes), recipe("imprint"), Aim(0, 2, 4, sites=sites), data)
    assert not outcome.quality.success.any()


def test_noise_by_a_malicious_server_hides_nothing_from_it(data):
    outcome = attack(config("trusted-curator"), recipe("imprint"), Aim(0, 2, 4, sites=5), data)
    assert exact(outcome).float().mean() > 0.9


@pytest.mark.statistical(false_alarm=1e-12)
def test_the_noise_in_a_sum_is_the_multiplier_times_the_clip(data):
    """Over 17,000 coordinates the spread is within 4%: more than seven standard deviations."""
    streams, module = Streams(2), build("imprint-mlp", (PIXELS,), 4)
    victims = choose(data, Aim(0, 1, 4, sites=5), streams, torch.device("cpu"))

    def seen(noise):
        method = config("trusted-curator", "per_round.at=shared", "per_update.clip_norm=0.3",
                        f"per_round.noise_multiplier={noise}").algorithm  # fmt: skip
        return observe(method, 0, module, victims, streams, sites=5).gradients

    assert float((seen(2.0) - seen(0.0)).std()) == pytest.approx(2.0 * 0.3 / 5, rel=0.04)


def test_an_agreed_network_need_not_be_the_attacks_own():
    digits = shoal.load("digits")
    outcome = attack(replace(config("fedavg"), model="digits-mlp"), recipe("imprint"), Aim(0, 4, 2), digits)
    assert exact(outcome).float().mean() >= 0.75  # 64 bins
    assert outcome.model == "digits-mlp"


@pytest.mark.parametrize("name", ["linear", "attack-mlp"])
def test_networks_without_rows_to_plant_are_refused(data, name):
    with pytest.raises(ModelError, match="use model=imprint-mlp"):
        attack(replace(config("fedavg"), model=name), recipe("imprint"), Aim(0, 2, 4), data)


def test_more_records_than_bins_are_refused():
    module = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 3), nn.ReLU(), nn.Linear(3, 2))
    size = sum(p.numel() for p in module.parameters())
    with pytest.raises(ModelError, match="4 records need as many bins, and the first layer has 3"):
        read_off(module, torch.zeros(1, size), (PIXELS,), 4)


def test_attackers_that_do_not_fit_are_refused(data):
    with pytest.raises(ConfigError, match="the server's attack on a batch: use --type 0"):
        attack(config("fedavg"), recipe("imprint"), Aim(2, 2), data)
    with pytest.raises(ConfigError, match="cpl explains single updates; use --attack imprint"):
        attack(config("fedavg"), recipe("cpl"), Aim(0, 2, sites=2), data)
    with pytest.raises(ConfigError, match="only the server sees a sum"):
        Aim(1, 2, sites=2)
    with pytest.raises(ConfigError, match="at least 1 in a sum"):
        Aim(0, 2, sites=0)
