"""The numbers of secure aggregation: shares, masks, rounding, a modulus that is never passed, and enough noise."""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.errors import ConfigError
from shoal.federation.messages import Payload, pack, unpack
from shoal.federation.secagg.encoding import KEYS, SHARES, UNMASK
from shoal.federation.secagg.masks import (
    BLOCK,
    add_masks,
    aes,
    as_vector,
    chacha,
    from_vector,
    masked,
    quantised,
    signed,
    unmask_pairs,
)
from shoal.federation.secagg.party import contribution
from shoal.federation.secagg.round_plan import COUNT_STEP, Plan
from shoal.federation.secagg.shamir import PRIME, join, split
from shoal.federation.terms import ROUND
from shoal.random.secure_streams import SecureGenerator, SecureStreams, grid
from support.secure_cohort import Cohort

ALPHA = 1e-6  # how often a statistical test may fail by chance
SECRETS = st.binary(min_size=32, max_size=32)


def numbers(sites, slots=6, most=1000, seed=0):
    return np.random.default_rng(seed).integers(-most, most, (sites, slots))


# ---------------------------------------------------------------- Shamir's shares


def test_the_prime_is_one():
    """Miller and Rabin's test, to 12 bases."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        powers = [pow(base, odd << k, PRIME) for k in range(twos)]
        assert powers[0] == 1 or PRIME - 1 in powers


@settings(max_examples=40, deadline=None)
@given(SECRETS, st.sets(st.integers(1, 10**6), min_size=1, max_size=9), st.data())
def test_as_many_shares_as_are_needed_give_the_secret(secret, holders, data):
    threshold = data.draw(st.integers(1, len(holders)))
    shares = split(secret, holders, threshold)
    some = data.draw(st.permutations(sorted(holders)))[:threshold]
    assert join({holder: shares[holder] for holder in some}) == secret


@settings(max_examples=20, deadline=None)
@given(SECRETS, SECRETS, st.integers(2, 6))
def test_one_share_less_fits_any_other_secret(secret, other, threshold):
    """There is a last share that makes the same first ones those of another secret."""
    shares = split(secret, range(1, threshold + 1), threshold)
    known = {place: share for place, share in shares.items() if place < threshold}
    at_zero = {0: int.from_bytes(other, "big"), **known}
    weights = {p: math.prod(Fraction(threshold - q, p - q) for q in at_zero if q != p) for p in at_zero}
    last = sum(at_zero[p] * w.numerator * pow(w.denominator, -1, PRIME) for p, w in weights.items()) % PRIME
    assert join(known | {threshold: last}) == other


@settings(max_examples=20, deadline=None)
@given(SECRETS, st.integers(2, 6), st.integers(1, PRIME - 1))
def test_a_share_that_was_changed_gives_another_secret(secret, threshold, by):
    shares = split(secret, range(1, threshold + 1), threshold)
    assert join(shares | {1: (shares[1] + by) % PRIME}) != secret


@pytest.mark.parametrize(("size", "threshold"), [(31, 2), (32, 0), (32, 4)])
def test_what_cannot_be_split_is_refused(size, threshold):
    with pytest.raises(ValueError, match="cannot be split"):
        split(bytes(size), (1, 2, 3), threshold)


# ---------------------------------------------------------------- masks


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.data())
def test_masks_cancel_whoever_drops_out(sites, data):
    """Senders' own masks are taken off, and the pairs' masks with those who agreed and sent nothing."""
    gone = data.draw(st.sets(st.integers(0, sites - 1), max_size=sites - 1))
    values = numbers(sites, seed=data.draw(st.integers(0, 10**6)))
    own = [bytes([number]) * 32 for number in range(sites)]
    pair = {frozenset(two): bytes(two) * 16 for two in combinations(range(sites), 2)}
    seeds = [{o: pair[frozenset((n, o))] for o in range(sites) if o != n} for n in range(sites)]
    senders = [n for n in range(sites) if n not in gone]
    total = sum(masked(values[n], n, own[n], seeds[n]) for n in senders)
    for other in gone:
        unmask_pairs(total, other, {n: seeds[n][other] for n in senders})
    add_masks(total, (), [own[n] for n in senders])
    assert (signed(total) == values[senders].sum(0)).all()


@pytest.mark.parametrize("count", [1, BLOCK, 2 * BLOCK + 7])
@pytest.mark.parametrize("cipher", [chacha, aes])
def test_masks_by_blocks_are_those_of_the_whole_keystream(cipher, count):
    """Also in a last block that is no multiple of the cipher's own."""
    up, down = bytes(range(32)), bytes(range(32, 64))
    words = np.arange(count, dtype=np.uint32)
    add_masks(words, [up], [down], cipher)
    plus, minus = (np.frombuffer(cipher(seed).update(bytes(4 * count)), "<u4") for seed in (up, down))
    assert (words == np.arange(count, dtype=np.uint32) + plus - minus).all()


def test_the_keystreams_are_those_of_the_ciphers():
    """AES-128 in counter mode: NIST SP 800-38A, F.5.1. ChaCha20 with a zero nonce: RFC 8439, A.1, vector 1."""
    key, counter = "2b7e151628aed2a6abf7158809cf4f3c", "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
    words = np.zeros(4, np.uint32)
    add_masks(words, [bytes.fromhex(key + counter)], (), aes)
    assert words.tobytes().hex() == "ec8cdf7398607cb0f2d21675ea9ea1e4"
    words = np.zeros(4, np.uint32)
    add_masks(words, [bytes(32)], (), chacha)
    assert words.tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_bits_pass_a_parcel_unharmed():
    """Also those that are no number as a float: quiet and signalling NaN, Inf, -0, the smallest ones."""
    odd = [0x7FC00000, 0x7F800001, 0xFFBFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1, 0xFFFFFFFF]
    words = np.concatenate([np.array(odd, np.uint32), np.frombuffer(chacha(bytes(32)).update(bytes(40_000)), "<u4")])
    passed = unpack(pack(Payload({}, {"masked": as_vector(words)})), 10**6).vectors["masked"]
    assert (from_vector(passed) == words).all()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=30),
    st.floats(1e-3, 1e3),
    st.sampled_from([0.5, 1.0, 1.0000004, 1e30]),
)
def test_rounding_makes_no_number_larger_and_the_norm_is_within_the_clip(values, bound, reach):
    """Also where the clip, computed in float32, leaves an update a little too long, or was left out, or it is Inf."""
    update = torch.tensor(values)
    norm = float(update.double().norm()) or 1.0
    update = update * (bound * reach / norm)
    step = grid(bound)
    found = quantised(update, bound, step)
    assert sum(Fraction(int(n)) ** 2 for n in found) * Fraction(step) ** 2 <= Fraction(bound) ** 2
    assert (np.abs(found) * step <= update.double().abs().nan_to_num(math.inf).numpy()).all()


# ---------------------------------------------------------------- the plan of a round


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(2, 300_000), st.floats(0, 1e4), st.floats(1e-6, 1e6), st.integers(1, 3), st.booleans())
def test_no_sum_passes_the_modulus(cohort, noise, bound, colluding, counts):
    """The greatest that all sites together can send, with the greatest noise that is ever drawn, is under 2^31."""
    plan = Plan(cohort, 2 * cohort // 3 + 1, colluding, 1000, bound, noise, 0.05 * cohort if counts else None)
    try:
        plan.refuse_unsound()
    except ConfigError:
        return
    furthest = [math.ceil(10 * scale) + 1 if scale else 0 for scale in (plan.share, plan.count_share)]
    assert cohort * (Fraction(bound) / Fraction(plan.step) + furthest[0]) < 2**31
    assert cohort * (0.5 / COUNT_STEP + furthest[1]) < 2**31


class Extreme(SecureGenerator):
    """Random words that are all the greatest there is."""

    def __init__(self):
        super().__init__(SecureStreams().keystream("none"))

    def words(self, count):
        return np.full(count, 2**64 - 1, np.uint64)


@pytest.mark.slow
def test_the_greatest_noise_is_what_the_plan_says():
    plan = Plan(4, 3, 1, 10, 0.4, 1.633, 0.2)
    update = torch.zeros(10)
    update[0] = 0.4
    drawn = contribution(plan, update, True, Extreme())
    assert 4 * np.abs(drawn).max() <= plan.most < 2**31


def plan_for(**changes):
    good = {"cohort": 8, "threshold": 6, "colluding": 1, "parameters": 795_010, "bound": 0.4, "noise": 1.0}
    return Plan(**(good | {"count_noise": None} | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threshold": 4}, "two different sums; set at least 5"),
        ({"colluding": 4}, "two different sums; set at least 7"),
        ({"threshold": 9}, "at most the cohort"),
        ({"threshold": 1}, "greater than federation.colluding"),
        ({"cohort": 400_000, "threshold": 300_000}, "exceed the modulus"),
        ({"noise": 1e7}, "exceed the modulus"),
        ({"noise": 1e-4}, "too little for the grid"),
        ({"bound": math.inf}, "clip norm > 0"),
        ({"bound": math.nan}, "clip norm > 0"),
        ({"bound": -1.0}, "clip norm > 0"),
    ],
    ids=str,
)
def test_a_plan_that_does_not_hold_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        plan_for(**changes).refuse_unsound()


def test_a_sum_of_shares_costs_no_more_than_one_gaussian():
    """2 tau P more epsilon, which is less than a float can be; where a share is small it is at least all terms."""
    assert plan_for().excess == 0
    small = plan_for(noise=1e-3)
    scale, others = small.share, small.threshold - small.colluding
    tau = 10 * sum(math.exp(-2 * math.pi**2 * scale**2 * k / (k + 1)) for k in range(1, others))
    assert 0 < 2 * tau * 795_010 <= small.excess < 1e-6


# ---------------------------------------------------------------- noise


@pytest.mark.slow
@pytest.mark.parametrize(
    "gone", [(), ((ROUND, 2),), ((SHARES, 1), (UNMASK, 3))], ids=["all", "one gone", "some gone"]
)
@pytest.mark.statistical(false_alarm=2 * ALPHA)
def test_the_noise_in_the_sum_is_what_is_charged_or_more(gone):
    """Chi-square on 40,000 numbers, alpha 1e-6 for each side: finds an error of 4% in the scale."""
    slots, z = 40_000, 1.633
    cohort = Cohort(8, slots=slots, noise=z)
    draws = [SecureGenerator(SecureStreams().keystream("noise")) for _ in range(8)]
    sent = np.stack([contribution(cohort.plan, torch.zeros(slots), False, draw) for draw in draws])
    total = cohort.sum(sent, gone)
    senders = 8 - sum(message in (KEYS, SHARES, ROUND) for message, _ in gone)
    plan = cohort.plan
    assert (plan.threshold, plan.colluding) == (6, 1)
    expected = senders * (z * plan.bound / plan.step) ** 2 / 5
    square = float((total.astype(float) ** 2).sum()) / expected
    assert chi2.isf(1 - ALPHA, slots) < square < chi2.isf(ALPHA, slots)
    assert expected >= (z * plan.bound / plan.step) ** 2
    assert plan.noise_of(senders) == pytest.approx(math.sqrt(expected) * plan.step)


def test_what_colluding_sites_know_leaves_the_noise_that_is_charged():
    """The least that can be unmasked is a sum of `threshold`; take from it the shares of those who collude."""
    plan = plan_for(threshold=7, colluding=2, noise=2.0)
    left = (plan.threshold - plan.colluding) * plan.share**2
    assert math.sqrt(left) * plan.step == pytest.approx(2.0 * plan.bound)


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=3 * ALPHA)
def test_the_count_has_noise_of_its_own():
    """10,000 counts of a site that was below: mean 1/2, variance sigma_b^2 / (threshold - colluding); alpha 1e-6."""
    plan = plan_for(parameters=1, count_noise=3.0)
    draw = SecureGenerator(SecureStreams().keystream("noise"))
    counts = np.array([contribution(plan, torch.zeros(1), True, draw)[-1] for _ in range(10_000)]) * COUNT_STEP
    assert abs(counts.mean() - 0.5) < 4.9 * 3.0 / math.sqrt(5) / 100
    square = ((counts - 0.5) ** 2).sum() / (9.0 / 5)
    assert chi2.isf(1 - ALPHA, 10_000) < square < chi2.isf(ALPHA, 10_000)
