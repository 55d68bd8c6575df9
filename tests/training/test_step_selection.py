"""Steps that are tested and undone where they fail: against a plain loop, and the noise of the test."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.nn.functional import cross_entropy

from shoal.algorithms.base import Local
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Records
from shoal.mechanisms.selective_release import SelectiveRelease
from shoal.mechanisms.step_test import StepTest
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.training.batch_plan import planned
from shoal.training.engine_settings import Settings
from shoal.training.local_training import train
from shoal.training.round_index import RoundIndex
from shoal.training.step_selection import Selection
from shoal.training.trainer import simulate
from support.small_federation import digits, parted, small

CLIENTS, STEPS = 3, 12


def with_tests(updates=None, noise=0.0, **changes):
    """dpsur with steps so long that many raise the loss."""
    per_step = SelectiveRelease(noise, test_batch=8, test_noise_multiplier=noise, threshold=0.0, updates=updates)
    return replace(
        small("dpsur"), records=Records("poisson", 6), local=Local(steps=STEPS, lr=6.0), per_record=RecordClip(1.0),
        per_step=replace(per_step, **changes),
    )  # fmt: skip


def simulation(record, model=None, streams=None, **settings):
    torch.manual_seed(1)
    model = model or nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    given = Settings("cpu", threads=1, **settings)
    return simulate(record, model, digits(), parted(CLIENTS), rounds=2, streams=streams or Streams(4), settings=given)


def plain_loop(sim, record):
    """The same by plain autograd, one record after another; the models, and which steps were kept."""
    clients, index, data = np.arange(CLIENTS), RoundIndex(0, 2), digits()
    plan = planned(sim.cohort, clients, index)
    tests = Selection.of(sim.cohort, sim.params.expand(CLIENTS, -1), clients, index, STEPS).batches
    start, found, kept = sim.params.view(1, -1), [], []

    def losses(params, rows):
        weight, bias = params[: 64 * 10].view(10, 64), params[64 * 10 :]
        return cross_entropy(data.train_x[rows].flatten(1) @ weight.T + bias, data.train_y[rows], reduction="none")

    for client in clients:
        params, passed = start[0].clone(), []
        for step in range(STEPS):
            if record.per_step.updates is not None and sum(passed) >= record.per_step.updates:
                break
            total = torch.zeros_like(params)
            for row in plan.batches[step, client]:
                if row >= 0:
                    held = params.clone().requires_grad_()
                    (gradient,) = torch.autograd.grad(losses(held, [row])[0], held)
                    total += gradient / max(1.0, float(gradient.norm()))
            new, rows = params - 6.0 * total / 6, tests[step, client]
            rows = rows[rows >= 0]
            passed.append(bool((losses(new, rows) - losses(params, rows)).sum() < 0))
            params = new if passed[-1] else params
        found.append(params)
        kept.append(passed)
    return torch.stack(found), kept


@pytest.mark.slow
@pytest.mark.parametrize("updates", [None, 3])
def test_a_step_is_kept_where_the_loss_of_other_records_falls(updates):
    record = with_tests(updates)
    sim = simulation(record)
    moved, metrics = train(sim.cohort, sim.params, np.arange(CLIENTS), RoundIndex(0, 2), {})
    expected, kept = plain_loop(sim, record)
    assert metrics.kept.tolist() == [sum(each) for each in kept]
    assert 0 < sum(map(sum, kept)) < sum(map(len, kept))
    torch.testing.assert_close(sim.params + moved, expected, rtol=1e-4, atol=1e-5)
    assert sim.run_round(0)["kept_steps"] == sum(map(sum, kept))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"way": "vmap"}, {"way": "sequential"}, {"micro_batch": 2}])
def test_every_way_to_train_keeps_the_same_steps(settings):
    expected, _ = plain_loop(simulation(with_tests()), with_tests())
    sim = simulation(with_tests(), **settings)
    moved, _ = train(sim.cohort, sim.params, np.arange(CLIENTS), RoundIndex(0, 2), {})
    torch.testing.assert_close(sim.params + moved, expected, rtol=1e-4, atol=1e-5)


def test_in_secure_mode_the_shape_of_a_test_is_public():
    """Whether a record is in the widest batch of a round would show in the last digits of all other tests."""
    sim, widths = simulation(with_tests(noise=1.0), streams=SecureStreams(4)), set()
    for attempt in range(10):
        given = sim.params.expand(1, -1), np.array([0]), RoundIndex(0, 2, attempt), STEPS
        widths.add(Selection.of(sim.cohort, *given).batches.shape[2])
    (held,) = sim.cohort.client_data.records_of(np.array([0]))
    assert widths == {Records("poisson", 8).widest(len(held))}


def test_the_state_of_an_optimiser_is_undone_too():
    """With a threshold that nothing passes, no client moves, and momentum stays 0."""
    record = with_tests(threshold=-2.0)
    record = replace(record, local=replace(record.local, momentum=0.9, keep_momentum=True))
    sim, state = simulation(record), {}
    moved, _ = train(sim.cohort, sim.params, np.arange(CLIENTS), RoundIndex(0, 2), state)
    assert not moved.any()
    assert state
    assert not any(tensor.any() for tensor in state.values())


def test_dropout_is_off_in_a_test():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    for way in ("rules", "vmap", "sequential"):
        sim = simulation(with_tests(), model, way=way)
        x, y = digits().train_x[None, :4], digits().train_y[None, :4]
        expected = cross_entropy(model.eval()(x[0]), y[0], reduction="none")
        model.train()
        torch.testing.assert_close(sim.cohort.network.losses(sim.params.view(1, -1), x, y)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [Streams(2), SecureStreams()], ids=["research", "secure"])
@pytest.mark.statistical(false_alarm=1e-7)
def test_the_noise_of_the_test_is_what_is_charged_and_never_the_same(monkeypatch, streams):
    """Chi-square on 3 x 400 numbers; it would find 25% too much or too little."""
    seen = []
    monkeypatch.setattr(StepTest, "passed", lambda self, noisy: seen.append(noisy.clone()) or noisy > 9)
    record = with_tests(noise=1.5, test_clip=1e-3)
    record = replace(record, local=Local(steps=400, lr=1e-12))  # the loss does not change
    sim = simulation(record, streams=streams)
    train(sim.cohort, sim.params, np.arange(CLIENTS), RoundIndex(0, 2), {})
    numbers = torch.stack(seen).numpy() / (2 * 1e-3 * 1.5)
    assert numbers.shape == (400, CLIENTS)
    assert chi2.ppf(5e-8, numbers.size) < np.square(numbers).sum() < chi2.ppf(1 - 5e-8, numbers.size)
    assert len(np.unique(numbers)) > 0.99 * numbers.size  # on secure mode's grid a few may meet


@pytest.mark.slow
def test_records_without_a_finite_loss_fail_the_tests_of_their_client_alone():
    sim, found = simulation(with_tests()), []
    wild = digits().train_x.clone()
    wild[sim.cohort.client_data.records_of(np.array([0]))[0]] = torch.inf
    for x in (digits().train_x, wild):
        cohort = replace(sim.cohort, client_data=replace(sim.cohort.client_data, x=x))
        found.append(train(cohort, sim.params, np.arange(CLIENTS), RoundIndex(0, 2), {})[0])
    assert found[0][1:].any()
    assert not found[1][0].any()
    assert torch.equal(found[0][1:], found[1][1:])


@pytest.mark.parametrize("clip", [1e-3, 0.003, 0.1, 0.7])
def test_noise_in_float32_is_no_less_than_is_charged(clip):
    class Scales:
        def add(self, into, scales, sums):
            self.least = float(scales.min())

    sim, clients = simulation(with_tests(noise=1.3, test_clip=clip)), np.arange(CLIENTS)
    params = sim.params.expand(CLIENTS, -1)
    selection = Selection.of(sim.cohort, params, clients, RoundIndex(0, 2), 1)
    selection.noise = Scales()
    selection.passed(params, params, torch.ones(CLIENTS))
    assert selection.test.scale <= selection.noise.least <= selection.test.scale * (1 + 2.0**-22)
