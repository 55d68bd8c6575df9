"""Noise that sites share for one record: what each observer is left with, the grid, and what a round really has."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import shoal
from shoal.accounting.accountants import epsilon
from shoal.accounting.events import Gaussian, Repeat, Sampled, SamplerError, Unbounded
from shoal.accounting.leaves import leaves
from shoal.algorithms import algorithm
from shoal.algorithms.charges import event, whole_run
from shoal.config import configure
from shoal.errors import ConfigError
from shoal.gradients.layout import Layout
from shoal.gradients.tapes import GradientTape
from shoal.mechanisms.gaussian import Gaussian as GaussianNoise
from shoal.mechanisms.mechanism import altered
from shoal.mechanisms.noise_shares import GradientSum, NoiseShares, tau
from shoal.mechanisms.record_clipping import RecordClip
from shoal.mechanisms.sampling import Clients, Records
from shoal.mechanisms.setting import Setting
from shoal.mechanisms.update_clipping import Clip
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.training.local_training import _first, train
from shoal.training.optimizers import gradient_sum
from shoal.training.optimizers.gradient_sum import OnGrid
from shoal.training.round_index import RoundIndex
from support.small_federation import (
    ALPHA,
    CLIENTS,
    ROUNDS,
    chi_square_fits,
    one_thread,
    silent,
    simulator,
    small,
    twin,
)

METHOD = algorithm("distributed-dp-sgd")
NOW = RoundIndex(0, ROUNDS)


def with_shares(**changes):
    return replace(METHOD, per_round=NoiseShares(**({"noise_multiplier": 1.0} | changes)))


# --- what an observer cannot subtract


@pytest.mark.parametrize(("sites", "threshold", "colluding"), [(3, 3, 1), (4, 3, 1), (5, 5, 3), (6, 5, 2)])
def test_the_noise_charged_is_the_least_that_is_left_in_any_sum(sites, threshold, colluding):
    """Every set of survivors, with every set of sites that collude: variances of the shares they do not know."""
    alone, served = [], []  # in units of a share's variance
    for came in product((0, 1), repeat=sites):
        if sum(came) >= threshold:
            alone.append(sum(came))
            for known in product((0, 1), repeat=sites):
                if sum(known) == colluding:
                    served.append(sum(here and not told for here, told in zip(came, known, strict=True)))
    record = with_shares(threshold=threshold, colluding=colluding, noise_multiplier=2.0)
    setting = Setting(sites, 1, sizes=(100,))
    scale = record.per_round.share(1.0, sites, 0, 1)
    for observer, left in (("release", min(alone)), ("server", min(served))):
        ((charged, _),) = leaves(event(record, setting, 0, "record", observer)).items()
        assert charged.event.noise == pytest.approx(scale * math.sqrt(left))
    assert scale * math.sqrt(min(served)) == pytest.approx(2.0)


@pytest.mark.parametrize(("survivors", "expected"), [(18, 2.4464), (16, 2.9185), (12, 4.8606)])
def test_golden_figures_of_too_few_survivors(survivors, expected):
    """Shares made for 20 sites less 3, without a threshold: what fewer would cost (add-or-remove, q 0.01, 1,000
    rounds)."""
    noise = math.sqrt((survivors - 3) / 17)
    one = Sampled("poisson", 0.01, Gaussian(noise))
    assert epsilon(Repeat(one, 1000), 1e-6).epsilon == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_golden_figures_of_the_method():
    record = with_shares(threshold=20, colluding=3)
    record = replace(record, records=Records("poisson", rate=0.01, nominal_records=1000))
    for observer, expected in (("server", 2.1245), ("release", 1.8006)):
        planned = whole_run(record, Setting(20, 1000), 1000, "record", observer)
        assert epsilon(planned, 1e-6).epsilon == pytest.approx(expected, abs=2e-4)


def test_replacing_a_record_costs_as_at_twice_the_clip():
    """Sampled surely: N(2) against N(0), which is half of the noise."""
    record = replace(with_shares(threshold=4), records=Records("poisson", rate=1.0, nominal_records=10))
    planned = whole_run(record, Setting(4, 5), 5, "record", "server")
    twice = epsilon(Repeat(Gaussian(0.5), 5), 1e-5, adjacency="add-or-remove").epsilon
    assert epsilon(planned, 1e-5, adjacency="replace-one").epsilon == pytest.approx(twice, rel=1e-6)


def test_who_is_not_protected_is_told_why():
    setting = Setting(10, 5, sizes=(100,))
    assert "for one record" in event(METHOD, setting, 0, "client", "server").because
    assert "holds the raw records" in event(METHOD, setting, 0, "record", "client-process").because
    copies = event(METHOD, replace(setting, multiplicity=3), 0, "record", "server")
    assert isinstance(copies, Gaussian), "copies may all be sampled: nothing is amplified"
    assert copies.noise == pytest.approx(1 / 3)
    unequal = event(METHOD, replace(setting, sizes=(100, 1000)), 0, "record", "server")
    assert unequal.sampling_rate == 0.6, "that of the smallest site"


def test_a_server_that_is_not_trusted_may_choose_a_site_in_every_round():
    """It draws the cohorts: only who trusts it with that may count on their being drawn at random."""
    chosen = replace(METHOD, clients=Clients("fixed-size", 10))
    setting = Setting(100, 5, sizes=(100,))
    found = {who: event(chosen, setting, 0, "record", who).client_rate for who in ("server", "release")}
    assert found == {"server": 1.0, "release": 0.1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local.steps": 2}, "set local.steps=1"),
        ({"local.momentum": 0.5}, "momentum is server.momentum"),
        ({"local.weight_decay": 0.1}, "leave out the other keys of local"),
        ({"per_record.layers": "each"}, "layers=flat or split"),
        ({"per_record.mechanism": "QuantileRecordClip"}, "RecordClip"),
        ({"records.sampling": "shuffled"}, "records.sampling must be poisson, got shuffled"),
        ({"records.max_per_user": 3}, "decides which others are used"),
        ({"clients.sampling": "poisson"}, "cohort of public size"),
        ({"per_round.threshold": 5}, "two different sums; set at least 6"),
        ({"per_round.threshold": 11}, "at most the cohort"),
        ({"per_round.colluding": 0}, "per_round.colluding must be >= 1"),
        ({"per_round.mechanism": "Gaussian"}, "go together"),
        ({"per_update.mechanism": "Clip"}, "go together"),
        ({"per_update.bits": 30}, "from 8 to 24"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_in_one_line(changes, words):
    def use():
        configure({"algorithm": "distributed-dp-sgd"} | changes).algorithm.refuse_unfit(0, 5, 10)

    with pytest.raises(ConfigError, match=words) as refused:
        use()
    assert "\n" not in str(refused.value)


def test_noise_in_another_unit_than_the_sum_proves_nothing():
    for other in (replace(METHOD, per_round=GaussianNoise(1.0)), replace(METHOD, per_update=Clip(1.0))):
        for unit, observer in product(("client", "record"), ("release", "server")):
            assert isinstance(event(other, Setting(10, 5, sizes=(100,)), 0, unit, observer), Unbounded)


# --- discrete shares


def test_tau_bounds_how_far_a_sum_of_shares_is_from_one_discrete_gaussian():
    """Brute force: probabilities of sums of two and three narrow shares, where the bound is not negligible."""
    numbers = np.arange(-60, 61)

    def gaussian(width):
        mass = np.exp(-(numbers**2) / (2 * width**2))
        return mass / mass.sum()

    for width, shares in ((0.8, 2), (0.8, 3), (1.0, 3)):
        one = summed = gaussian(width)
        for _ in range(shares - 1):
            summed = np.convolve(summed, one, mode="same")
        whole, likely = gaussian(width * math.sqrt(shares)), np.abs(numbers) < 8
        ratio = np.abs(np.log(summed[likely] / whole[likely])).max()
        exact = 10 * sum(math.exp(-2 * math.pi**2 * width**2 * k / (k + 1)) for k in range(1, shares))
        assert 0 < ratio <= exact <= tau(width, shares)
    # of the note, for three shares or fewer terms: r = 1, 2, 4
    assert [tau(width, 2) for width in (1.0, 2.0, 4.0)] == pytest.approx([5.17e-4, 7.2e-17, 2.7e-68], rel=0.02)


def test_secure_mode_charges_less_noise_and_a_distance():
    setting = Setting(10, 5, sizes=(100,), parameters=1000, secure=True)
    found = leaves(event(METHOD, setting, 0, "record", "server"))
    (noise,) = [leaf.event.noise for leaf in found if isinstance(leaf, Sampled)]
    assert 1 - 1e-7 < noise < 1
    (distance,) = [leaf.distance for leaf in found if isinstance(leaf, SamplerError)]
    assert distance >= METHOD.per_round.distance(METHOD.round(setting, 0)) >= 1e-30
    coarse = replace(METHOD, per_update=GradientSum(bits=8), per_round=NoiseShares(noise_multiplier=0.02))
    width = 0.02 * 256 / math.sqrt(6)
    assert coarse.per_round.distance(coarse.round(setting, 0)) == pytest.approx(1000 * tau(width, 10))


# --- what a round has


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=2 * ALPHA)
def test_a_round_has_the_shares_of_all_clients():
    """Chi-square on 104,000 numbers (finds 2%): sigma sqrt(10/6), more than is charged against the server."""
    record = small("distributed-dp-sgd")
    sim = simulator(record, width=1600)
    with one_thread():
        noisy = sim.cohort.train(np.arange(CLIENTS), sim.params, {}, NOW)
        bare = twin(sim, algorithm=silent(record)).cohort.train(np.arange(CLIENTS), sim.params, {}, NOW)
    scale = record.bound({}, 0, ROUNDS) * math.sqrt(10 / 6)
    found = (noisy.update - bare.update).double().numpy()
    assert noisy.noise == pytest.approx(scale)
    assert chi_square_fits(found / scale)
    assert not chi_square_fits(found / scale * 0.97)


@pytest.mark.parametrize("bits", [8, 14])
def test_noise_on_a_grid_leaves_nothing_of_the_gradients_between_its_points(bits):
    """In research mode too: what a sum is beyond whole steps would be that of the gradients, without any noise."""
    sim = simulator(small("distributed-dp-sgd", per_update=GradientSum(bits=bits)))
    with one_thread():
        noisy = sim.cohort.sum(np.arange(CLIENTS), sim.params, {}, NOW).update
    steps = noisy / sim.cohort.algorithm.per_update.step(sim.cohort.algorithm.bound({}, 0, ROUNDS))
    assert sim.cohort.streams.mode == "research"
    assert torch.equal(steps, steps.round())
    assert steps.unique().numel() > 10


def test_a_coarse_grid_is_charged_in_research_mode_as_well():
    coarse = replace(METHOD, per_update=GradientSum(bits=8), per_round=NoiseShares(noise_multiplier=0.01))
    found = coarse.round(Setting(10, 5, sizes=(100,), parameters=1000), 0)
    assert coarse.per_round.distance(found) == pytest.approx(1000 * tau(0.01 * 256 / math.sqrt(6), 10))
    assert coarse.per_round.distance(found) > 1


def chosen(sampler, rows):
    """Batches of our own choosing, the same for every client."""
    return altered(sampler, draw=lambda self, generator, records, steps: np.array([rows]))


def summed(sim, clients=(0,), streams=None):
    """The updates of clients."""
    cohort = sim.cohort if streams is None else replace(sim.cohort, streams=streams)
    with one_thread():
        updates, _ = train(cohort, sim.params, np.array(clients), NOW, {})
    return updates


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["flat", "split"])
def test_a_record_is_rounded_towards_zero_on_the_grid_and_never_longer_than_its_clip(layers):
    record = small("distributed-dp-sgd", per_record=RecordClip(0.3, layers))
    bound = record.bound({}, 0, ROUNDS)
    step = record.per_update.step(bound)
    sims = {n: simulator(replace(record, records=chosen(record.records, [n])), layers=3) for n in range(6)}
    fine = replace(record, per_update=GradientSum(bits=24))
    exact = {
        n: summed(twin(sim, algorithm=replace(fine, records=sim.cohort.algorithm.records)))[0]
        for n, sim in sims.items()
    }
    whole = 0
    for n, sim in sims.items():
        found = summed(sim, streams=SecureStreams())[0]
        assert torch.equal(found / step, (found / step).round())
        assert (found.abs() <= exact[n].abs() + 1e-7 * bound).all()
        assert float((found - exact[n]).abs().max()) <= step * 1.01 <= bound * 2**-14 * 1.01
        assert 0.9 < float(found.norm()) / bound <= 1
        whole = whole + found
    together = simulator(replace(record, records=chosen(record.records, list(range(6)))), layers=3)
    assert torch.equal(summed(together, streams=SecureStreams())[0], whole), "rounded one by one, and added exactly"


def test_what_is_measured_is_what_is_rounded():
    """As of a convolution on CUDA: in TF32 a record is longer than the norm that other products give."""

    class Longer(GradientTape):
        def squares(self):
            return super().squares() * (1 - 2e-3)

    layout = Layout.of(torch.nn.Linear(4, 2))
    places, made = layout.named_layers, torch.randn(1, 5, layout.size, generator=torch.Generator().manual_seed(0))
    tape = OnGrid(Longer.of(layout, made), 2.0**-20, places)
    factors = RecordClip().factors(tape.squares(), 0.25, places)
    for record in torch.eye(5):
        into = torch.zeros(1, layout.size, dtype=torch.float64)
        tape.accumulate(into, 1.0, factors * record)
        assert 0.2499 < float(into.norm()) <= 0.25


def test_what_is_rounded_in_parts_is_what_is_rounded_as_a_whole(monkeypatch):
    """The parts fit a CPU's cache; sums on the grid are exact, in any order."""
    layout = Layout.of(torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)))
    made = torch.randn(2, 6, layout.size, generator=torch.Generator().manual_seed(0))
    for layers in ("flat", "split"):
        tape = OnGrid(GradientTape.of(layout, made), 2.0**-10, layout.named_layers)
        factors = RecordClip(layers=layers).factors(tape.squares(), 0.25, layout.named_layers)
        found = torch.zeros(2, 2, layout.size, dtype=torch.float64)
        for into, most in zip(found, (2**17, 30), strict=True):
            monkeypatch.setattr(gradient_sum, "IN_CACHE", most)
            tape.accumulate(into, -0.5, factors)
        clipped = torch.zeros_like(found[0])
        for place, factor in zip(layout.named_layers.values(), factors.expand(2, -1, -1), strict=True):
            clipped[:, place] = (made[..., place].double() * (-0.5 * 2**10 * factor).unsqueeze(2)).trunc().sum(1)
        assert torch.equal(found[0], clipped * 2.0**-10)
        assert torch.equal(found[0], found[1])


def test_where_records_are_rounded_sites_are_trained_one_by_one():
    """Else the gradients of all their records are in memory at once: of 20 sites, with 100,000 parameters, 3 GB."""
    sim = simulator(small("distributed-dp-sgd"))
    cohort, everybody = sim.cohort, np.arange(CLIENTS)
    assert [len(chunk) for chunk in cohort.chunker.chunks(everybody, cohort.client_data.sizes(everybody))] == [1] * 10


def test_a_recorded_step_is_not_replayed_on_another_grid():
    """A larger clip has a coarser grid: records on a finer one would be rounded again, as a sum, and move further."""
    record = small("distributed-dp-sgd", per_record=RecordClip("linear:0.1:4"))
    sim = simulator(record)
    cohort = replace(sim.cohort, streams=SecureStreams())
    first, last = (_first(cohort, sim.params, np.array([0]), RoundIndex(t, ROUNDS), {}) for t in (0, ROUNDS - 1))
    assert first.grid < last.grid
    assert first.constants != last.constants


def test_pieces_of_a_batch_add_up_to_the_same_sum():
    record = small("distributed-dp-sgd")
    record = replace(record, records=chosen(record.records, list(range(7))))
    sim = simulator(record, layers=2)
    pieces = twin(sim, micro_batch=3)
    torch.testing.assert_close(summed(pieces), summed(sim), rtol=1e-5, atol=1e-7)
    step = record.per_update.step(record.bound({}, 0, ROUNDS))
    one, other = (summed(each, streams=SecureStreams()) for each in (sim, pieces))
    assert float((one - other).abs().max()) <= 7 * step, "which way a number is rounded may differ"


def test_a_large_model_takes_no_digits_from_the_sum():
    """w + update - w in float32 would move by 2^-11 where weights are 9,000."""
    record = small("distributed-dp-sgd")
    sim = simulator(replace(record, records=chosen(record.records, [0])))
    sim.params = torch.full_like(sim.params, 9000.0)
    found = summed(sim)
    assert found.dtype == torch.float64
    assert 0.99 < float(found.norm()) / record.bound({}, 0, ROUNDS) <= 1


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=2e-7)
def test_no_record_moves_the_sum_by_more_than_its_clip():
    """The same random numbers on 40 pairs of neighbours, one record replaced by another: two clips at most."""
    random, moved = np.random.default_rng(3), []
    record = small("distributed-dp-sgd")
    base = simulator(silent(record), layers=2)
    for _ in range(40):
        clip = RecordClip(10 ** random.uniform(-3, 1))
        sim = twin(
            base, algorithm=replace(base.cohort.algorithm, per_record=clip), streams=Streams(random.integers(99))
        )
        data = sim.cohort.client_data
        row, x, y = int(data.partition.records(4)[0]), data.x.clone(), data.y.clone()
        x[row] = torch.from_numpy(random.normal(size=x[row].shape) * 1000).float()
        y[row] = int(random.integers(10))
        other = twin(sim, client_data=replace(data, x=x, y=y))
        with one_thread():
            one, two = (each.cohort.train(np.arange(CLIENTS), sim.params, {}, NOW) for each in (sim, other))
        moved.append(float((one.update - two.update).norm()) / one.clip_norm)
    assert max(moved) <= 2 * (1 + 1e-6)
    assert max(moved) > 1.2, "about half of the pairs sample the record"
    assert min(moved) == 0


@pytest.mark.slow
@pytest.mark.parametrize("random", ["research", "secure"])
def test_a_run_spends_its_budget_against_the_server(tmp_path, random):
    given = {"algorithm": "distributed-dp-sgd", "data.clients": 6, "model": "linear", "rounds": 3, "random": random}
    budget = {"unit": "record", "observer": "server", "epsilon": 4.0, "calibrate": True}
    given |= {f"budget.{key}": value for key, value in budget.items()}
    run = shoal.run(given | {"engine.threads": 1}, runs=tmp_path, device="cpu")
    proven = {(claim["unit"], claim["observer"]): claim["epsilon"] for claim in run.proven}
    assert 3.96 < proven["record", "server"] <= 4.0
    assert proven["record", "release"] < proven["record", "server"]
    assert proven["record", "client-process"] is None


@pytest.mark.parametrize(("threshold", "colluding"), [(3, 5), (5, 5), (6, 5), (11, 1), (5, 1)])
@pytest.mark.parametrize("observer", ["release", "server"])
def test_shares_that_leave_no_noise_prove_nothing(threshold, colluding, observer):
    """Of 10 sites: all of a sum may collude, two sums may be unmasked, or none ever is."""
    record = with_shares(threshold=threshold, colluding=colluding)
    found = event(record, Setting(10, 5, sizes=(100,)), 0, "record", observer)
    assert isinstance(found, Unbounded)
    assert "per_round.threshold" in found.because
