"""A clip of gradients bounds what one record moves the sum of a batch by, and says by how much it does."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.mechanisms.record_clipping import MaxClip, QuantileRecordClip, RecordClip
from shoal.mechanisms.update_clipping import MARGIN
from shoal.random.streams import Streams

LAYERS, CLIENTS, BATCH, WIDTH = 3, 2, 5, 7
KINDS = ("flat", "split", "each")


def gradients(seed=0, scale=1.0):
    """[layers, K, B, width], of lengths that differ by orders of magnitude, one of them 0."""
    random = Streams(seed).generator("gradients")
    found = torch.from_numpy(random.normal(size=(LAYERS, CLIENTS, BATCH, WIDTH)))
    found *= torch.from_numpy(10 ** random.uniform(-2, 2, (LAYERS, CLIENTS, BATCH, 1))) * scale
    found[:, 0, 0] = 0
    return found


def by_loop(found, bound, layers):
    """Each record by itself, layer by layer, as the papers write it."""
    clipped = found.clone()
    for client in range(CLIENTS):
        for record in range(BATCH):
            whole = math.sqrt(sum(float(found[m, client, record].norm()) ** 2 for m in range(LAYERS)))
            for m in range(LAYERS):
                length = whole if layers == "flat" else float(found[m, client, record].norm())
                limit = (1 - MARGIN) * bound / (math.sqrt(LAYERS) if layers == "split" else 1)
                clipped[m, client, record] /= max(1.0, length / limit)
    return clipped


@pytest.mark.parametrize("layers", KINDS)
@pytest.mark.parametrize("make", [RecordClip, MaxClip])
def test_factors_clip_as_a_slow_loop_does(make, layers):
    found = gradients()
    factors = make(1.5, layers).factors(found.square().sum(3), 1.5, {})
    assert factors.shape == (1 if layers == "flat" else LAYERS, CLIENTS, BATCH)
    torch.testing.assert_close(found * factors.unsqueeze(3), by_loop(found, 1.5, layers))


@pytest.mark.slow
@given(seed=st.integers(0, 2**30), bound=st.floats(1e-3, 1e3), layers=st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None)
def test_no_record_is_longer_than_the_excess_says(seed, bound, layers):
    clip = RecordClip(bound, layers)
    squares = gradients(seed, scale=bound).square().sum(3)
    lengths = (squares * clip.factors(squares, bound, {}).square()).sum(0).sqrt()
    assert float(lengths.max()) <= bound * clip.excess(LAYERS) * (1 + 1e-12)
    assert (clip.factors(squares, bound, {}) <= 1).all()


def test_only_a_clip_of_each_layer_lets_a_whole_gradient_pass_its_bound():
    """Every layer far too long: the whole has exactly C sqrt(M), which the excess says, and C otherwise."""
    squares = torch.full((4, 1, 1), 1e6, dtype=torch.float64)
    for layers, length in (("flat", 2.0), ("split", 2.0), ("each", 4.0)):
        clip = RecordClip(2.0, layers)
        found = (squares * clip.factors(squares, 2.0, {}).square()).sum().sqrt()
        assert float(found) == pytest.approx(length, rel=2 * MARGIN)
        assert clip.excess(4) == length / 2


def test_noise_is_scaled_to_the_bound_whatever_the_batch():
    clip = RecordClip(2.0)
    for squares in (
        torch.zeros(LAYERS, CLIENTS, BATCH),
        torch.full((LAYERS, CLIENTS, BATCH), 1e8),
        torch.zeros(1, 2, 0),
    ):
        factors = clip.factors(squares, 2.0, {})
        assert clip.sensitivity(squares, factors, 2.0).tolist() == [2.0, 2.0]


def test_a_clip_may_follow_a_schedule_over_the_rounds():
    assert [RecordClip("decay:4:0.5:1").bound({}, t, 10) for t in range(4)] == [4, 2, 1, 1]


@pytest.mark.parametrize("clip", [0, -1, "linear:1:-1"])
def test_a_clip_that_is_not_positive_is_refused_by_name(clip):
    with pytest.raises(ConfigError, match=rf"per_record\.clip_norm must be > 0 .*, got {clip}"):
        RecordClip(clip)


def test_a_clip_that_reaches_zero_in_a_late_round_is_refused_there():
    clip = RecordClip("linear:1:-0.001")
    with pytest.raises(ConfigError, match="in round 9992 of 10000"):
        clip.bound({}, 9991, 10_000)


# --- l2-max


@pytest.mark.parametrize("layers", KINDS)
def test_l2_max_is_the_greatest_clipped_norm_over_records_and_layers(layers):
    found, clip = gradients(), MaxClip(1.5, layers)
    squares = found.square().sum(3)
    clipped = by_loop(found, 1.5, layers)
    lengths = clipped.square().sum((0, 3)).sqrt() if layers == "flat" else clipped.square().sum(3).sqrt().amax(0)
    torch.testing.assert_close(clip.sensitivity(squares, clip.factors(squares, 1.5, {}), 1.5), lengths.amax(1))


def test_l2_max_follows_the_data_and_says_that_this_proves_nothing():
    """All gradients 0, then one of norm C: the noise's scale is 0, then C. An empty batch has none."""
    clip = MaxClip(2.0)
    seen = []
    for squares in (torch.zeros(3, 1, 4), torch.tensor([[[0.0, 0, 0, 9]]]).expand(3, 1, 4), torch.zeros(3, 1, 0)):
        seen.append(float(clip.sensitivity(squares, clip.factors(squares, 2.0, {}), 2.0)))
    assert seen == pytest.approx([0, 2, 0], rel=2 * MARGIN)
    assert "depends on the data" in MaxClip.unproven
    assert RecordClip.unproven is QuantileRecordClip.unproven is None


# --- the quantile


def test_the_count_below_the_bound_is_that_of_a_full_batch_whatever_came():
    """A record adds 1/2 below the bound and takes 1/2 away above it; a place that is only filled up does nothing."""
    clip = QuantileRecordClip(count_noise_multiplier=0.5)
    squares = torch.tensor([[[0.1, 4.0, 0.2, 0.0], [4.0, 4.0, 0.0, 0.0]]])
    real = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]])
    assert clip.count(squares, real, 1.0).tolist() == [0.5, -1.0]
    assert clip.count(squares, torch.zeros(2, 4), 1.0).tolist() == [0.0, 0.0]


def test_one_record_moves_the_count_by_a_half():
    clip, squares = QuantileRecordClip(), torch.tensor([[[0.5, 4.0, 0.2]]])
    here = clip.count(squares, torch.ones(1, 3), 1.0)
    for place in range(3):
        gone = torch.ones(1, 3)
        gone[0, place] = 0
        assert abs(float(here - clip.count(squares, gone, 1.0))) == pytest.approx(0.5)


def test_gradients_and_count_together_are_one_gaussian():
    """Sensitivities 1 and 1/2 in units of their noises: z_delta^-2 + (2 sigma_b)^-2 = z^-2."""
    found = QuantileRecordClip(count_noise_multiplier=2.0).update_noise(6.0, 5)
    assert found == pytest.approx(6.29, abs=5e-3)
    assert found**-2 + (2 * 2.0 * 5) ** -2 == pytest.approx(6.0**-2)


def test_too_little_noise_for_the_count_is_refused_with_the_fix():
    with pytest.raises(ConfigError, match=r"per_record\.count_noise_multiplier 0\.05 x 5 .* raise it over 0\.6"):
        QuantileRecordClip().update_noise(6.0, 5)


def test_the_bound_moves_towards_the_quantile():
    clip, memory = QuantileRecordClip(initial_clip_norm=2.0, quantile=0.5, clip_norm_lr=0.2), {}
    clip.adapt(memory, 1.0)
    assert clip.bound(memory, 1, 10) == pytest.approx(2 * math.exp(-0.1))
    clip.adapt(memory, 0.0)
    assert clip.bound(memory, 2, 10) == pytest.approx(2.0)


@pytest.mark.parametrize("key", ["initial_clip_norm", "quantile", "clip_norm_lr", "count_noise_multiplier"])
def test_what_cannot_be_is_refused_by_its_key(key):
    with pytest.raises(ConfigError, match=rf"per_record\.{key} must be"):
        QuantileRecordClip(**{key: -1.0})
