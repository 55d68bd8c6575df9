"""A data owner's site-policy.toml: whatever is outside is refused by its line, before any record is read."""

import json
import re
import sys
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.accountants import epsilon
from shoal.accounting.events import Gaussian, Repeat
from shoal.accounting.privacy_ledger import Ledger
from shoal.cli.main import main
from shoal.config import configure, to_toml
from shoal.data import load
from shoal.errors import ConfigError
from shoal.federation.consent import Refused, Requirements
from shoal.federation.flower.apps import owner
from shoal.federation.key_files import authorities
from shoal.federation.key_making import make_authority
from shoal.federation.messages import Payload
from shoal.federation.policy_check import refusals
from shoal.federation.policy_file import policy_of, read_policy
from shoal.federation.secagg.encoding import KEYS
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import ROUND, TERMS, Terms
from shoal.federation.validation import Request
from shoal.mechanisms.setting import Setting
from shoal.training.round_index import RoundIndex
from support.federations import site_ledger
from support.paths import TESTS

NOISY = {
    "algorithm": "fed-sdp",
    "model": "linear",
    "rounds": 100,
    "data.name": "digits",
    "data.clients": 8,
    "clients.sampling": "all",
    "records.batch": 5,
    "local.steps": 2,
    "local.lr": 0.5,
    "per_update.clip_norm": 2.0,
    "per_update.at": "client",
    "per_update.noise_multiplier": 40.0,
    "engine.threads": 1,
    "engine.device": "cpu",
}
CURATOR = {key: value for key, value in NOISY.items() if not key.startswith("per_update")}
CURATOR |= {"algorithm": "trusted-curator", "per_round.noise_multiplier": 10.0}
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def terms(given=NOISY, **changes):
    config, digits = (
        configure(given | {key.replace("__", "."): value for key, value in changes.items()}),
        load("digits"),
    )
    setting = Setting(config.data.clients, config.rounds, all_answer=False)
    return Terms("run", to_toml(config), setting, digits.classes, digits.input_shape, 650, None)


def written(folder, *lines):
    path = folder / "site-policy.toml"
    path.write_text("\n".join(["# what we accept", *lines]) + "\n")
    return path


def unread(_terms):
    raise AssertionError("a record was read")


def site(folder, policy, records=unread, **more):
    return Site(Owner("north", folder / "own", records, policy.requirements, bounds=policy.bounds, **more))


def answer(here, offered):
    return here.answer(TERMS, Payload({"terms": offered.text, "round": 0})).values


def asked(here, offered, t=0):
    names = Request("run", offered.digest, 0, RoundIndex(t, offered.setting.rounds)).names
    return here.answer(ROUND, Payload(names, {"model": torch.zeros(650)}))


FORBIDDEN = [
    ("rounds = [1, 99]", "rounds is 100, this site accepts 1 to 99"),
    ("clients = [10, 100]", "data.clients is 8, this site accepts 10 to 100"),
    ("cohort = [9, 100]", "the expected cohort in round 1 of 100 is 8, this site accepts 9 to 100"),
    ("parameters = [1, 649]", "the model's number of parameters is 650, this site accepts 1 to 649"),
    ("clip_norm = [0.1, 1]", "per_update.clip_norm is 2, this site accepts 0.1 to 1"),
    ("lr = [1e-4, 0.4]", "local.lr is 0.5, this site accepts 0.0001 to 0.4"),
    ("steps = [1, 1]", "local.steps is 2, this site accepts 1 to 1"),
    ("batch = [8, 64]", "records.batch is 5, this site accepts 8 to 64"),
    ('methods = ["dp-sgd", "pfl"]', "the method is fed-sdp, this site accepts dp-sgd, pfl"),
    ("noise_multiplier = 200.0", "its least noise multiplier for a client is"),
    ('observer = "client-process"', "nothing is proven for a client against the client-process"),
    ("epsilon_per_run = 1.0", "the run's epsilon would exceed the owner's 1 (delta 1e-05)"),
    ("epsilon_per_month = 0.05", "the epsilon of 30 days would exceed the owner's 0.05 (delta 1e-05)"),
    ("epsilon_total = 0.05", "the total epsilon would exceed the owner's 0.05 (delta 1e-05)"),
]


@pytest.mark.parametrize(("line", "words"), FORBIDDEN, ids=[line.split()[0] for line, _ in FORBIDDEN])
def test_a_refusal_names_the_line_and_reads_no_record(tmp_path, line, words):
    policy = read_policy(written(tmp_path, "", f"{line}  # since May", 'unit = "client"'))
    here = site(tmp_path, policy)
    refused = answer(here, terms())["refused"]
    here.close()
    assert refused.startswith(words)
    assert refused.endswith(f" (site-policy.toml, line 3: {line})")
    assert refusals(policy, terms())[0] == refused, "the check says the same before"


def test_the_largest_parameter_of_a_model_is_bounded_too(tmp_path):
    policy = read_policy(written(tmp_path, "weight = [0, 10]"))
    with pytest.raises(Refused, match=re.escape("is 11, this site accepts 0 to 10 (site-policy.toml, line 2:")):
        policy.bounds.refuse_model(torch.tensor([1.0, -11.0]))


def test_terms_inside_a_policy_are_accepted(tmp_path):
    lines = ["epsilon_per_run = 3", "epsilon_per_month = 5", "epsilon_total = 9.5", 'methods = ["fed-sdp"]',
             'unit = "client"', 'observer = "server"', "rounds = [1, 100]", "cohort = [8, 8]"]  # fmt: skip
    policy = read_policy(written(tmp_path, *lines))
    assert refusals(policy, terms()) == []
    here = site(tmp_path, policy, reader("digits", part=0))
    assert "agreed" in answer(here, terms())
    here.close()


def test_a_check_tells_all_that_is_forbidden(tmp_path):
    policy = read_policy(written(tmp_path, "rounds = [1, 9]", "batch = [8, 9]", 'observer = "client-process"'))
    found = refusals(policy, terms(), authorities=["SHA256:x"])
    assert [re.search(r"line (\d)", line)[1] for line in found] == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("epsilon_per_day = 1", "line 2: epsilon_per_day = 1: there is no key 'epsilon_per_day'; did you mean"),
        ("rounds = 9", "rounds cannot be 9: it should be a list in brackets"),
        ("rounds = [9, 1]", "line 2: rounds = [9, 1]: it must be LOW:HIGH with 0 <= LOW <= HIGH, got 9:1"),
        ("epsilon_total = 0", "line 2: epsilon_total = 0 must be > 0, got 0"),
        ("delta = 1.0", "line 2: delta = 1.0 must be in (0, 1), got 1.0"),
        ("noise_multiplier = -1", "line 2: noise_multiplier = -1 must be >= 0"),
        ('observer = "anyone"', "observer cannot be 'anyone': it is one of release, server, client-process, none"),
        ('hours = ["8-18"]', "hours cannot be '8-18': write HH:MM-HH:MM"),
        ('hours = ["08:00-08:00"]', "start and end must differ"),
        ("methods = 3", "methods cannot be 3"),
        (
            "epsilon_per_run = 3",
            'line 2: epsilon_per_run = 3: for whom? Add unit = "record", unit = "user" or unit = "client"',
        ),
        ('noise_multiplier = 1\nunit = "client"\nobserver = "none"', 'It contradicts site-policy.toml, line 4'),
        ("[privacy]\ndelta = 1e-6", "site-policy.toml: there is no key 'privacy'"),
        ("rounds = ", "cannot be read: Invalid value (at line 2"),
    ],
)  # fmt: skip
def test_a_policy_that_means_nothing_is_refused(tmp_path, line, words):
    with pytest.raises(ConfigError, match=r"site-policy\.toml") as found:
        read_policy(written(tmp_path, line))
    assert words in str(found.value)


# ---------------------------------------------------------------- epsilon, by the site's own ledger


def ledger(folder, requirements, run="run", clock=lambda: NOON, method=None, setting=None):
    method, setting = method or configure(CURATOR).algorithm, setting or Setting(8, 10_000)
    return site_ledger(folder, method, setting, requirements, run=run, clock=clock)


def costs(rounds):
    """Of so many rounds of the curator: its sum with noise 10, and all sites take part."""
    return epsilon(Repeat(Gaussian(10.0), rounds), 1e-5).epsilon


def refusal(book, t):
    try:
        book.charge(range(0), t)
    except Refused as refused:
        return str(refused)
    return None


def rounds_until_refused(book, words):
    done = 0
    while (why := refusal(book, done)) is None:
        done += 1
    assert why.startswith(words)
    return done


def test_a_run_spends_its_own_cap_and_the_next_run_has_one_again(tmp_path):
    for run in ("one", "two"):
        book = ledger(tmp_path, Requirements(epsilon_per_run=1.0), run)
        done = rounds_until_refused(book, "the run's epsilon would exceed the owner's 1")
        book.close()
        assert costs(done) <= 1 < costs(done + 1)
    book = ledger(tmp_path, Requirements(epsilon_per_run=1.0), "two")
    assert rounds_until_refused(book, "the run's epsilon") == 0, "also after a restart"
    book.close()


def test_a_month_is_any_30_days(tmp_path):
    time = [datetime.now(UTC)]
    book = ledger(tmp_path, Requirements(epsilon_per_month=1.0), clock=lambda: time[0])
    words = "the epsilon of 30 days would exceed the owner's 1"
    done = rounds_until_refused(book, words)
    assert costs(done) <= 1 < costs(done + 1)
    time[0] += timedelta(days=29)
    assert rounds_until_refused(book, words) == 0
    time[0] += timedelta(days=2)
    book.charge(range(0), 0)
    book.close()
    time[0] -= timedelta(days=62)  # a clock that was set back forgives nothing
    book = ledger(tmp_path, Requirements(epsilon_per_month=1.0), clock=lambda: time[0])
    assert rounds_until_refused(book, words) == 0
    book.close()


@pytest.mark.slow
def test_a_clock_that_was_behind_while_rounds_were_charged_forgives_nothing(tmp_path, monkeypatch):
    class Behind(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - timedelta(days=40)

    book = ledger(tmp_path, Requirements(epsilon_per_month=1.0), clock=lambda: datetime.now(UTC))
    assert refusal(book, 0) is None
    monkeypatch.setattr("shoal.accounting.privacy_ledger.datetime", Behind)
    done = 1 + sum(refusal(book, t) is None for t in range(1, 20))
    book.close()
    assert costs(done) <= 1 < costs(done + 1)


def test_all_caps_hold_at_once_and_the_ledger_says_which_run_spent(tmp_path):
    caps = Requirements(epsilon=1.0, epsilon_per_month=2.0, epsilon_per_run=0.8)
    book = ledger(tmp_path, caps, "one")
    first = rounds_until_refused(book, "the run's epsilon")
    book.close()
    book = ledger(tmp_path, caps, "two")
    second = rounds_until_refused(book, "the total epsilon")
    book.close()
    assert costs(first) <= 0.8 < costs(first + 1)
    assert costs(first + second) <= 1 < costs(first + second + 1)
    with Ledger(tmp_path / "ledger.jsonl") as written_down:
        runs = [intent.run for intent in written_down.charged]
    assert runs == ["one"] * first + ["two"] * second


@pytest.mark.slow
def test_a_plan_that_exceeds_the_cap_of_a_run_is_refused_before_it_starts(tmp_path):
    fits = max(n for n in range(1, 60) if costs(n) <= 1)
    for rounds in (fits, fits + 1, 10**9):
        book = ledger(tmp_path, Requirements(epsilon_per_run=1.0), setting=Setting(8, rounds))
        words = "the run's epsilon would exceed the owner's 1 "
        with pytest.raises(Refused, match=words) if rounds > fits else nullcontext():
            book.agree()
        book.close()


def test_a_plan_is_judged_by_its_cheapest_round_and_by_how_often_a_site_is_sampled(tmp_path):
    """What is not certain to exceed the cap may start: every round is checked when it is charged."""
    linear = configure(CURATOR | {"per_round.noise_multiplier": "linear:1000:1"}).algorithm
    sampled = configure(
        NOISY | {"clients.sampling": "fixed-size", "clients.cohort": 1, "data.clients": 100}
    ).algorithm
    book = ledger(tmp_path, Requirements(epsilon_per_run=1.0), method=linear, setting=Setting(8, 100))
    book.agree()
    book.close()
    for clients, refused in ((100, False), (2, True)):
        required = Requirements(epsilon_per_run=1.0, observer="server")
        book = ledger(tmp_path, required, method=sampled, setting=Setting(clients, 100))
        with pytest.raises(Refused, match="the run's epsilon") if refused else nullcontext():
            book.agree()
        book.close()


def test_a_check_counts_what_the_sites_ledger_has_charged(tmp_path):
    policy = read_policy(written(tmp_path, "epsilon_total = 0.2", 'observer = "release"', 'unit = "client"'))
    offered = terms(CURATOR | {"per_round.noise_multiplier": 60.0})
    assert refusals(policy, offered) == []
    (tmp_path / "own").mkdir()
    book = ledger(tmp_path / "own", Requirements())
    book.charge(range(0), 0)
    (found,) = refusals(policy, offered, tmp_path / "own")  # the site is running
    book.close()
    assert found.startswith("the total epsilon would exceed the owner's 0.2")
    with pytest.raises(ConfigError, match="there is no ledger"):
        refusals(policy, offered, tmp_path / "elsewhere")


# ---------------------------------------------------------------- hours


@pytest.mark.parametrize(
    ("hours", "now", "open"),
    [
        ('["20:00-06:00"]', "12:00", False),
        ('["20:00-06:00"]', "23:30", True),
        ('["20:00-06:00"]', "05:59", True),
        ('["20:00-06:00"]', "06:00", False),
        ('["08:00-12:00", "13:00-18:00"]', "12:30", False),
        ('["08:00-12:00", "13:00-18:00"]', "13:00", True),
    ],
)
def test_a_site_trains_in_its_hours(tmp_path, hours, now, open):
    bounds = read_policy(written(tmp_path, f"hours = {hours}")).bounds
    when = datetime.fromisoformat(f"2026-03-01T{now}")
    if open:
        bounds.refuse_hour(when)
    else:
        with pytest.raises(Refused, match=rf"it is {now} here, .*line 2: hours"):
            bounds.refuse_hour(when)


@pytest.mark.slow
def test_outside_its_hours_a_site_agrees_to_terms_and_answers_no_round(tmp_path):
    policy, time = read_policy(written(tmp_path, 'hours = ["20:00-06:00"]')), [NOON]
    here = site(tmp_path, policy, reader("digits", part=0), clock=lambda: time[0])
    assert "agreed" in answer(here, terms())
    words = (
        'it is 12:00 here, this site trains from 20:00 to 06:00 (site-policy.toml, line 2: hours = ["20:00-06:00"])'
    )
    assert asked(here, terms()).values["refused"] == words
    time[0] += timedelta(hours=9)
    assert asked(here, terms()).vectors["update"].shape == (650,)
    here.close()
    with Ledger(tmp_path / "own" / "ledger.jsonl") as charged:
        assert len(charged.charged) == 1


def test_nor_does_it_begin_a_secure_round(tmp_path, monkeypatch):
    policy = read_policy(written(tmp_path, 'hours = ["20:00-06:00"]', 'observer = "none"'))
    here = site(tmp_path, policy, reader("digits", part=0), clock=lambda: NOON)
    offered = terms()
    assert "agreed" in answer(here, offered)
    monkeypatch.setattr(here, "_secure", object())
    names = Request("run", offered.digest, 0, RoundIndex(0, 100), KEYS).names
    assert here.answer(KEYS, Payload(names)).values["refused"].startswith("it is 12:00 here")
    here.close()


# ---------------------------------------------------------------- who may ask, and the defaults


def test_only_the_named_coordinators_may_ask(tmp_path):
    make_authority(tmp_path / "ours", ["127.0.0.1"], 5)
    make_authority(tmp_path / "theirs", ["127.0.0.1"], 5)
    ours, theirs = (authorities(tmp_path / name / "ca.pem") for name in ("ours", "theirs"))
    policy = read_policy(written(tmp_path, f'coordinators = ["{ours[0]}"]'))
    policy.refuse_coordinator(ours)
    for others in (theirs, ours + theirs):
        with pytest.raises(Refused, match=rf"{re.escape(theirs[0])} of --ca may not ask \(site-policy.toml, line 2"):
            policy.refuse_coordinator(others)
    with pytest.raises(Refused, match="without TLS anyone could be the coordinator"):
        policy.refuse_coordinator([])
    read_policy(written(tmp_path)).refuse_coordinator([])
    with pytest.raises(ConfigError, match="only `shoal join` checks who the coordinator is"):
        owner({"data": "digits", "policy": str(written(tmp_path, "coordinators = []"))})


def test_without_a_policy_a_guarantee_against_the_server_is_required(tmp_path):
    offered = terms(CURATOR)
    here = site(tmp_path, policy_of())
    refused = answer(here, offered)["refused"]
    here.close()
    assert "nothing is proven for a client against the server: each update reaches the server" in refused
    assert "to trust the coordinator: --against release; to accept anything: --no-guarantee" in refused
    assert refusals(policy_of(), terms()) == [], "noise that the site adds itself is enough"
    assert refusals(policy_of(against="release"), offered) == []
    plain = terms({key: value for key, value in NOISY.items() if "per_update" not in key} | {"algorithm": "fedavg"})
    assert "nothing is proven" in refusals(policy_of(against="release"), plain)[0]
    assert refusals(policy_of(no_guarantee=True), plain) == []
    with pytest.raises(ConfigError, match="contradict each other"):
        policy_of(no_guarantee=True, epsilon=3.0)
    for option in ("epsilon", "noise"):
        with pytest.raises(ConfigError, match=f"--require-{option} 3: for whom"):
            policy_of(**{option: 3.0})
        assert policy_of(**{option: 3.0}, unit="record").requirements.unit == "record"


def test_a_policy_without_an_observer_means_the_server_and_none_must_be_written(tmp_path):
    offered = terms(CURATOR)
    (found,) = refusals(read_policy(written(tmp_path, "rounds = [1, 200]")), offered)
    assert found.endswith("(site-policy.toml names no observer, so it is the server)")
    assert refusals(read_policy(written(tmp_path, 'observer = "none"')), offered) == []


def test_flowers_own_nodes_have_the_same_defaults(tmp_path):
    given = {"data": "digits", "folder": str(tmp_path)}
    assert owner(given).requirements == policy_of().requirements
    assert not owner(given | {"no-guarantee": True}).requirements.any
    path = written(tmp_path, "epsilon_total = 3.5", "lr = [0, 1]", 'unit = "record"')
    found = owner(given | {"policy": str(path)})
    assert (found.requirements.epsilon, found.bounds.lr) == (3.5, (0, 1))


# ---------------------------------------------------------------- the command line


def shoal(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        main()
    said = capsys.readouterr()
    return done.value.code, said.out + said.err


@pytest.mark.slow
def test_the_command_writes_terms_and_checks_them(tmp_path, monkeypatch, capsys):
    config, file = TESTS.parent / "examples" / "federation.toml", tmp_path / "terms.toml"
    code, said = shoal(monkeypatch, capsys, "policy", "terms", config, "-o", file, "-c", "engine.device=cpu")
    assert code == 0, said
    policy = written(tmp_path, 'observer = "release"')
    assert shoal(monkeypatch, capsys, "policy", "check", policy, file) == (0, f"{file} is accepted by {policy}\n")
    policy = written(tmp_path, 'observer = "release"', "rounds = [1, 3]")
    code, said = shoal(monkeypatch, capsys, "policy", "check", policy, file, "--json")
    line = "rounds is 20, this site accepts 1 to 3 (site-policy.toml, line 3: rounds = [1, 3])"
    assert (code, json.loads(said)) == (1, {"accepted": False, "refused": [line]})
    code, said = shoal(monkeypatch, capsys, "policy", "check", policy, config)
    assert (code, said.startswith("shoal: these are not terms of `shoal policy terms`")) == (2, True)


def test_terms_in_a_file_are_the_terms_that_are_sent():
    for each in (terms(), terms(data__label="gr\u00f6\u00dfe '''")):
        assert Terms.from_toml(each.to_toml()).digest == each.digest


def test_a_policy_stands_alone_on_the_command_line(tmp_path, monkeypatch, capsys):
    policy = written(tmp_path, 'coordinators = ["SHA256:none"]')
    join = ["join", "localhost", "--data", "digits", "--policy", policy, "--folder", tmp_path / "own"]
    code, said = shoal(monkeypatch, capsys, *join, "--require-noise", "1")
    problem = f"--policy and --require-noise contradict each other: write it into {policy}\n"
    assert (code, said.endswith(f" ERROR {problem}")) == (2, True), said
    code, said = shoal(monkeypatch, capsys, *join)
    assert (code, "without TLS anyone could be the coordinator" in said) == (2, True)
    assert not (tmp_path / "own").exists()
