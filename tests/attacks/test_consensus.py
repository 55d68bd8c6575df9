"""Group consistency: searches are matched record by record before they pull each other."""

from dataclasses import replace

import pytest
import torch

import shoal
from shoal.attacks import Aim, attack, recipe
from shoal.attacks.consensus import _anchors
from shoal.attacks.reconstruct import Found
from shoal.config import configure


def found(x, labels, left):
    nothing = torch.zeros(len(x), dtype=torch.int64)
    return Found(x, labels, torch.tensor(left), nothing, nothing, nothing.bool())


def test_records_are_matched_by_label_and_distance_whatever_their_order():
    truth = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.2, 0.1]])
    labels, turned = torch.tensor([3, 3, 5]), torch.tensor([2, 1, 0])
    other = truth + 0.02
    copies = found(torch.stack([truth, other[turned]]), torch.stack([labels, labels[turned]]), [0.1, 0.2])
    first, second = _anchors(copies, torch.tensor([True, True]))
    assert torch.allclose(first, truth + 0.01)
    assert torch.allclose(second, (truth + 0.01)[turned])


def test_a_record_of_another_label_is_not_matched_however_near_it_is():
    x = torch.tensor([[[0.0], [1.0]], [[1.0], [0.0]]])
    labels = torch.tensor([[1, 2], [1, 2]])
    first, _ = _anchors(found(x, labels, [0.1, 0.2]), torch.tensor([True, True]))
    assert torch.allclose(first, torch.tensor([[0.5], [0.5]]))


@pytest.mark.slow
def test_a_batch_of_two_is_recovered():
    config = configure({"algorithm": "fedavg", "engine.device": "cpu", "engine.threads": 1, "data.name": "digits"})
    group = replace(recipe("cpl-group"), copies=2, iterations=40, prior=0.0)
    outcome = attack(config, group, Aim(0, 1, 2), shoal.load("digits"))
    assert outcome.truth.shape == outcome.found.x.shape
    assert outcome.quality.success.all()
    assert outcome.found.left.shape == (1,)
