"""The figures of a model by client."""

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.gradients import Layout
from shoal.training.evaluation import IN_FULL, Evaluation
from shoal.training.workers import Workers


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, IN_FULL, IN_FULL + 1])
def test_many_clients_have_their_headline_figure_alone(clients):
    """Each holds as many rows as the others; the model answers 1 where the first feature is positive."""
    x = np.random.Generator(np.random.Philox(key=3)).standard_normal((clients * 10, 2)).astype(np.float32)
    owners = np.repeat(np.arange(clients), 10)
    y = (x[:, 1] > 0).astype(np.int64)
    data = shoal.from_arrays(x, y, client=owners, test_fraction=0.5)
    module = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    evaluation = Evaluation.of(module, Layout.of(module), data, Workers(torch.device("cpu"), 1, side_by_side=False))
    found = evaluation.figures(evaluation.layout.flatten(module))["figures_by_client"]
    assert len(found) == len(set(data.test_owners.tolist())) == clients
    right = (data.test_x[:, 0] > 0).long() == data.test_y
    for row in found:
        own = data.test_owners == data.owner_names.index(row["client"])
        assert row["records"] == own.sum()
        assert row["figures"]["accuracy"] == pytest.approx(float(right[own].float().mean()))
        assert ("f1" in row["figures"]) == (clients <= IN_FULL)
