"""A federation under secure aggregation, in one process, packed like a real one: from terms to the released model."""

import hashlib
import json
import math
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

import shoal
from shoal.accounting.accountants import epsilon
from shoal.accounting.events import Gaussian, Repeat
from shoal.accounting.privacy_ledger import Ledger, Record
from shoal.algorithms import algorithm
from shoal.algorithms.charges import KNOWN_SEED, event, proves
from shoal.config import configure
from shoal.errors import ConfigError, RunError
from shoal.federation.consent import Requirements
from shoal.federation.federated_run import coordinator, serve
from shoal.federation.flower.transport import Transport
from shoal.federation.key_files import public_pem, read_public, read_site_key
from shoal.federation.key_making import make_site
from shoal.federation.messages import Payload
from shoal.federation.roster import Roster
from shoal.federation.secagg import graph, round_plan
from shoal.federation.secagg.aggregator import SecureAggregator
from shoal.federation.secagg.encoding import CHECK, KEYS, SHARES, UNMASK, read_shares, write_shares
from shoal.federation.secagg.masks import from_vector
from shoal.federation.secagg.round_plan import Plan
from shoal.federation.secagg.secure_cohort import SecureCohort
from shoal.federation.site import Owner, Site
from shoal.federation.site_progress import Progress
from shoal.federation.site_records import reader
from shoal.federation.terms import END, ROUND, TERMS, Terms
from shoal.mechanisms.setting import Setting
from shoal.prepare import prepare
from shoal.random.secure_streams import grid, toward_zero
from shoal.training.round import protected_updates
from shoal.training.round_index import RoundIndex
from support.federations import NAMED, farthest, served, settings, simulated
from support.loopback import Loopback, Peer

SITES, NOISE = 4, 1.633


class Known(Loopback):
    """Sites that are known by their keys."""

    def get_nodes(self):
        return [Peer(node, public_pem(site.owner.key.public_key())) for node, site in self.sites.items()]


def with_keys(folder, count=SITES, peers=True, **owner):
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(count)]
    known = frozenset(public_pem(key.public_key()) for key in keys) if peers else None
    made = {}
    for n, key in enumerate(keys):
        word = Owner(f"site-{n:02}", folder / f"site-{n}", reader("digits", part=n), key=key, peers=known, **owner)
        made[100 + n] = Site(word)
    return Known(made)


def secure(name="trusted-curator", **changes):
    given = settings(name, clients__sampling="all", federation__aggregation="secure", federation__deadline=20.0)
    return given | {"per_round.at": "shared"} | {key.replace("__", "."): value for key, value in changes.items()}


def in_clear(**changes):
    """The same, with the coordinator's noise: seeded, so that the simulator plays the same round."""
    return secure(per_round__at="server", **changes)


def silent_at(kind):
    return lambda what, answer: None if what == kind else answer


# ---------------------------------------------------------------- the sum


@pytest.fixture
def sums(monkeypatch):
    """What the coordinator unmasked, round by round."""
    kept, was = [], SecureCohort._summed

    def keeping(self, plan, numbers, clients, params):
        kept.append((plan, numbers.copy()))
        return was(self, plan, numbers, clients, params)

    monkeypatch.setattr(SecureCohort, "_summed", keeping)
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("gone", [None, 102], ids=["all", "a drop-out"])
def test_the_sum_is_that_of_the_plain_path_on_the_grid(tmp_path, sums, gone):
    """Number by number what the clipped updates add up to when each is rounded towards 0 in the open."""
    given = in_clear() | {"rounds": 1, "federation.deadline": 0.5 if gone else 20.0}
    grid_ = with_keys(tmp_path)
    if gone:
        grid_.changes[gone] = silent_at(ROUND)
    result, grid_ = served(tmp_path, given, grid_)
    _, simulator = prepare(configure(given), None, None)
    messages = {node: payload for to, node, kind, payload in grid_.wire if (to, kind) == ("to", ROUND)}
    clip = simulator.cohort.algorithm.per_update.bound({}, 0, 1, None)
    expected = 0
    for node, message in messages.items():
        client = np.array([message.values["number"]])
        part = simulator.cohort.updates(client, message.vectors["model"], {}, RoundIndex(0, 1, 0))
        if node != gone:
            expected = expected + toward_zero(
                protected_updates(simulator.cohort, part, clip, RoundIndex(0, 1, 0))[0], grid(clip)
            )
    ((plan, numbers),) = sums
    assert plan.step == grid(clip)
    assert torch.equal(torch.from_numpy(numbers * plan.step).float(), expected)
    assert result.metrics[0]["clients"] == len(messages) - (gone is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trusted-curator", "geyer-private", "quantile", "end-to-end-private"])
def test_with_the_coordinators_noise_it_ends_where_the_simulator_does(tmp_path, name):
    """But for what rounding to the grid takes, less than a step of each update, and what later rounds make of it."""
    given = secure(name, per_round__at="server")
    result, _ = served(tmp_path, given, with_keys(tmp_path))
    expected = simulated(tmp_path, given)
    steps = [grid(line["clip"]) for line in expected.metrics]
    moved = configure(given).algorithm.server
    assert farthest(result, expected) <= 3 * moved.lr * sum(steps)
    clips = [[line["clip"] for line in run.metrics] for run in (result, expected)]
    assert clips[0] == pytest.approx(clips[1], rel=1e-6), "the count of norms within the clip is exact"


@pytest.mark.slow
def test_a_cohort_of_fixed_size_is_enough(tmp_path):
    """Three of the four sites a round: all three must answer."""
    given = secure(clients__sampling="fixed-size", clients__cohort=3)
    result, _ = served(tmp_path, given, with_keys(tmp_path))
    assert [line["clients"] for line in result.metrics] == [3, 3]


# ---------------------------------------------------------------- what is on the wire


@pytest.mark.slow
def test_nothing_but_the_protocols_letters_is_on_the_wire(tmp_path):
    given = secure("geyer-private", federation__seeded=False)
    _, grid_ = served(tmp_path, given, with_keys(tmp_path))
    answers = {
        KEYS: {"identity", "sealing", "masking", "signature"},
        SHARES: {"sealed", "commitments", "seed"},
        ROUND: set(),
        CHECK: {"signature"},
        UNMASK: {"shares", "disputed"},
    }
    sent = [(kind, payload) for to, _, kind, payload in grid_.wire if to == "from" and kind not in (TERMS, END)]
    assert len(sent) == 2 * SITES * len(answers)
    for kind, payload in sent:
        assert set(payload.values) == NAMED | answers[kind]
        assert set(payload.vectors) == ({"masked"} if kind == ROUND else set())
    words = np.concatenate([from_vector(payload.vectors["masked"]) for kind, payload in sent if kind == ROUND])
    assert len(words) == 2 * SITES * 651, "the update and, as one number more, the bit for the quantile"
    assert len(set(words.tolist())) > len(words) - 5, "no two are alike, but by chance"


# ---------------------------------------------------------------- noise and claims


@pytest.mark.slow
def test_the_sites_noise_is_in_the_model(tmp_path, sums):
    """52,650 numbers whose standard deviation is what the plan says, to 2.2% (by chance off once in 10^11 times)."""
    given = secure(model="mlp", rounds=1, federation__seeded=False)
    result, _ = served(tmp_path, given, with_keys(tmp_path))
    ((plan, numbers),) = sums
    expected = NOISE * plan.bound * math.sqrt(SITES / 2)  # three must answer, one of whom may collude
    assert result.metrics[0]["noise"] == pytest.approx(expected)
    assert (numbers * plan.step).std() == pytest.approx(expected, rel=0.022)
    assert "snr" not in result.metrics[0]


@pytest.mark.slow
def test_the_claim_holds_against_the_server_too(tmp_path):
    """A client's content is hidden, by noise of z/2 on a change of one clip; nobody's taking part is."""
    result, _ = served(tmp_path, secure(federation__seeded=False), with_keys(tmp_path))
    proven = {(claim["unit"], claim["observer"]): claim["epsilon"] for claim in result.proven}
    expected = epsilon(Repeat(Gaussian(NOISE / 2), 2), 1e-5).epsilon
    for unit in ("client", "record"):
        for observer in ("release", "server"):
            assert expected <= proven[unit, observer] <= 1.000002 * expected
    trusted, _ = served(tmp_path / "2", in_clear(), with_keys(tmp_path / "2"))
    proven = {(claim["unit"], claim["observer"]): claim["epsilon"] for claim in trusted.proven}
    assert proven["client", "server"] is None
    assert proven["client", "release"] < expected


def test_sampling_does_not_hide_who_takes_part():
    """The server draws it, and everybody sees by the noise how many came."""
    given = {"algorithm": "trusted-curator", "per_round.at": "shared", "clients.cohort": 10}
    record, setting = configure(given).algorithm, Setting(100, 5)
    for observer in ("release", "server"):
        found = event(record, setting, 0, "client", observer)
        assert (found.participation, found.client_rate, found.noise) == ("visible", 0.1, NOISE / 2)
        assert event(record, setting, 0, "record", observer).noise == NOISE
    assert event(record, Setting(100, 5, multiplicity=3), 0, "record", "server") == Gaussian(NOISE / 3)
    assert "server" in proves(record)
    assert "server" not in proves(algorithm("trusted-curator"))


@pytest.mark.slow
def test_noise_that_follows_from_a_seed_proves_nothing_to_a_server_that_chose_it(tmp_path):
    """Every site's share follows from it: the server subtracts them all."""
    result, _ = served(tmp_path, secure(rounds=1), with_keys(tmp_path))
    claims = {claim["observer"]: claim for claim in result.proven if claim["unit"] == "client"}
    assert claims["release"]["epsilon"] is not None
    assert claims["server"]["epsilon"] is None
    assert claims["server"]["because"] == KNOWN_SEED


@pytest.mark.slow
def test_noise_can_be_calibrated_against_the_server(tmp_path):
    budget = {"epsilon": 3.0, "calibrate": True, "observer": "server"}
    given = secure(federation__seeded=False) | {f"budget.{key}": value for key, value in budget.items()}
    result, _ = served(tmp_path, given, with_keys(tmp_path))
    claim = next(c for c in result.proven if (c["unit"], c["observer"]) == ("client", "server"))
    assert 2.97 <= claim["epsilon"] <= 3.0


# ---------------------------------------------------------------- sites that go, and sites that lie


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KEYS, SHARES, ROUND, CHECK, UNMASK])
def test_a_round_goes_on_without_a_site(tmp_path, kind):
    grid_ = with_keys(tmp_path)
    grid_.changes[102] = silent_at(kind)
    result, _ = served(tmp_path, secure(federation__deadline=0.3, rounds=1), grid_)
    assert result.metrics[0]["clients"] == (SITES if kind in (CHECK, UNMASK) else SITES - 1)
    assert [(report["site"], report["what"]) for report in result.metrics[0]["reports"]] == [("site-02", "late")]


@pytest.mark.slow
def test_a_round_with_too_few_is_charged_and_changes_nothing(tmp_path):
    grid_ = with_keys(tmp_path)
    for node in (101, 102):
        grid_.changes[node] = silent_at(ROUND)
    given = secure(federation__deadline=0.2)
    result, _ = served(tmp_path, given, grid_)
    _, simulator = prepare(configure(given), None, None)
    views = simulator.model_tensors()
    assert all(torch.equal(result.model[key], views[key]) for key in views), "no sum, no step"
    for line in result.metrics:
        assert (line["clients"], line["noise"]) == (0, 0)
        assert line["reports"][-1]["what"] == "failed"
        assert "2 sites sent their numbers, fewer than federation.threshold (3)" in line["reports"][-1]["why"]
    with Ledger(result.run / "ledger.jsonl") as ledger:
        assert len(ledger.charged) == 2
    with Ledger(tmp_path / "site-0" / "ledger.jsonl") as ledger:
        assert len(ledger.charged) == 2


def masked_lie(kind, answer):
    if kind != ROUND:
        return answer
    return Payload(answer.values, {"masked": torch.ones_like(answer.vectors["masked"])})


@pytest.mark.slow
def test_a_masked_lie_spoils_its_round_and_is_told_of(tmp_path):
    grid_ = with_keys(tmp_path)
    grid_.changes[101] = masked_lie
    result, _ = served(tmp_path, secure(rounds=1), grid_)
    assert result.metrics[0]["clients"] == 0
    assert "masks hide which one" in result.metrics[0]["reports"][0]["why"]


@pytest.mark.slow
def test_a_run_stops_after_failed_rounds_in_a_row_and_charges_no_more(tmp_path):
    """Nobody can be named for a masked lie, so it is the run that ends; sites are told, and pay for two rounds."""
    grid_, told = with_keys(tmp_path), []
    grid_.changes[101] = masked_lie
    given = secure(rounds=6, federation__max_failed_rounds=2)
    with pytest.raises(
        RunError, match=r"stopped after round 2: 2 rounds in a row gave no sum .*masks hide which one"
    ):
        served(tmp_path, given, grid_, log=told.append)
    assert grid_.sites[100].ended == "failed"
    for site in grid_.sites.values():
        site.close()
    (run,) = (tmp_path / "served").iterdir()
    for folder in (run, tmp_path / "site-0"):
        with Ledger(folder / "ledger.jsonl") as ledger:
            assert len(ledger.charged) == 2
    progress = Progress.read(Record.read(tmp_path / "site-0" / "ledger.jsonl")[1].progress)
    assert (progress.next, progress.ended) == (2, True)


@pytest.mark.slow
def test_a_run_that_stopped_so_can_be_resumed(tmp_path):
    grid_ = with_keys(tmp_path)
    grid_.changes[101] = masked_lie
    with pytest.raises(RunError):
        served(tmp_path, secure(rounds=3, federation__max_failed_rounds=1), grid_)
    del grid_.changes[101]
    (run,) = (tmp_path / "served").iterdir()
    result = serve(grid_, resume=run)
    assert [line["clients"] for line in result.metrics] == [0, SITES, SITES]
    for site in grid_.sites.values():
        site.close()


@pytest.mark.slow
def test_a_good_round_forgives_the_failed_ones(tmp_path):
    grid_, seen = with_keys(tmp_path), count()

    def now_and_then(kind, answer):
        return masked_lie(kind, answer) if kind == ROUND and next(seen) % 2 == 0 else answer

    grid_.changes[101] = now_and_then
    result, _ = served(tmp_path, secure(rounds=4, federation__max_failed_rounds=2), grid_)
    assert [line["clients"] for line in result.metrics] == [0, SITES, 0, SITES]


def opened_wrongly(kind, answer):
    if kind != UNMASK:
        return answer
    shares = read_shares(answer, "shares")
    return Payload(answer.values | {"shares": write_shares(dict.fromkeys(shares, 1))})


@pytest.mark.slow
def test_a_site_that_opens_wrong_shares_is_named_and_excluded_and_no_round_is_lost(tmp_path):
    grid_, told = with_keys(tmp_path), []
    grid_.changes[101] = opened_wrongly
    given = secure(rounds=3, federation__strikes=2, federation__threshold=3)
    result, _ = served(tmp_path, given, grid_, log=told.append)
    assert [line["clients"] for line in result.metrics] == [SITES, SITES, SITES - 1]
    reports = [report for line in result.metrics for report in line.get("reports", [])]
    assert [(report["site"], report["what"]) for report in reports] == [("site-01", "bad")] * 2
    assert "is not the one that site 0 dealt it" in reports[0]["why"]
    assert "excluded from now on" in reports[1]["why"]
    assert json.loads((result.run / "sites.json").read_text())[identity(grid_, 101)]["strikes"] == 2


def identity(grid_, node):
    return hashlib.sha256(public_pem(grid_.sites[node].owner.key.public_key())).hexdigest()[:16]


@pytest.mark.slow
def test_a_site_that_deals_false_shares_is_named_and_excluded_and_the_run_goes_on(tmp_path):
    """Two rounds are lost to it; the third has a sum, of the others."""
    grid_, told = with_keys(tmp_path), []

    def dealt_wrongly(kind, answer):
        if kind != SHARES:
            return answer
        return Payload(answer.values | {"seed": bytes(32)})

    grid_.changes[101] = dealt_wrongly
    result, _ = served(tmp_path, secure(rounds=3, federation__strikes=2), grid_, log=told.append)
    assert [line["clients"] for line in result.metrics] == [0, 0, SITES - 1]
    first = result.metrics[0]["reports"]
    assert [(report["site"], report["what"]) for report in first] == [("site-01", "bad"), ("", "failed")]
    assert "do not give the secret to which it is committed" in first[0]["why"]
    assert any("site site-01" in line and "excluded from now on" in line for line in told)


@pytest.mark.slow
def test_a_liar_that_an_operator_drops_meanwhile_stops_nothing(tmp_path, monkeypatch):
    """Its number is free by the time that its lie is found."""
    grid_ = with_keys(tmp_path)

    def dealt_wrongly(kind, answer):
        return answer if kind != SHARES else Payload(answer.values | {"seed": bytes(32)})

    opened = SecureAggregator._collect_openings

    def dropped_before(aggregator, *given):
        (cohort,) = cohorts
        cohort._roster.drop(identity(grid_, 101), "site-01")
        opened(aggregator, *given)

    gathered, cohorts = SecureCohort._gather, []

    def gather(cohort, *given):
        cohorts.append(cohort)
        return gathered(cohort, *given)

    monkeypatch.setattr(SecureAggregator, "_collect_openings", dropped_before)
    monkeypatch.setattr(SecureCohort, "_gather", gather)
    grid_.changes[101] = dealt_wrongly
    result, _ = served(tmp_path, secure(rounds=1), grid_)
    first = result.metrics[0]["reports"]
    assert [(report["site"], report["what"]) for report in first] == [("site-01", "bad"), ("", "failed")]


@pytest.mark.slow
def test_a_dispute_is_reported_without_a_strike(tmp_path):
    grid_ = with_keys(tmp_path)

    def disputing(kind, answer):
        if kind != UNMASK:
            return answer
        shares = read_shares(answer, "shares")
        del shares[3]
        return Payload(answer.values | {"shares": write_shares(shares), "disputed": "[3]"})

    grid_.changes[101] = disputing
    result, _ = served(tmp_path, secure(rounds=1), grid_)
    assert result.metrics[0]["clients"] == SITES
    assert [(report["site"], report["what"]) for report in result.metrics[0]["reports"]] == [("site-03", "disputed")]
    kept = json.loads((result.run / "sites.json").read_text())
    assert kept[identity(grid_, 103)]["strikes"] == kept[identity(grid_, 101)]["strikes"] == 0


@pytest.fixture
def few_neighbours(monkeypatch):
    """A sparse graph among four sites, which no site would accept otherwise."""
    monkeypatch.setattr(graph, "SPARSE_ABOVE", 3)
    monkeypatch.setattr(round_plan, "SPARSE_ABOVE", 3)
    monkeypatch.setattr(graph, "FAILURE", math.inf)
    monkeypatch.setattr(graph, "UNDELIVERED", math.inf)


@pytest.mark.slow
def test_a_large_cohort_shares_with_neighbours_and_says_what_that_risks(tmp_path, few_neighbours, sums):
    grid_, told = with_keys(tmp_path), []
    site = grid_.sites[100]
    site._log = told.append
    result, _ = served(tmp_path, secure(rounds=2), grid_, log=told.append)
    assert [line["clients"] for line in result.metrics] == [SITES, SITES]
    assert "reports" not in result.metrics[0]
    terms = next(payload for to, _, kind, payload in grid_.wire if (to, kind) == ("to", TERMS))
    assert "neighbours = 2" in terms.text("terms")
    said = [line for line in told if "each site shares with 2 others" in line and "added to delta" in line]
    assert len(said) == 2, "the coordinator's log, and the site's"
    sent = {kind: payload for to, _, kind, payload in grid_.wire if to == "to"}
    assert set(sent[ROUND].values) - NAMED == {"answered", "sealed", "commitments", "dealers"}
    assert set(sent[UNMASK].values) - NAMED == {"signatures", "agreements"}
    sent = {kind: payload for to, _, kind, payload in grid_.wire if to == "from"}
    assert set(sent[ROUND].values) - NAMED == {"signature"}


@pytest.mark.slow
@pytest.mark.parametrize("failure", [1e-13, 1.0])
def test_the_claim_against_the_server_counts_the_graphs_failure(tmp_path, few_neighbours, monkeypatch, failure):
    """Of a run: two rounds are charged half of it each; a site charges what it computes, not what it is told."""
    monkeypatch.setattr(graph.Graph, "failure", failure)
    grid_ = with_keys(tmp_path)
    result, _ = served(tmp_path, secure(rounds=2, federation__seeded=False), grid_)
    claims = {(claim["unit"], claim["observer"]): claim for claim in result.proven}
    against, released = claims["client", "server"], claims["client", "release"]
    assert released["sampler_delta"] < 1e-20
    if failure == 1.0:
        assert against["epsilon"] is None
        assert "exceeds delta" in against["because"]
    else:
        assert against["epsilon"] > released["epsilon"]
        assert against["sampler_delta"] == pytest.approx((1 + math.exp(against["epsilon"])) * failure, abs=0)
        assert "sparse graph of secure aggregation" in against["because"]
    terms = next(payload for to, _, kind, payload in grid_.wire if (to, kind) == ("to", TERMS)).text("terms")
    lower = json.loads(terms)
    lower["setting"]["graph_failure"] = 0.0
    assert Terms.read(json.dumps(lower, sort_keys=True)).charged.graph_failure == pytest.approx(failure / 2, abs=0)


@pytest.mark.slow
def test_a_site_refuses_terms_with_an_unsafe_graph(tmp_path, few_neighbours, monkeypatch):
    grid_ = with_keys(tmp_path)
    served(tmp_path, secure(rounds=1, federation__neighbours=1, federation__share_threshold=1), grid_)
    terms = next(payload for to, _, kind, payload in grid_.wire if (to, kind) == ("to", TERMS))
    monkeypatch.setattr(graph, "FAILURE", 1e-9)
    key = ec.generate_private_key(ec.SECP256R1())
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0), key=key))
    assert "could break the guarantee with probability" in site.answer(TERMS, terms).values["refused"]
    site.close()


@pytest.mark.parametrize("other", [5, 6, 7, 8, 10, "9", None])
def test_terms_of_another_protocol_are_refused_in_one_line(tmp_path, other):
    """Unread: 5 had no `graph_failure`, 6 another graph, 7 no `charged`, 8 counted planned rounds as `repeats`."""
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0)))
    said = site.answer(TERMS, Payload({"terms": json.dumps({"protocol": other, "setting": {}}), "round": 0}))
    expected = "the coordinator uses another version of the protocol: install the same Shoal everywhere"
    assert said.values == {"refused": expected}
    site.close()


def test_the_number_of_failed_rounds_is_checked():
    with pytest.raises(ConfigError, match=r"federation.max_failed_rounds must be > 0, got 0"):
        configure({"federation.max_failed_rounds": 0})


@pytest.mark.slow
def test_another_sites_signature_is_a_bad_answer(tmp_path):
    """A site that shows another key than the one by which it joined is told of, and gets a strike."""
    grid_ = with_keys(tmp_path)
    nodes, owner = grid_.get_nodes(), grid_.sites[101].owner
    grid_.get_nodes = lambda: nodes
    grid_.sites[101] = Site(replace(owner, key=ec.generate_private_key(ec.SECP256R1())))
    result, _ = served(tmp_path, secure(rounds=1), grid_)
    (report,) = result.metrics[0]["reports"]
    assert (report["site"], report["what"]) == ("site-01", "bad")
    assert "another key" in report["why"]
    assert result.metrics[0]["clients"] == 3


@pytest.mark.slow
def test_a_site_that_starts_anew_sits_out_the_round(tmp_path):
    """Its keys are gone with its memory: no disk ever holds them."""
    grid_ = with_keys(tmp_path)

    def restart(kind, answer):
        if kind == SHARES and answer.values["round"] == 0:
            site = grid_.sites[103]
            site.close()
            grid_.sites[103] = Site(site.owner)
        return answer

    grid_.changes[103] = restart
    result, _ = served(tmp_path, secure(), grid_)
    assert [line["clients"] for line in result.metrics] == [3, 4], "it is greeted again"
    assert "skips the round" in result.metrics[0]["reports"][0]["why"]


def test_it_does_not_begin_with_fewer_than_the_threshold(tmp_path):
    """`federation.min_sites` and `first` may be less: it waits all the same."""
    grid_ = with_keys(tmp_path)
    _, made = coordinator(
        configure(secure(federation__min_sites_to_start=1)), None, None, partial(Transport, grid_), {}, print
    )
    made.cohort._complete, made.cohort._resumed, made.cohort._started = True, False, 0.0
    made.cohort._roster = Roster(tmp_path, SITES, 3)
    assert made.cohort._wanted({}, RoundIndex(0, made.rounds)) == 3


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("fedavg", {}, "fedavg does not"),
        ("dp-sgd", {}, "dp-sgd does not"),
        ("fed-sdp", {}, "fed-sdp does not"),
        ("geyer", {}, "geyer does not"),
        ("dssgd", {}, "dssgd does not"),
        ("trusted-curator", {"aggregate.weights": "size"}, "aggregate.weights=equal"),
        ("trusted-curator", {"clients.sampling": "poisson", "clients.cohort": 3}, "cohort of public size"),
        ("trusted-curator", {"federation.threshold": 2}, "two different sums"),
        ("trusted-curator", {"federation.threshold": 0}, "federation.threshold must be > 0"),
        ("trusted-curator", {"federation.colluding": 0}, "federation.colluding must be >= 1"),
        ("trusted-curator", {"federation.aggregation": "plain", "per_round.at": "shared"}, "protects a sum"),
    ],
    ids=str,
)
def test_methods_and_settings_that_do_not_fit_are_refused(tmp_path, name, changes, words):
    given = settings(name, federation__aggregation="secure", clients__sampling="all") | changes
    with pytest.raises(ConfigError, match=words):
        served(tmp_path, given, with_keys(tmp_path))


@pytest.mark.parametrize(
    "own",
    [
        {"add": lambda self, total, z, bound, *given: total + 3 * z * bound * torch.randn_like(total)},
        {"share": lambda self, bound, cohort, t, total: 3 * self.multiplier(t, total) * bound},
    ],
    ids=lambda own: next(iter(own)),
)
def test_noise_that_sites_would_not_draw_is_refused(own):
    """They draw Gaussian shares of its multiplier, whatever it adds in a simulation, and charges."""
    config, setting = configure(secure()), Setting(5, 2, sizes=(100,))
    record, section = config.algorithm, config.federation
    round_plan.refuse_unfit(record, section, setting, 10)
    kind = type(record.per_round)
    other = type("Odd", (kind,), own | {"event": kind.event})(record.per_round.noise_multiplier, at="shared")
    with pytest.raises(ConfigError, match="of Odd, for which its event is, would not be used"):
        round_plan.refuse_unfit(replace(record, per_round=other), section, setting, 10)
    round_plan.refuse_unfit(replace(record, per_round=replace(other, at="server")), section, setting, 10)


def told_by_a_site(tmp_path, given, **owner):
    """What the first site says to the terms."""
    grid_ = with_keys(tmp_path)
    served(tmp_path, given, grid_)
    terms = next(payload for to, _, kind, payload in grid_.wire if (to, kind) == ("to", TERMS))
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0), **owner))
    answer = site.answer(TERMS, terms)
    site.close()
    return answer.values


@pytest.mark.slow
def test_sites_refuse_what_they_cannot_check(tmp_path):
    key = ec.generate_private_key(ec.SECP256R1())
    server = Requirements(epsilon=50.0, observer="server")
    given = secure(rounds=1, federation__seeded=False)
    assert "needs a long-lived site with a key" in told_by_a_site(tmp_path / "1", given)["refused"]
    assert "--peers" in told_by_a_site(tmp_path / "2", given, key=key, requirements=server)["refused"]
    assert "agreed" in told_by_a_site(tmp_path / "3", given, key=key, requirements=server, peers=frozenset())
    assert "agreed" in told_by_a_site(tmp_path / "4", given, key=key, requirements=Requirements(epsilon=50.0))


@pytest.mark.slow
def test_a_site_never_adds_no_noise_where_it_should_share_it(tmp_path):
    """Terms with shared noise, but without secure aggregation, are refused by the site itself."""
    grid_ = with_keys(tmp_path)
    served(tmp_path, secure(rounds=1), grid_)
    terms = next(payload for to, _, kind, payload in grid_.wire if (to, kind) == ("to", TERMS))
    plain = terms.values["terms"].replace('aggregation = \\"secure\\"', 'aggregation = \\"plain\\"')
    assert plain != terms.values["terms"]
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0)))
    assert "protects a sum" in site.answer(TERMS, Payload({"terms": plain, "round": 0})).values["refused"]
    site.close()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"per_update.at": "client", "algorithm": "fed-sdp"}, {"algorithm": "dp-sgd"}])
def test_a_round_asked_for_twice_has_no_noise_twice(tmp_path, changes):
    """Under plain aggregation a site answers again, and is charged again: then its noise must be new as well."""
    given = settings(changes["algorithm"], federation__seeded=False, rounds=1) | changes
    _, grid_ = served(tmp_path, given, with_keys(tmp_path))
    messages = {kind: payload for to, _, kind, payload in grid_.wire if to == "to"}
    site = Site(Owner("new", tmp_path / "new", reader("digits", part=0)))
    site.answer(TERMS, messages[TERMS])
    one, other = (site.answer(ROUND, messages[ROUND]).vectors["update"] for _ in range(2))
    site.close()
    assert float((one - other).abs().median()) > 1e-4


def test_peers_are_read_from_a_folder(tmp_path):
    private, _ = make_site(tmp_path, "north")
    make_site(tmp_path, "south")
    found = read_public(tmp_path)
    assert set(found) == {"north", "south"}
    assert found["north"] == public_pem(read_site_key(private).public_key())


@pytest.mark.slow
def test_a_simulation_of_it_adds_the_noise_to_the_sum(tmp_path):
    given = {key: value for key, value in secure().items() if not key.startswith("federation")}
    one = shoal.run(given, runs=tmp_path)
    other = shoal.run(given | {"per_round.at": "server"}, runs=tmp_path)
    assert farthest(one, other) == 0


def test_the_sum_of_many_sites_is_exact_before_the_noise():
    """From 2^24 on float32 has even numbers only: a site that moves the sum by 1 step would move it by 2, or by 0."""
    plan = Plan(cohort=10**4, threshold=6000, colluding=0, parameters=2, bound=1.0, noise=0.0, count_noise=None)
    numbers = np.array([2**24 + 1, -(2**24) - 3])
    total = SecureCohort._summed(None, plan, numbers, 10**4, torch.zeros(2))
    assert (total.update / plan.step).tolist() == numbers.tolist()
