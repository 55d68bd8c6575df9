"""On CUDA a recorded step gives what the step itself gives, and none is used with another round's numbers."""

from dataclasses import replace

import pytest
import torch

from shoal.engine.moment import Moment
from shoal.engine.round import play_round
from shoal.engine.settings import Settings
from shoal.privacy.example_clip import ExampleClip
from shoal.privacy.noise import StepNoise
from small_federation import simulator, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def models(record, graphs):
    sim = simulator(record, settings=Settings("cuda", graphs=graphs))
    state, found = sim.state, []
    for t in range(4):
        state, _ = play_round(sim.stage, state, Moment(t, 4))
        found.append(state.model.cpu())
    return torch.stack(found)


@pytest.mark.parametrize(
    "record",
    [
        small("fed-cdp"),
        replace(small("fed-cdp"), per_example=ExampleClip("linear:4:1"), per_step=StepNoise("linear:2:1")),
        small("fed-alpha-cdp-private"),
        small("adaclip"),
        small("pfl"),
        small("fedavg"),
    ],
    ids=lambda record: record.name,
)
def test_recorded_steps_equal_the_steps(record):
    torch.testing.assert_close(models(record, True), models(record, False), rtol=1e-4, atol=1e-6)
