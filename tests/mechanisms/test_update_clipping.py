"""Clips really clip, and each bound is the one that its paper says."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm

from shoal.algorithms import algorithm
from shoal.errors import ConfigError
from shoal.mechanisms.update_clipping import (
    MARGIN,
    PIECE,
    Clip,
    MedianClip,
    NoisyClip,
    QuantileClip,
    noisy_share,
    row_norms,
)
from shoal.random.streams import Streams
from support.small_federation import (
    ALPHA,
    ROUNDS,
    of_one_length,
    plain_server,
    play,
    silent,
    simulator,
    small,
    stubbed,
    total,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def streams(row):
    return Streams(1).generator("test", row)


def left(clip, updates, bound, t=0, total=1, draw=streams):
    return clip.apply(updates.clone(), row_norms(updates), bound, t, total, draw, {})


def vectors(*norms, size=7):
    """Rows in different directions, of these norms."""
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(len(norms), size))).float()
    return rows / rows.norm(dim=1, keepdim=True) * torch.tensor(norms).unsqueeze(1)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [Clip(1.0), MedianClip(), QuantileClip(), NoisyClip(1.0, noise_multiplier=0.0)])
def test_a_long_update_is_shortened_and_a_short_one_left_alone(clip):
    updates = vectors(10.0, 0.5, 1.0, 0.0)
    protected_updates = left(clip, updates, 1.0)
    assert row_norms(protected_updates).tolist() == pytest.approx([1.0, 0.5, 1.0, 0.0], rel=2 * MARGIN)
    torch.testing.assert_close(protected_updates[0], updates[0] / 10, rtol=2 * MARGIN, atol=0)
    assert torch.equal(protected_updates[1], updates[1])


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_a_norm_is_that_of_its_pieces_to_the_last_bit(size):
    rows = torch.randn(4, size)
    pieces = [torch.linalg.vector_norm(part, dim=1) for part in rows.split(PIECE, dim=1)]
    whole = torch.linalg.vector_norm(torch.stack(pieces, 1), dim=1, dtype=torch.float64)
    assert torch.equal(row_norms(rows), whole)


@pytest.mark.parametrize("pieces", [1, 8, 13_000])
def test_norms_of_long_updates_do_not_fall_short(pieces):
    """A few large numbers and a million small ones: a plain float32 norm is .6% too small, and the clip too mild."""
    updates = torch.full((2, 1_663_370), 2.4e-4)
    for start in range(0, updates.shape[1], updates.shape[1] // pieces):
        updates[0, start : start + 16] = 1.0
    exact = updates.double().norm(dim=1)
    assert row_norms(updates).double().tolist() == pytest.approx(exact.tolist(), rel=6e-7)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_norms_are_right_at_every_length(size):
    updates = vectors(3.0, 1e-3, 0.0, size=size)
    assert row_norms(updates).tolist() == pytest.approx([3.0, 1e-3, 0.0])
    assert row_norms(updates[:0]).shape == (0,)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_the_norm_of_rubbish_is_not_finite(rubbish):
    updates = torch.zeros(1, 300)
    updates[0, 200] = rubbish
    assert not torch.isfinite(row_norms(updates)).any()


def test_the_median_clip_is_the_median_of_the_norms():
    assert MedianClip().bound({}, 0, 1, torch.tensor([5.0, 1.0, 3.0, 100.0, 2.0])) == 3.0
    assert MedianClip().bound({}, 0, 1, None) == 0.0
    assert MedianClip.needs_cohort_norms


def test_a_falling_clip_falls_from_round_to_round(monkeypatch):
    """The Thesis, Algorithm 6, in real rounds with updates far longer than the clip."""
    stubbed(monkeypatch, lambda client, size: 1e5 * of_one_length(client, size))
    record = plain_server(silent(small("trusted-curator", per_update=Clip("decay:4:0.5:0.7"))))
    sim = simulator(replace(record, clients=replace(record.clients, cohort=1)))
    rounds = [total(sim, t) for t in range(ROUNDS)]
    assert [float(update.norm()) for update, _ in rounds] == pytest.approx([4, 2, 1, 0.7], rel=2 * MARGIN)
    assert [told["clip"] for _, told in rounds] == [4, 2, 1, 0.7]


def test_another_clip_in_the_same_process_takes_effect(monkeypatch):
    stubbed(monkeypatch, lambda client, size: 1e5 * of_one_length(client, size))
    for bound in (3.0, 0.25, 8.0):
        record = plain_server(silent(small("trusted-curator", per_update=Clip(bound))))
        update, _ = total(simulator(replace(record, clients=replace(record.clients, cohort=1))))
        assert float(update.norm()) == pytest.approx(bound, rel=2 * MARGIN)


class Drawn:
    """A generator of one number."""

    def __init__(self, number):
        self.standard_normal = lambda: number


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.statistical(false_alarm=1e-14)
def test_the_adaptive_clip_finds_the_quantile_with_noise_on_the_count(quantile):
    """Fixed norms of 200 clients; the mean clip of rounds 200 to 400 lies within .05 of the quantile's place: 8
    standard deviations, as 400 seeds show (.006 at most)."""
    norms = np.random.default_rng(1).lognormal(size=200)
    clip, memory, random = QuantileClip(initial_clip_norm=0.01, quantile=quantile), {}, streams(0)
    found = []
    for _ in range(400):
        bound = clip.bound(memory, 0, 1, None)
        found.append(bound)
        clip.adapt(memory, noisy_share(clip, int((norms <= bound).sum()), 200, 200, 1.0, random))
    assert abs((norms <= np.mean(found[200:])).mean() - quantile) < 0.05


@pytest.mark.parametrize("cohort", [4.0, 10.0])
def test_the_clip_moves_as_andrew_et_al_write_it(cohort):
    """b~ = (1/m) (sum_k (b_k - 1/2) + N(0, sigma_b^2)) + 1/2; C <- C exp(-rate (b~ - quantile)), m the expected."""
    clip, memory = QuantileClip(initial_clip_norm=2.0, quantile=0.5, clip_norm_lr=0.2, count_noise_multiplier=0.3), {}
    clip.adapt(memory, noisy_share(clip, 3, 5, cohort, 1.0, Drawn(-1.5)))
    share = ((3 - 5 / 2) + 0.3 * cohort * -1.5) / cohort + 0.5
    assert clip.bound(memory, 1, 9, None) == pytest.approx(2 * math.exp(-0.2 * (share - 0.5)))


def test_the_count_has_no_noise_only_where_the_round_has_none():
    clip = QuantileClip(initial_clip_norm=2.0)
    quiet, noisy = {}, {}
    clip.adapt(quiet, noisy_share(clip, 5, 10, 10, 0.0, Drawn(100.0)))
    clip.adapt(noisy, noisy_share(clip, 5, 10, 10, 1e-9, Drawn(100.0)))
    assert clip.bound(quiet, 1, 9, None) == pytest.approx(2.0)
    assert clip.bound(noisy, 1, 9, None) != pytest.approx(2.0)


@pytest.mark.parametrize(
    ("noise", "cohort", "on_updates"), [(1.20, 50, 1.236), (1.44, 220, 1.443), (1.0925, 508.5, 1.0928)]
)
def test_counting_costs_what_andrew_et_al_say(noise, cohort, on_updates):
    clip = QuantileClip(count_noise_multiplier=1 / 20)
    found = clip.update_noise(noise, cohort)
    assert found == pytest.approx(on_updates, abs=5e-4)
    together = (found**-2 + (2 * cohort / 20) ** -2) ** -0.5
    assert together == pytest.approx(noise)
    assert clip.update_noise(0, cohort) == 0


def test_too_little_noise_for_the_count_is_refused_with_the_fix():
    with pytest.raises(ConfigError, match=r"count_noise_multiplier 0\.05 x 4 is too little .* raise it over 0\.15"):
        QuantileClip().update_noise(1.2, 4)
    with pytest.raises(ConfigError, match=r"per_update\.count_noise_multiplier"):
        simulator(small("geyer-private", per_update=QuantileClip()))


def test_a_round_moves_the_clip_by_the_norms_that_it_saw(monkeypatch):
    """Norms are all .01: without noise the clip falls by exp(-rate (1 - quantile)) each round of all clients."""
    stubbed(monkeypatch, of_one_length)
    record = silent(small("quantile", per_update=QuantileClip(initial_clip_norm=1.0, quantile=0.5, clip_norm_lr=0.2)))
    sim, memory = simulator(replace(record, clients=replace(record.clients, sampling="all"))), {}
    for t in range(3):
        state, told = play(sim, t, memory=memory)
        memory = state.memory
        assert told["clip"] == pytest.approx(math.exp(-0.1 * t))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.statistical(false_alarm=3 * ALPHA)
def test_noise_at_each_client_is_its_own_and_of_the_clips_size(device):
    """10^5 numbers a client: their size, that they have nothing in common (ALPHA each), whoever is beside it."""
    clip, zeros = NoisyClip(clip_norm=2.0, noise_multiplier=3.0), torch.zeros(4, 100_000, device=device)
    protected_updates = left(clip, zeros, 2.0).cpu().double().numpy()
    low, high = (chi2.ppf(p, 100_000) for p in (ALPHA / 8, 1 - ALPHA / 8))
    squares = np.square(protected_updates / 6).sum(axis=1)
    assert low < squares.min() < squares.max() < high
    assert np.abs(protected_updates.mean(axis=1)).max() < 6 * norm.isf(ALPHA / 8) / math.sqrt(100_000)
    assert np.abs(np.corrcoef(protected_updates) - np.eye(4)).max() < norm.isf(ALPHA / 12) / math.sqrt(100_000)
    alone = left(clip, zeros[:1], 2.0).cpu().double().numpy()
    assert (alone[0] == protected_updates[0]).all()
    assert left(clip, zeros[:0], 2.0).shape == (0, 100_000), "nobody came"


@pytest.mark.statistical(false_alarm=1e-15)
def test_noise_is_added_after_the_clip_not_before():
    """A norm of 100,000 numbers to 2%, 9 standard deviations."""
    updates = vectors(10.0, size=100_000)
    protected_updates = left(NoisyClip(clip_norm=1.0, noise_multiplier=1.0), updates, 1.0)
    assert float(protected_updates.norm()) == pytest.approx(math.sqrt(1e5 + 1), rel=0.02)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Clip(0.0), r"per_update\.clip_norm must be > 0.*got 0"),
        (lambda: Clip(-1.0), r"per_update\.clip_norm must be > 0.*got -1"),
        (lambda: Clip("linear:1:-1"), r"per_update\.clip_norm must be > 0.*got linear:1:-1"),
        (lambda: Clip("decay:4"), r"decay:from:rate:low"),
        (lambda: QuantileClip(initial_clip_norm=0.0), r"per_update\.initial_clip_norm must be > 0"),
        (lambda: QuantileClip(initial_clip_norm=math.inf), r"per_update\.initial_clip_norm must be > 0"),
        (lambda: QuantileClip(initial_clip_norm=math.nan), r"per_update\.initial_clip_norm must be > 0"),
        (lambda: QuantileClip(quantile=0.0), r"per_update\.quantile must be in \(0, 1\), got 0"),
        (lambda: QuantileClip(quantile=1.0), r"per_update\.quantile must be in \(0, 1\), got 1"),
        (lambda: QuantileClip(quantile=-0.5), r"per_update\.quantile must be in \(0, 1\)"),
        (lambda: QuantileClip(clip_norm_lr=-0.1), r"per_update\.clip_norm_lr must be >= 0"),
        (lambda: QuantileClip(count_noise_multiplier=0.0), r"per_update\.count_noise_multiplier must be > 0"),
        (lambda: NoisyClip(clip_norm=-1.0), r"per_update\.clip_norm must be > 0"),
        (lambda: NoisyClip(noise_multiplier=-1.0), r"per_update\.noise_multiplier must be >= 0, got -1"),
        (
            lambda: NoisyClip(noise_multiplier="linear:1:-1"),
            r"noise_multiplier must be >= 0, got linear:1:-1",
        ),
    ],
)
def test_a_bad_parameter_is_refused_by_name(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_clip_that_turns_negative_in_a_late_round_is_refused():
    record = replace(algorithm("trusted-curator"), per_update=Clip("linear:1:-0.001"))
    record.refuse_unfit(0, 10_000, 100)
    with pytest.raises(ConfigError, match=r"per_update\.clip_norm must be > 0.*in round 9995 of 10000"):
        record.refuse_unfit(9_994, 10_000, 100)
