"""What a site may claim in a real federation, beyond what test_deploy_gate tries: weights, and an update of zeros."""

import math

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")
from support.federations import BAD, full_cohort, in_rounds, named, served, settings, with_update
from support.loopback import with_sites

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("records", [10**9, -9, 0, math.nan, 1e9, "many", True], ids=str)
def test_a_claimed_weight_that_cannot_be_counts_as_zero(tmp_path, records):
    given = settings("fedavg", clients__sampling="all", federation__fewest_records=100, federation__most_records=500)
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = in_rounds(named(records=records))
    result, _ = served(tmp_path, given, grid)
    assert [line["bad_updates"] for line in result.metrics] == [1, 1]
    assert all(torch.isfinite(tensor).all() for tensor in result.model.values())


def test_an_update_of_zeros_is_an_honest_one(tmp_path):
    grid = with_sites(tmp_path, 4)
    grid.changes[BAD] = in_rounds(lambda _, answer: with_update(answer, torch.zeros(650)))
    result, _ = served(tmp_path, full_cohort(), grid)
    assert [line["bad_updates"] for line in result.metrics] == [0] * len(result.metrics)
    assert [line["clients"] for line in result.metrics] == [4] * len(result.metrics)
