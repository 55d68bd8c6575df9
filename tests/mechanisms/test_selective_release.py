"""Steps that are tested and undone: what is charged for them, what the paper counts, what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from shoal.accounting import accountants
from shoal.accounting.events import Gaussian, Sampled, Unbounded
from shoal.accounting.leaves import leaves
from shoal.accounting.published import dpsur_epsilon
from shoal.algorithms import algorithm
from shoal.algorithms.charges import event, whole_run
from shoal.audit.cases import cases
from shoal.config import configure
from shoal.errors import ConfigError
from shoal.federation.consent import least_noise
from shoal.mechanisms.sampling import Clients
from shoal.mechanisms.schedules import NO_NOISE, parse
from shoal.mechanisms.selective_release import SelectiveRelease
from shoal.mechanisms.setting import Setting
from shoal.random.normals import TAIL

DPSUR = algorithm("dpsur")
MNIST = Setting(1, 5, sizes=(60_000,))


def charged(record=DPSUR, setting=MNIST, unit="record", observer="server"):
    return event(record, setting, 0, unit, observer)


@pytest.mark.parametrize("observer", ["release", "server", "client-process"])
def test_every_step_that_may_be_tried_is_charged_with_its_test_however_few_are_kept(observer):
    steps = {
        Sampled("poisson", 1024 / 60_000, Gaussian(2.0)): 60,
        Sampled("poisson", 256 / 60_000, Gaussian(1.3)): 60,
    }
    assert leaves(charged(observer=observer)) == steps
    fewer = replace(DPSUR, per_step=replace(DPSUR.per_step, updates=1, threshold=-50.0))
    assert charged(fewer) == charged()


def test_client_sampling_which_gradient_and_test_share_amplifies_neither():
    """As two events, each sampled by itself, the cost would be too low: they happen together or not at all."""
    setting = replace(MNIST, clients=10)
    some = replace(DPSUR, clients=Clients("poisson", 1))
    assert leaves(charged(some, setting)) == leaves(charged(DPSUR, setting))


def test_a_record_at_several_clients_is_charged_for_each():
    twice = leaves(charged(setting=replace(MNIST, clients=2, multiplicity=2)))
    assert twice == {leaf: 2 * count for leaf, count in leaves(charged()).items()}


def test_nothing_is_proven_where_a_number_is_not_public_or_a_noise_is_0():
    unknown = replace(DPSUR, local=replace(DPSUR.local, steps=None))
    silent = replace(DPSUR, per_step=replace(DPSUR.per_step, test_noise_multiplier=0.0))
    assert "set local.steps" in charged(unknown).because
    assert charged(silent) == Unbounded("the noise is 0")


def test_a_client_is_protected_in_name_only_and_by_its_own_noise_alone():
    setting = Setting(10, 5, sizes=(100,))
    for observer in ("release", "server"):
        found = leaves(charged(setting=setting, unit="client", observer=observer))
        assert found == {Gaussian(2.0 / 100 / 2): 60, Gaussian(1.3): 60}


def test_a_user_is_charged_for_the_test_too():
    capped = replace(DPSUR, records=replace(DPSUR.records, max_per_user=3))
    found = leaves(charged(capped, replace(MNIST, user_columns=1), unit="user"))
    assert {(leaf.records, leaf.noise, count) for leaf, count in found.items()} == {(3, 2.0, 60), (3, 1.3, 60)}


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_no_change_of_one_record_moves_the_test_further_than_is_charged(rate):
    """Brute force: without the record the change of the loss is m, with it a, with another b, all from -C to C."""
    noise, x = 1.3, np.linspace(-30, 30, 60_001)
    step = Sampled("poisson", rate, Gaussian(noise))
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        most = accountants.delta(step, epsilon, adjacency="replace-one").delta
        for m in (-1.0, 0.0, 1.0):
            for a, b in ((-1, 1), (1, -1), (-1, 0), (0, 1), (1, 1)):
                first, second = (
                    rate * norm.pdf(x, each, 2 * noise) + (1 - rate) * norm.pdf(x, m, 2 * noise) for each in (a, b)
                )
                delta = np.maximum(first - math.exp(epsilon) * second, 0).sum() * (x[1] - x[0])
                assert delta <= most + 1e-6


def test_the_published_figure_counts_only_what_is_kept_and_is_below_the_proven_one():
    (published,) = DPSUR.published(DPSUR, MNIST, 5, 1e-5)
    assert published.epsilon == dpsur_epsilon(1024 / 60_000, 2.0, 256 / 60_000, 1.3, 100)
    assert published.epsilon == pytest.approx(0.5491, abs=1e-4)
    proven = accountants.epsilon(
        whole_run(DPSUR, MNIST, 5, "record", "server"), 1e-5, adjacency="replace-one"
    ).epsilon
    assert proven == pytest.approx(1.2118, abs=1e-3)


def test_other_noise_is_shared_in_proportion_and_without_any_all_is_kept():
    half = DPSUR.per_step.with_noise(parse(1.0))
    assert (half.noise_multiplier, half.test_noise_multiplier, half.threshold) == (1.0, 0.65, -1.0)
    none = DPSUR.per_step.with_noise(NO_NOISE)
    assert (none.test.scale, none.threshold) == (0.0, math.inf)


def test_a_site_asks_for_the_noise_of_the_test_too():
    assert least_noise(DPSUR, MNIST, "record") == 1.3
    assert (
        least_noise(replace(DPSUR, per_step=replace(DPSUR.per_step, test_noise_multiplier=9.0)), MNIST, "record") == 2
    )


def test_the_sampler_of_the_test_counts_and_in_secure_mode_its_grid():
    distances = [
        leaf.distance for leaf in leaves(charged(setting=replace(MNIST, parameters=1))) if hasattr(leaf, "distance")
    ]
    assert distances == [60 * 2 * TAIL]
    secure = leaves(charged(setting=replace(MNIST, secure=True, parameters=1)))
    noises = [leaf.event.noise for leaf in secure if isinstance(leaf, Sampled)]
    assert 1.2999 < noises[1] < 1.3


def test_a_change_of_the_loss_is_clipped_over_the_whole_range_of_floats():
    wild = torch.tensor([math.nan, math.inf, -math.inf, 1e300, -1e300, 5e-324, 0.0], dtype=torch.float64)
    found = DPSUR.per_step.test.clipped(wild)
    assert found.tolist() == [0.001, 0.001, -0.001, 0.001, -0.001, 5e-324, 0.0]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("test_clip", 0.0, "per_step.test_clip must be > 0"),
        ("test_batch", 0, "per_step.test_batch must be >= 1, got 0"),
        ("test_noise_multiplier", -1.0, "per_step.test_noise_multiplier must be >= 0, got -1"),
        ("updates", 0, "per_step.updates must be >= 1, got 0"),
        ("threshold", math.nan, "per_step.threshold (must be|cannot be nan)"),
    ],
)
def test_settings_without_a_meaning_are_refused(key, value, words):
    with pytest.raises(ConfigError, match=words):
        SelectiveRelease(**{key: value})
    with pytest.raises(ConfigError, match=words):
        configure({"algorithm": "dpsur", f"per_step.{key}": value})


def test_both_claims_are_audited():
    proven, published = cases(DPSUR, "record")
    assert (proven.kind, published.kind) == ("proven", "published")
    assert published.claim.epsilon == pytest.approx(1.0, abs=0.01)
    assert leaves(published.claim.event).keys() == {Gaussian(noise) for noise in (
        published.record.per_step.noise_multiplier, published.record.per_step.test_noise_multiplier)}  # fmt: skip
    assert list(leaves(published.claim.event).values()) == [1, 1]
