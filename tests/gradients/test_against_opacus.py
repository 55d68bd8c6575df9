"""On the papers' networks Shoal's norms and clipped sums are those of Opacus, which shares no code with it."""

import warnings

import pytest
import torch
from torch import nn

from shoal.gradients import network
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.update_clipping import MARGIN
from shoal.models import build
from support.layers import OF_NUMBERS, home

pytestmark = pytest.mark.slow

CLIP = 0.7
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def of_opacus(module, x, y):
    """Every example's gradient [B, P] by Opacus' hooks, and the sum of the clipped ones by its optimiser."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        wrapped = GradSampleModule(module, loss_reduction="sum")
        plain = torch.optim.SGD(module.parameters(), lr=1.0)
        optimiser = DPOptimizer(
            plain, noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=1, loss_reduction="sum"
        )
        nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
    each = torch.cat([parameter.grad_sample.flatten(1) for parameter in module.parameters()], 1)
    optimiser.clip_and_accumulate()
    return each, torch.cat([parameter.summed_grad.flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_norms_and_clipped_sums_are_opacus(name):
    torch.manual_seed(0)
    shape = home(name)
    module = build(name, shape, 4, seed=0).double()
    x, y = torch.rand(6, *shape, dtype=torch.float64), torch.randint(0, 4, (6,))
    fast = network(module, per_record=True)
    params = fast.layout.flatten(module).unsqueeze(0)
    tape = fast.backward(params, x.unsqueeze(0), y.unsqueeze(0), torch.ones(1, 6, dtype=torch.float64))
    squares, total = tape.squares(), torch.zeros_like(params)
    factors = RecordClip(CLIP).factors(squares, CLIP, {})
    tape.accumulate(total, 1.0, factors)
    each, clipped = of_opacus(module, x, y)
    norms = each.norm(dim=1)
    assert float(norms.max()) > CLIP, "nothing would be clipped"
    torch.testing.assert_close(squares.sum(0).squeeze(0).sqrt(), norms, **CLOSE)
    away = 1e-5 + MARGIN  # Opacus adds 1e-6 to a norm
    torch.testing.assert_close(total.squeeze(0), clipped, rtol=away, atol=away * float(clipped.abs().max()))
