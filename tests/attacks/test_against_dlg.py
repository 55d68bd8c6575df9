"""DLG beside the loop of its authors (Zhu, Liu, Han 2019, Deep Leakage from Gradients, arXiv 1906.08935), and iDLG.

The pictures are digits enlarged to 16 x 16, on DLG's own network: there full steps without a line search leave some
searches where the model is saturated and the gradient is 0.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import shoal
from shoal.attacks import Aim, attack, observe, recipe
from shoal.attacks.leakage import attacked_model, choose
from shoal.attacks.objective import Objective
from shoal.attacks.quality import judge
from shoal.config import configure
from shoal.random.streams import Streams

AIM = Aim(2, 3)
SIDE = 16
ATTEMPTS, STEPS = 4, 15


@pytest.fixture(scope="module")
def large():
    digits = shoal.load("digits")
    x, y = F.interpolate(digits.train_x[:200], size=(SIDE, SIDE), mode="bilinear"), digits.train_y[:200]
    return replace(digits, train_x=x, train_y=y, test_x=x[:2], test_y=y[:2])


def config(name="fedavg", *changes):
    return configure({"algorithm": name, "model": "dlg-cnn", "engine.device": "cpu", "engine.threads": 1}, changes)


def original(module, seen, generator):
    """The published loop: dummy picture and soft label by PyTorch's L-BFGS, lr 1; from the best of a few starts."""
    parameters = list(module.parameters())
    found = []
    for _ in range(ATTEMPTS):
        x = torch.rand((1, 1, SIDE, SIDE), generator=generator).requires_grad_()
        y = torch.randn((1, 10), generator=generator).requires_grad_()
        optimiser = torch.optim.LBFGS([x, y])

        def distance(x=x, y=y, optimiser=optimiser):
            optimiser.zero_grad()
            loss = -(y.softmax(-1) * module(x).log_softmax(-1)).sum()
            slopes = torch.autograd.grad(loss, parameters, create_graph=True)
            left = (torch.cat([slope.flatten() for slope in slopes]) - seen).square().sum()
            left.backward()
            return left

        for _ in range(STEPS):
            left = float(optimiser.step(distance).detach())
            if not left > 1e-8 * float(seen.square().sum()):  # explained, or no number
                break
        found.append((left if left == left else float("inf"), x.detach().clamp(0, 1)))
        if found[-1][0] <= 1e-8 * float(seen.square().sum()):
            break
    return min(found, key=lambda each: each[0])[1]


@pytest.mark.slow
def test_dlg_gets_at_least_what_the_original_loop_gets_of_the_same_gradients(large):
    settings, streams = config(), Streams(0)
    ours = attack(settings, recipe("dlg"), AIM, large)
    victims = choose(large, AIM, streams, torch.device("cpu"))
    module = attacked_model(settings, large, streams)
    seen = observe(settings.algorithm, 2, module, victims, streams).gradients
    generator = torch.Generator().manual_seed(0)
    theirs = torch.stack([original(module, each, generator) for each in seen])
    judged = judge(theirs, victims.y, victims.x, victims.y)
    assert torch.equal(ours.truth, victims.x)
    assert int(judged.success.sum()) == int(ours.quality.success.sum()) == 3
    assert int(ours.found.restarts.sum()) > 0  # else this shows nothing


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1e3])
def test_the_distance_is_relative_to_what_was_seen(size):
    """Else a search for a gradient that a clip made small ends where its slope only seems to be 0."""

    def value(scale):
        seen = scale * torch.tensor([[1.0, 2.0, -1.0]])
        objective = Objective(
            recipe=recipe("cpl"), shown=lambda x, y: scale * x.flatten(1), replay=lambda shown, seen: shown,
            shape=(3,), batch=1, classes=2, seen=seen, labels=torch.zeros(1, 1, 1, dtype=torch.int64),
        )  # fmt: skip
        return objective.evaluate(torch.tensor([[0.5, 0.5, 0.5]]), torch.tensor([0]), torch.tensor([0]))

    for ours, same in zip(value(size), value(1.0), strict=True):
        assert torch.allclose(ours, same, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "clip"), [("dlg", "1e-2"), ("cpl", "1e-4")])
def test_a_gradient_that_a_clip_made_small_is_explained_as_well(name, clip):
    small = replace(config("fed-cdp", f"per_record.clip_norm={clip}", "per_step.noise_multiplier=0"), model="auto")
    row = attack(small, replace(recipe(name), iterations=40), Aim(2, 3), shoal.load("digits")).row()
    assert row["success"] == 1.0
