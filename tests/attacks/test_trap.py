"""Trap weights: a malicious server reads off the records that are alone in a row, through clips but not noise."""

import pytest
import torch
from torch import nn

import shoal
from shoal.attacks import Aim, attack, recipe
from shoal.attacks.leakage import attacked_model, choose
from shoal.attacks.trap import ACTIVE, planted
from shoal.config import configure
from shoal.errors import ModelError
from shoal.random.streams import Streams

CPU = torch.device("cpu")


def config(name, *changes):
    return configure({"algorithm": name, "engine.device": "cpu", "engine.threads": 1, "data.name": "digits"}, changes)


@pytest.fixture(scope="module")
def data():
    return shoal.load("digits")


def active(settings, data, x):
    """Which records [V, B] activate which rows [k]."""
    streams = Streams(settings.seed)
    module = planted(attacked_model(settings, data, streams, recipe("trap-weights")), data.test_x.float(), streams)
    linear = next(each for each in module.modules() if isinstance(each, nn.Linear))
    return x.flatten(2) @ linear.weight.T > 0


def exact(outcome):
    apart = (outcome.found.x.unsqueeze(1) - outcome.truth.unsqueeze(2)).square().flatten(3).mean(3).sqrt()
    return apart.amin(2) < 1e-3


def test_held_out_records_activate_the_share_of_rows_that_was_asked_for(data):
    share = active(config("fedavg"), data, data.test_x[:, None].float()).float().mean()
    assert float(share) == pytest.approx(ACTIVE, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [("fedavg", ()), ("dp-sgd", ("per_record.clip_norm=1e-3", "per_step.noise_multiplier=0"))],
)
def test_records_that_are_alone_in_two_rows_are_read_off_clipped_or_not(data, name, changes):
    settings, aim = config(name, *changes), Aim(0, 4, 8)
    outcome = attack(settings, recipe("trap-weights"), aim, data)
    on = active(settings, data, choose(data, aim, Streams(settings.seed), CPU).x)
    alone = (on & (on.sum(1, keepdim=True) == 1)).sum(2)
    assert exact(outcome)[alone >= 2].all()
    assert (alone >= 2).float().mean() > 0.9


@pytest.mark.slow
def test_of_a_larger_batch_nothing_but_records_that_are_alone_is_read_off(data):
    settings, aim = config("fedavg"), Aim(0, 2, 32)
    outcome = attack(settings, recipe("trap-weights"), aim, data)
    on = active(settings, data, choose(data, aim, Streams(settings.seed), CPU).x)
    alone = (on & (on.sum(1, keepdim=True) == 1)).any(2)
    assert exact(outcome)[alone].float().mean() > 0.8
    assert not exact(outcome)[~alone].any()


def test_layers_after_the_first_may_be_any(data):
    torch.manual_seed(0)
    later = nn.Linear(200, 20), nn.Tanh(), nn.Linear(20, 10)
    module = planted(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), *later), data.test_x.float(), Streams(0)
    )
    x, y = data.train_x[:4].float(), data.train_y[:4]
    nn.functional.cross_entropy(module(x), y).backward()
    on = module[1](x.flatten(1)) > 0
    row = int((on.sum(0) == 1).nonzero()[0])
    read = module[1].weight.grad[row] / module[1].bias.grad[row]
    assert torch.allclose(read, x.flatten(1)[on[:, row]][0], atol=1e-4)


@pytest.mark.slow
def test_noise_by_the_client_hides_every_record(data):
    outcome = attack(config("dp-sgd"), recipe("trap-weights"), Aim(0, 2, 4), data)
    assert not outcome.quality.success.any()


def test_a_network_that_begins_otherwise_is_refused(data):
    with pytest.raises(ModelError, match="begins with a linear layer and ReLU"):
        planted(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), data.test_x.float(), Streams(0))
