"""Norms and weighted sums of rows on CUDA against plain ones; tests/gradients/test_kernels_cuda.py says where."""

import os

import pytest
import torch

from shoal.kernels import triton
from shoal.mechanisms.row_sums_cuda import norms, weighted_sum

GPU = torch.cuda.is_available()
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not GPU and not INTERPRETED, reason="needs a GPU, or Triton's interpreter")
DEVICE = "cuda" if GPU else "cpu"


@pytest.mark.parametrize("size", [1, 1000, 3000])
def test_norms_hold_from_subnormal_numbers_to_the_largest(size):
    rows = torch.randn(5, size + 3, device=DEVICE)[:, :size]
    rows[1], rows[2], rows[3, 0], rows[4, -1] = 1e-40, 3e38, torch.inf, torch.nan
    found = norms(rows)
    torch.testing.assert_close(found[:3], torch.linalg.vector_norm(rows.double(), dim=1)[:3], rtol=1e-14, atol=0)
    assert found[3] == torch.inf
    assert found[4].isnan()


def test_long_sums_keep_what_float32_would_lose():
    rows = torch.ones(2, 4097, 1030, device=DEVICE)[:, :, :1025]
    rows[:, 0] = 2.0**30
    factors = torch.rand(2, 4097, device=DEVICE)
    factors[:, 0] = 1.0
    found = weighted_sum(rows, factors)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.einsum("kb,kbp->kp", factors.double(), rows.double()), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("clients", "size"), [(3, 1100), (70_000 if GPU else 40, 2)])
def test_sums_of_as_many_clients_as_there_are(clients, size):
    rows, factors = torch.randn(clients, 3, size, device=DEVICE), torch.rand(clients, 3, device=DEVICE)
    wanted = torch.einsum("kb,kbp->kp", factors.double(), rows.double())
    torch.testing.assert_close(weighted_sum(rows, factors), wanted, rtol=1e-14, atol=1e-14)
