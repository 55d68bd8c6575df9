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


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("items", [1, 3])
def test_where_results_must_be_steady_no_threads_divide_the_rows_of_a_product(side_by_side, items):
    workers = Workers(torch.device("cpu"), threads=4, side_by_side=side_by_side)
    assert set(workers.map(lambda _: torch.get_num_threads(), range(items), steady=True)) == {1}
    workers.close()
