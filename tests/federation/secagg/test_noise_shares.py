"""distributed-dp-sgd over sites: the simulator's model, the noise that drop-outs and collusion leave, refusals."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from scipy.stats import chi2

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.events import Gaussian, Sampled
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.privacy_ledger import Ledger
from shoal.errors import ConfigError
from shoal.federation.consent import Requirements
from shoal.federation.key_files import public_pem
from shoal.federation.messages import Payload
from shoal.federation.secagg.aggregator import Failed
from shoal.federation.secagg.encoding import CHECK, KEYS, SHARES, UNMASK
from shoal.federation.secagg.party import contribution
from shoal.federation.secagg.secure_cohort import SecureCohort
from shoal.federation.site import Owner, Site
from shoal.federation.site_records import reader
from shoal.federation.terms import ROUND, TERMS, Terms
from shoal.random.secure_streams import SecureGenerator, SecureStreams
from shoal.training import context
from support.federations import farthest, served, settings, simulated
from support.loopback import Loopback, Peer
from support.secure_cohort import Cohort

ALPHA = 1e-6  # how often a statistical test may fail by chance
SITES, SLOTS = 6, 20_000
MESSAGES = (KEYS, SHARES, ROUND, CHECK, UNMASK)
METHOD = {"algorithm": "distributed-dp-sgd", "federation.min_records": 50, "federation.max_records": 400}


class Known(Loopback):
    """Sites that are known by their keys."""

    def get_nodes(self):
        return [Peer(node, public_pem(site.owner.key.public_key())) for node, site in self.sites.items()]


def with_keys(folder, count=4, **owner):
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(count)]
    peers = frozenset(public_pem(key.public_key()) for key in keys)
    made = (Owner(f"site-{n}", folder / f"site-{n}", reader("digits", part=n), key=k, peers=peers, **owner)
            for n, k in enumerate(keys))  # fmt: skip
    return Known({100 + n: Site(each) for n, each in enumerate(made)})


def given(**changes):
    found = settings("distributed-dp-sgd", federation__aggregation="secure") | METHOD
    return found | {key.replace("__", "."): value for key, value in changes.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A seeded run, and the wire that it went over."""
    folder = tmp_path_factory.mktemp("served")
    return served(folder, given(), with_keys(folder))


@pytest.mark.slow
def test_sites_end_where_the_simulator_does(tmp_path, finished):
    """With the same seed each draws the same records and the same share of the noise."""
    result, _ = finished
    expected = simulated(tmp_path, given())
    assert farthest(result, expected) <= 1e-6, "both round to the same grid"
    for key in ("noise", "clip", "clients"):
        assert [line[key] for line in result.metrics] == pytest.approx([line[key] for line in expected.metrics])
    assert result.metrics[0]["noise"] == pytest.approx(0.5 / 5 * math.sqrt(4 / 2))


@pytest.mark.slow
@pytest.mark.parametrize(("seeded", "device"), [(True, "cpu"), (False, "auto")])
def test_a_seeded_site_rounds_its_records_also_where_it_has_a_gpu(tmp_path, monkeypatch, seeded, device):
    """On CUDA, in research mode, none is rounded, and the sum was as a whole: a record moves each coordinate more."""
    asked = []

    def pick(name):
        asked.append(name)
        return torch.device("cpu")

    monkeypatch.setattr(context, "pick_device", pick)
    served(tmp_path, given(federation__seeded=seeded, rounds=1, engine__device="auto"), with_keys(tmp_path))
    assert asked == [device] * 4


@pytest.mark.slow
def test_what_is_unmasked_is_on_the_records_grid_and_the_claim_is_of_secure_mode(tmp_path, monkeypatch):
    kept, was = [], SecureCohort._summed

    def keeping(self, plan, numbers, clients, params):
        kept.append((plan, numbers.copy()))
        return was(self, plan, numbers, clients, params)

    monkeypatch.setattr(SecureCohort, "_summed", keeping)
    result, _ = served(tmp_path, given(federation__seeded=False, rounds=1), with_keys(tmp_path))
    ((plan, numbers),) = kept
    assert plan.step == 2.0 ** (math.floor(math.log2(plan.bound)) - 14)
    assert plan.wraps == pytest.approx(4e-30)
    expected = plan.noise_of(4) / plan.step
    assert 0.8 * expected < numbers.std() < 1.2 * expected, "650 numbers: by chance off once in 10^11 times"
    proven = {(claim["unit"], claim["observer"]): claim for claim in result.proven}
    assert proven["record", "server"]["epsilon"] > proven["record", "release"]["epsilon"] > 0
    assert all("research" not in (claim["because"] or "") for claim in proven.values())


# ---------------------------------------------------------------- drop-outs and collusion


def cohort(colluding=1, threshold=5, **changes):
    own = {"per_round.colluding": colluding, "per_round.threshold": threshold, "federation.colluding": 1}
    return Cohort(SITES, slots=SLOTS, changes=METHOD | own | changes)


def contributions(plan):
    draws = [SecureGenerator(SecureStreams().keystream("noise")) for _ in range(SITES)]
    return np.stack([contribution(plan, torch.zeros(SLOTS), False, draw) for draw in draws])


def fits(numbers, width) -> bool:
    """Chi-square on 20,000 numbers, ALPHA for each side: finds 5%."""
    square = float((numbers.astype(float) ** 2).sum()) / width**2
    return chi2.isf(1 - ALPHA, SLOTS) < square < chi2.isf(ALPHA, SLOTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.statistical(false_alarm=4 * ALPHA)
def test_a_site_that_goes_at_any_message_leaves_the_noise_that_is_charged(kind):
    """Sites that sent their numbers are in the sum, with their noise, also if they go afterwards."""
    made = cohort()
    sent = contributions(made.plan)
    total = made.sum(sent, [(kind, 2)])
    senders = SITES - (kind in (KEYS, SHARES, ROUND))
    charged = made.plan.noise * made.plan.bound / made.plan.step
    assert fits(total, charged * math.sqrt(senders / 4))
    left = total - sent[0]
    assert fits(left, charged * math.sqrt((senders - 1) / 4)), "as one colluding site sees it"
    assert senders - 1 >= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESSAGES)
def test_too_few_at_any_message_leave_no_sum(kind):
    made = cohort()
    with pytest.raises(Failed, match=r"only 4 sites .* fewer than federation.threshold \(5\)"):
        made.sum(contributions(made.plan), [(kind, 2), (kind, 3)])


@pytest.mark.slow
@pytest.mark.statistical(false_alarm=4 * ALPHA)
def test_colluding_sites_subtract_their_shares_and_the_charged_noise_is_left():
    """Two of six may collude; with a third one it would be too little."""
    made = cohort(colluding=2)
    sent = contributions(made.plan)
    total = made.sum(sent, [(ROUND, 5)])
    charged = made.plan.noise * made.plan.bound / made.plan.step
    assert fits(total - sent[:2].sum(0), charged)
    assert fits(total - sent[:3].sum(0), charged * math.sqrt(2 / 3))
    assert not fits(total - sent[:3].sum(0), charged)


# ---------------------------------------------------------------- what a site agrees to, and what it is charged


@pytest.mark.slow
def test_the_sites_ledger_charges_what_its_records_suffer(tmp_path):
    """At its own sampling rate, once for each round in which it sent something, also where there was no sum."""
    grid = with_keys(tmp_path, requirements=Requirements(epsilon=500.0, unit="record", observer="server"))
    grid.changes[102] = lambda kind, answer: None if kind == KEYS else answer
    served(tmp_path, given(federation__seeded=False, federation__deadline=0.3), grid)
    for n, times in ((0, 2), (2, 0)):
        with Ledger(tmp_path / f"site-{n}" / "ledger.jsonl") as ledger:
            charged, distance = without_sampler(leaves(ledger.charged_event("record", "server")))
        if not times:
            assert not charged
            continue
        ((event, count),) = charged.items()
        records = len(reader("digits", part=0)(_terms(grid)).train_y)
        assert (event.kind, event.rate, count) == ("poisson", pytest.approx(5 / records), times)
        assert isinstance(event, Sampled)
        assert isinstance(event.event, Gaussian)
        assert event.event.noise == pytest.approx(1.0, abs=1e-7)
        assert event.event.noise < 1
        assert 0 < distance < 1e-20


def _terms(grid):
    message = next(payload for to, _, kind, payload in grid.wire if (to, kind) == ("to", TERMS))
    return Terms.read(message.text("terms"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('\\"shared\\"\\ncolluding = 1', '\\"shared\\"\\ncolluding = 2', "two different sums; set at least 4"),
        ("[per_round]\\n", "[per_round]\\nthreshold = 2\\n", "two different sums; set at least 3"),
        (
            "[federation]\\n",
            "[federation]\\nthreshold = 4\\n",
            "federation.threshold 4 contradicts per_round.threshold",
        ),
        ('aggregation = \\"secure\\"', 'aggregation = \\"plain\\"', "protects a sum"),
        ("[local]\\nepochs = 1\\nsteps = 1", "[local]\\nepochs = 1\\nsteps = 2", "set local.steps=1"),
    ],
    ids=["colluding", "threshold", "contradiction", "plain", "two steps"],
)
def test_a_site_refuses_terms_whose_shares_do_not_add_up(tmp_path, finished, old, new, words):
    _, grid = finished
    text = _terms(grid).text
    assert text.count(old) == 1, text
    site = Site(replace(grid.sites[100].owner, folder=tmp_path / "new"))
    answer = site.answer(TERMS, Payload({"terms": text.replace(old, new), "round": 0})).values
    site.close()
    assert words in answer["refused"]


def test_shares_that_the_grid_or_the_modulus_cannot_hold_are_refused():
    with pytest.raises(ConfigError, match="too little for the grid"):
        cohort(**{"per_round.noise_multiplier": 4e-4})
    with pytest.raises(ConfigError, match=r"16,384 records: set federation.min_records"):
        Cohort(SITES, slots=SLOTS, changes={"algorithm": "distributed-dp-sgd", "per_update.bits": 16})


@pytest.mark.slow
def test_claims_name_the_observers(tmp_path):
    result, _ = served(tmp_path, given(federation__seeded=False, rounds=1), with_keys(tmp_path))
    told = json.loads((result.run / "result.json").read_text())["proven"]
    proven = {(claim["unit"], claim["observer"]) for claim in told if claim["epsilon"] is not None}
    assert proven == {("record", "release"), ("record", "server")}
