"""Steps that take the place of another round's have that round's numbers: its clip, its noise, its streams."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.engine.local import _first, planned
from shoal.engine.moment import Moment
from shoal.privacy.example_clip import ExampleClip, MaxClip
from shoal.privacy.noise import StepNoise
from small_federation import ROUNDS, simulator, small

FALLING = {"per_example": ExampleClip("linear:4:1"), "per_step": StepNoise("linear:2:1")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "record",
    [
        small("fed-cdp", **FALLING),
        small("fed-cdp", **FALLING | {"per_example": MaxClip("linear:4:1")}),
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
        return _first(sim.stage, sim.state.model, clients, Moment(t, ROUNDS), quantile)

    plan = planned(sim.stage, clients, Moment(1, ROUNDS))
    real = torch.from_numpy(plan.batches >= 0).float()
    inputs = (torch.from_numpy(plan.filled), real, real, torch.ones(len(real), len(clients)))
    steps, other, wanted, before = first(0), first(3), first(3), first(0)
    assert steps.sanitised.values == other.sanitised.values
    steps.begin(other)
    found = steps.play(inputs)
    torch.testing.assert_close(found.params, wanted.play(inputs).params, rtol=0, atol=0)
    assert not torch.allclose(found.params, before.play(inputs).params)
    torch.testing.assert_close(vars(found.sanitised.told), vars(wanted.sanitised.told), rtol=0, atol=0)


def test_steps_with_noise_do_not_take_the_place_of_steps_without():
    sims = [simulator(replace(small("fed-cdp"), per_step=StepNoise(noise))) for noise in (0.0, 1.0)]
    none, some = (_first(s.stage, s.state.model, np.arange(3), Moment(0, ROUNDS), {}).sanitised.values for s in sims)
    assert none != some
