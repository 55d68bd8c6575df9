"""Sites that come when they can, with correlated noise: both sides keep the separation, each site its own account."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.accountants import epsilon
from shoal.accounting.events import Compose, Gaussian, Unbounded
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.privacy_ledger import Ledger
from shoal.config import configure, to_toml
from shoal.data import load
from shoal.errors import ConfigError
from shoal.federation.consent import Refused, Requirements, least_noise
from shoal.federation.messages import InvalidMessage, Payload
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import END, ROUND, TERMS, Terms
from shoal.federation.validation import Request
from shoal.mechanisms import correlated
from shoal.mechanisms.setting import Setting
from shoal.training.round_index import RoundIndex
from support.federations import farthest, served, settings, simulated, site_ledger
from support.loopback import with_sites

SEPARATED = {"clients__sampling": "min-separation", "clients__separation": 3, "clients__participations": 2}
ROUNDS = 12


def spaced(**changes):
    return settings("dp-ftrl", **SEPARATED, **changes) | {"clients.cohort": 2, "rounds": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        spaced(per_round__factorisation="blt", per_round__buffers=2),
        spaced(per_round__factorisation="band-inverse", per_round__bands=3),
        settings("dp-ftrl", per_round__factorisation="banded", per_round__bands=2)
        | {"clients.cohort": 2, "rounds": 5},
    ],
    ids=["blt", "band-inverse", "cyclic"],
)
def test_a_federation_with_correlated_noise_ends_where_the_simulator_does(tmp_path, given):
    result, grid = served(tmp_path, given)
    expected = simulated(tmp_path, given)
    assert farthest(result, expected) <= 1e-5
    assert [line["clients"] for line in result.metrics] == [line["clients"] for line in expected.metrics]
    assert not any("reports" in line for line in result.metrics), "no site had to refuse"
    asked = [(node, payload.values["round"]) for to, node, kind, payload in grid.wire if (to, kind) == ("to", ROUND)]
    for site in grid.sites:
        rounds = [t for node, t in asked if node == site]
        assert all(np.diff(rounds) >= (3 if "clients.separation" in given else 2))
        assert len(rounds) <= (2 if "clients.separation" in given else 3)


@pytest.mark.slow
def test_the_coordinator_asks_those_who_are_there(tmp_path):
    """Two of four places are taken: both sites come in round 1, and again after three rounds."""
    given = spaced() | {"federation.min_sites_to_start": 2}
    result, _ = served(tmp_path, given, with_sites(tmp_path, 2))
    assert [line["clients"] for line in result.metrics] == [2, 0, 0, 2, 0, 0]


def test_groups_with_secret_sampling_are_simulated_only_and_both_sides_say_so(tmp_path):
    given = settings("dp-ftrl", clients__sampling="cyclic-poisson", clients__separation=2, clients__cohort=1)
    given["per_round.bands"] = 2
    with pytest.raises(ConfigError, match=r"clients\.sampling=cyclic-poisson can only be simulated"):
        served(tmp_path, given)
    terms = Terms("run", to_toml(configure(given)), Setting(4, 3), ("0", "1"), (1, 8, 8), 650, None)
    with pytest.raises(InvalidMessage, match=r"clients\.sampling=cyclic-poisson can only be simulated"):
        Terms.read(terms.text).settings  # noqa: B018


@pytest.mark.slow
def test_a_site_is_charged_by_the_numbers_that_make_the_noise_whatever_it_would_find_itself(tmp_path, monkeypatch):
    """It takes part in rounds 1 and 5: its ledger is the norm of C's columns there, of the coordinator's C."""
    given = spaced(per_round__factorisation="band-inverse", per_round__bands=3)
    config = configure(given | {"rounds": ROUNDS, "federation.seeded": False})
    setting, digits = Setting(4, ROUNDS, all_answer=False), load("digits")
    noise = config.algorithm.per_round.multiplier(0, 1)
    unsettled = Terms("run", to_toml(config), setting, digits.classes, digits.input_shape, 650, None)
    with pytest.raises(InvalidMessage, match=r"without its numbers \(per_round\.numbers\)"):
        unsettled.settings  # noqa: B018
    algorithm = config.algorithm.settled(ROUNDS, 4)
    algorithm = replace(algorithm, per_round=replace(algorithm.per_round, numbers=(1.0, -0.25, -0.125)))
    terms = replace(unsettled, config=to_toml(replace(config, algorithm=algorithm)))
    monkeypatch.setattr(correlated, "factorise", None)  # nothing is optimised at the site
    site = Asked(Owner("site", tmp_path / "site", reader("digits", part=0)), terms)
    assert "agreed" in site.answer(TERMS, Payload({"terms": terms.text, "round": 0})).values
    assert site.ask(1) is None
    assert site.ask(5) is None
    inverse = np.eye(ROUNDS) - 0.25 * np.eye(ROUNDS, k=-1) - 0.125 * np.eye(ROUNDS, k=-2)
    columns = np.linalg.inv(inverse)[:, [1, 5]].sum(1)
    assert site.shift() == pytest.approx(columns @ columns / noise**2, rel=1e-3)  # and the grid of secure mode


@pytest.mark.parametrize(
    ("kind", "numbers"), [("banded", (1.0, -3.0)), ("banded", (1.0, 1e200)), ("band-inverse", (1.0, 1e308, 1e308))]
)
def test_numbers_that_make_old_noise_grow_are_refused(kind, numbers):
    """Beside it new noise would be lost in the last digits."""
    given = spaced(per_round__factorisation=kind, per_round__bands=3, per_round__numbers=numbers)
    config = configure(given | {"rounds": 12, "federation.seeded": False})
    digits = load("digits")
    terms = Terms("run", to_toml(config), Setting(4, 12), digits.classes, digits.input_shape, 650, None)
    with pytest.raises(InvalidMessage, match=r"per_round\.numbers make old noise grow"):
        terms.settings  # noqa: B018


@pytest.mark.slow
def test_a_run_keeps_the_numbers_of_its_noise(tmp_path):
    result, grid = served(tmp_path, spaced(per_round__factorisation="blt", per_round__buffers=2) | {"rounds": 1})
    (written,) = {payload.values["terms"] for to, _, kind, payload in grid.wire if (to, kind) == ("to", TERMS)}
    kept = configure(result.run / "config.toml").algorithm.per_round
    assert len(kept.numbers) == 4
    assert Terms.read(written).settings.algorithm.per_round == kept


@dataclass
class Asked:
    """A site that starts anew for every message, as stock Flower's do; it forgets nothing."""

    owner: Owner
    terms: Terms

    def answer(self, kind, payload):
        site = Site(self.owner)
        try:
            return site.answer(kind, payload)
        finally:
            site.close()

    def ask(self, t, attempt=0):
        """Why it refuses the round; None where it answers."""
        names = Request("run", self.terms.digest, 0, RoundIndex(t, ROUNDS, attempt)).names
        return self.answer(ROUND, Payload(names, {"model": torch.zeros(650)})).values.get("refused")

    def spent(self, observer="release"):
        with Ledger(self.owner.folder / "ledger.jsonl") as ledger:
            return ledger.charged_event("client", observer)

    def shift(self):
        """The whole ledger as one Gaussian: 1/noise^2 of all its events, added up."""
        return sum(count / leaf.noise**2 for leaf, count in without_sampler(leaves(self.spent()))[0].items())


@pytest.fixture
def site(tmp_path):
    """A site that has agreed to twelve rounds, in secure mode, of which it may answer two, three apart."""
    config = configure(spaced() | {"rounds": ROUNDS, "federation.seeded": False, "per_round.bands": 2})
    digits = load("digits")
    setting = Setting(4, ROUNDS, all_answer=False)
    terms = Terms("run", to_toml(config), setting, digits.classes, digits.input_shape, 650, None)
    made = Asked(Owner("site", tmp_path / "site", reader("digits", part=0)), terms)
    assert "agreed" in made.answer(TERMS, Payload({"terms": terms.text, "round": 0})).values
    return made


@pytest.mark.slow
def test_a_site_refuses_a_round_that_comes_too_early_whatever_the_coordinator_says(site):
    assert site.ask(1) is None
    before = site.shift()
    for t in (2, 3, 0):
        assert f"round {t + 1} is too close to round 2, in which it took part" in site.ask(t)
    assert site.shift() == before
    assert site.ask(4) is None
    assert "it has taken part in 2 rounds, and may in 2" in site.ask(8)


@pytest.mark.slow
def test_another_run_in_between_does_not_make_it_forget_its_rounds(site):
    """The coordinator of a run that was stopped still has its noise, and goes on with it."""
    assert site.ask(1) is None
    for terms in (replace(site.terms, run="other"), site.terms):
        assert "agreed" in site.answer(TERMS, Payload({"terms": terms.text, "round": 2})).values
    assert "round 3 is too close to round 2, in which it took part" in site.ask(2)
    assert site.ask(4) is None
    assert "it has taken part in 2 rounds, and may in 2" in site.ask(8)


@pytest.mark.slow
def test_a_site_pays_for_its_own_rounds_in_all_rounds_to_come(site):
    """Two bands: a round costs 1 + c_1^2 in units of the noise, 4; c_1 = (1 + 0.9) / 2."""
    once = (1 + 0.95**2) / 16
    site.ask(1)
    assert site.shift() == pytest.approx(once, rel=1e-4)
    site.ask(6)
    assert site.shift() == pytest.approx(2 * once, rel=1e-4)
    ended = {"run": "run", "terms": site.terms.digest, "why": "rounds", "round": ROUNDS}
    assert "refused" not in site.answer(END, Payload(ended)).values
    assert site.shift() == pytest.approx(2 * once, rel=1e-4)
    assert isinstance(site.spent("server"), Compose)
    assert any(isinstance(leaf, Unbounded) for leaf in leaves(site.spent("server")))
    with Ledger(site.owner.folder / "ledger.jsonl") as ledger:
        assert sum(intent.round - intent.first + 1 for intent in ledger.charged) == ROUNDS


@pytest.mark.slow
def test_a_site_that_joins_late_pays_in_full(site):
    """A run's later rounds are charged little, for clients that have come before: this one has not."""
    site.ask(ROUNDS - 3)
    assert site.shift() == pytest.approx((1 + 0.95**2) / 16, rel=1e-4)


@pytest.mark.slow
def test_a_round_asked_for_again_is_charged_again(site):
    """After a crash the coordinator's noise starts anew, and the site's first answer may have been seen."""
    site.ask(1)
    once = site.shift()
    assert site.ask(1, attempt=1) is None
    assert site.shift() >= 2 * once
    assert Site(site.owner)._progress.answered == (1, 1)


def test_an_owner_requires_noise_of_what_one_round_costs_and_a_budget_of_all(tmp_path):
    """With bands that meet in one sum, noise of 4 is worth less than 4 to a client that comes once."""
    record, setting = configure(spaced() | {"per_round.bands": 2}).algorithm, Setting(4, ROUNDS)
    worth = 4 / np.sqrt(1 + 0.95**2)
    assert least_noise(record, setting, "client") == pytest.approx(worth)
    ledger = site_ledger(tmp_path, record, setting, Requirements(noise=3.0))
    with pytest.raises(Refused, match=r"least noise multiplier for a client is 2\.9"):
        ledger.agree()
    ledger.close()
    cost = epsilon(Gaussian(worth), 1e-5).epsilon
    ledger = site_ledger(tmp_path, record, setting, Requirements(epsilon=1.01 * cost))
    ledger.agree()
    ledger.charge(range(0), 0)
    with pytest.raises(Refused, match="would exceed the owner's"):
        ledger.charge(range(1, 5), 5, history=(0,))
    ledger.close()
