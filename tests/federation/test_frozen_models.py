"""A model with a frozen part: sites build it themselves, and one that has another backbone is found out."""

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.federation import site as site_module
from shoal.federation.terms import ROUND, TERMS, Terms
from support.federations import asked, farthest, served, settings, simulated
from support.loopback import with_sites

MODEL = """
from torch import nn

class Backbone(nn.Sequential):
    def __init__(self, input_shape, classes):
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU()).requires_grad_(False)
        body[2].eval()
        super().__init__(body, nn.Linear(12, classes))
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    (tmp_path / "frozen_backbone.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    return settings("dp-sgd", model="frozen_backbone:Backbone")


def sites(folder):
    return with_sites(folder, 4, model="frozen_backbone:Backbone")


@pytest.mark.slow
def test_a_frozen_part_is_built_at_every_site_and_not_sent(tmp_path, given):
    result, grid = served(tmp_path, given, sites(tmp_path))
    assert set(result.model) >= {"1.weight", "1.bias"}
    assert farthest(result, simulated(tmp_path, given)) <= 1e-5
    assert asked(grid, ROUND).vectors["model"].numel() == 12 * 10 + 10
    assert len(Terms.read(asked(grid, TERMS).text("terms")).frozen) == 64


@pytest.mark.slow
def test_a_site_with_another_backbone_refuses_the_terms(tmp_path, given, monkeypatch):
    built = []

    def other_at_first(*arguments, **named):
        module = build(*arguments, **named)
        if not built:
            with torch.no_grad():
                module[0][1].weight[0, 0] += 1e-3
        built.append(module)
        return module

    build = site_module.build
    monkeypatch.setattr(site_module, "build", other_at_first)
    _, grid = served(tmp_path, given | {"federation.min_sites_to_start": 3}, sites(tmp_path))
    answers = [(node, answer.values) for way, node, kind, answer in grid.wire if (way, kind) == ("from", TERMS)]
    refused = {node: values["refused"] for node, values in answers if "refused" in values}
    (node,) = refused
    assert "the frozen part of model frozen_backbone:Backbone is not the same at the site" in refused[node]
    assert {to for way, to, kind, _ in grid.wire if (way, kind) == ("to", ROUND)} == {*range(100, 104)} - {node}
