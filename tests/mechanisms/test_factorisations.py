"""Factorisations are as good as the literature's, and the noise drawn from them is theirs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from scipy.stats import norm

from shoal.accounting.events import Unbounded
from shoal.algorithms import algorithm as named
from shoal.algorithms.charges import event
from shoal.errors import ConfigError
from shoal.mechanisms import factorisations
from shoal.mechanisms.correlated import PAST, Correlated
from shoal.mechanisms.factorisations import errors, factorise, given, inverse
from shoal.mechanisms.participation import Participation
from shoal.mechanisms.setting import Setting
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from support.small_federation import ALPHA, chi_square_fits

KINDS = ["square-root", "banded", "blt", "bisr", "band-inverse"]
SMALL = Participation(9, 3, 3)

TABLE = {  # root mean square and largest error, by (rounds, separation, participations) and kind with its size
    (100, 100, 1): [(2.371, 2.531), (2.319, 2.612), (2.383, 2.737), (2.321, 2.610), (2.320, 2.606)],
    (100, 10, 10): [(9.611, 12.80), (9.318, 12.12), (9.894, 12.79), (9.894, 12.79), (9.894, 12.79)],
    (1000, 1000, 1): [(3.102, 3.265), (3.049, 3.352), (3.444, 3.956), (3.076, 3.400), (3.051, 3.349)],
    (1000, 100, 10): [(12.10, 15.69), (11.57, 14.44), (12.45, 15.50), (12.19, 15.19), (12.19, 15.19)],
    (2000, 2000, 1): [(3.323, 3.486), (3.270, 3.573), (3.849, 4.424), (3.318, 3.657), (3.274, 3.576)],
    (2000, 100, 20): [(22.19, 29.85), (20.21, 26.00), (21.75, 27.81), (21.37, 27.37), (21.37, 27.37)],
}


@pytest.mark.slow
@pytest.mark.parametrize("key", TABLE, ids=str)
def test_errors_are_those_of_the_reference_to_one_per_cent(key):
    plan, bands = Participation(*key), key[1]
    sizes = [("square-root", bands), ("banded", bands), *(("blt", buffers) for buffers in (1, 2, 3))]
    found = [errors(factorise(kind, size, 0.0, plan), plan) for kind, size in sizes]
    np.testing.assert_allclose(found, TABLE[key], rtol=0.01)


def test_inverse_bands_and_momentum_are_those_of_the_reference_too():
    plan = Participation(1000, 100, 10)
    assert errors(factorise("bisr", 16, 0.0, plan), plan)[0] == pytest.approx(15.99, rel=0.01)
    assert errors(factorise("band-inverse", 16, 0.0, plan), plan)[0] == pytest.approx(12.22, rel=0.01)
    with_momentum = [errors(factorise(kind, 100, 0.9, plan), plan, 0.9)[0] for kind in ("square-root", "banded")]
    assert with_momentum == pytest.approx([88.7, 86.7], rel=0.01)
    assert errors(factorise("square-root", 100, 0.0, plan), plan, 0.9)[0] == pytest.approx(107.3, rel=0.01)
    one = factorise("blt", 1, 0.0, Participation(1000, 1000, 1))
    assert one.decays == pytest.approx([0.989658], abs=1e-4)
    assert one.coefficients(3)[1] == pytest.approx(0.181639, abs=1e-3)


def square(series, rounds):
    column = np.zeros(rounds)
    column[: len(series)] = series[:rounds]
    return toeplitz(column, np.zeros(rounds))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_the_inverse_is_the_inverse_and_the_error_is_that_of_its_matrices(kind, momentum):
    found, rounds = factorise(kind, 3, momentum, SMALL), SMALL.rounds
    c, inverse = square(found.coefficients(rounds), rounds), square(found.inverse(rounds), rounds)
    np.testing.assert_allclose(c @ inverse, np.eye(rounds), atol=1e-12)
    models = np.tril(np.ones((rounds, rounds))) @ square(momentum ** np.arange(rounds), rounds)
    spread = np.square(models @ np.linalg.inv(c)).sum(axis=1)
    shift = np.linalg.norm(SMALL.reach(found.coefficients(rounds)))
    expected = shift * math.sqrt(spread.mean()), shift * math.sqrt(spread[-1])
    assert errors(found, SMALL, momentum) == pytest.approx(expected)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("regular", [True, False])
@pytest.mark.parametrize("which", ["_of_bands", "_of_inverse_bands", "_of_chain"])
def test_slopes_are_those_of_small_differences(which, momentum, regular):
    plan = Participation(30, 4, None if regular else 3, regular)
    objective = getattr(factorisations, which)(momentum, plan)
    at = np.random.default_rng(4).uniform(0.05, 0.15, size=6) * (-1 if which == "_of_inverse_bands" else 1)
    differences = [(objective(at + e)[0] - objective(at - e)[0]) / 2e-6 for e in 1e-6 * np.eye(6)]
    np.testing.assert_allclose(objective(at)[1], differences, atol=1e-6)


@pytest.mark.parametrize(
    "plan", [Participation(40, 8, 5), Participation(40, 5, 3), Participation(40, 8, regular=True)]
)
@pytest.mark.parametrize(("kind", "begun"), [("banded", "square-root"), ("band-inverse", "bisr")])
def test_what_is_optimised_is_better_than_the_root_of_as_many_bands(kind, begun, plan):
    found, root = (errors(factorise(each, 8, 0.0, plan), plan)[0] for each in (kind, begun))
    assert found < 0.999 * root


@pytest.mark.slow
def test_blt_never_rises_and_all_its_weights_are_positive():
    for buffers in (1, 2, 5):
        found = factorise("blt", buffers, 0.0, Participation(200, 20, 10)).coefficients(200)
        assert (np.diff(found) <= 0).all()
        assert (found > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_settings_give_the_same_factorisation(kind):
    first = factorise(kind, 4, 0.5, SMALL).coefficients(9)
    factorise.cache_clear()
    assert factorise(kind, 4, 0.5, SMALL).coefficients(9).tolist() == first.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", [Participation(1), Participation(2, 7), Participation(5, 1)])
def test_the_shortest_runs_work(kind, plan):
    found = factorise(kind, 4, 0.0, plan)
    assert found.coefficients(plan.rounds)[0] == 1
    assert all(math.isfinite(each) for each in errors(found, plan))


# --- the noise


def noise_of(kind, **more):
    return Correlated(2.0, bands=4, momentum=0.5, factorisation=kind, buffers=2, **more).fitted(SMALL)


def drawn(noise, rounds, numbers, streams, state=None, first=0):
    state = {} if state is None else state
    found = [
        noise.add(torch.zeros(numbers), 2.0, 0.5, state, streams.generator("noise", t)).double().numpy()
        for t in range(first, rounds)
    ]
    return np.stack(found) / 0.5 / 2.0


@pytest.mark.slow
@pytest.mark.parametrize("streams", [Streams(3), SecureStreams()], ids=["research", "secure"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.statistical(false_alarm=2 * ALPHA)
def test_the_noise_has_the_covariance_of_the_inverse(kind, streams):
    """C times the noise of 9 rounds is white: chi-square on 180,000 numbers, and 36 correlations."""
    noise, rounds, numbers = noise_of(kind), SMALL.rounds, 20_000
    found = drawn(noise, rounds, numbers, streams)
    white = square(noise.coefficients(SMALL, rounds), rounds) @ found
    assert chi_square_fits(white)
    assert not chi_square_fits(1.03 * white)
    assert not chi_square_fits(found)
    between = np.corrcoef(white) - np.eye(rounds)
    assert np.abs(between).max() < float(norm.isf(ALPHA / 2 / 36)) / math.sqrt(numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_from_what_was_kept(kind):
    noise, state = noise_of(kind), {}
    whole = drawn(noise, 9, 50, Streams(1))
    begun = drawn(noise, 4, 50, Streams(1), state)
    rest = drawn(noise_of(kind), 9, 50, Streams(1), {PAST: state[PAST].clone()}, first=4)
    np.testing.assert_array_equal(whole, np.concatenate([begun, rest]))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "vectors"), [("blt", 2), ("banded", 3), ("bisr", 3)])
def test_what_is_kept_does_not_grow_with_the_rounds(kind, vectors):
    for rounds in (9, 60):
        noise, state = noise_of(kind).fitted(Participation(rounds, 3)), {}
        drawn(noise, rounds, 7, Streams(1), state)
        assert {key: tuple(kept.shape) for key, kept in state.items()} == {PAST: (vectors, 7)}
        assert noise.factors(Participation(rounds, 3)).vectors == vectors


@pytest.mark.slow
def test_in_secure_mode_the_kept_noise_is_that_which_was_released():
    """Else the rounding of every round would stay in all later ones."""
    for kind in KINDS:
        noise, state = noise_of(kind), {}
        found = 2.0 * drawn(noise, 9, 200, SecureStreams(), state)
        white = square(noise.coefficients(SMALL, 9), 9) @ found
        if kind in ("bisr", "band-inverse"):
            np.testing.assert_allclose(state[PAST].numpy(), white[:-4:-1], atol=1e-6)
        assert state[PAST].dtype == torch.float64


def test_buffers_and_factorisations_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match=r"per_round\.buffers must be from 1 to 16, got 0"):
        Correlated(1.0, buffers=0)


@pytest.mark.parametrize("kind", factorisations.OPTIMISED)
def test_numbers_that_were_found_make_the_same_noise_again(kind):
    found = factorise(kind, 3, 0.5, SMALL)
    again = given(kind, found.numbers)
    assert again.coefficients(9).tolist() == found.coefficients(9).tolist()
    assert again.inverse(9).tolist() == found.inverse(9).tolist()
    settled = Correlated(1.0, bands=3, momentum=0.5, factorisation=kind).settled(SMALL)
    assert settled.numbers == found.numbers
    assert settled.factors(SMALL) is again
    assert settled.settled(Participation(4)) is settled


def test_what_needs_no_optimising_has_no_numbers():
    for kind in ("square-root", "bisr"):
        noise = Correlated(1.0, bands=3, factorisation=kind)
        assert noise.settled(SMALL) is noise


@pytest.mark.parametrize(
    ("kind", "numbers", "words"),
    [
        ("blt", (0.9, 0.8, 0.7), "must be pairs that fall from below 1 to above 0"),
        ("blt", (0.8, 0.9), "must be pairs that fall"),
        ("blt", (1.0, 0.9), "must be pairs that fall"),
        ("banded", (0.5, 0.1), "must begin with 1, got 0.5"),
        ("banded", (1.0, 0.1, 0.1, 0.1), "must be 3 or fewer, got 4"),
        ("square-root", (1.0, 0.5), "square-root has none: leave them out"),
    ],
)
def test_numbers_of_no_factorisation_are_refused(kind, numbers, words):
    with pytest.raises(ConfigError, match=words):
        Correlated(1.0, bands=3, factorisation=kind, numbers=numbers)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("band-inverse", (1.0, 1e308, 1e308)),  # 1/c overflows to inf and nan
        ("banded", (1.0, 1e200)),  # its square does
        ("blt", tuple(step * 1e-310 for step in range(6, 0, -1))),  # products underflow: 0/0
    ],
)
def test_a_cost_that_is_no_finite_number_is_not_charged_as_nothing(kind, numbers):
    noise = Correlated(1.0, bands=3, factorisation=kind, numbers=numbers)
    algorithm, setting = replace(named("dp-ftrl"), per_round=noise), Setting(100, 9, sizes=(10,))
    for history in ((), (0,), None):  # a site's charge, and the coordinator's
        found = event(algorithm, setting, 3, "client", "release", history=history)
        assert isinstance(found, Unbounded)
        assert "per_round.numbers" in found.because


def test_noise_that_all_but_cancels_is_refused():
    """C^-1 = 1 - x/10 - 1024 x^2 grows no more than is allowed, and c up to 1e15: a sum of such terms is rounded.

    A client that moves the sum of the last round but one by a clip should move the last by c_1 = 0.1 clips.
    """
    numbers = tuple(inverse(np.array([1.0, -0.1, -1024.0]), 12).tolist())
    noise = Correlated(1.0, bands=12, factorisation="banded", numbers=numbers)
    kept = torch.zeros(0, 2000, dtype=torch.float64)
    factors, generator = noise.factors(SMALL), np.random.default_rng(0)
    for _ in range(11):
        share = factors.share(kept)
        kept = factors.following(kept, share, share + torch.from_numpy(generator.standard_normal(2000)))
    moved = kept.clone()
    moved[0] -= 2000**-0.5
    assert float((factors.share(kept) - factors.share(moved)).norm()) > 3 * numbers[1]
    for refuse in (noise.refuse_growing, lambda rounds: noise.refuse_unfit(0, rounds)):  # of a site, and in a run
        with pytest.raises(ConfigError, match="and nearly all cancels"):
            refuse(12)


@pytest.mark.parametrize("kind", ["banded", "blt", "band-inverse"])
def test_what_is_optimised_is_never_refused(kind):
    participation = Participation(300, 30)
    Correlated(1.0, bands=30, factorisation=kind).settled(participation).refuse_growing(300)
