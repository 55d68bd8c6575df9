"""A coordinator, or a site, that is up to something: what it is told is no more than the ledgers say."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.accountants import epsilon
from shoal.accounting.events import Unbounded
from shoal.accounting.leaves import leaves
from shoal.accounting.privacy_ledger import Ledger
from shoal.config import configure, to_toml
from shoal.data import load
from shoal.errors import ConfigError
from shoal.federation.consent import Requirements
from shoal.federation.coordinator import RemoteCohort
from shoal.federation.messages import Payload
from shoal.federation.roster import Roster
from shoal.federation.site import INTERNAL_ERROR, Owner, Site
from shoal.federation.site_policy import Bounds
from shoal.federation.site_records import reader
from shoal.federation.terms import END, ROUND, TERMS, Terms
from shoal.federation.validation import Request, Validator
from shoal.mechanisms.gaussian import add_to_sum
from shoal.mechanisms.mechanism import ADJACENCIES
from shoal.mechanisms.setting import Setting
from shoal.random.secure_streams import SecureStreams, grid, toward_zero
from shoal.training.round_index import RoundIndex
from support.federations import asked, curator, served, settings
from support.loopback import with_sites

RECORDS = 200
SAID = {
    "algorithm": "dp-sgd",
    "model": "linear",
    "rounds": 1,
    "data.name": "digits",
    "data.clients": 2,
    "clients.sampling": "all",
    "records.batch": RECORDS,
    "local.steps": 1,
    "per_step.noise_multiplier": 8.0,
    "engine.threads": 1,
    "engine.device": "cpu",
    "random": "secure",
    "federation.min_records": RECORDS,
    "federation.max_records": RECORDS,
}


def terms(**changes):
    config = configure(SAID | {key.replace("__", "."): value for key, value in changes.items()})
    digits = load("digits")
    setting = Setting(2, 1, 1, 1, (RECORDS,), False)
    return Terms("run", to_toml(config), setting, digits.classes, digits.input_shape, 650, None)


def some(_terms):
    digits = load("digits")
    return replace(digits, train_x=digits.train_x[:RECORDS], train_y=digits.train_y[:RECORDS])


STRICT = Requirements(epsilon=50.0, noise=1.0, unit="record", observer="server")


WIDE = Bounds.read(["clip_norm=0:1e30", "lr=0:1e30"])


def answers(folder, agreed, model, times, requirements=STRICT):
    """Of a site whose owner sets no bounds."""
    site = Site(Owner("site", folder, some, requirements, bounds=WIDE))
    assert "agreed" in site.answer(TERMS, Payload({"terms": agreed.text, "round": 0})).values
    messages = (
        Payload(Request("run", agreed.digest, 0, RoundIndex(0, 1)).names, {"model": model}) for _ in range(times)
    )
    found = [site.answer(ROUND, message) for message in messages]
    site.close()
    return found


@pytest.mark.slow
def test_a_great_parameter_does_not_swallow_the_noise(tmp_path):
    """A bias of 2^20 rounds what is added to it to a 16th: gradient and noise must be added as one.

    The attacker plays the site without noise, to find the rate at which the gradient alone is about half of that.
    With noise each answer is then one or the other as by a coin: thirty are the same once in 10^8 times.
    """
    model = torch.zeros(650)
    model[640] = 2.0**20

    def moved(lr, noise, times=1, requirements=STRICT):
        agreed = terms(local__lr=lr, per_step__noise=noise)
        found = answers(tmp_path / f"{lr} {noise}", agreed, model, times, requirements)
        return [float(answer.vectors["update"][640]) for answer in found]

    low, high = 1e-3, 1.0
    for _ in range(15):
        rate = math.sqrt(low * high)
        low, high = (low, rate) if moved(rate, 0.0, requirements=Requirements())[0] else (rate, high)
    assert high < 0.1, "so that noise alone, 8 high/200, is far from half a 16th"
    assert {0.0, -0.0625} <= set(moved(low, 8.0, 30))


@pytest.mark.parametrize("lr", [1e-8, 1e-12])
def test_steps_too_small_for_their_noise_are_refused(tmp_path, lr):
    site, small = (
        Site(Owner("site", tmp_path, some, STRICT, bounds=WIDE)),
        terms(local__lr=lr, per_example__clip=1e-10),
    )
    answer = site.answer(TERMS, Payload({"terms": small.text, "round": 0}))
    assert "local.lr x clip / records.batch must be from 1e-18" in answer.values["refused"]
    site.close()


@pytest.mark.slow
def test_small_steps_have_their_noise(tmp_path):
    """650 numbers: their standard deviation is off by 20% once in 10^12 times."""
    found = answers(tmp_path, terms(local__lr=1e-7, per_example__clip=1e-8), torch.zeros(650), 2)
    one, other = (answer.vectors["update"].double() for answer in found)
    assert float((one - other).std()) == pytest.approx(math.sqrt(2) * 8e-15 / RECORDS, rel=0.2, abs=0)


@pytest.mark.slow
def test_momentum_of_one_run_does_not_reach_another_of_the_same_name(tmp_path):
    """What a run without noise in its steps left is raw: in another run's update nothing would protect it."""
    momentum = {"local__momentum": 0.9, "local__keep_momentum": True}
    raw = terms(per_step__noise_multiplier=0.0, **momentum)
    assert answers(tmp_path, raw, torch.zeros(650), 1, Requirements())[0].vectors
    site = Site(Owner("site", tmp_path, some))
    assert "agreed" in site.answer(TERMS, Payload({"terms": raw.text, "round": 1})).values
    assert site._state, "after a restart it goes on"
    site.close()
    site = Site(Owner("site", tmp_path, some))
    assert "agreed" in site.answer(TERMS, Payload({"terms": terms(**momentum).text, "round": 0})).values
    assert not site._state
    site.close()


@pytest.mark.parametrize("found", [b"", b"{}", b"\xff" * 20])
def test_damaged_momentum_is_named_and_nothing_is_trained_without_it(tmp_path, found):
    agreed, told = terms(local__momentum=0.9, local__keep_momentum=True), []
    (tmp_path / "memory.safetensors").write_bytes(found)
    site = Site(Owner("site", tmp_path, some), told.append)
    assert "refused" in site.answer(TERMS, Payload({"terms": agreed.text, "round": 0})).values
    assert "memory.safetensors is damaged; restore it from the latest copy" in told[-1]
    site.close()


@pytest.fixture
def replies(tmp_path):
    """Terms and a round's message of an earlier run, and a site that has agreed to nothing yet."""
    _, wire = served(tmp_path, curator(3))
    told = []
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0)), told.append)
    yield site, asked(wire, TERMS), asked(wire, ROUND), told
    site.close()


@pytest.mark.slow
def test_terms_are_agreed_to_once_so_that_nobody_can_ask_what_fits(replies):
    site, first, _, _ = replies
    said = json.loads(first.values["terms"])
    said["config"] += "[federation]\nfewest_records = 20\n"
    said["setting"]["sizes"] = [20]
    other = Payload({"terms": json.dumps(said, sort_keys=True), "round": 0})
    assert "agreed" in site.answer(TERMS, first).values
    assert "agreed" in site.answer(TERMS, first).values
    assert "answered other terms" in site.answer(TERMS, other).values["refused"]


@pytest.mark.slow
def test_terms_that_do_not_fit_are_the_only_ones_answered_and_not_by_name(tmp_path):
    """Else a coordinator could count the records, or find out which classes occur, one question after another."""

    def between(least, most):
        asked_for = terms(federation__min_records=least, federation__max_records=most)
        setting = replace(asked_for.setting, sizes=(least, most), bounds=True)
        return Payload({"terms": replace(asked_for, setting=setting).text, "round": 0})

    site = Site(Owner("site", tmp_path, some))
    for _ in range(2):
        assert site.answer(TERMS, between(1, RECORDS - 1)).values["refused"] == INTERNAL_ERROR.format(site="the site")
    assert "answered other terms" in site.answer(TERMS, between(1, RECORDS)).values["refused"]
    site.close()
    for least in (1, 2):  # stock Flower starts a process for every message
        again = Site(Owner("site", tmp_path, some), joins=False)
        assert "answered other terms" in again.answer(TERMS, between(least, RECORDS)).values["refused"]
        again.close()
    joined = Site(Owner("site", tmp_path, some))
    assert "agreed" in joined.answer(TERMS, between(1, RECORDS)).values
    joined.close()
    for least, said in ((1, "agreed"), (2, "refused")):  # terms that fit are one bit too
        again = Site(Owner("site", tmp_path, some), joins=False)
        assert said in again.answer(TERMS, between(least, RECORDS)).values
        again.close()


@pytest.mark.slow
def test_a_site_that_restarts_for_every_message_answers_other_terms_after_a_round(tmp_path):
    def fresh():
        return Site(Owner("site", tmp_path, some), joins=False)

    def said(kind, payload):
        site = fresh()
        answer = site.answer(kind, payload)
        site.close()
        return answer

    first, second = terms(), terms(local__momentum=0.5)
    ask, other = (Payload({"terms": each.text, "round": 0}) for each in (first, second))
    assert "agreed" in said(TERMS, ask).values
    assert "answered other terms" in said(TERMS, other).values["refused"]
    model = {"model": torch.zeros(650)}
    assert said(ROUND, Payload(Request("run", first.digest, 0, RoundIndex(0, 1)).names, model)).vectors
    assert "agreed" in said(TERMS, other).values


@pytest.mark.slow
def test_noise_from_a_seed_is_charged_as_none(tmp_path):
    served(tmp_path, settings("trusted-curator"))
    with Ledger(tmp_path / "site-0" / "ledger.jsonl") as ledger:
        assert ledger.charged
        for unit, observer in (("client", "release"), ("record", "server")):
            assert all(isinstance(event, Unbounded) for event in ledger.charged_event(unit, observer).events)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "old", "gone"])
def test_a_ledger_that_is_not_the_last_one_is_noticed(replies, tmp_path, how):
    site, first, message, _ = replies
    path = tmp_path / "new" / "ledger.jsonl"
    site.answer(TERMS, first)
    site.answer(ROUND, message)
    old = path.read_bytes()
    site.answer(ROUND, message)
    site.close()
    kept = {"cut": path.read_bytes()[:-1].rsplit(b"\n", 1)[0] + b"\n", "old": old, "gone": None}[how]
    path.unlink()
    if kept is not None:
        path.write_bytes(kept)
    told = []
    again = Site(site.owner, told.append)
    resumed = Payload(first.values | {"charged": 1})
    assert again.answer(TERMS, resumed).values["refused"] == INTERNAL_ERROR.format(site="the site")
    assert "is not the one last written" in told[0]
    again.close()
    assert path.exists() == (how != "gone")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "empty", "older"])
def test_a_ledger_without_its_latest_hash_beside_it_is_not_believed(replies, tmp_path, how):
    """It may be an older copy, alone in a new folder."""
    site, first, message, _ = replies
    of_first = Terms.read(first.values["terms"], ())
    before, later = (replace(of_first, run=name) for name in ("before", "later"))
    path, names = tmp_path / "new" / "head.json", {"run": "before", "terms": before.digest}
    site.answer(TERMS, Payload({"terms": before.text, "round": 0}))
    site.answer(ROUND, Payload(message.values | names, message.vectors))
    site.answer(END, Payload(names | {"why": "rounds", "round": 3}))
    site.close()
    older = path.read_text()
    site = Site(site.owner)
    site.answer(TERMS, first)
    site.answer(ROUND, message)
    site.close()
    path.write_text({"missing": "", "empty": "{}", "older": older}[how])
    if how == "missing":
        path.unlink()
    told = []
    again = Site(site.owner, told.append)
    asked_again = Payload({"terms": later.text, "round": 0})
    assert again.answer(TERMS, asked_again).values["refused"] == INTERNAL_ERROR.format(site="the site")
    assert "head.json is missing or an older copy" in told[0]
    again.close()


@pytest.mark.slow
def test_rounds_left_of_a_run_are_not_forgotten_where_its_terms_were_replaced_by_others(replies, tmp_path):
    site, first, message, _ = replies
    later = replace(Terms.read(first.values["terms"], ()), run="later")
    site.answer(TERMS, first)
    site.answer(ROUND, message)
    site.close()
    kept, told = tmp_path / "new" / "terms.json", []
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"terms": later.text}))
    again = Site(site.owner, told.append)
    assert "refused" in again.answer(TERMS, Payload({"terms": later.text, "round": 0})).values
    assert any("has rounds that are not charged yet" in words for words in told)
    again.close()


def test_a_federation_commits_every_round(tmp_path):
    with pytest.raises(ConfigError, match=r"engine.checkpoint_every must be 1 in a federation, got 4"):
        served(tmp_path, curator(2) | {"engine.checkpoint_every": 4})


def test_numbers_off_the_grid_do_not_make_others_count_for_more():
    """Half a step everywhere would make the sum's rounding depend on whether another's number is odd."""
    bound, size = 2.0, 1_000_000
    step = grid(bound)
    honest = torch.full((size,), step)
    left = math.floor(math.sqrt((bound / step) ** 2 - size + 1))
    honest[0] = (left - 1 + left % 2) * step
    assert torch.equal(honest, toward_zero(honest, step))
    record = configure({"algorithm": "trusted-curator", "per_update.clip_norm": bound}).algorithm
    validator = Validator(record, size, 1e4, None)
    checked = []
    for number, update in enumerate((torch.full((size,), step / 2), honest)):
        request = Request("run", "terms", number, RoundIndex(0, 1))
        checked.append(validator.check(request, Payload(request.names, {"update": update}), bound))
    here = SimpleNamespace(_validator=validator, algorithm=record, streams=SecureStreams())

    def total(answers):
        found = RemoteCohort._sum(here, answers, torch.zeros(size), {}, bound, RoundIndex(0, 1))
        return add_to_sum(found.update, 0.0, bound, SecureStreams().generator("noise"))

    moved = (total(checked) - total(checked[:1])).double().norm()
    assert float(moved) <= bound * (1 + 1e-6)


def told_otherwise(first, **changes):
    said = json.loads(first.values["terms"])
    said["config"] = changes.pop("config", lambda text: text)(said["config"])
    said["setting"] |= changes
    return json.dumps(said, sort_keys=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"config": lambda text: text.replace("seed = 0", "seed = " + "1" * 5000)},
        {"config": lambda text: text.replace("seed = 0", "seed = " + "[" * 5000 + "]" * 5000)},
        {"rounds": "x"},
        {"rounds": 10**15},
        {"clients": 10**13},
        {"clients": 4.5},
        {"layers": None},
    ],
    ids=["digits", "deep", "word", "rounds", "clients", "half", "none"],
)
def test_terms_that_cannot_be_are_refused_and_the_site_lives(replies, changes):
    site, first, message, _ = replies
    site.owner = replace(site.owner, requirements=Requirements(noise=1.0))
    refused = site.answer(TERMS, Payload({"terms": told_otherwise(first, **changes), "round": 0}))
    assert refused.values["refused"]
    for number in (-(10**12), 10**12):
        assert f"no round {number}" in site.answer(TERMS, Payload(first.values | {"round": number})).values["refused"]
    assert "agreed" in site.answer(TERMS, first).values
    assert "refused" not in site.answer(ROUND, message).values


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("name", ["clients", "rounds", "multiplicity", "layers", "parameters", "sizes"])
def test_counts_below_one_are_refused(tmp_path, name, count):
    """A record on 0 clients would be charged for no number of its noise."""
    told = terms()
    if name == "parameters":
        told = replace(told, parameters=count)
    else:
        told = replace(told, setting=replace(told.setting, **{name: (count,) if name == "sizes" else count}))
    site = Site(Owner("site", tmp_path, some, bounds=WIDE))
    answer = site.answer(TERMS, Payload({"terms": told.text, "round": 0}))
    site.close()
    assert name in answer.values["refused"]
    assert f"must be >= 1, got {count}" in answer.values["refused"]


@pytest.mark.slow
def test_refused_terms_leave_no_mark_on_the_unit(tmp_path):
    """The owner names no unit: what is shown and limited is that of the terms that were agreed to."""
    refused, agreed = terms(budget__unit="client", per_step__noise=0.5), terms(budget__unit="record")
    said = []
    site = Site(Owner("site", tmp_path, some, Requirements(noise=1.0), bounds=WIDE), said.append)
    assert "refused" in site.answer(TERMS, Payload({"terms": refused.text, "round": 0})).values
    assert "agreed" in site.answer(TERMS, Payload({"terms": agreed.text, "round": 0})).values
    message = Payload(Request("run", agreed.digest, 0, RoundIndex(0, 1)).names, {"model": torch.zeros(650)})
    assert "refused" not in site.answer(ROUND, message).values
    site.close()
    assert ADJACENCIES["record"] in said[-1]


PLANNED = 1000


def sampled(run, noise=1.0, seed=None):
    """Terms under which 10 of 1,000 sites are sampled a round, which released models do not show."""
    said = {key: value for key, value in SAID.items() if key != "per_step.noise_multiplier"}
    said |= {
        "algorithm": "trusted-curator",
        "rounds": PLANNED,
        "per_round.noise_multiplier": noise,
        "data.clients": 1000,
    }
    said |= {"clients.sampling": "poisson", "clients.cohort": 10}
    told = terms()
    setting = replace(told.setting, clients=1000, rounds=PLANNED)
    return replace(told, run=run, config=to_toml(configure(said)), setting=setting, seed=seed)


def joined(folder, told, messages=(), requirements=None):
    """What a site answers that is started, joins and gets these messages."""
    site = Site(Owner("site", folder, some, requirements or Requirements()))
    found = [site.answer(TERMS, Payload({"terms": told.text, "round": 0}))]
    found += [site.answer(kind, message) for kind, message in messages]
    site.close()
    return found


def a_round(told, t=0):
    names = Request(told.run, told.digest, 0, RoundIndex(t, PLANNED)).names
    return ROUND, Payload(names, {"model": torch.zeros(650)})


def the_end(told, done):
    return END, Payload({"run": told.run, "terms": told.digest, "why": "rounds", "round": done})


def spent(folder):
    """Rounds in the ledger, and the client's epsilon."""
    with Ledger(folder / "ledger.jsonl") as ledger:
        event = ledger.charged_event("client", "release")
        return ledger.charged[-1].round, epsilon(event, 1e-5, adjacency="zero-out").epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("run", "noise"), [("two", 1.0), ("one", 8.0)], ids=["run", "terms"])
def test_a_run_whose_end_never_comes_is_charged_before_the_next(tmp_path, run, noise):
    """Of 1,000 rounds the site was asked in the first: being sampled by chance costs something in all of them."""
    first, other = sampled("one"), sampled(run, noise)
    assert not any("refused" in answer.values for answer in joined(tmp_path / "end", first, [a_round(first)]))
    assert spent(tmp_path / "end")[0] == 1
    joined(tmp_path / "end", first, [the_end(first, PLANNED)])
    joined(tmp_path / "lost", first, [a_round(first)])
    joined(tmp_path / "lost", first)  # a restart in between is no other run
    assert "agreed" in joined(tmp_path / "lost", other)[0].values
    assert spent(tmp_path / "lost") == spent(tmp_path / "end")
    joined(tmp_path / "lost", other, [a_round(other, 2)])
    assert spent(tmp_path / "lost")[0] == PLANNED + 3, "the other run is charged from its own beginning"


@pytest.mark.slow
def test_a_run_that_ended_early_is_charged_no_further(tmp_path):
    first, second = sampled("one"), sampled("two")
    joined(tmp_path, first, [a_round(first), the_end(first, 5)])
    assert "agreed" in joined(tmp_path, second)[0].values
    assert spent(tmp_path)[0] == 5


@pytest.mark.slow
def test_a_round_after_the_end_opens_the_run_again(tmp_path):
    first, second = sampled("one"), sampled("two")
    joined(tmp_path, first, [a_round(first), the_end(first, 5), a_round(first, 9)])
    joined(tmp_path, second)
    assert spent(tmp_path)[0] == PLANNED


def test_refused_terms_end_no_run(tmp_path):
    first = sampled("one")
    joined(tmp_path, first, [a_round(first)], Requirements(noise=1.0))
    assert "refused" in joined(tmp_path, sampled("two", noise=0.5), requirements=Requirements(noise=1.0))[0].values
    assert spent(tmp_path)[0] == 1


@pytest.mark.slow
def test_a_run_whose_end_never_came_counts_against_the_budget(tmp_path):
    """Whatever the owner allows by now: the rounds have been played."""
    first = sampled("one")
    joined(tmp_path, first, [a_round(first)])
    answer = joined(tmp_path, sampled("two"), requirements=Requirements(epsilon=1.5, unit="client"))[0]
    assert "owner's 1.5" in answer.values["refused"]
    count, found = spent(tmp_path)
    assert count == PLANNED
    assert found > 1.5


def test_what_is_left_of_a_seeded_run_is_charged_as_no_noise(tmp_path):
    joined(tmp_path, sampled("one", seed=3))
    joined(tmp_path, sampled("two"))
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.charged[-1].round == PLANNED
        assert any(isinstance(leaf, Unbounded) for leaf in leaves(ledger.charged_event("client", "release")))


@pytest.mark.slow
def test_an_open_run_whose_terms_are_lost_is_not_forgotten(tmp_path):
    first = sampled("one")
    joined(tmp_path, first, [a_round(first)])
    kept = (tmp_path / "terms.json").read_bytes()
    (tmp_path / "terms.json").unlink()
    assert joined(tmp_path, sampled("two"))[0].values["refused"] == INTERNAL_ERROR.format(site="the site")
    (tmp_path / "terms.json").write_bytes(kept)
    assert "agreed" in joined(tmp_path, sampled("two"))[0].values
    assert spent(tmp_path)[0] == PLANNED


@pytest.mark.slow
@pytest.mark.parametrize("clip", [math.nan, math.inf, 0.0, -1.0, 5e-324])
def test_a_clip_that_cannot_be_is_refused_before_it_is_charged(tmp_path, clip):
    _, wire = served(tmp_path, settings("geyer-private", clients__sampling="all", federation__seeded=False))
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0)))
    site.answer(TERMS, asked(wire, TERMS))
    message = asked(wire, ROUND)
    answer = site.answer(ROUND, Payload(message.values | {"clip": clip}, message.vectors))
    assert answer.values["refused"]
    site.close()
    with Ledger(tmp_path / "new" / "ledger.jsonl") as ledger:
        assert not ledger.charged


@pytest.mark.slow
def test_whatever_goes_wrong_in_a_letter_the_site_lives_and_says_nothing_of_it(replies, monkeypatch):
    site, first, message, told = replies
    site.answer(TERMS, first)

    def broken(*_):
        raise ZeroDivisionError("29.3 in row 7")

    monkeypatch.setattr(site, "_learn", broken)
    assert site.answer(ROUND, message).values["refused"] == INTERNAL_ERROR.format(site="site new")
    assert "ZeroDivisionError: 29.3 in row 7" in told[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "reason"),
    [
        (1.0, "its least noise multiplier for a client is 0, the owner requires 1"),
        (None, "each update reaches the server before any noise is added"),
    ],
)
def test_sites_refuse_a_method_that_shows_the_server_their_updates(tmp_path, noise, reason):
    wire = with_sites(tmp_path, 1, requirements=Requirements(noise=noise, observer="server"))
    (site,) = wire.sites.values()
    _, other = served(tmp_path / "other", curator(3))
    assert reason in site.answer(TERMS, asked(other, TERMS)).values["refused"]
    site.close()


def test_a_site_that_went_before_the_first_round_has_left_its_place(tmp_path):
    roster = Roster(tmp_path, 2, 3)
    assert roster.admit("a", "a", 1)
    assert roster.admit("b", "b", 2)
    assert roster.admit("c", "c", 3) is None
    assert len(roster.connected({1: "a"})) == 1
    assert roster.admit("c", "c", 3)
    roster.assign_numbers()
    roster.connected({3: "c"})
    assert roster.admit("d", "d", 4) is None, "one that has a number keeps it"


def test_data_that_are_not_there_are_told_of_before_anybody_is_called():
    with pytest.raises(ConfigError, match=r"--data nothere.csv: there is no such file"):
        reader("nothere.csv")
