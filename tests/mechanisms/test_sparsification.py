"""The defences of Wei et al. (2023), section 4, do what they say, and promise nothing."""

import math

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.mechanisms.sparsification import Prune, RandomNoise, Select
from shoal.random.streams import Streams


def left(defence, updates):
    def draw(row):
        return Streams(2).generator("test", row)

    return defence.apply(updates.clone(), updates.norm(dim=1), math.inf, 0, 1, draw, {})


def updates(rows=3, size=1000, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, size))).float()


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 0.99])
def test_pruning_keeps_exactly_the_largest_coordinates(share):
    before = updates()
    after = left(Prune(share), before)
    kept = 1000 - round(share * 1000)
    for old, new in zip(before, after, strict=True):
        largest = old.abs().topk(kept).indices
        assert set(new.nonzero().squeeze(1).tolist()) == set(largest.tolist())
        assert torch.equal(new[largest], old[largest])


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 1.0])
def test_selection_sends_the_fraction_and_caps_it(fraction):
    before = updates()
    after = left(Select(fraction, cap=0.5), before)
    for old, new in zip(before, after, strict=True):
        sent = new.nonzero().squeeze(1)
        assert len(sent) == math.ceil(fraction * 1000)
        assert torch.equal(new[sent], old[sent].clamp(-0.5, 0.5))
    assert float(after.abs().max()) <= 0.5


def test_selection_sends_only_what_is_over_the_threshold():
    before = updates()
    after = left(Select(fraction=0.9, threshold=1.0, cap=10.0), before)
    for old, new in zip(before, after, strict=True):
        assert new.nonzero().squeeze(1).tolist() == (old.abs() > 1).nonzero().squeeze(1).tolist()
    assert not left(Select(threshold=100.0), before).any()


@pytest.mark.statistical(false_alarm=1e-16)
def test_clients_select_each_for_themselves_and_at_random():
    """What two have in common is hypergeometric, of mean 10: 40 or more with 7e-18."""
    same = updates(rows=1).repeat(3, 1)
    sent = left(Select(fraction=0.1, cap=10.0), same) != 0
    assert [int(row.sum()) for row in sent] == [100] * 3
    assert int((sent[0] & sent[1]).sum()) < 40
    assert int((sent[1] & sent[2]).sum()) < 40


def test_nothing_is_sent_of_an_update_of_zeros():
    for select in (Select(), Select(noise_multiplier=1.0)):
        assert not left(select, torch.zeros(2, 50)).any()


@pytest.mark.statistical(false_alarm=2e-11)
def test_noise_on_what_is_selected_is_in_units_of_the_cap():
    """50,000 numbers: the mean to 6.7 standard deviations, the spread to 3%, which are 9."""
    before = torch.full((1, 100_000), 1.0)
    after = left(Select(fraction=0.5, cap=0.5, noise_multiplier=2.0), before)[0]
    sent = after[after != 0]
    assert len(sent) == 50_000
    assert float(sent.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(sent.std()) == pytest.approx(1.0, rel=0.03)


@pytest.mark.statistical(false_alarm=1.1e-7)
def test_random_noise_has_a_fixed_scale_and_is_each_clients_own():
    """100,000 numbers a client: the spread to 1.5%, 6.7 standard deviations; their correlation at 1e-7."""
    before = updates(rows=2, size=100_000)
    noise = (left(RandomNoise(0.01), before) - before).double().numpy()
    assert noise.std(axis=1) == pytest.approx([0.01] * 2, rel=0.015)
    assert abs(np.corrcoef(noise)[0, 1]) < 5.33 / math.sqrt(100_000)
    assert torch.equal(left(RandomNoise(0.0), before), before)


@pytest.mark.parametrize("defence", [Prune(), Select(), Select(noise_multiplier=1.0), RandomNoise()])
def test_each_says_why_nothing_is_proven(defence):
    assert defence.unproven
    assert defence.bound({}, 0, 1, None) == math.inf


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Prune(-0.1), r"per_update\.share must be in \[0, 1\), got -0.1"),
        (lambda: Prune(1.0), r"per_update\.share must be in \[0, 1\)"),
        (lambda: RandomNoise(-1.0), r"per_update\.scale must be >= 0, got -1"),
        (lambda: Select(fraction=0.0), r"per_update\.fraction must be in \(0, 1\], got 0"),
        (lambda: Select(fraction=1.1), r"per_update\.fraction must be in \(0, 1\]"),
        (lambda: Select(threshold=-1.0), r"per_update\.threshold and noise_multiplier must be >= 0, got -1"),
        (
            lambda: Select(noise_multiplier=-1.0),
            r"threshold and noise_multiplier must be >= 0, got 0.0 and -1",
        ),
        (lambda: Select(cap=0.0), r"per_update\.cap must be > 0 .*, got 0"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
