"""The tails of the noise: right samplers pass, one of few bits is flagged, on every device."""

import math

import numpy as np
import pytest
import torch

from shoal.audit import tails
from shoal.random.discrete_gaussian import table_of
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import SLACK, Streams

STREAMS = Streams(5)


def of_31_bits(into, scales, keystreams, sums=None):
    """Box and Muller's formula on a radius of 31 bits, as Shoal's first version had it."""
    half = (into.shape[1] + 1) // 2
    for row, scale, keystream in zip(into, scales, keystreams, strict=True):
        held = np.empty(8 * half + SLACK, dtype=np.uint8)
        keystream.fill(held.data)
        bits = torch.from_numpy(held[: 8 * half].view(np.int32).copy())
        radius = torch.sqrt(-2 * torch.log(((bits[:half] & 0x7FFFFFFF).float() + 0.5) * 2.0**-31))
        angle = bits[half:].float() * (math.pi * 2.0**-31)
        row += torch.cat([radius * angle.cos(), radius * angle.sin()])[: len(row)] * scale


@pytest.mark.slow
@pytest.mark.parametrize("streams", [STREAMS, SecureStreams()], ids=["research", "secure"])
@pytest.mark.statistical(false_alarm=3 * tails.CHANCE)
def test_the_samplers_of_both_modes_pass(streams):
    """Each check flags a right sampler with a chance of 1e-7."""
    checks = tails.sampler_checks(streams, torch.device("cpu"))
    assert checks
    assert not [check for check in checks if check.flagged]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_sampler_on_cuda_passes():
    assert not tails.sampler_checks(STREAMS, torch.device("cuda"))[-1].flagged


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_sampler_of_31_bits_is_flagged(seed):
    numbers = torch.zeros(tails.ROWS, tails.WIDTH)
    of_31_bits(numbers, torch.ones(tails.ROWS), [Streams(seed).keystream("x", row) for row in range(tails.ROWS)])
    assert tails.lattice(numbers.double().numpy()).flagged
    assert tails.beyond(of_31_bits, Streams(seed)).flagged


@pytest.mark.slow
def test_a_sampler_of_31_bits_is_flagged_where_a_run_would_use_it(monkeypatch):
    """Through the pieces in which a run draws."""
    monkeypatch.setattr("shoal.random.normals.add_normals", lambda *given, loop: of_31_bits(*given))
    assert tails.sampler_checks(STREAMS, torch.device("cpu"))[-1].flagged


@pytest.mark.slow
def test_radii_that_are_not_extended_where_they_should_be_are_flagged(monkeypatch):
    monkeypatch.setattr("shoal.random.normals.RARE", 2**12)
    monkeypatch.setattr("shoal.random.normals.loop_in_c", lambda: None)
    assert tails.sampler_checks(STREAMS, torch.device("cpu"))[-1].flagged


@pytest.mark.slow
def test_noise_that_leaves_out_steps_of_its_grid_is_flagged(monkeypatch):
    monkeypatch.setattr("shoal.random.discrete_gaussian.parts", lambda width: ((512, 2048.0),))
    assert tails.discrete_steps(SecureStreams().generator("x")).flagged


def test_a_table_that_ends_too_early_is_flagged(monkeypatch):
    monkeypatch.setattr("shoal.random.discrete_gaussian.FURTHEST", 6.0)
    table_of.cache_clear()
    try:
        assert tails.discrete_tail(SecureStreams().generator("x")).flagged
    finally:
        table_of.cache_clear()
