"""Threads that train slices side by side."""

import pytest
import torch

from shoal.training.workers import Workers

TINY = torch.tensor(1e-40)


def is_zero(_=None):
    return float(TINY * 1) == 0


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush denormals")
@pytest.mark.parametrize("items", [1, 4])
@pytest.mark.parametrize("already", [False, True])
def test_numbers_that_are_too_small_to_matter_count_as_0_while_slices_are_trained_and_only_then(items, already):
    workers = Workers(torch.device("cpu"), 2)
    torch.set_flush_denormal(already)
    try:
        assert list(workers.map(is_zero, range(items))) == [True] * items
        assert is_zero() == already
    finally:
        torch.set_flush_denormal(False)
        workers.close()
