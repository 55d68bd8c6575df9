"""What counts as a reconstruction: labels as a multiset, and tables that must beat the mean record."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import shoal
from shoal.attacks import Aim, recipe
from shoal.attacks.gradient_map import gradients
from shoal.attacks.leakage import choose
from shoal.attacks.objective import Objective
from shoal.attacks.quality import judge, label_hits
from shoal.attacks.reconstruct import reconstruct
from shoal.models import build
from shoal.random.streams import Streams

STREAMS = Streams(5)


@pytest.mark.parametrize(
    ("found", "true", "hits"),
    [
        ([1, 2, 3], [3, 1, 2], [True, True, True]),
        ([1, 1, 2], [1, 2, 2], [True, True, False]),
        ([0, 0, 0], [0, 0, 4], [True, True, False]),
        ([5, 6, 7], [1, 2, 3], [False, False, False]),
    ],
)
def test_labels_are_counted_whatever_record_they_go_with(found, true, hits):
    assert label_hits(torch.tensor([found]), torch.tensor([true])).tolist() == [hits]


def test_right_labels_count_where_pictures_are_noise():
    """Which noise fits which record best is chance."""
    generator = STREAMS.generator("noise")
    truth, found = (torch.from_numpy(generator.random((4, 3, 1, 8, 8), dtype=np.float32)) for _ in range(2))
    labels = torch.arange(12).view(4, 3) % 10
    quality = judge(found, labels, truth, labels)
    assert quality.label_hit.shape == (4, 3)
    assert quality.label_hit.all()
    assert not quality.success.any()


def test_the_mean_record_of_a_table_is_no_success_and_the_record_itself_is():
    victims = choose(shoal.load("cancer"), Aim(2, 100), STREAMS, torch.device("cpu"))
    mean = victims.x.mean(0, keepdim=True).expand_as(victims.x)
    guessed = judge(mean, victims.y, victims.x, victims.y)
    assert (guessed.rmse < 0.15).float().mean() > 0.5
    assert not guessed.success.any()
    assert judge(victims.x + 0.01, victims.y, victims.x, victims.y).success.all()


def test_the_baseline_is_the_mean_of_the_other_victims():
    truth = torch.tensor([0.2, 0.4, 0.9]).view(3, 1, 1).expand(3, 2, 4)
    typical = judge(truth, torch.zeros(3, 2), truth, torch.zeros(3, 2)).typical
    assert torch.allclose(typical, torch.tensor([[0.45] * 2, [0.15] * 2, [0.6] * 2]))
    assert judge(truth[:1], torch.zeros(1, 2), truth[:1], torch.zeros(1, 2)).typical is None


def test_pictures_are_judged_as_published():
    x = torch.from_numpy(STREAMS.generator("x").random((3, 1, 1, 8, 8), dtype=np.float32))
    assert judge(x, torch.zeros(3, 1), x, torch.zeros(3, 1)).typical is None


@pytest.mark.parametrize("most", [7, 20, 30, 41])
def test_no_more_iterations_are_done_than_were_asked_for(most):
    evaluations = []
    shown = gradients(build("linear", (12,), 4, seed=1))

    def watched(x, y):
        evaluations.append(1)
        return shown(x, y)

    x = torch.from_numpy(STREAMS.generator("rows").random((2, 1, 12), dtype=np.float32))
    y = torch.arange(2).view(2, 1)
    short = type(recipe("gradinv"))(**vars(recipe("gradinv")) | {"iterations": most, "prior": 0.0})
    seen = shown(x, F.one_hot(y, 4).float()).detach()
    found = reconstruct(Objective(short, watched, lambda a, _: a, (12,), 1, 4, seen, y.unsqueeze(1)), STREAMS)
    assert len(evaluations) == most
    assert found.iterations.tolist() == [most] * 2
