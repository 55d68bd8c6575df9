"""Secure mode: nothing can be repeated or foretold, and what is released lies on a public grid."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from scipy.stats import chi2, chisquare, norm

from shoal.config import configure
from shoal.errors import ConfigError
from shoal.mechanisms.sampling import Clients, Records
from shoal.random.normals import normals
from shoal.random.secure_streams import STEPS, SecureGenerator, SecureStreams, grid, toward_zero
from shoal.training.round import run_round
from shoal.training.round_index import RoundIndex
from shoal.training.run_folder import CHECKPOINT
from support.federations import served, settings
from support.small_federation import idle, plain_server, simulator, small, twin
from support.tiny import PRIVATE, go_on, play, stopped_after

ALPHA = 1e-7  # how often a statistical check may fail by chance: what is drawn here differs from run to run


def test_no_two_streams_of_two_runs_are_alike():
    one, other = SecureStreams(5), SecureStreams(5)
    assert one.generator("noise", 1).words(4).tolist() == one.generator("noise", 1).words(4).tolist()
    seen = {stream.generator(name, t).bytes(16) for stream in (one, other) for name in ("a", "b") for t in range(3)}
    assert len(seen) == 12
    assert one.key("noise", 1) != other.key("noise", 1)


def test_a_secret_is_not_shown():
    streams = SecureStreams(5)
    assert repr(streams) == "SecureStreams()"
    assert streams.__dict__["_secret"].hex()[:8] not in str(streams)


def test_a_draw_that_is_not_made_from_the_cipher_cannot_be_made():
    generator = SecureStreams().generator("x")
    with pytest.raises(AttributeError, match="draws no 'exponential'"):
        generator.exponential()


@pytest.mark.statistical(false_alarm=4 * ALPHA)
def test_bits_shares_and_normals_are_what_they_should_be():
    """Chi-square on each, at ALPHA."""
    generator = SecureStreams().generator("x")
    ones = np.unpackbits(generator.words(20_000).view(np.uint8)).mean()
    assert abs(ones - 0.5) < norm.isf(ALPHA / 2) / 2 / math.sqrt(20_000 * 64)
    assert chisquare(np.histogram(generator.random(100_000), bins=64, range=(0, 1))[0]).pvalue > ALPHA
    assert chisquare(np.bincount(generator.integers(7, size=70_000), minlength=7)).pvalue > ALPHA
    low, high = (chi2.ppf(p, 10**5) for p in (ALPHA / 2, 1 - ALPHA / 2))
    assert low < np.square(generator.standard_normal(10**5)).sum() < high
    assert sorted(generator.permutation(50).tolist()) == list(range(50))
    assert len(set(generator.choice(50, size=20, replace=False).tolist())) == 20
    assert isinstance(generator.standard_normal(), float)


def test_whole_numbers_keep_to_their_range_for_every_span():
    generator = SecureStreams().generator("x")
    for low, high in ((0, 1), (3, 5), (0, 2**63), (-4, 4)):
        drawn = generator.integers(low, high, size=200)
        assert drawn.min() >= low
        assert drawn.max() < high
    assert 0 <= generator.integers(2**63) < 2**63


def test_rounding_towards_zero_makes_no_update_longer():
    values = torch.from_numpy(np.random.default_rng(1).normal(size=(50, 300))).float()
    short = toward_zero(values, 2.0**-6)
    assert (short.norm(dim=1) <= values.norm(dim=1)).all()
    assert (short * 2**6 == (short * 2**6).round()).all()
    assert float((values - short).abs().max()) < 2.0**-6
    assert grid(1.0) == 2.0**-12
    assert grid(1.9) == 2.0**-12
    assert grid(0.0) == 0.0


def released(name, **changes):
    sim = simulator(plain_server(idle(small(name, **changes))), width=160)
    sim = twin(sim, streams=SecureStreams())
    params, _, told = run_round(sim.cohort, torch.zeros_like(sim.params), {}, RoundIndex(0, 4))
    return params.double().numpy() * told["expected_clients"], told


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=ALPHA)
def test_the_sum_that_is_released_lies_on_the_grid_of_its_clip_and_has_its_noise():
    """10,400 numbers, chi-square at ALPHA (finds 7%)."""
    found, told = released("trusted-curator")
    steps = found / grid(told["clip"])
    assert np.abs(steps - np.round(steps)).max() < 1e-2, "but for the division by the cohort, in float32"
    low, high = (chi2.ppf(p, found.size) for p in (ALPHA / 2, 1 - ALPHA / 2))
    assert low < np.square(found / told["noise"]).sum() < high


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=ALPHA)
def test_an_update_leaves_its_client_with_discrete_noise():
    record = small("fed-sdp")
    record = replace(record, per_update=replace(record.per_update, at="client"), clients=Clients("all"))
    sim = twin(simulator(plain_server(idle(record)), clients=1, width=160), streams=SecureStreams())
    params, _, told = run_round(sim.cohort, torch.zeros_like(sim.params), {}, RoundIndex(0, 4))
    scale = record.per_update.multiplier(0, 4) * told["clip"]
    steps = params.double().numpy() / grid(scale)
    assert np.array_equal(steps, np.round(steps))
    low, high = (chi2.ppf(p, steps.size) for p in (ALPHA / 2, 1 - ALPHA / 2))
    assert low < np.square(steps * grid(scale) / scale).sum() < high


@pytest.mark.slow
def test_a_step_moves_a_model_of_zeros_by_steps_of_the_grid_of_its_noise():
    """One step: whatever the gradients, what is left of them is a whole number of steps."""
    record = small("fed-cdp-private")
    sim = simulator(replace(record, local=replace(record.local, steps=1)), width=16)
    found = []
    for _ in range(2):
        cohort = twin(sim, streams=SecureStreams()).cohort
        found.append(cohort.updates(np.arange(3), torch.zeros_like(sim.params), {}, RoundIndex(0, 4)).updates)
    scale = 0.05 * 6 * 4 / 5  # learning rate, noise multiplier, clip norm, batch
    steps = found[0].double() / (scale / STEPS)
    steps = steps[steps.abs() < STEPS]  # of about two thirds a float32 has more digits than the whole number
    assert len(steps) > 100
    assert float((steps - steps.round()).abs().max()) < 0.2, "up to a float32's last digit"
    assert not torch.equal(*found)


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=ALPHA)
def test_sampling_works_from_the_cipher():
    generator = SecureStreams().generator("clients")
    assert len(Clients("fixed-size", 4).draw(generator, 0, 1, 10)) == 4
    shares = np.mean([np.isin(range(10), Clients("poisson", 4).draw(generator, 0, 1, 10)) for _ in range(2000)])
    assert abs(shares - 0.4) < norm.isf(ALPHA / 2) * math.sqrt(0.24 / 20_000)
    for kind in ("shuffled", "poisson", "with-replacement", "fixed-order"):
        assert Records(kind, 3).draw(generator, 10, 4).shape[0] == 4


@pytest.mark.slow
def test_a_secure_run_says_so_everywhere_and_cannot_be_repeated(tmp_path):
    runs = [play(tmp_path, PRIVATE | {"random": "secure"}) for _ in range(2)]
    assert not torch.equal(runs[0].model["weight"], runs[1].model["weight"])
    for run in runs:
        assert run.random == run.to_json()["random"] == "secure"
        assert "random: secure\n" in (run.run / "environment.txt").read_text()
        assert 'random = "secure"' in (run.run / "config.toml").read_text()
        assert "secure" in (run.run / "report.html").read_text()
    plain = play(tmp_path, PRIVATE)
    assert plain.random == "research"
    assert "random: research\n" in (plain.run / "environment.txt").read_text()
    for claim, secure in zip(plain.proven, runs[0].proven, strict=True):
        assert (claim["epsilon"] is None) == (secure["epsilon"] is None)
        if claim["epsilon"] is not None:  # discrete noise is charged a trifle more
            assert claim["epsilon"] == pytest.approx(secure["epsilon"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("seeded", "mode"), [(False, "secure"), (True, "research")])
def test_a_federation_is_in_secure_mode_unless_it_asks_for_a_seed_and_says_which(tmp_path, seeded, mode):
    run, _ = served(tmp_path, settings("geyer-private", federation__seeded=seeded))
    assert run.random == run.to_json()["random"] == mode
    assert f"random: {mode}\n" in (run.run / "environment.txt").read_text()
    assert f"random numbers</th><td>{mode}<" in (run.run / "report.html").read_text()


@pytest.mark.slow
def test_a_resumed_secure_run_draws_fresh_entropy(tmp_path):
    """The same checkpoint resumed twice: two different models, and both charged."""
    import shutil

    run = stopped_after(tmp_path, PRIVATE | {"random": "secure"}, rounds=2)
    copied = tmp_path / "copy" / run.name
    shutil.copytree(run, copied)
    one, other = go_on(run), go_on(copied)
    assert one.random == other.random == "secure"
    assert not torch.equal(one.model["weight"], other.model["weight"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["secure", "research"])
def test_the_checkpoint_of_a_secure_run_holds_no_clients_momentum(tmp_path, mode):
    kept = {"local.momentum": 0.5, "local.keep_momentum": True, "random": mode}
    run = stopped_after(tmp_path, PRIVATE | kept, rounds=2)
    with safe_open(run / CHECKPOINT, framework="pt") as file:
        assert any(key.startswith("velocity.") for key in file.keys()) == (mode == "research")  # noqa: SIM118
    assert go_on(run).rounds > 2


def test_secure_mode_and_a_noise_seed_contradict_each_other():
    with pytest.raises(ConfigError, match="noise_seed 3 and random=secure contradict"):
        configure({"random": "secure", "noise_seed": 3})
    with pytest.raises(ConfigError, match="random cannot be 'secur'"):
        configure({"random": "secur"})


def test_every_cell_of_a_secure_sweep_draws_noise_of_its_own():
    from shoal.sweep.plan import Plan

    plan = Plan({"random": "secure", "algorithm": "fedavg"}, [{"rounds": 1}, {"rounds": 2}], [11, 12])
    assert plan.config(0).noise_seed is None
    assert plan.config(1).random == "secure"


def test_noise_of_local_steps_on_a_gpu_is_refused():
    class OnGpu:
        is_cuda = True

    with pytest.raises(ConfigError, match=r"random=secure .* --device cpu"):
        normals(SecureStreams(), "step noise", (0, 0), [0], OnGpu())


def test_secure_generators_are_numpy_generators_to_whoever_takes_one():
    assert isinstance(SecureStreams().generator("x"), np.random.Generator)
    assert isinstance(SecureStreams().generator("x"), SecureGenerator)
