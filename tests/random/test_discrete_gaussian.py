"""The discrete Gaussian: its table to the last bit, its draws, and what it may be accounted as."""

import math
from decimal import Decimal, localcontext
from hashlib import sha256

import numpy as np
import pytest
from scipy.stats import chisquare, norm

from shoal.random import discrete_gaussian
from shoal.random.discrete_gaussian import by_operations, distance, draw, loop_in_c, parts, table_of
from shoal.random.secure_streams import SecureStreams, charged

ALPHA = 1e-7  # how often a statistical check may fail by chance


def words(count):
    return SecureStreams().generator("x").words((count + 1) // 2).view(np.uint32)[:count]


def mass(width, furthest=12):
    places = np.arange(-math.ceil(furthest * width), math.ceil(furthest * width) + 1)
    shares = np.exp(-(places.astype(float) ** 2) / (2 * width**2))
    return places, shares / shares.sum()


@pytest.mark.parametrize("width", [0.7, 3.0, 40.5])
def test_a_table_is_right_to_its_last_bits(width):
    """Against the sum of exponentials in 150 digits, one by one."""
    table = table_of(width)
    with localcontext() as context:
        context.prec = 150
        square = 2 * Decimal(width) ** 2
        shares = [(-(Decimal(k) ** 2) / square).exp() for k in range(table.first, -table.first + 1)]
        total, below = sum(shares), Decimal(0)
        for place, share in enumerate(shares[:-1]):
            below += share
            words = [int(table.high[place]), *map(int, table.rest[place])]
            found = sum(word << 32 * (7 - i) for i, word in enumerate(words))
            assert abs(Decimal(found) - below / total * 2**256) < 3


def test_tables_are_those_of_every_version():
    """From the narrowest, whose last masses are 0: the same bits give the same noise."""
    tables = [table_of(width) for width in (0.05, 3.0, 40.5, 2000.5)]
    words = [part.astype("<u4").tobytes() for table in tables for part in (table.high, table.rest, table.guide)]
    assert sha256(b"".join(words)).hexdigest() == "f13bdf3ded7cbc4ef490ce0891d05bcd022fd20a155ee01a42ed24ecd3065526"


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("width", [0.7, 3.0, 40.5])
@pytest.mark.statistical(false_alarm=2 * ALPHA)
def test_draws_have_the_probabilities_of_the_discrete_gaussian(width, kernels):
    """200,000 draws, chi-square at 1e-7."""
    drawn = draw(width, 200_000, words, kernels)
    places, shares = mass(width)
    counts = np.bincount(drawn - places[0], minlength=len(places))
    kept = shares * len(drawn) > 20
    pooled = [np.append(found[kept], found[~kept].sum()) for found in (counts, shares * len(drawn))]
    assert chisquare(pooled[0], pooled[1] * pooled[0].sum() / pooled[1].sum()).pvalue > ALPHA


def test_words_that_do_not_decide_are_followed_by_others():
    """The same in C and in numpy; at every entry, just below it and at it."""
    table = table_of(3.0)
    count = len(table.high)
    for more in (table.rest, table.rest - np.uint32([[0] * 6 + [1]])):
        found = [np.zeros(count, dtype=np.int64) for _ in range(2)]
        ways = [by_operations, loop_in_c() or by_operations]
        used = [
            way(table, into, 2, table.high, np.ascontiguousarray(more).ravel())
            for way, into in zip(ways, found, strict=True)
        ]
        assert used == [7 * count] * 2
        assert np.array_equal(*found)
        at = more is table.rest  # a number that reaches the entry belongs to the place after it
        expected = 2 * (table.first + np.arange(count) + at)
        clear = slice(5, count - 5)  # the outermost are alike to their last bit
        assert np.array_equal(found[0][clear], expected[clear])
    assert by_operations(table, np.zeros(count, dtype=np.int64), 1, table.high, words(7)) == -1


def test_a_sum_of_draws_is_a_discrete_gaussian(monkeypatch):
    """Exactly: the probabilities of the sum, worked out, are within 1e-14 of the discrete Gaussian's."""
    monkeypatch.setattr(discrete_gaussian, "WIDEST", 16.0)
    parts.cache_clear()
    try:
        made = parts(150.0)
        assert len(made) > 1
        whole = np.ones(1)
        for factor, width in made:
            _, shares = mass(width)
            spread = np.zeros((len(shares) - 1) * factor + 1)
            spread[::factor] = shares
            whole = np.convolve(whole, spread)
        places = np.arange(len(whole)) - len(whole) // 2
        wanted = np.exp(-(places.astype(float) ** 2) / (2 * 150.0**2))
        assert np.abs(whole - wanted / wanted.sum()).max() < 1e-14
        assert math.sqrt(sum((factor * width) ** 2 for factor, width in made)) == pytest.approx(150.0, rel=1e-12)
    finally:
        parts.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("width", [3.0, 2048.0, 5000.5, 2.0**20, 1e9])
@pytest.mark.statistical(false_alarm=ALPHA)
def test_wide_ones_have_their_variance_and_are_as_good_as_exact(width):
    """Chi-square at 1e-7 on 100,000 draws."""
    drawn = draw(width, 100_000, words)
    off = abs(np.square(drawn / width).mean() - 1)
    assert off < norm.isf(ALPHA / 2) * math.sqrt(2 / 100_000) + 1 / width**2
    assert 0 < distance(width) < 1e-65


def test_an_impossible_width_is_refused():
    for width in (0.0, -1.0, math.inf, math.nan, 2.0**51):
        with pytest.raises(ValueError, match="must have a width"):
            parts(width)


def _delta_discrete(width, shift, epsilon):
    places = np.arange(-200 * math.ceil(width), 200 * math.ceil(width)).astype(float)
    one, other = (np.exp(-((places - s) ** 2) / (2 * width**2)) for s in (shift, 0))
    return np.maximum(one / one.sum() - math.exp(epsilon) * other / other.sum(), 0).sum()


def _delta_continuous(noise, epsilon):
    mean = 1 / noise
    return norm.cdf(mean / 2 - epsilon / mean) - math.exp(epsilon) * norm.cdf(-mean / 2 - epsilon / mean)


@pytest.mark.parametrize("width", [4.0, 16.0, 64.0])
@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_a_discrete_gaussian_is_charged_as_one(width, noise):
    """The continuous Gaussian's delta is no bound for it, that of `charged` is; for every epsilon."""
    shift = round(width / noise)
    own = width / shift
    short = 0.0
    for epsilon in np.linspace(0, 6 / own, 60):
        true = _delta_discrete(width, shift, epsilon)
        assert true <= _delta_continuous(charged(own, width), epsilon) * (1 + 1e-9) + 1e-15
        if true > 1e-9:
            short = max(short, true / _delta_continuous(own, epsilon) - 1)
    assert short > 0, "so that accounting it as a continuous one would be wrong"


def test_a_sum_that_is_rounded_as_a_whole_is_charged_for_it():
    """Two sums at a distance of the clip, rounded: at most a step more apart in every coordinate."""
    random = np.random.default_rng(0)
    noise, width, size = 2.0, 2.0**10, 400
    step = noise / width
    worst = 0.0
    for _ in range(200):
        one = random.normal(size=size)
        move = random.normal(size=size)
        other = one + move / np.linalg.norm(move)
        worst = max(worst, float(np.linalg.norm(np.trunc(one / step) - np.trunc(other / step))) * step)
    assert 1 < worst <= noise / charged(noise, width, size) <= 1 + 1.01 * math.sqrt(size) * step
