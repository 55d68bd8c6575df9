"""The bounds of a site's owner: what is outside is refused by name, at no cost, before anything is charged."""

import math
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.accountants import epsilon
from shoal.accounting.events import Gaussian, Repeat
from shoal.accounting.privacy_ledger import Ledger
from shoal.algorithms.charges import charges
from shoal.config import configure, to_toml
from shoal.data import load
from shoal.errors import ConfigError
from shoal.federation import consent
from shoal.federation.consent import Refused, Requirements, least_noise
from shoal.federation.flower.apps import owner
from shoal.federation.messages import Payload
from shoal.federation.site import INTERNAL_ERROR, Owner, Site, _own_engine
from shoal.federation.site_policy import Bounds
from shoal.federation.site_records import reader
from shoal.federation.terms import END, ROUND, TERMS, Terms
from shoal.federation.validation import Request
from shoal.mechanisms.schedules import parse
from shoal.mechanisms.setting import Setting
from shoal.training.engine_settings import Settings, cores
from shoal.training.round_index import RoundIndex
from support.federations import site_ledger

SAID = {
    "algorithm": "fed-sdp",
    "model": "linear",
    "rounds": 100,
    "data.name": "digits",
    "data.clients": 2,
    "clients.sampling": "all",
    "records.batch": 5,
    "local.steps": 2,
    "per_update.at": "client",
    "per_update.noise_multiplier": 6.0,
    "engine.threads": 1,
    "engine.device": "cpu",
}
STRICT = Requirements(epsilon=50.0, noise=1.0, unit="record", observer="server")


RECORDS = {key: value for key, value in SAID.items() if not key.startswith("per_update")} | {"algorithm": "dp-sgd"}
ADAPTIVE = RECORDS | {"algorithm": "geyer-private", "per_update.count_noise_multiplier": 3.0}
TINY = "is 1e-09, this site accepts 1e-06 to 1e+06 (its --bound clip_norm=LOW:HIGH)"


def terms(given, rounds=None):
    config, digits = configure(given), load("digits")
    setting = Setting(config.data.clients, rounds or config.rounds, all_answer=False)
    return Terms("run", to_toml(config), setting, digits.classes, digits.input_shape, 650, None)


def test_a_clip_is_bounded_whatever_settings_it_follows_from(monkeypatch):
    """AdaClip's follows from two keys; another package may call it what it likes."""
    tiny = terms(RECORDS | {"algorithm": "adaclip", "per_record.h1": 1e-9})
    with pytest.raises(Refused, match=re.escape(f"per_record.h1 {TINY}")):
        Bounds().refuse(tiny)
    monkeypatch.setattr(type(tiny.settings.algorithm.per_record), "scales", lambda self: {})
    with pytest.raises(Refused, match="the clip of per_record in round 1 of 100 is"):
        Bounds().refuse(tiny)
    other = terms(SAID)
    monkeypatch.setattr(type(other.settings.algorithm.per_update), "scales", lambda self: {})
    Bounds().refuse(other)
    with pytest.raises(Refused, match="the clip of per_update in round 1 of 100 is 4, this site accepts 5 to 6"):
        Bounds(clip_norm=(5, 6)).refuse(other)


def test_terms_cannot_ask_for_more_threads_than_a_site_has_cores():
    """PyTorch ends the process where it is told to start 100,000."""
    assert 1 <= _own_engine(Settings(threads=100_000)).threads <= cores()
    assert _own_engine(Settings(threads=1)).threads == 1
    assert _own_engine(Settings()).threads is None


def test_nor_for_more_memory_than_it_would_take_itself():
    """The gradients of all records of a batch at once, say."""
    assert _own_engine(Settings(memory=1e9)) == _own_engine(Settings())


def test_each_view_of_a_record_counts_as_one():
    viewed = terms(RECORDS | {"records.augmentations": 256})
    Bounds().refuse(viewed)
    Bounds(batch=(1, 5)).refuse(terms(RECORDS))
    words = "records.batch x 256 records.augmentations is 1280, this site accepts 1 to 1279 "
    with pytest.raises(Refused, match=re.escape(words)):
        Bounds(batch=(1, 1279)).refuse(viewed)


def site(folder, *bounds, requirements=STRICT):
    return Site(Owner("site", folder, reader("digits", part=0), requirements, bounds=Bounds.read(bounds)))


def agreed(here, offered):
    return here.answer(TERMS, Payload({"terms": offered.text, "round": 0})).values


def asked(here, offered, model, t=0, **values):
    names = Request("run", offered.digest, 0, RoundIndex(t, offered.setting.rounds)).names
    return here.answer(ROUND, Payload(names | values, {"model": model}))


def charged(here):
    """Rounds in its ledger, once it is closed."""
    here.close()
    with Ledger(here.owner.folder / "ledger.jsonl") as ledger:
        return sum(intent.round - intent.first + 1 for intent in ledger.charged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (SAID | {"per_update.clip_norm": 1e-9}, f"per_update.clip_norm {TINY}"),
        (SAID | {"per_update.clip_norm": 1e8}, "per_update.clip_norm is 1e+08"),
        (
            SAID | {"per_update.clip_norm": "decay:1:0.5:1e-9"},
            "per_update.clip_norm in round 100 of 100 (decay:1:0.5:1e-9) is",
        ),
        (
            SAID | {"per_update.clip_norm": "exponential:1e-9:1"},
            "per_update.clip_norm in round 1 of 100 (exponential:",
        ),
        (RECORDS | {"per_record.clip_norm": 1e-9}, f"per_record.clip_norm {TINY}"),
        (RECORDS | {"algorithm": "adaclip", "per_record.h1": 1e-9}, f"per_record.h1 {TINY}"),
        (RECORDS | {"algorithm": "adaclip", "per_record.h2": 1e8}, "per_record.h2 is 1e+08"),
        (ADAPTIVE | {"per_update.initial_clip_norm": 1e-9}, f"per_update.initial_clip_norm {TINY}"),
        (SAID | {"local.lr": 1e-11}, "local.lr is 1e-11, this site accepts 1e-09 to 10000 (its --bound lr=LOW:HIGH)"),
        (SAID | {"local.lr": 0.0}, "local.lr is 0,"),
        (SAID | {"local.lr": "linear:0.1:1e6"}, "local.lr in round 100 of 100 (linear:0.1:1e6) is 990000"),
        (SAID | {"local.lr": "cyclic:1e-7:2"}, "local.lr in round 50 of 100 (cyclic:1e-7:2) is 9.86636e-11"),
        (SAID | {"local.steps": 20_000}, "local.steps is 20000, this site accepts 1 to 10000 (its --bound steps="),
        (RECORDS | {"records.sampling": "with-replacement", "records.batch": 10**9}, "records.batch is 1e+09"),
        (SAID | {"data.clients": 10**10}, "data.clients is 1e+10, this site accepts 1 to 1e+06"),
        (SAID | {"rounds": 20_000}, "rounds is 20000, this site accepts 1 to 10000 (its --bound rounds=LOW:HIGH)"),
        (
            SAID | {"per_update.noise_multiplier": "exponential:6:1e-9"},
            "its least noise multiplier for a record is 1.25",
        ),
    ],
)  # fmt: skip
def test_terms_outside_the_bounds_are_refused_by_name(tmp_path, given, words):
    here = site(tmp_path)
    assert agreed(here, terms(given))["refused"].startswith(words)
    assert charged(here) == 0


def test_steps_that_follow_from_the_data_are_for_the_owner_to_know(tmp_path):
    """How many steps an epoch takes tells how many records there are."""
    words = []
    here = site(tmp_path, "steps=:20", requirements=Requirements())
    here._log = words.append
    given = {key: value for key, value in SAID.items() if not key.startswith(("per_update", "local"))}
    assert agreed(here, terms(given | {"algorithm": "fedavg", "local.epochs": 3}))[
        "refused"
    ] == INTERNAL_ERROR.format(site="the site")
    assert "local steps a round is" in words[0]
    here.close()


@pytest.mark.parametrize("rounds", [1_000_000, 10**15])
def test_a_refusal_costs_the_same_however_many_rounds_there_are(tmp_path, monkeypatch, rounds):
    here = site(tmp_path)
    monkeypatch.setattr(consent, "charges", None)
    assert "rounds is 1e+" in agreed(here, terms(SAID, rounds=rounds))["refused"]
    here.close()


@pytest.mark.parametrize("noise", [6.0, "linear:6:3", "staircase:6:3:10"])
def test_agreeing_costs_the_same_however_many_rounds_there_are(tmp_path, monkeypatch, noise):
    calls = []
    monkeypatch.setattr(consent, "charges", lambda *given: (calls.append(given), charges(*given))[1])
    record = configure(SAID | {"per_update.noise_multiplier": noise}).algorithm
    setting = Setting(2, 10**15, all_answer=False, secure=True)
    own = site_ledger(tmp_path, record, setting, Requirements(epsilon=50.0, unit="record", observer="server"))
    own.agree()
    own.close()
    assert 1 <= len(calls) <= 2
    assert least_noise(record, setting, "client") == pytest.approx({6.0: 6, "linear:6:3": 3}.get(noise, 3.3))


def test_rounds_that_were_missed_are_charged_together_and_in_full(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(consent, "charges", lambda *given: (calls.append(given), charges(*given))[1])
    given = {"algorithm": "trusted-curator", "clients.sampling": "all", "per_round.noise_multiplier": 100.0}
    own = site_ledger(tmp_path, configure(given).algorithm, Setting(2, 5000), Requirements(epsilon=8.0))
    own.charge(range(3999), 3999)
    own.close()
    assert len(calls) == 2
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert [(intent.first, intent.round) for intent in ledger.charged] == [(1, 3999), (4000, 4000)]
        spent = epsilon(ledger.charged_event("client", "release"), 1e-5).epsilon
    assert spent == pytest.approx(epsilon(Repeat(Gaussian(100.0), 4000), 1e-5).epsilon, rel=1e-9)


def test_a_schedule_is_charged_round_by_round(tmp_path):
    given = {"algorithm": "trusted-curator", "clients.sampling": "all", "per_round.noise_multiplier": "linear:20:10"}
    own = site_ledger(tmp_path, configure(given).algorithm, Setting(2, 10))
    own.charge(range(3))
    own.close()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.charged_event("client", "release").events == (Gaussian(20.0), Gaussian(19.0), Gaussian(18.0))


def test_the_end_of_a_run_charges_what_the_budget_pays_for(tmp_path):
    """Epsilon 8 at delta 1e-5 pays for a good part of 1,000 rounds, and not for all."""
    given = {key: value for key, value in SAID.items() if not key.startswith("per_update")}
    given |= {"algorithm": "trusted-curator", "per_round.noise_multiplier": 10.0, "rounds": 1000}
    here = site(tmp_path, requirements=Requirements(epsilon=8.0))
    offered = terms(given)
    assert "agreed" in agreed(here, offered)
    here.answer(END, Payload({"run": "run", "terms": offered.digest, "why": "rounds", "round": 1000}))
    last, next_one = (epsilon(Repeat(Gaussian(10.0), charged(here) + more), 1e-5).epsilon for more in (0, 1))
    assert last <= 8 < next_one


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (math.nan, "NaN or Inf"),
        (math.inf, "NaN or Inf"),
        (1e30, "the model's largest parameter is 1e+30, this site accepts 0 to 1e+09 (its --bound weight=LOW:HIGH)"),
        (-1e30, "the model's largest parameter is 1e+30"),
    ],
)
def test_a_model_that_no_training_makes_is_refused_before_it_is_charged(tmp_path, model, words):
    here, offered = site(tmp_path), terms(SAID)
    assert "agreed" in agreed(here, offered)
    answer = asked(here, offered, torch.tensor([0.0] * 649 + [model]))
    assert words in answer.values["refused"]
    assert not answer.vectors
    assert charged(here) == 0


@pytest.mark.parametrize("clip", [1e-9, 1e9, math.nan])
def test_a_clip_that_adapts_stays_within_the_bounds(tmp_path, clip):
    here, offered = site(tmp_path, requirements=Requirements()), terms(ADAPTIVE)
    assert "agreed" in agreed(here, offered)
    answer = asked(here, offered, torch.zeros(650), clip=clip)
    assert answer.values["refused"].startswith("this round's clip norm is")
    assert charged(here) == 0


def refuse_other_norms(tmp_path, given, weight, clip):
    """The update that leaves a site is as long as a clipped one with noise of 6 clips may be."""
    here, offered = site(tmp_path), terms(given)
    assert "agreed" in agreed(here, offered)
    model = torch.full((650,), weight) * torch.linspace(-1, 1, 650).sign()
    norm = float(asked(here, offered, model).vectors["update"].double().norm()) / clip
    here.close()
    assert 6 * 15 - 1 <= norm <= 1 + 6 * (math.sqrt(650) + 10)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 1e-44, 1e9], ids=["zero", "subnormal", "great"])
@pytest.mark.parametrize("sampling", ["shuffled", "with-replacement"])
@pytest.mark.parametrize(("clip", "lr"), [(1e-6, 1e4), (1e-6, 1e-9), (1e6, 1e4), (1e6, 1e-9)])
def test_at_the_edges_of_the_bounds_an_update_is_clipped_and_has_its_noise(tmp_path, clip, lr, sampling, weight):
    """One record a step. Noise of norm 6 (sqrt(650) + 10) comes once in e^50 times, of less than 6 x 15 as rarely."""
    given = SAID | {"per_update.clip_norm": clip, "local.lr": lr, "records.batch": 1, "records.sampling": sampling}
    refuse_other_norms(tmp_path, given, weight, clip)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 1.0, 1e9])
@pytest.mark.parametrize(("clip", "lr"), [(1e-6, 1e4), (1e-6, 1e-9), (1e6, 1e4), (1e6, 1e-9)])
def test_so_it_is_where_steps_are_normalised(tmp_path, clip, lr, weight):
    """AdamW's update is about lr long in every number, however short the gradient: the clip comes after it."""
    given = SAID | {"per_update.clip_norm": clip, "local.lr": lr, "records.batch": 1, "local.optimizer": "adamw"}
    given |= {"local.weight_decay": 1e12, "local.proximal": 1e12}
    refuse_other_norms(tmp_path, given, weight, clip)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("clip", "lr"), [(1e-6, 1e4), (1e-6, 1e-9), (1e6, 1e4), (1e6, 1e-9)])
@pytest.mark.statistical(false_alarm=2e-9)
def test_a_lone_record_cannot_be_read_off_the_signs_of_a_step(tmp_path, clip, lr, optimizer):
    """One record, one step from a model of zeros, noise of 6 clips: the attack of tiny clips and rates.

    SGD multiplies gradient and noise by the same learning rate. AdamW keeps the signs alone, of a gradient that had
    its noise in units of the clip before: whatever the learning rate, it cannot shrink the noise and spare the
    record. Of n signs that the record decides, each agrees with probability 1/2 + 0.07/sqrt(n) at most on average;
    6 standard deviations from n/2 are left to chance.
    """
    digits = load("digits")
    one = replace(digits, train_x=digits.train_x[:1], train_y=digits.train_y[:1])
    given = RECORDS | {"records.batch": 1, "records.sampling": "shuffled", "local.steps": 1}
    given |= {"per_record.clip_norm": clip, "per_step.noise_multiplier": 6.0, "local.lr": lr}
    here = Site(Owner("site", tmp_path, lambda _terms: one, Requirements(noise=1.0, unit="record")))
    offered = terms(given | {"local.optimizer": optimizer})
    assert "agreed" in agreed(here, offered)
    update = asked(here, offered, torch.zeros(650)).vectors["update"]
    here.close()
    wrong = torch.full((10,), 0.1)
    wrong[one.train_y[0]] -= 1
    gradient = torch.cat([torch.outer(wrong, one.train_x[0].flatten()).flatten(), wrong])
    seen = gradient != 0
    n, agree = int(seen.sum()), int((update[seen].sign() == -gradient[seen].sign()).sum())
    assert n > 200
    assert float(update.abs().min()) > 0
    assert abs(agree - n / 2) < 3 * math.sqrt(n)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("clip_norm", "write clip_norm=LOW:HIGH, for example clip_norm=1e-06:1e+06"),
        ("clip_norm=3", "write clip_norm=LOW:HIGH"),
        ("clipp=1:2", "there is no bound 'clipp'; did you mean 'clip_norm'"),
        ("rounds=a:b", "LOW and HIGH must be numbers"),
        ("lr=2:1", "got 2:1"),
        ("lr=nan:1", "got nan:1"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(word, words):
    with pytest.raises(ConfigError, match="--bound") as found:
        Bounds.read([word])
    assert words in str(found.value)


def test_a_site_looks_at_its_machine_first(tmp_path):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers to 0")
    try:
        with pytest.raises(ConfigError, match="flush-to-zero"):
            site(tmp_path)
    finally:
        torch.set_flush_denormal(False)


def test_bounds_are_the_owners(tmp_path):
    assert Bounds.read([]) == Bounds()
    assert Bounds.read(["clip_norm=0.1:10", "rounds=:500"]) == Bounds(clip_norm=(0.1, 10), rounds=(1, 500))
    here = site(tmp_path, "rounds=:99")
    assert "rounds is 100, this site accepts 1 to 99" in agreed(here, terms(SAID))["refused"]
    here.close()
    assert owner({"data": "digits", "folder": str(tmp_path), "bound": "clip_norm=1:2 lr=:3"}).bounds.lr == (1e-9, 3)


@pytest.mark.parametrize("total", [1, 2, 7, 100])
@pytest.mark.parametrize(
    "text",
    ["6", "linear:15:4.85", "linear:1:3", "staircase:15:4.85:10", "exponential:15:4.85", "cyclic:15:2",
     "cyclic:15:7.5", "decay:4:0.01:0.5", "epsilon-linear:0.3:1.3:1e-5", "epsilon-staircase:0.3:1.3:10:1e-5",
     "epsilon-exponential:0.3:1.6:1e-5"],
)  # fmt: skip
def test_a_schedule_knows_where_it_is_least_and_greatest(text, total):
    schedule = parse(text)
    values, ends = schedule.values(total), [schedule.value(t, total) for t in schedule.extremes(total)]
    assert (min(ends), max(ends)) == (min(values), max(values))
