"""Noise has the size that the record says, in every round, and comes from where it should."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.algorithms import algorithm
from shoal.errors import ConfigError
from shoal.mechanisms.gaussian import Gaussian, StepNoise, gaussian_like
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.sparsification import Prune
from shoal.mechanisms.update_clipping import Clip, NoisyClip
from shoal.random.streams import Streams
from support.small_federation import (
    ALPHA,
    FAR,
    ROUNDS,
    WIDE,
    chi_square_fits,
    idle,
    noise_charged,
    plain_server,
    simulator,
    small,
    total,
)
from support.small_federation import against_release as charged


@pytest.mark.statistical(false_alarm=2 * ALPHA)
def test_gaussian_numbers_have_the_scale_asked_for():
    """10^6 numbers: 1% too much or too little would be found; its size and its mean at ALPHA."""
    drawn = gaussian_like(torch.empty(1000, 1000), 2.5, Streams(3).generator("test"))
    assert drawn.shape == (1000, 1000)
    assert drawn.dtype == torch.float32
    scaled = drawn.double().numpy().ravel() / 2.5
    assert chi_square_fits(scaled)
    assert not chi_square_fits(1.01 * scaled)
    assert abs(scaled.mean()) < FAR / math.sqrt(scaled.size)


def test_the_same_stream_gives_the_same_noise_and_another_another():
    empty = torch.empty(100)
    draws = [gaussian_like(empty, 1.0, Streams(3).generator("test", n)) for n in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_no_noise_is_exactly_none():
    assert torch.equal(gaussian_like(torch.empty(5), 0.0, Streams(3).generator("test")), torch.zeros(5))


SCHEDULES = ["linear:3:1", "staircase:8:2:2", "exponential:4:0.5", "cyclic:6:1", "decay:5:0.3:0.1"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["at the sum", "at each client"])
@pytest.mark.statistical(false_alarm=ROUNDS * ALPHA)
def test_a_schedule_of_noise_is_applied_and_charged_in_every_round(schedule, kind):
    """Four decays of Wei et al. and the thesis's, with a clip that falls too; 104,000 numbers a round, at ALPHA."""
    falling = "decay:2:0.2:0.1"
    if kind == "at the sum":
        record = small("trusted-curator", per_update=Clip(falling), per_round=Gaussian(schedule))
    else:
        record = small("fed-sdp", per_update=NoisyClip(falling, schedule))
    record = idle(plain_server(record))
    sim = simulator(record, width=WIDE)
    sizes = []
    for t in range(ROUNDS):
        noise, told = total(sim, t)
        assert told["clip"] == pytest.approx(2 * 0.8**t)
        assert chi_square_fits(noise.numpy() / told["clip"] / noise_charged(charged(record, t)))
        sizes.append(float(noise.std()))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.2 * sizes[-1]


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=3 * ALPHA)
def test_another_noise_in_the_same_process_takes_effect():
    for noise in (0.5, 7.0, 2.0):
        record = idle(plain_server(small("trusted-curator", per_round=Gaussian(noise))))
        found, told = total(simulator(record, width=WIDE))
        assert chi_square_fits(found.numpy() / told["clip"] / noise)


@pytest.mark.parametrize("noise", [-1, -0.001, "linear:1:-1", "decay:-1:0.1:-2"])
def test_negative_noise_is_refused_by_name(noise):
    with pytest.raises(ConfigError, match=rf"per_round\.noise_multiplier must be >= 0, got {noise}"):
        Gaussian(noise)


@pytest.mark.parametrize("noise", ["much", "nan", math.inf, "linear:1"])
@pytest.mark.parametrize("kind", [Gaussian, StepNoise])
def test_noise_that_is_no_number_is_refused(kind, noise):
    with pytest.raises(ConfigError):
        kind(noise)


@pytest.mark.parametrize("noise", [-1, "linear:1:-1"])
def test_negative_noise_in_a_step_is_refused_by_name(noise):
    with pytest.raises(ConfigError, match=rf"per_step\.noise_multiplier must be >= 0, got {noise}"):
        StepNoise(noise)


@pytest.mark.parametrize(
    ("placement", "on_the_mean"), [("algorithm1", 6), ("per-record", 6 / math.sqrt(5)), ("dp-sgd", 6 / 5)]
)
def test_the_three_scales_of_004_are_those_of_its_text_on_the_mean_of_a_batch(placement, on_the_mean):
    assert StepNoise(6.0, placement).multiplier(0, 10, batch=5) / 5 == pytest.approx(on_the_mean)


def test_noise_in_a_step_follows_its_schedule_over_the_rounds():
    assert [StepNoise("linear:4:2").multiplier(t, 4, 10) for t in range(4)] == [4, 3.5, 3, 2.5]


def test_noise_in_a_step_without_a_clip_to_measure_it_by_is_refused():
    with pytest.raises(ConfigError, match="per_step adds noise in units of the clip, but nothing clips"):
        simulator(small("fed-cdp", per_record=None))


@pytest.mark.parametrize(
    "record",
    [
        replace(algorithm("trusted-curator"), per_round=Gaussian("linear:1:-0.001")),
        replace(algorithm("fed-sdp"), per_update=NoisyClip(noise_multiplier="linear:1:-0.001")),
        replace(algorithm("fed-cdp"), per_step=StepNoise("linear:1:-0.001")),
    ],
    ids=["at the sum", "at each client", "in each step"],
)
def test_noise_that_turns_negative_in_a_late_round_is_refused(record):
    record.refuse_unfit(0, 10_000, 1000)
    with pytest.raises(ConfigError, match=r"must be >= 0, got linear:1:-0.001, .* in round 9995 of 10000"):
        record.refuse_unfit(9_994, 10_000, 1000)


@pytest.mark.parametrize("per_update", [None, Prune()])
def test_noise_without_a_clip_to_measure_it_by_is_refused(per_update):
    with pytest.raises(ConfigError, match="per_round adds noise in units of the clip, but nothing clips"):
        simulator(small("trusted-curator", per_update=per_update))


def test_a_stream_for_noise_is_shared_with_nothing_else():
    """First numbers of streams with like names: pairwise different."""
    names = [
        ("noise", 1, 2),
        ("noise", 12),
        ("noise", 2, 1),
        ("count noise", 1, 2),
        ("update noise", 1, 2),
        ("noise",),
    ]
    first = [Streams(0).generator(*name).standard_normal() for name in names]
    assert len(np.unique(first)) == len(names)


@pytest.mark.parametrize("name", ["trusted-curator", "end-to-end-private"])
def test_shares_of_seeded_sites_are_charged_as_the_discrete_ones_that_they_are(name):
    """In a simulation in research mode the server adds continuous noise, and in a seeded federation none."""
    record = algorithm(name)
    seeded = Setting(100, 10, sizes=(10,), all_answer=False)
    for at, lost in (("shared", True), ("server", False)):
        method = replace(record, per_round=replace(record.per_round, at=at))
        plain, sites, secure = (
            method.round(setting, 0).counted(1.0)
            for setting in (replace(seeded, all_answer=True), seeded, replace(seeded, secure=True))
        )
        assert plain == 1
        assert sites == (secure if lost else 1)
        assert secure < 1
