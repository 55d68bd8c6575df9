"""What a site's owner insists on: the site refuses by its own ledger, whatever the coordinator says."""

import json
import math
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal import release
from shoal.accounting import privacy_ledger
from shoal.accounting.accountants import epsilon
from shoal.accounting.calibration import Budget
from shoal.accounting.dominating import dominating
from shoal.accounting.events import Compose, Gaussian, Repeat, Sampled, Unbounded
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.privacy_ledger import Charge, Ledger, Record, verify
from shoal.accounting.rdp import Running
from shoal.algorithms import algorithm
from shoal.algorithms.charges import event as round_event
from shoal.algorithms.charges import whole_run
from shoal.config import configure, to_toml
from shoal.data import load
from shoal.errors import ConfigError, LedgerError, RunError
from shoal.federation import consent
from shoal.federation.consent import Refused, Requirements, SiteLedger, least_noise
from shoal.federation.coordinator import _charged_before
from shoal.federation.federated_run import serve
from shoal.federation.messages import Payload
from shoal.federation.site import INTERNAL_ERROR, Owner, Site
from shoal.federation.site_progress import Progress
from shoal.federation.site_records import reader
from shoal.federation.terms import END, FOLDER_OLD, OLDER_COPY, ROUND, TERMS, Terms
from shoal.federation.validation import Request
from shoal.mechanisms.correlated import Correlated
from shoal.mechanisms.gaussian import Gaussian as GaussianNoise
from shoal.mechanisms.sampling import PoissonClients
from shoal.mechanisms.setting import Setting
from shoal.random import secure_streams
from shoal.result import Interrupted
from shoal.training import run_folder
from shoal.training.round_index import RoundIndex
from shoal.training.run_folder import CHECKPOINT
from support.federations import BAD, asked, curator, end_of, served, settings, site_ledger
from support.loopback import with_sites


def charged(folder):
    """Rounds in the ledger of a site, and what they cost."""
    _, ledger = Record.read(folder / "ledger.jsonl")
    rounds = sum(intent.round - intent.first + 1 for intent in ledger.charged)
    return rounds, ledger.charged_event("client", "release")


@pytest.mark.slow
def test_a_site_leaves_when_its_own_budget_ends(tmp_path):
    """Epsilon 4 at delta 1e-5 pays for two rounds of noise 1.633: a third costs 4.66 (PLD)."""
    assert epsilon(Repeat(Gaussian(1.633), 2), 1e-5).epsilon < 4 < epsilon(Repeat(Gaussian(1.633), 3), 1e-5).epsilon
    grid = with_sites(tmp_path, 4)
    strict = grid.sites[102]
    strict.owner = Owner("site-02", strict.owner.folder, strict.owner.records, Requirements(epsilon=4.0))
    result, _ = served(tmp_path, curator(5), grid)
    assert [line["clients"] for line in result.metrics] == [4, 4, 3, 3, 3]
    assert [line["asked"] for line in result.metrics][:3] == [4, 4, 4], "later it is asked now and then"
    assert "owner's 4" in result.metrics[2]["reports"][0]["why"]
    assert charged(tmp_path / "site-2")[0] == 2
    assert charged(tmp_path / "site-1")[0] == 5


@pytest.mark.slow
def test_the_budget_is_of_all_runs_together(tmp_path):
    requirements = Requirements(epsilon=4.0)
    for turn, answered in enumerate((1, 1, 0)):
        grid = with_sites(tmp_path, 4, requirements=requirements)
        told = []
        if answered:
            result, _ = served(tmp_path / str(turn), curator(1), grid)
            assert [line["clients"] for line in result.metrics] == [4]
        else:
            ledger = site_ledger(tmp_path / "site-0", *plan(1.633), requirements, site="site-00")
            with pytest.raises(Refused, match="owner's 4"):
                ledger.agree()
            ledger.close()
        assert not told
    count, event = charged(tmp_path / "site-0")
    assert count == 2
    assert epsilon(event, 1e-5).epsilon == pytest.approx(epsilon(Repeat(Gaussian(1.633), 2), 1e-5).epsilon, rel=1e-6)


def plan(noise, name="trusted-curator", clients=4, rounds=3):
    given = {"algorithm": name, "clients.sampling": "all", "per_round.noise_multiplier": noise}
    return configure(given).algorithm, Setting(clients, rounds)


@pytest.mark.parametrize(
    ("requirements", "name", "noise", "words"),
    [
        (Requirements(noise=2.0), "trusted-curator", 1.633, "least noise multiplier for a client is 1.633"),
        (Requirements(noise=1.5), "trusted-curator", "linear:2:1", "least noise multiplier for a client is 1.33333"),
        (Requirements(epsilon=8.0, observer="server"), "trusted-curator", 1.633, "each update reaches the server"),
        (Requirements(epsilon=0.1), "trusted-curator", 1.633, "owner's 0.1"),
        (Requirements(epsilon=8.0), "geyer", 1.2, "median"),
    ],
)
def test_a_plan_with_less_than_was_agreed_is_refused(tmp_path, requirements, name, noise, words):
    ledger = site_ledger(tmp_path, *plan(noise, name), requirements)
    with pytest.raises(Refused, match=words):
        ledger.agree()
    assert ledger.rounds == 0
    ledger.close()


def test_a_budget_on_which_no_theorem_bounds_an_earlier_run_pays_for_nothing_more(tmp_path):
    """What an earlier version charged for a method of another package."""
    site_ledger(tmp_path, *plan(1.633)).close()
    with Ledger(tmp_path / "ledger.jsonl") as before:
        before.intend(1, [Charge("client", "release", Sampled("shuffled", 0.1, Gaussian(50.0)), "zero-out")])
    ledger = site_ledger(tmp_path, *plan(1.633), Requirements(epsilon=50.0))
    assert ledger.epsilon() is None
    with pytest.raises(Refused, match="owner's 50"):
        ledger.agree()
    ledger.close()


def test_noise_that_follows_from_a_seed_is_none(tmp_path):
    ledger = site_ledger(tmp_path, *plan(1.633), Requirements(noise=0.1), seeded=True)
    with pytest.raises(Refused, match="follows from a seed"):
        ledger.agree()
    ledger.close()


def test_the_least_noise_is_that_of_the_unit():
    setting = Setting(100, 3, layers=4, sizes=(100,))
    assert least_noise(algorithm("fedavg"), setting, "client") == 0
    assert least_noise(algorithm("trusted-curator"), setting, "client") == 1.633
    assert least_noise(algorithm("end-to-end-private"), setting, "client") == 1.633
    assert least_noise(algorithm("end-to-end-private"), setting, "record") == 4.0
    assert least_noise(algorithm("fed-cdp"), setting, "record") == 3.0  # 6, but a gradient of 4 layers may be 2 C
    assert least_noise(algorithm("fed-cdp"), setting, "client") == 0
    assert least_noise(algorithm("fed-cdp"), setting, "user") == 0  # who may have any number of records
    capped = replace(algorithm("fed-cdp"), records=replace(algorithm("fed-cdp").records, max_per_user=4))
    assert least_noise(capped, setting, "user") == 0.75
    assert least_noise(algorithm("fed-sdp"), setting, "client") == 6.0


def test_the_least_noise_is_that_of_any_round_where_no_schedule_says_it():
    lower = {"multiplier": lambda self, t, total: 2.0 / (1 + t % 2), "noise_schedule": GaussianNoise.noise_schedule}
    record = replace(algorithm("trusted-curator"), per_round=type("Lower", (GaussianNoise,), lower)())
    assert least_noise(record, Setting(100, 3), "client") == 1


def test_noise_that_the_coordinator_adds_does_not_count_against_itself(tmp_path):
    setting = Setting(100, 3, layers=4, sizes=(100,))
    assert least_noise(algorithm("end-to-end-private"), setting, "client", "server") == 0
    assert least_noise(algorithm("end-to-end-private"), setting, "record", "server") == 4.0
    assert least_noise(algorithm("fed-sdp"), setting, "client", "server") == 6.0
    shared = configure({"algorithm": "trusted-curator", "per_round.at": "shared"}).algorithm
    assert least_noise(shared, setting, "client", "server") == 1.633
    asked = Requirements(noise=1.5, unit="client", observer="server")
    ledger = site_ledger(tmp_path, algorithm("end-to-end-private"), setting, asked)
    with pytest.raises(Refused, match="least noise multiplier for a client is 0,"):
        ledger.agree()
    ledger.close()


def test_a_site_is_charged_for_the_records_that_it_has(tmp_path):
    """The federation is for sites of 20 to 2,600 records: this one has 100, and is charged for that."""
    method = configure({"algorithm": "dp-sgd", "records.batch": 20, "per_step.noise_multiplier": 8.0}).algorithm
    terms = Setting(12, 3, sizes=(20, 2600), bounds=True, all_answer=False)
    own = site_ledger(tmp_path, method, terms, Requirements(unit="record"), records=100)
    own.charge(range(1), 1)
    own.close()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        here = replace(terms, sizes=(100,), bounds=False)
        expected = Compose(tuple(round_event(method, here, t, "record", "release") for t in (0, 1)))
        assert ledger.charged_event("record", "release") == expected
        assert ledger.charged_event("client", "release") == Compose(
            tuple(round_event(method, terms, t, "client", "release") for t in (0, 1))
        )


@pytest.mark.parametrize(
    "wrong",
    [{"epsilon": 0.0}, {"epsilon": math.nan}, {"noise": -1.0}, {"noise": math.nan}, {"delta": 0.0}, {"delta": 1.0}],
)
def test_wishes_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match="--require-"):
        Requirements(**wrong)


@pytest.fixture
def replies(tmp_path):
    """The messages of an earlier run, and a new site that has agreed to its terms."""
    _, grid = served(tmp_path, curator(3))
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0)))
    yield site, asked(grid, TERMS), asked(grid, ROUND)
    site.close()


@pytest.mark.slow
def test_every_round_asked_for_is_charged_and_those_between(replies, tmp_path):
    site, terms, message = replies
    site.answer(TERMS, terms)
    for t, so_far in ((0, 1), (0, 2), (2, 4), (2, 5), (1, 6)):
        answer = site.answer(ROUND, Payload(message.values | {"round": t}, message.vectors))
        assert "refused" not in answer.values
        site.close()
        assert charged(tmp_path / "new")[0] == so_far
        site = Site(site.owner)  # a restart forgets nothing
    assert verify(tmp_path / "new" / "ledger.jsonl").whole


@pytest.mark.slow
def test_the_end_of_a_run_charges_the_rounds_since_the_last_one_asked_for(replies, tmp_path):
    site, terms, message = replies
    site.answer(TERMS, terms)
    site.answer(ROUND, message)
    site.close()
    site = Site(site.owner)
    said = end_of(message, round=3)
    assert "refused" not in site.answer(END, Payload(said)).values
    assert site.ended == "rounds"
    site.answer(END, Payload(said))
    site.close()
    assert charged(tmp_path / "new")[0] == 3


def test_the_least_noise_is_that_of_the_round_that_costs_most():
    """c = 1, 1 and noise that falls from 10 to 1.9: the last round but one costs as much as noise of 1.57."""
    noise = Correlated("linear:10:1", bands=2, factorisation="banded", numbers=(1.0, 1.0))
    found = least_noise(replace(algorithm("dp-ftrl"), per_round=noise), Setting(100, 10), "client")
    assert found == pytest.approx((2.8**-2 + 1.9**-2) ** -0.5)


@pytest.mark.slow
def test_rounds_that_are_run_again_without_the_site_are_charged_too(replies, tmp_path):
    """Round 1 runs three times, and the site is in the first and the last; round 2 twice, and it is in neither."""
    site, terms, message = replies
    site.answer(TERMS, terms)
    asks = [({"round": 0}, 1), ({"round": 0, "attempt": 2, "repeats": 2}, 3), ({"round": 2, "repeats": 3}, 6)]
    for changes, so_far in asks:
        assert "refused" not in site.answer(ROUND, Payload(message.values | changes, message.vectors)).values
        site.close()
        assert charged(tmp_path / "new")[0] == so_far
        site = Site(site.owner)
    said = end_of(message, round=3)
    for _ in range(2):
        site.answer(END, Payload(said | {"repeats": 4}))  # round 3, after the site's own part in it
    site.close()
    rounds, event = charged(tmp_path / "new")
    assert rounds == sum(without_sampler(leaves(event))[0].values()) == 7


@dataclass(frozen=True)
class OwnCharge(PoissonClients):
    """A plug-in's sampling that charges by itself, and does not say by which rounds."""

    sampling: str = "own-charge"

    def charged(self, event_at, t, total, clients, unit, again):
        return event_at(t)


def hidden(folder, sampling, rounds, cohort):
    """The terms of a run that hides who takes part, and the first message of a round."""
    _, grid = served(folder, curator(rounds) | {"clients.sampling": sampling, "clients.cohort": cohort})
    rounds = (payload for to, _, kind, payload in grid.wire if (to, kind) == ("to", ROUND))
    return asked(grid, TERMS), next(rounds)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "own-charge"])
def test_a_round_run_again_is_charged_twice_whoever_charges(tmp_path, sampling):
    """Round 2 is begun without the site, which may have been drawn, and then with it; round 1 is charged once."""
    terms, message = hidden(tmp_path, sampling, 4, 2)
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0)))
    site.answer(TERMS, terms)
    said = message.values | {"round": 1, "attempt": 1, "repeats": 1}
    assert "refused" not in site.answer(ROUND, Payload(said, message.vectors)).values
    site.close()
    assert charged(tmp_path / "new")[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["random-allocation", "own-charge"])
@pytest.mark.parametrize("away", [True, False])
def test_a_folder_from_before_the_last_answer_is_refused_also_within_a_block(tmp_path, sampling, away):
    """The site joins in round 5 of blocks of four, and answers round 6. One that was in another run goes on."""
    terms, message = hidden(tmp_path, sampling, 8, 1)
    folder, copy = tmp_path / "new", tmp_path / "copy"
    site = Site(Owner("new", folder, reader("digits", part=0)))
    site.answer(TERMS, Payload(terms.values | {"round": 4}))
    shutil.copytree(folder, copy)
    assert "refused" not in site.answer(ROUND, Payload(message.values | {"round": 5}, message.vectors)).values
    site.close()
    site = Site(site.owner)
    if away:
        other = replace(Terms.read(terms.text("terms"), ()), run="another")
        assert "agreed" in site.answer(TERMS, Payload({"terms": other.text, "round": 0})).values
        site.close()
        site = Site(site.owner)
    else:
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
    answer = site.answer(TERMS, Payload(terms.values | {"round": 6, "member": 1, "answered": 6})).values
    assert answer.get("refused") == (None if away else FOLDER_OLD)
    if away:
        said = message.values | {"round": 7, "answered": 6}
        assert site.answer(ROUND, Payload(said, message.vectors)).values.get("refused") is None
    site.close()


@pytest.mark.slow
def test_an_end_charges_all_repeats_that_the_budget_pays_for(replies, tmp_path):
    """Five of six: half of them is not enough."""
    site, terms, message = replies
    site.owner = replace(
        site.owner, requirements=Requirements(epsilon=1.001 * epsilon(Repeat(Gaussian(1.633), 5), 1e-5).epsilon)
    )
    site.answer(TERMS, terms)
    said = end_of(message, round=0)
    assert "refused" not in site.answer(END, Payload(said | {"repeats": 6})).values
    site.close()
    assert charged(tmp_path / "new")[0] == 5


@pytest.mark.slow
@pytest.mark.parametrize("said", [{"round": 3}, {"round": 1, "repeats": 2}])
@pytest.mark.parametrize("most", [3.5, 4.5])
def test_rounds_run_while_the_owner_required_less_are_charged_whatever_the_new_budget_pays_for(
    replies, tmp_path, said, most
):
    """Epsilon 3.5 pays for one round, 4.5 for two: the site, restarted with these, may have been drawn before."""
    site, terms, message = replies
    site.answer(TERMS, terms)
    site.answer(ROUND, message)
    site.close()
    site = Site(replace(site.owner, requirements=Requirements(epsilon=most)))
    assert "refused" not in site.answer(END, Payload(end_of(message, **said))).values
    answer = site.answer(ROUND, Payload(message.values | {"round": 2}, message.vectors))
    assert f"owner's {most}" in answer.values["refused"], "and nothing more leaves the site"
    site.close()
    assert charged(tmp_path / "new")[0] == 3


@pytest.mark.slow
def test_rounds_that_are_over_are_charged_whatever_the_month_pays_for(replies, tmp_path):
    """Epsilon 4 pays for two rounds of noise 1.633, but these may have been in four months."""
    site, terms, message = replies
    site.owner = replace(site.owner, requirements=Requirements(epsilon_per_month=4.0))
    site.answer(TERMS, terms)
    assert "refused" not in site.answer(END, Payload(end_of(message, round=3, repeats=1))).values
    answer = site.answer(ROUND, message)
    assert "owner's 4" in answer.values["refused"], "and nothing more leaves the site in this month"
    site.close()
    assert charged(tmp_path / "new")[0] == 4


@pytest.mark.slow
def test_an_end_charges_repeats_by_the_rounds_that_the_budget_paid_for(tmp_path):
    """It pays for the first round four times, and not once for both: those run again were the first, and cheap."""
    _, grid = served(tmp_path, curator(2, "linear:4:0.2"))
    cap = 1.01 * epsilon(Repeat(Gaussian(4.0), 4), 1e-5).epsilon
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0), Requirements(epsilon=cap)))
    site.answer(TERMS, asked(grid, TERMS))
    message = asked(grid, ROUND)
    assert "refused" in site.answer(ROUND, Payload(message.values | {"round": 1}, message.vectors)).values
    site.answer(END, Payload(end_of(message, round=2, repeats=3)))
    site.close()
    assert charged(tmp_path / "new")[0] == 4


def limited(folder, rounds, noise, *most):
    """A site whose budget pays for rounds of this noise and no more, and the messages of a run."""
    _, grid = served(folder, curator(rounds, noise))
    cap = 1.001 * epsilon(Compose(tuple(map(Gaussian, most))), 1e-5).epsilon
    site = Site(Owner("new", folder / "new", reader("digits", part=0), Requirements(epsilon=cap)))
    return site, asked(grid, TERMS), asked(grid, ROUND), cap


def again(message, t, repeats):
    return Payload(message.values | {"round": t, "attempt": 1, "repeats": repeats}, message.vectors)


@pytest.mark.slow
def test_repeats_of_which_the_cheap_ones_may_have_spent_the_budget_spend_it(tmp_path):
    """It pays for both rounds and for the cheap one again, not for the other: it may have been in that one."""
    site, terms, message, cap = limited(tmp_path, 2, "linear:4:1", 4.0, 2.5, 4.0)
    site.answer(TERMS, terms)
    said = end_of(message, round=2, repeats=2)
    for _ in range(2):  # it spends the budget once
        site.answer(END, Payload(said))
    site.close()
    rounds, event = charged(tmp_path / "new")
    assert rounds == 3
    assert epsilon(event, 1e-5).epsilon > cap


@pytest.mark.slow
def test_a_site_answers_no_round_again_where_those_that_have_begun_spend_its_budget(tmp_path):
    """Three rounds, in each of which it may have been, spend all of it. The first, run again, would be a fourth."""
    site, terms, message, _ = limited(tmp_path, 3, 2.0, 2.0, 2.0, 2.0)
    site.answer(TERMS, terms)
    site.answer(TERMS, Payload(terms.values | {"charged": 3}))
    assert "would exceed" in site.answer(ROUND, again(message, 0, 1)).values["refused"]
    site.close()
    assert charged(tmp_path / "new")[0] == 3


@pytest.mark.slow
def test_an_end_first_charges_the_rounds_that_never_were(tmp_path):
    """Two costly rounds are charged, and two cheap ones not, when the first is run again, and the run ends."""
    site, terms, message, _ = limited(tmp_path, 4, "linear:1:4", 1.0, 1.75, 2.5, 3.25, 1.0)
    site.answer(TERMS, terms)
    site.answer(ROUND, Payload(message.values | {"round": 1}, message.vectors))
    site.answer(TERMS, Payload(terms.values | {"charged": 4}))
    assert "refused" not in site.answer(ROUND, again(message, 0, 1)).values
    site.answer(END, Payload(end_of(message, round=4, repeats=1)))
    site.close()
    rounds, event = charged(tmp_path / "new")
    assert rounds == 5
    noise = {round(leaf.noise, 2) for leaf in without_sampler(leaves(event))[0]}
    assert noise == {1.0, 1.75, 2.5, 3.25}


class Killed(BaseException):
    """The site's process ends here."""


def kill(file, raw):
    raise Killed


@pytest.mark.slow
def test_a_site_killed_between_two_lines_charges_the_rest_and_nothing_twice(tmp_path, monkeypatch):
    """The budget pays for a cheap round and a costly one, not for the cheap one twice and then the other."""
    site, terms, message, _ = limited(tmp_path, 2, "linear:4:1", 4.0, 2.5)
    site.answer(TERMS, terms)
    write, lines = privacy_ledger._write_all, []

    def killed_at_the_second(file, raw):
        lines.append(raw)
        if len(lines) == 2:
            raise Killed
        write(file, raw)

    monkeypatch.setattr(privacy_ledger, "_write_all", killed_at_the_second)
    said = Payload(end_of(message, round=2))
    with pytest.raises(Killed):
        site.answer(END, said)
    site.close()
    monkeypatch.undo()
    site = Site(site.owner)
    assert "refused" not in site.answer(END, said).values
    site.close()
    noise = Counter(
        round(leaf.noise, 2) for leaf in leaves(charged(tmp_path / "new")[1]) if isinstance(leaf, Gaussian)
    )
    assert noise == {4.0: 1, 2.5: 1}


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_rounds_run_again_one_after_the_other_are_charged_once_more_each(replies, tmp_path, ends):
    """The coordinator goes back from round 3 to round 1, and the site is in both again, or in the first of them."""
    site, terms, message = replies
    site.answer(TERMS, terms)
    for t in (0, 1):
        site.answer(ROUND, Payload(message.values | {"round": t}, message.vectors))
    site.answer(TERMS, Payload(terms.values | {"charged": 2}))
    assert "refused" not in site.answer(ROUND, again(message, 0, 1)).values
    found = site.answer(END, Payload(end_of(message, round=2, repeats=2))) if ends else None
    found = found or site.answer(ROUND, again(message, 1, 2))
    assert "refused" not in found.values
    site.close()
    assert charged(tmp_path / "new")[0] == 4


@pytest.mark.slow
def test_repeats_are_charged_though_their_month_pays_for_no_more_and_count_in_that_month_alone(
    replies, tmp_path, monkeypatch
):
    """Epsilon 4 pays for two rounds a month: one is run three times, and the next is for next month."""
    site, terms, message = replies
    time = [datetime(2026, 1, 1, tzinfo=UTC)]
    monkeypatch.setattr(privacy_ledger, "datetime", SimpleNamespace(now=lambda _zone: time[0]))
    site.owner = replace(site.owner, requirements=Requirements(epsilon_per_month=4.0), clock=lambda: time[0])
    site.answer(TERMS, terms)
    site.answer(ROUND, message)
    later = Payload(message.values | {"round": 1, "repeats": 2}, message.vectors)
    for answers in (False, True):
        assert ("refused" not in site.answer(ROUND, later).values) == answers
        assert charged(site.owner.folder)[0] == 3 + answers
        time[0] += timedelta(days=31)
    site.close()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_what_an_earlier_version_left_to_charge_is_charged(replies, tmp_path, monkeypatch, killed):
    """It kept progress.json beside a ledger that does not say how far the site is; also if `killed` between the two,
    and this version in its first message."""
    site, terms, message = replies
    site.answer(TERMS, terms)
    site.close()
    folder, digest = tmp_path / "new", json.loads((tmp_path / "new" / "compared.json").read_text())["terms"]
    (folder / "ledger.jsonl").unlink()
    (folder / "head.json").unlink()
    with Ledger(folder / "ledger.jsonl") as ledger:
        ledger.begin("new", "every run that this site took part in", "", note=release.SITE)
        before = ledger.head
        ledger.intend(1, [Charge("client", "release", Gaussian(1.633), "zero-out")], run=message.text("run"))
        kept = {"run": message.text("run"), "terms": digest, "next": 1, "furthest": 1, "ended": False, "records": 360}
        (folder / "progress.json").write_text(json.dumps(kept | {"ledger": before if killed else ledger.head}))
    site, said = Site(site.owner), Payload(end_of(message, round=3))
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(privacy_ledger, "_write_all", kill)
            with pytest.raises(Killed):
                site.answer(END, said)
        site.close()
        site = Site(site.owner)
    assert "refused" not in site.answer(END, said).values
    site.close()
    assert charged(folder)[0] == 3
    assert not (folder / "progress.json").exists()


@pytest.mark.parametrize("found", ["", "[]", "{"])
def test_a_damaged_hash_beside_the_ledger_is_named(replies, tmp_path, found):
    site, terms, _ = replies
    site.answer(TERMS, terms)
    site.close()
    (tmp_path / "new" / "head.json").write_text(found)
    told = []
    site = Site(site.owner, told.append)
    assert "refused" in site.answer(TERMS, terms).values
    site.close()
    assert "head.json is damaged; restore it and the ledger from the latest copy" in told[-1]


@pytest.mark.parametrize("found", ["", "[]", "{", "{}"])
def test_damaged_terms_of_a_site_are_named_and_nothing_is_charged_until_its_run_is_resumed(replies, tmp_path, found):
    site, terms, message = replies
    site.answer(TERMS, terms)
    site.close()
    (tmp_path / "new" / "terms.json").write_text(found)
    told = []
    site = Site(site.owner, told.append, joins=False)
    assert site.answer(ROUND, message).values["refused"] == INTERNAL_ERROR.format(site="the site")
    assert "terms.json is damaged or of another version of Shoal; restore it" in told[-1]
    assert charged(tmp_path / "new")[0] == 0
    assert "agreed" in site.answer(TERMS, terms).values
    assert "refused" not in site.answer(ROUND, message).values
    site.close()


@pytest.mark.parametrize("found", ["", "[]", "{", "{}"])
def test_damaged_names_of_the_last_terms_are_named_until_the_site_joins_again(replies, tmp_path, found):
    site, terms, _ = replies
    site.answer(TERMS, terms)
    site.close()
    (tmp_path / "new" / "compared.json").write_text(found)
    with pytest.raises(LedgerError, match=r"new/compared\.json is damaged; remove it, or join again"):
        Site(site.owner, joins=False)
    assert "agreed" in Site(site.owner).answer(TERMS, terms).values


def test_rounds_are_charged_in_the_order_in_which_they_ran(tmp_path):
    """The coordinator goes back to the cheap round; the budget pays for both rounds, or for the cheap one twice."""
    chosen = {"clients.sampling": "poisson", "clients.cohort": 2, "per_round.noise_multiplier": "linear:4:1"}
    method, setting = configure({"algorithm": "trusted-curator", **chosen}).algorithm, Setting(4, 3)
    costs = [round_event(method, setting, t, "client", "release") for t in (0, 1)]
    most = [epsilon(Compose(tuple(spent)), 1e-5).epsilon for spent in ((costs[0], costs[1]), (costs[0], *costs))]
    ledger = site_ledger(tmp_path, method, setting, Requirements(epsilon=sum(most) / 2))
    ledger.charge(range(1), progress=Progress(next=0, begun=1, charged=1))
    assert ledger.catch_up(range(1), 2, 1) == "epsilon"
    ledger.close()
    assert charged(tmp_path)[1] == Compose((costs[0], costs[0]))


def test_rounds_that_are_missed_are_charged_for_the_records_of_then_and_of_now(tmp_path):
    """A record of a smaller site enters a batch more often; the site may have been drawn before it grew."""
    chosen = {"algorithm": "dpsur", "clients.sampling": "poisson", "clients.cohort": 2, "records.sampling": "poisson"}
    ledger = site_ledger(tmp_path, configure(chosen).algorithm, Setting(4, 3, sizes=(100, 1000)))
    costs = []
    for now, before, asked_for in ((100, 100, False), (1000, 100, False), (1000, 100, True), (1000, 1000, False)):
        ledger.records, ledger.progress = now, Progress(records=before)
        charges = ledger._charged(0, asked=asked_for)
        (event,) = (each.event for each in charges if (each.unit, each.observer) == ("record", "release"))
        costs.append(epsilon(event, 1e-5).epsilon)
    ledger.close()
    assert costs[0] == costs[1] > costs[2] == costs[3]


@pytest.mark.slow
@pytest.mark.parametrize("said", [{"round": 0, "repeats": 2}, {"round": 2}])
def test_a_coordinator_whose_ledger_is_an_older_copy_ends_nothing(replies, tmp_path, said):
    """It does not know which rounds there were: all that were planned are charged before the next run."""
    site, terms, message = replies
    site.answer(TERMS, terms)
    for asks in ({"round": 1}, {"round": 1, "attempt": 1, "repeats": 1}):
        assert "refused" not in site.answer(ROUND, Payload(message.values | asks, message.vectors)).values
    assert site.answer(END, Payload(end_of(message, **said))).values["refused"] == OLDER_COPY
    site.close()
    site = Site(site.owner)
    other = replace(Terms.read(terms.text("terms"), ()), run="another")
    assert "agreed" in site.answer(TERMS, Payload({"terms": other.text, "round": 0})).values
    site.close()
    rounds, event = charged(tmp_path / "new")
    assert rounds == sum(without_sampler(leaves(event))[0].values()) == 4


@pytest.mark.slow
def test_repeats_that_a_coordinator_spoke_of_are_charged_though_it_never_came_back(replies, tmp_path):
    """It was killed in round 1, went on, and was killed for good: all three rounds, and one of them again."""
    site, terms, message = replies
    site.answer(TERMS, terms)
    site.answer(ROUND, message)
    site.answer(TERMS, Payload(terms.values | {"charged": 1}))
    site.close()
    site = Site(site.owner)
    other = replace(Terms.read(terms.text("terms"), ()), run="another")
    assert "refused" not in site.answer(TERMS, Payload({"terms": other.text, "round": 0})).values
    site.close()
    rounds, event = charged(tmp_path / "new")
    assert rounds == sum(without_sampler(leaves(event))[0].values()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_all_that_an_older_checkpoint_runs_again_is_charged_though_the_coordinator_never_came_back(
    replies, tmp_path, asked, again
):
    """After three rounds, `asked` for the last or none, it went back to the first, with the site `again` or not."""
    site, terms, message = replies
    site.answer(TERMS, terms)
    if asked:
        site.answer(ROUND, Payload(message.values | {"round": 2}, message.vectors))
    site.answer(TERMS, Payload(terms.values | {"charged": 3}))
    if again:
        site.answer(ROUND, Payload(message.values | {"attempt": 1, "repeats": 1}, message.vectors))
    site.close()
    site = Site(site.owner)
    other = replace(Terms.read(terms.text("terms"), ()), run="another")
    assert "refused" not in site.answer(TERMS, Payload({"terms": other.text, "round": 0})).values
    site.close()
    assert charged(tmp_path / "new")[0] == 3 + 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "goes_on", "more"),
    [
        ({"round": 2, "charged": 3, "repeats": 1}, True, 0),
        ({"round": 0, "charged": 3, "repeats": 2}, True, 1),
        ({"round": 2, "repeats": 1}, False, 0),
        ({"round": 1, "charged": 2, "repeats": 2}, False, 0),
        ({"round": 2, "charged": 3}, False, 0),
        ({"round": 3}, False, 0),
    ],
)
def test_a_coordinator_whose_ledger_is_an_older_copy_is_refused(replies, tmp_path, said, goes_on, more):
    """Round 3 ran twice, and the site was in the second. An older copy would run rounds again and not say so.

    What has been run since, as any other coordinator says, is charged at once.
    """
    site, terms, message = replies
    site.answer(TERMS, terms)
    site.answer(ROUND, Payload(message.values | {"round": 2, "attempt": 1, "repeats": 1}, message.vectors))
    site.close()
    before = charged(tmp_path / "new")[0]
    site = Site(site.owner)
    answer = site.answer(TERMS, Payload(terms.values | said))
    site.close()
    assert ("agreed" in answer.values) == goes_on
    assert goes_on or "its run folder is an older copy" in answer.values["refused"]
    assert charged(tmp_path / "new")[0] == before + more


@pytest.mark.slow
def test_rounds_run_again_while_a_site_was_away_cost_it_as_much_as_any_that_has_begun(tmp_path):
    """It was asked for the last of three rounds, and away while all were run again; the first has the least noise."""
    _, grid = served(tmp_path, curator(3, "linear:1:4"))
    site, terms = Site(Owner("new", tmp_path / "new", reader("digits", part=0))), asked(grid, TERMS)
    site.answer(TERMS, terms)
    message = asked(grid, ROUND)
    assert "refused" not in site.answer(ROUND, Payload(message.values | {"round": 2}, message.vectors)).values
    site.answer(TERMS, Payload(terms.values | {"round": 3, "repeats": 3}))
    ended = end_of(message, round=3, repeats=3)
    site.answer(END, Payload(ended))
    site.close()
    times = without_sampler(leaves(charged(tmp_path / "new")[1]))[0]
    assert [times[each] for each in sorted(times, key=lambda each: each.noise)] == [1 + 3, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("new", [True, False])
def test_a_coordinator_that_put_its_latest_checkpoint_back_is_no_older_copy(replies, tmp_path, new):
    """With one of before round 1 it said what it was to run again, and ran none of it: its ledger has two rounds.

    What was only said is not charged, and does not stand for the round that is run again later.
    """
    site, terms, message = replies
    if not new:
        site.answer(TERMS, terms)
        site.answer(ROUND, message)
    site.answer(TERMS, Payload(terms.values | {"charged": 2}))
    for said in ({"round": 2}, {"round": 3}):
        site.close()
        site = Site(site.owner)
        assert "agreed" in site.answer(TERMS, Payload(terms.values | said)).values
        if said["round"] == 2:
            site.answer(ROUND, Payload(message.values | said, message.vectors))
    ended = end_of(message, round=3, repeats=1)
    site.answer(END, Payload(ended))
    site.close()
    assert charged(tmp_path / "new")[0] == (1 if new else 3) + 1


@pytest.mark.slow
def test_a_run_goes_on_where_its_latest_checkpoint_is_put_back_after_an_older_one(tmp_path):
    """Of four rounds two are done, when the checkpoint of the first is put back; no round is run again with that."""
    trainers = []

    def part(rounds, run=None, changes=()):
        """Run until so many rounds are done."""
        grid = with_sites(tmp_path, 4)
        grid.changes = dict(changes)
        given = {"resume": run} if run else {"config": curator(4), "runs": tmp_path / "served"}
        given["on_start"] = lambda _config, trainer, _run: trainers.append(trainer)
        given["on_round"] = lambda line: line["round"] < rounds or trainers[-1].stop()
        try:
            return serve(grid, **given, no_guarantee=True)
        finally:
            for site in grid.sites.values():
                site.close()

    def kill(_kind, _answer):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        part(1)
    (run,) = (tmp_path / "served").iterdir()
    older, latest = tmp_path / "older", tmp_path / "latest"
    shutil.copy(run / CHECKPOINT, older)
    with pytest.raises(Interrupted):
        part(2, run)
    shutil.move(run / CHECKPOINT, latest)
    shutil.copy(older, run / CHECKPOINT)
    with pytest.raises(KeyboardInterrupt):
        part(4, run, {103: kill})
    shutil.copy(latest, run / CHECKPOINT)
    with pytest.raises(Interrupted):
        part(3, run)
    assert part(4, run).stopped == "rounds"
    assert [charged(tmp_path / f"site-{number}")[0] for number in range(4)] == [4] * 4


@pytest.mark.slow
def test_a_coordinator_that_lost_its_last_lines_ends_where_one_site_knows_of_them(tmp_path):
    """Its folder of before the second round is put back. The other sites do not know, and would be charged less."""
    grid, backup = with_sites(tmp_path, 4), tmp_path / "backup"
    given = curator(3) | {"federation.min_sites": 1, "federation.deadline": 1.0}

    def killed(line):
        (run,) = (tmp_path / "served").iterdir()
        if line["round"] == 2:
            raise KeyboardInterrupt
        shutil.copytree(run, backup)
        for node in (101, 102, 103):
            grid.sites.pop(node).close()

    with pytest.raises(KeyboardInterrupt):
        served(tmp_path, given, grid, on_round=killed)
    grid.sites[100].close()
    (run,) = (tmp_path / "served").iterdir()
    shutil.rmtree(run)
    shutil.copytree(backup, run)
    grid = with_sites(tmp_path, 4)
    with pytest.raises(RunError, match=r"knows of rounds .* put the latest one back, or start a new run"):
        serve(grid, None, resume=run, no_guarantee=True)
    for site in grid.sites.values():
        site.close()
    assert [charged(tmp_path / f"site-{number}")[0] for number in range(4)] == [2, 1, 1, 1]


@pytest.mark.slow
def test_no_site_stops_a_new_run_by_saying_that_its_folder_is_an_older_copy(tmp_path):
    grid = with_sites(tmp_path, 4)
    grid.changes = {BAD: lambda kind, answer: Payload({"refused": OLDER_COPY}) if kind == TERMS else answer}
    result, _ = served(tmp_path, curator(1) | {"federation.min_sites_to_start": 3}, grid)
    assert [line["clients"] for line in result.metrics] == [3]


@pytest.mark.slow
def test_runs_of_one_configuration_that_start_in_the_same_second_are_two_to_a_site(tmp_path, monkeypatch):
    """Else a site that was not asked in the first, which never ended, would be charged for one alone."""
    monkeypatch.setattr(run_folder, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 1)))
    runs = [asked(served(tmp_path / each, curator(1))[1], TERMS).text("terms") for each in ("one", "other")]
    assert runs[0] != runs[1]
    assert json.loads(runs[0])["run"] == json.loads(runs[1])["run"]


@pytest.mark.slow
def test_a_coordinator_that_speaks_of_many_repeats_spends_no_more_than_the_budget(replies, tmp_path):
    """Of 10,000 repeats, the cap of a run pays for four; the rest, and rounds 2 and 3, it would have refused."""
    site, terms, message = replies
    cap = 1.001 * epsilon(Repeat(Gaussian(1.633), 5), 1e-5).epsilon
    site.owner = replace(site.owner, requirements=Requirements(epsilon=100.0, epsilon_per_run=cap))
    site.answer(TERMS, terms)
    site.answer(ROUND, message)
    site.answer(TERMS, Payload(terms.values | {"charged": 1, "repeats": 10**4}))
    assert "run's epsilon" in site.answer(ROUND, again(message, 1, 10**4)).values["refused"]
    site.close()
    site = Site(site.owner)
    other = replace(Terms.read(terms.text("terms"), ()), run="another")
    assert "refused" not in site.answer(TERMS, Payload({"terms": other.text, "round": 0})).values
    site.close()
    assert charged(tmp_path / "new")[0] == 1 + 4


def test_repeats_cost_no_less_than_any_rounds_of_a_run_whose_cohorts_and_noise_both_change(tmp_path):
    """The first rounds cost more alone, the last ones more together: which were run again is not known."""
    method, setting = algorithm("trusted-curator"), Setting(1000, 10)
    method = replace(
        method,
        clients=replace(method.clients, sampling="poisson", cohort="linear:10:210"),
        per_round=replace(method.per_round, noise_multiplier="linear:0.7:1.7"),
    )
    ledger = site_ledger(tmp_path, method, setting, records=100)
    (costliest,) = (c.event for c in ledger._costliest_again(range(10)) if (c.unit, c.observer) == CLIENT)
    ledger.close()
    spent = epsilon(Repeat(Compose((costliest,)), 20), 1e-5, "rdp", "zero-out").epsilon
    for t in (0, 9):
        event = round_event(method, setting, t, "client", "release")
        assert spent >= epsilon(Repeat(Compose((event,)), 20), 1e-5, "rdp", "zero-out").epsilon


CLIENT = ("client", "release")
POISSON = {"algorithm": "trusted-curator", "clients.sampling": "poisson", "clients.cohort": 2, "data.clients": 100}


def test_a_cap_below_what_rdp_can_prove_still_allows_what_costs_less(tmp_path):
    """By RDP one round costs 0.6, by PLD 0.01."""
    rare = POISSON | {"clients.cohort": 1, "data.clients": 1000, "rounds": 1, "per_round.noise_multiplier": 1.0}
    required = Requirements(epsilon=0.05)
    ledger = site_ledger(tmp_path, configure(rare).algorithm, Setting(1000, 1), required, records=50)
    assert ledger.affordable_repeats(range(1), 1) == 1
    ledger.close()


@pytest.mark.parametrize("noise", [5.0, "linear:6:5"])
def test_a_million_repeats_take_the_accountants_few_questions(tmp_path, monkeypatch, noise):
    """However many rounds there are to choose from; the answer is the last number that the budget pays for."""
    rounds, calls = 2000, Counter()
    counted = ((Running, "epsilon_with"), (Budget, "cost"), (SiteLedger, "_charged"))
    chosen = configure(POISSON | {"rounds": rounds, "per_round.noise_multiplier": noise}).algorithm
    plain = {name: getattr(owner, name) for owner, name in counted}
    for owner, name in counted:

        def counting(*given, name=name, **named):
            calls[name] += 1
            return plain[name](*given, **named)

        monkeypatch.setattr(owner, name, counting)
    most = 1.0
    ledger = site_ledger(tmp_path, chosen, Setting(100, rounds), Requirements(epsilon=most), records=50)
    found = ledger.affordable_repeats(range(rounds), 10**6)
    ledger.close()
    assert calls["_charged"] <= 2
    assert calls["epsilon_with"] + calls["cost"] <= 50
    one = Sampled("poisson", 0.02, Gaussian(5.0 if noise == 5.0 else 5.0005))
    assert epsilon(Repeat(one, found), 1e-5, adjacency="zero-out").epsilon <= most
    assert epsilon(Repeat(one, found + 1), 1e-5, adjacency="zero-out").epsilon > most


@pytest.mark.parametrize(
    "changes",
    [
        {"per_round.noise_multiplier": "linear:1:3"},
        {"per_round.noise_multiplier": "cyclic:9:2", "per_update.clip_norm": "linear:2:1"},
        {"clients.cohort": "exponential:2:10"},
    ],
)
def test_repeats_are_charged_as_the_costliest_round_where_one_is(tmp_path, changes):
    rounds, setting = range(2, 8), Setting(100, 10)
    chosen = configure(POISSON | {"rounds": 10} | changes).algorithm
    ledger = site_ledger(tmp_path, chosen, setting, records=50)
    each = [ledger._charged(t, asked=False, again=True) for t in rounds]
    found = ledger._costliest_again(rounds)
    ledger.close()
    for charge, column in zip(found, zip(*each, strict=True), strict=True):
        assert charge in column
        costs = [epsilon(one.event, 1e-5, "rdp", "zero-out").epsilon for one in (charge, *column)]
        assert costs[0] == max(costs)


def costliest_again(folder, chosen, setting):
    """What any round run again is charged, and what it must be: no less than each of them."""
    rounds, ledger = range(setting.rounds), site_ledger(folder, chosen, setting, records=50)
    each = [ledger._charged(t, asked=False, again=True) for t in rounds]
    found = ledger._costliest_again(rounds)
    ledger.close()
    truth = [dominating(charge.event for charge in column) for column in zip(*each, strict=True)]
    return [charge.event for charge in found], truth


@pytest.mark.parametrize("noise", ["linear:1:3", "cyclic:9:2", "linear:2:10"])
def test_of_rounds_with_cohorts_of_one_size_only_the_ends_are_asked_for_their_cost(tmp_path, noise):
    keys = {"algorithm": "trusted-curator", "clients.cohort": "linear:2:10", "per_round.noise_multiplier": noise}
    chosen, setting = configure(keys | {"data.clients": 100, "rounds": 300}).algorithm, Setting(100, 300)
    found, truth = costliest_again(tmp_path, chosen, setting)
    assert found == truth
    assert len(consent._extremes(chosen, range(300), setting)) <= 2 * 9  # of 2 to 10 clients


@pytest.mark.parametrize("place", ["per_round", "per_step"])
def test_where_noise_is_added_in_two_places_each_round_is_asked_for_its_cost(tmp_path, place):
    """The first round has no noise here, and is charged for the other; the second has little."""
    keys = {"algorithm": "end-to-end-private", "clients.sampling": "fixed-size", "data.clients": 100}
    keys[f"{place}.noise_multiplier"] = "linear:0:2"
    found, truth = costliest_again(tmp_path, configure(keys).algorithm, Setting(100, 20, sizes=(50,), multiplicity=2))
    assert found == truth


@pytest.mark.slow
def test_repeats_that_a_budget_pays_for_can_be_charged(tmp_path):
    """By PLD it pays for more: of rare rounds with little noise RDP says so much more that PLD is not asked."""
    chosen = configure(POISSON | {"clients.cohort": 0.1, "per_round.noise_multiplier": 0.5, "rounds": 10}).algorithm
    ledger = site_ledger(tmp_path, chosen, Setting(100, 10), Requirements(epsilon=1.0), records=50)
    found = ledger.affordable_repeats(range(10), 10**6)
    (costliest,) = (c.event for c in ledger._costliest_again(range(10)) if (c.unit, c.observer) == CLIENT)
    assert found > 0
    assert ledger._over_budget(Repeat(Compose((costliest,)), found)) is None
    assert ledger._over_budget(Repeat(Compose((costliest,)), found + 1)) == "epsilon"
    ledger.close()


def test_repeats_are_unbounded_where_a_round_between_the_ends_of_a_schedule_of_cohorts_is(tmp_path):
    """Of 3 sites all must be in a sum, of 5 four; of 4 only three, and two that collude could unmask two sums."""
    keys = {"algorithm": "distributed-dp-sgd", "clients.sampling": "fixed-size", "clients.cohort": "linear:3:5.4"}
    chosen = configure(keys | {"per_round.colluding": 2, "data.clients": 10, "rounds": 10}).algorithm
    ledger = site_ledger(tmp_path, chosen, Setting(10, 10, sizes=(100,)), records=100)
    found = ledger._costliest_again(range(10))
    ledger.close()
    (event,) = (charge.event for charge in found if (charge.unit, charge.observer) == ("record", "release"))
    assert isinstance(event, Unbounded)


def test_a_number_of_repeats_that_cannot_be_is_refused(replies):
    site, terms, message = replies
    site.answer(TERMS, terms)
    for repeats in (-1, 10**4 + 1, True, 1.0):
        answer = site.answer(ROUND, Payload(message.values | {"repeats": repeats}, message.vectors))
        assert "repeats" in answer.values["refused"], repeats


def charged_after_a_kill(tmp_path, killed):
    """The rounds and the event that each of four sites charged: `killed` ends the run, which is then resumed."""
    given = curator(3) | {"clients.sampling": "poisson", "clients.cohort": 2}
    grid = with_sites(tmp_path, 4)
    with pytest.raises(KeyboardInterrupt):
        served(tmp_path, given, grid, on_round=killed)
    for site in grid.sites.values():
        site.close()
    (run,) = (tmp_path / "served").iterdir()
    grid = with_sites(tmp_path, 4)
    serve(grid, None, resume=run, no_guarantee=True)
    for site in grid.sites.values():
        site.close()
    return [charged(site.owner.folder) for site in grid.sites.values()]


@pytest.mark.slow
def test_every_site_is_charged_every_draw_of_a_coordinator_that_was_killed(tmp_path):
    """Three rounds, and the second one twice: whoever is drawn, four draws."""

    def killed(line):
        if line["round"] == 2:
            raise KeyboardInterrupt

    for rounds, event in charged_after_a_kill(tmp_path, killed):
        assert rounds == sum(without_sampler(leaves(event))[0].values()) == 4


@pytest.mark.slow
def test_every_draw_is_charged_where_an_older_checkpoint_was_put_back(tmp_path):
    """Three rounds, and all of them again."""

    def killed(line):
        (run,) = (tmp_path / "served").iterdir()
        if line["round"] == 3:
            (run / CHECKPOINT).unlink()
            raise KeyboardInterrupt

    assert min(rounds for rounds, _ in charged_after_a_kill(tmp_path, killed)) >= 6


@pytest.mark.slow
def test_all_rounds_are_charged_where_the_run_ends_with_an_older_checkpoint(tmp_path):
    """Three rounds, which are all that the budget pays for, and that of the first is put back; a site saw only it."""
    given = curator(5) | {"federation.min_sites": 1, "federation.deadline": 1.0}
    given["budget.epsilon"] = 1.001 * epsilon(Repeat(Gaussian(1.633), 3), 1e-5).epsilon
    grid, backup = with_sites(tmp_path, 4), tmp_path / "backup"

    def killed(line):
        (run,) = (tmp_path / "served").iterdir()
        if line["round"] == 2:
            shutil.copy(run / CHECKPOINT, backup)
        if line["round"] == 3:
            shutil.copy(backup, run / CHECKPOINT)
            raise KeyboardInterrupt
        if line["round"] == 1:
            grid.sites.pop(103).close()

    with pytest.raises(KeyboardInterrupt):
        served(tmp_path, given, grid, on_round=killed)
    for site in grid.sites.values():
        site.close()
    (run,) = (tmp_path / "served").iterdir()
    grid = with_sites(tmp_path, 4)
    result = serve(grid, None, resume=run, no_guarantee=True)
    for site in grid.sites.values():
        site.close()
    assert (result.stopped, len(result.metrics)) == ("budget", 1)
    assert [charged(site.owner.folder)[0] for site in grid.sites.values()] == [3, 3, 3, 3]


@pytest.mark.slow
def test_a_site_for_which_the_run_has_ended_is_charged_no_later_round(replies, tmp_path):
    """It was dropped, and each time it connects again it is told so; the run goes on without it."""
    site, terms, message = replies
    site.answer(TERMS, terms)
    ended = end_of(message, why="dropped")
    for done in (1, 2):
        assert "refused" not in site.answer(END, Payload(ended | {"round": done})).values
    site.close()
    assert charged(tmp_path / "new")[0] == 1
    site = Site(site.owner)
    site.answer(TERMS, Payload(terms.values | {"round": 2, "member": 1}))  # it was invited again
    site.answer(END, Payload(ended | {"round": 3}))
    site.close()
    assert charged(tmp_path / "new")[0] == 3


@pytest.mark.slow
def test_rounds_since_a_site_was_invited_again_are_charged_though_its_folder_is_from_before(replies, tmp_path):
    site, terms, message = replies
    site.answer(TERMS, terms)
    ended = end_of(message)
    site.answer(END, Payload(ended | {"round": 1}))
    for _ in range(2):
        site.answer(END, Payload(ended | {"round": 3, "member": 1}))  # it has a place, and its folder does not say so
    site.close()
    assert charged(tmp_path / "new")[0] == 3


@pytest.mark.slow
def test_a_coordinator_says_at_the_end_who_has_a_place_in_the_run(tmp_path):
    """Node 104 is a fifth site, for which there is no place."""
    _, grid = served(tmp_path, curator(1), with_sites(tmp_path, 5))
    ends = {node: payload.values["member"] for to, node, kind, payload in grid.wire if (to, kind) == ("to", END)}
    assert ends == {100: 1, 101: 1, 102: 1, 103: 1, 104: 0}


def test_a_coordinator_says_how_many_rounds_it_ran_again(tmp_path):
    """Round 3 was charged twice, and killed each time: two rounds are done."""
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin("run", "method", "")
        for t in (1, 2, 3, 3):
            ledger.intend(t, ())
    assert _charged_before(tmp_path / "ledger.jsonl") == (1, 3)
    assert _charged_before(tmp_path / "none.jsonl") == (0, 0)


def test_against_the_server_no_lot_is_believed(tmp_path):
    """Of 1,000 clients ten come, and this one is asked again and again: each answer costs a change of two clips."""
    given = {
        "algorithm": "fed-sdp",
        "per_update.at": "client",
        "per_update.noise_multiplier": 4.0,
        "clients.cohort": 10,
    }
    method, setting = configure(given).algorithm, Setting(1000, 30, all_answer=False, secure=True)
    own = site_ledger(tmp_path, method, setting, Requirements(epsilon=8.0, observer="server"))
    own.charge(range(3), 3)
    own.charge(range(4, 4), 4)
    own.close()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        true = epsilon(Repeat(Gaussian(2.0), 2), 1e-5).epsilon
        assert epsilon(ledger.charged_event("client", "server"), 1e-5).epsilon == pytest.approx(true, rel=1e-3)


ROUNDED = secure_streams.charged(4.0 / (1 + 2.0**-9 + 100 * 2.0**-23), secure_streams.STEPS, 1)
"""What counts of a noise of 4 in secure mode, where a sum of 100 records is rounded."""


@pytest.mark.parametrize(
    ("observer", "secure", "noise"), [("release", False, 4.0), ("release", True, ROUNDED), ("server", True, ROUNDED)]
)
def test_where_it_shows_who_took_part_no_lot_is_believed(tmp_path, observer, secure, noise):
    """A record's noise is in its client's own update: released models may show whether that came."""
    given = {"algorithm": "dp-sgd", "clients.sampling": "fixed-size", "clients.cohort": 10}
    given |= {"records.batch": 100, "local.steps": 1, "per_step.noise_multiplier": 4.0}
    method, setting = configure(given).algorithm, Setting(1000, 30, sizes=(100,), all_answer=False, secure=secure)
    own = site_ledger(tmp_path, method, setting)
    own.charge(range(3), 3)
    own.close()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ((leaf, times),) = leaves(ledger.charged_event("record", observer)).items()
    assert (type(leaf), leaf.noise, times) == (Gaussian, pytest.approx(noise, rel=1e-12), 1)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["server", "client"])
def test_a_site_is_charged_for_noise_on_updates_without_amplification(tmp_path, at):
    """fed-sdp, a record against released models: 10 of 100 sites a round, noise 6, 100 rounds.

    Who answered can show in the amount of the noise. Amplified, the run would cost 1.48; without, 5.46. A site knows
    in which rounds it was asked, and is charged for these alone, in full.
    """
    clients, rounds, mine = 100, 100, range(0, 100, 10)
    noise = {"per_update__at": at, "per_update__noise_multiplier": 6.0}
    given = settings("fed-sdp", clients__cohort=10, data__clients=clients, **noise)
    config = configure(given | {"rounds": rounds, "federation.seeded": False})
    digits = load("digits")
    setting = Setting(clients, rounds, all_answer=False)
    told = Terms("run", to_toml(config), setting, digits.classes, digits.input_shape, 650, None)
    site = Site(Owner("site", tmp_path, reader("digits", part=0)))
    assert "agreed" in site.answer(TERMS, Payload({"terms": told.text, "round": 0})).values
    for t in mine:
        names = Request("run", told.digest, 0, RoundIndex(t, rounds)).names
        assert "refused" not in site.answer(ROUND, Payload(names, {"model": torch.zeros(650)})).values
    ended = {"run": "run", "terms": told.digest, "why": "rounds", "round": rounds}
    assert "refused" not in site.answer(END, Payload(ended)).values
    site.close()

    def cost(event):
        return epsilon(event, 1e-5, adjacency="replace-one").epsilon

    planned = whole_run(config.algorithm, told.charged, rounds, "record", "release")
    amplified = Repeat(Sampled("fixed-size", 0.1, Gaussian(6.0)), rounds)
    assert (cost(planned), cost(amplified)) == (pytest.approx(5.46, abs=0.01), pytest.approx(1.48, abs=0.01))
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert sum(intent.round - intent.first + 1 for intent in ledger.charged) == rounds
        event = ledger.charged_event("record", "release")
    assert cost(event) == pytest.approx(cost(Repeat(Gaussian(6.0), len(mine))), rel=1e-3)
    assert cost(event) > 4.6


@pytest.mark.slow
@pytest.mark.parametrize("false", [{"sizes": [10**7]}, {"all_answer": True}])
def test_terms_that_count_on_other_sites_than_they_say_are_refused(replies, false):
    site, terms, _ = replies
    told = json.loads(terms.values["terms"])
    told["setting"] |= false
    answer = site.answer(TERMS, Payload({"terms": json.dumps(told, sort_keys=True), "round": 0}))
    assert "site sizes differ" in answer.values["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["layers", "parameters"])
def test_terms_of_another_model_are_refused_before_the_site_has_a_place(replies, what):
    """Agreed to, they would let a site that can never train hold a place of the roster."""
    site, terms, _ = replies
    told = json.loads(terms.values["terms"])
    (told["setting"] if what == "layers" else told)[what] = 7
    answer = site.answer(TERMS, Payload({"terms": json.dumps(told, sort_keys=True), "round": 0}))
    words = "layers at the site, 7 at the coordinator" if what == "layers" else "and 7"
    assert answer.values["refused"].startswith("the model has ")
    assert answer.values["refused"].endswith(words)


@pytest.mark.slow
def test_a_late_joiner_pays_from_when_it_joined(replies, tmp_path):
    site, terms, message = replies
    site.answer(TERMS, Payload(terms.values | {"round": 2}))
    site.answer(ROUND, Payload(message.values | {"round": 2}, message.vectors))
    site.close()
    count, event = charged(tmp_path / "new")
    ((leaf, times),) = without_sampler(leaves(event))[0].items()
    assert (count, times, leaf.noise) == (1, 1, pytest.approx(1.633, rel=1e-6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"terms": "0" * 64}, "not the terms"),
        ({"run": "other"}, "not the terms"),
        ({"round": 3}, "no round 3"),
        ({"round": -1}, "no round -1"),
        ({"number": 4}, "client 4"),
        ({"round": 1.5}, "not of type int"),
        ({"noise": 0}, "unexpected"),
    ],
)
def test_a_site_answers_only_what_it_agreed_to(replies, tmp_path, changes, words):
    site, terms, message = replies
    site.answer(TERMS, terms)
    answer = site.answer(ROUND, Payload(message.values | changes, message.vectors))
    assert words in answer.values["refused"]
    assert not answer.vectors
    site.close()
    assert charged(tmp_path / "new")[0] == 0


@pytest.mark.slow
def test_terms_from_another_version_are_refused(replies):
    site, terms, _ = replies
    told = json.loads(terms.values["terms"]) | {"more": 1}
    answer = site.answer(TERMS, Payload({"terms": json.dumps(told, sort_keys=True), "round": 0}))
    assert "fields unknown to this site" in answer.values["refused"]
    answer = site.answer(TERMS, Payload({"terms": "[" * 100_000, "round": 0}))
    assert "malformed field 'terms'" in answer.values["refused"]


@pytest.mark.slow
def test_no_code_is_imported_because_the_coordinator_says_so(replies):
    site, terms, _ = replies
    told = json.loads(terms.values["terms"])
    told["config"] = told["config"].replace('model = "linear"', 'model = "antigravity:Net"')
    answer = site.answer(TERMS, Payload({"terms": json.dumps(told, sort_keys=True), "round": 0}))
    assert "--model antigravity:Net" in answer.values["refused"]


@pytest.mark.slow
def test_data_that_do_not_fit_are_refused(tmp_path, replies):
    _, terms, _ = replies
    site = Site(Owner("other", tmp_path / "other", reader("cancer", part=0)))
    told = []
    site._log = told.append
    assert "internal error at the site; see its log" in site.answer(TERMS, terms).values["refused"]
    assert "shape (30,)" in told[0]
    site.close()


@pytest.mark.slow
def test_nothing_of_the_data_crosses_with_a_refusal(tmp_path, replies):
    """The coordinator says which column is the label: what stands in it is for the owner's eyes."""
    _, terms, _ = replies
    (tmp_path / "own.csv").write_text("age,ill\n29.3,0\n31.5,1\n44.1,0\n")
    told = json.loads(terms.values["terms"])
    told["config"] = told["config"].replace('label = "label"', 'label = "age"')
    said = []
    site = Site(Owner("own", tmp_path / "own", reader(str(tmp_path / "own.csv"))), said.append)
    answer = site.answer(TERMS, Payload({"terms": json.dumps(told, sort_keys=True), "round": 0}))
    site.close()
    assert "label 29.3" in said[0], said
    for word in ("29.3", "31.5", "own.csv", "age"):
        assert word not in answer.values["refused"]


def test_a_refusal_over_budget_does_not_tell_how_many_records_there_are(tmp_path):
    """Their number sets the sampling rate, and with it what a round costs."""
    config = configure(settings("dp-sgd", clients__sampling="all", federation__seeded=False))
    setting, said = Setting(4, 2, 1, 1, (100, 400), False, bounds=True, parameters=650, secure=True), set()
    for records in (100, 400):
        requirements = Requirements(epsilon=1e-3, unit="record")
        ledger = site_ledger(tmp_path, config.algorithm, setting, requirements, records=records)
        with pytest.raises(Refused, match="owner's") as refusal:
            ledger.charge(range(0), 0)
        said.add(str(refusal.value))
        ledger.close()
    assert len(said) == 1
