"""Schedules say before the first round what every round's value will be."""

import math

import pytest

from shoal.accounting.published import decayed_noise
from shoal.errors import ConfigError
from shoal.mechanisms.schedules import parse


def test_a_number_is_the_same_in_every_round():
    assert parse("6").values(3) == [6, 6, 6]
    assert parse(0.5).value(99, 100) == 0.5


@pytest.mark.parametrize(
    ("text", "first", "middle"),
    [
        ("linear:15:4.85", 15, 15 - 10.15 * 0.5),
        ("staircase:15:4.85:10", 15, 15 - 1.015 * 5),
        ("exponential:15:4.85", 15, math.sqrt(15 * 4.85)),
        ("cyclic:15:1", 15, 7.5),
        ("decay:4:0.01:0.5", 4, 4 * 0.99**50),
    ],
)
def test_the_decays_of_the_papers(text, first, middle):
    schedule = parse(text)
    assert schedule.value(0, 100) == pytest.approx(first)
    assert schedule.value(50, 100) == pytest.approx(middle)
    assert parse(schedule.written()) == schedule
    assert schedule.scaled(3).values(100) == pytest.approx([3 * value for value in schedule.values(100)])


def test_the_exponential_of_004_is_its_printed_formula():
    printed = [math.exp(1.58 + 1.13 * (100 - t) / 100) for t in range(100)]
    ours = parse(f"exponential:{math.exp(1.58 + 1.13)}:{math.exp(1.58)}").values(100)
    assert ours == pytest.approx(printed)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("epsilon-linear:0.30747:1.30747:1e-5", "linear"),
        ("epsilon-staircase:0.35747:1.35747:10:1e-5", "staircase"),
        (f"epsilon-exponential:{math.exp(-1.1809)}:{math.exp(1.664 - 1.1809)}:1e-5", "exponential"),
        ("epsilon-exponential:0.30700:1.62109:1e-5", "exponential"),
    ],
)
def test_the_schedules_that_tables_8_and_11_of_004_really_used(text, policy):
    """Their sigma_t at the first iteration of each of 100 rounds."""
    schedule = parse(text)
    assert schedule.values(100) == pytest.approx(decayed_noise(policy)[::100].tolist(), rel=1e-5)
    assert parse(schedule.written()) == schedule
    assert schedule.scaled(3).values(100) == pytest.approx([3 * value for value in schedule.values(100)])


def test_a_rising_epsilon_is_a_falling_sigma():
    values = parse("epsilon-linear:0.5:2:1e-5").values(10)
    assert values[0] == pytest.approx(math.sqrt(2 * math.log(1.25e5)) / 0.5)
    assert values == sorted(values, reverse=True)


def test_cycles_begin_anew():
    assert parse("cyclic:6:2").values(8) == pytest.approx(parse("cyclic:6:1").values(4) * 2)


def test_a_stair_keeps_its_value():
    assert parse("staircase:10:0:2").values(6) == [10, 10, 10, 5, 5, 5]


def test_the_clip_never_falls_below_its_floor():
    assert parse("decay:4:0.5:1").values(4) == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("linaer:1:2", "did you mean 'linear'"),
        ("linear:1", "linear:from:to"),
        ("six", "neither a number nor a schedule"),
        ("nan", "neither a number nor a schedule"),
        ("exponential:1:0", "must be > 0"),
        ("cyclic:1:0", "must be >= 1"),
        ("decay:4:1:1", "rate must be in"),
        ("staircase:4:1:0", "must be >= 1"),
        ("epsilon-staircase:0.3:1.3:0:1e-5", "must be >= 1"),
        ("epsilon-linear:0.3:1.3", "epsilon-linear:first:last:delta"),
        ("epsilon-linear:0:1.3:1e-5", "both epsilons must be > 0"),
        ("epsilon-exponential:0.3:1.3:1", r"delta in \(0, 1\)"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_fix(text, says):
    with pytest.raises(ConfigError, match=says):
        parse(text)
