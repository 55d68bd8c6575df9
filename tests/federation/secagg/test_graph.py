"""The sparse graph of secure aggregation: its probabilities, what holds for every graph, and rounds that use it."""

import math
import re
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from scipy.stats import binom

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.config import configure
from shoal.errors import ConfigError
from shoal.federation.messages import InvalidMessage, Payload
from shoal.federation.secagg import graph
from shoal.federation.secagg.aggregator import Failed
from shoal.federation.secagg.bundle_list import BundleList
from shoal.federation.secagg.encoding import (
    CHECK,
    KEYS,
    SHARES,
    UNMASK,
    read_bytes,
    read_numbers,
    read_shares,
    write_bytes,
    write_numbers,
    write_shares,
)
from shoal.federation.secagg.graph import FAILURE, Graph, computed
from shoal.federation.secagg.round_plan import Plan, with_graph
from shoal.federation.terms import ROUND
from shoal.mechanisms.setting import Setting
from shoal.training.round_index import RoundIndex
from support.secure_cohort import NOW, Cohort

SITES, SPARSE = 12, (6, 3)  # 9 of 12 must answer


def numbers(sites=SITES, slots=6, seed=0):
    return np.random.default_rng(seed).integers(-1000, 1000, (sites, slots))


@pytest.fixture
def tiny(monkeypatch):
    """Graphs of a dozen sites, which no site would accept: their failure is likely."""
    monkeypatch.setattr(graph, "FAILURE", math.inf)
    return lambda **changes: Cohort(SITES, sparse=SPARSE, **changes)


# ---------------------------------------------------------------- probabilities


def choose(n, k):
    return Fraction(math.comb(n, k)) if 0 <= k <= n else Fraction(0)


@pytest.mark.parametrize(("population", "marked", "draws"), [(10, 3, 4), (30, 1, 9), (40, 25, 12), (9, 9, 3)])
def test_hypergeometric_tails_are_exact(population, marked, draws):
    found = np.exp(graph._log_tail(population, marked, draws))
    for x in range(draws + 1):
        terms = (choose(marked, i) * choose(population - marked, draws - i) for i in range(x + 1, draws + 1))
        assert found[x] == pytest.approx(float(sum(terms) / choose(population, draws)), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(
    ("n", "threshold", "colluding", "k", "inside"),
    [(30, 20, 0, 4, 3), (40, 27, 0, 8, 5), (60, 40, 2, 12, 5), (120, 80, 1, 20, 8)],
)
def test_the_bound_on_cuts_is_at_least_the_sum_of_its_terms(n, threshold, colluding, k, inside):
    """And not much more: within a factor of 3 wherever it says anything."""
    found = np.exp(np.minimum(graph._log_cuts(n, threshold, colluding, k, inside), 0))
    honest = threshold - colluding
    terms, by_part = [], 0
    for r in range(1, honest - inside):
        size, avoid = honest - r, float(choose(n - 1 - r, k) / choose(n - 1, k))
        terms.append(math.comb(n, r) * binom.sf(size - 1, n, avoid))
        if 2 * size < honest:
            each = choose(k, inside) * choose(size - 1, inside) / choose(threshold - 1, inside)
            by_part += (small := float(math.comb(n, size) * min(each, 1) ** size)) < terms[-1]
            terms[-1] = min(terms[-1], small)
    for loose in range(len(terms)):
        exact = math.fsum(terms[loose:])
        assert found[loose] >= min(exact, 1) * (1 - 1e-6)
        if exact < 1e-3:
            assert found[loose] <= 3 * exact
    assert by_part, "the second bound is the smaller one for some parts"


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "colluding"), [(101, 1), (150, 15), (300, 30), (1000, 1), (1000, 100)])
def test_a_computed_graph_is_safe_delivers_and_has_no_neighbour_too_many(sites, colluding):
    found = computed(sites, 2 * sites // 3 + 1, colluding)
    assert found.neighbours < sites / 2
    assert found.failure <= FAILURE
    assert found.undelivered <= graph.UNDELIVERED
    found.refuse_unsafe()
    fewer = [replace(found, neighbours=found.neighbours - 1, share_threshold=t) for t in range(1, found.neighbours)]
    assert all(each.failure > FAILURE / 2 or each.undelivered > graph.UNDELIVERED for each in fewer)


def test_up_to_100_sites_all_share_with_all():
    assert not computed(100, 67, 1).sparse
    given = {"clients.sampling": "all", "algorithm": "trusted-curator", "federation.aggregation": "secure"}
    for sites, sparse in ((100, False), (101, True)):
        config = configure(given | {"data.clients": sites})
        section = with_graph(config.algorithm, config.federation, Setting(sites, 1))
        assert (section.neighbours is not None) is sparse
        assert (section == config.federation) is not sparse


def test_a_threshold_of_all_sites_needs_few_neighbours():
    assert computed(200, 200, 1).neighbours < computed(200, 150, 1).neighbours


def test_few_signatures_are_verified_where_many_must_sign():
    """The chance that some site has too many neighbours whom a list with too few valid signatures fooled, over all
    rounds of a run."""
    found = computed(1000, 667, 1)
    k, fooled, valid = found.neighbours, found._risk.fooled, 500
    assert 0 < fooled < found.shares - found.corrupt

    def likely(q):
        return 1000 * graph.BEGUN * choose(k, fooled + 1) * (choose(valid, q) / choose(667, q)) ** (fooled + 1)

    q = found.sample(667)
    assert likely(q) <= FAILURE / 8 < likely(q - 1)
    assert found.sample(700) < q
    close = Graph(1000, 501, 0, 49, 14)
    assert close.sample(501) == 501, "one more than may be false"


def test_so_many_fooled_neighbours_of_one_site_are_as_rare_as_the_bound_says():
    """Sites that each verify 2 of 8 signatures, of which 5 are valid: one of 3 sites has more than one fooled among
    its 4 neighbours. False alarms: once in 10^9 times."""
    drawn = np.random.default_rng(2).random((20_000, 3, 4, 8)).argsort(-1)[..., :2]
    fooled = (drawn < 5).all(-1).sum(-1)  # neighbours, by site
    frequency = (fooled > 1).any(-1).mean()
    bound = 3 * math.comb(4, 2) * (math.comb(5, 2) / math.comb(8, 2)) ** 2
    exact = 1 - binom.cdf(1, 4, math.comb(5, 2) / math.comb(8, 2)) ** 3
    assert abs(frequency - exact) < 6.2 * math.sqrt(exact * (1 - exact) / 20_000)
    assert exact <= bound


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"neighbours": 20}, "could break the guarantee with probability"),
        ({"share_threshold": 1}, "could break the guarantee with probability"),
        ({"colluding": 200}, "could break the guarantee with probability"),
        ({"share_threshold": 50}, "share_threshold must be 1 to federation.neighbours"),
        ({"neighbours": 700, "share_threshold": 300}, "must be less than federation.threshold"),
        ({"share_threshold": None}, "must be given together"),
        ({"neighbours": None}, "must be given together"),
        ({"cohort": 4000, "threshold": 3000}, "at most 3,000 sites"),
    ],
    ids=str,
)
def test_a_graph_that_is_not_safe_is_refused(changes, words):
    good = {"cohort": 1000, "threshold": 667, "colluding": 1, "neighbours": 49, "share_threshold": 14}
    Graph(**good).refuse_unsafe()
    with pytest.raises(ConfigError, match=words):
        Graph(**(good | changes)).refuse_unsafe()
    if "cohort" not in changes:
        sparse = {key: (good | changes)[key] for key in ("neighbours", "share_threshold")}
        colluding = (good | changes)["colluding"]
        with pytest.raises(ConfigError, match=words):
            Plan(1000, 667, colluding, 10, 0.4, 1.0, None, **sparse).refuse_unsound()


def test_the_noise_of_loose_sites_is_made_up_for():
    plan = Plan(1000, 667, 1, 10, 0.4, 1.0, None, 49, 14)
    assert plan.graph.loose > 0
    left = (plan.threshold - plan.colluding - plan.graph.loose) * plan.share**2
    assert math.sqrt(left) * plan.step == pytest.approx(plan.noise * plan.bound)


# ---------------------------------------------------------------- what holds for every graph


def exposed(picks, colluding, sum_of, opened):
    """The sets of honest sites in the sum whose sum a coordinator can unmask, by trying them all.

    `opened`: whose seeds it can open. A set must cancel its masks within itself: masks with colluding sites are
    known, those with sites that are not in the sum are opened.
    """
    honest = sum_of - colluding
    edges = {frozenset((a, b)) for a in picks for b in picks[a] if a in honest and b in honest}
    some = [set(each) for size in range(1, len(honest) + 1) for each in combinations(sorted(honest & opened), size)]
    return [each for each in some if not any(len(edge & each) == 1 for edge in edges)]


def test_by_brute_force_what_can_be_unmasked_is_closed_under_picks():
    """Every graph of five sites with two picks each, one site colluding, one gone (3 sites in the sum are honest):
    a seed needs two shares. Whatever smaller sum can be unmasked, nobody in it picked a site that is left out, and
    every one of its sites has as many honest picks in it as are needed: the bound follows from these two facts."""
    sites, colluding, needed = 5, {4}, 2  # site 3 is gone
    smaller = 0
    options = {site: list(combinations([s for s in range(sites) if s != site], 2)) for site in (0, 1, 2)}
    for chosen in product(*options.values()):
        picks = dict(zip(options, map(set, chosen), strict=True))
        sum_of = {0, 1, 2, 4}
        opened = {site for site in (0, 1, 2) if len(picks[site] & sum_of) >= needed}
        for part in exposed(picks, colluding, sum_of, opened):
            others = sum_of - colluding - part
            assert all(not picks[site] & others for site in part)
            assert all(len(picks[site] & part) >= needed - len(picks[site] & colluding) for site in part)
            smaller += bool(others)
    assert smaller > 0, "such sums exist: only their probability protects"


@pytest.mark.slow
def test_cuts_are_no_more_frequent_than_their_bound():
    """Random picks of 5 among 10 sites, of which one may be gone: in how many graphs some choice of survivors leaves
    a part cut off, by trying all of them."""
    n, k, threshold, inside = 10, 5, 9, 3
    generator = np.random.default_rng(3)
    others = [[site for site in range(n) if site != own] for own in range(n)]
    cut = 0
    for _ in range(100):
        picks = [sum(1 << int(site) for site in generator.choice(others[own], k, replace=False)) for own in range(n)]
        cut += cuttable(picks, threshold, inside)
    assert 0 < cut / 100 <= float(np.exp(graph._log_cuts(n, threshold, 0, k, inside)[0])) < 0.3


def cuttable(picks, threshold, inside):
    """Whether there are disjoint sets Q and R of `threshold` sites, each of Q with `inside` picks in Q and none in R.

    `picks` are bits.
    """
    for size in range(1, threshold - inside):
        for left_out in combinations(range(len(picks)), size):
            others = sum(1 << site for site in left_out)
            part = {site for site, pick in enumerate(picks) if not (others >> site & 1 or pick & others)}
            while lacking := {site for site in part if sum(picks[site] >> each & 1 for each in part) < inside}:
                part -= lacking
            if len(part) >= threshold - size:
                return True
    return False


@pytest.mark.slow
def test_small_parts_that_pick_within_themselves_are_no_more_frequent_than_their_bound():
    """Three of 16 sites who each picked one of the other two: the second bound, for a list of all 16 or of 11."""
    n, k, threshold, size = 16, 2, 11, 3
    generator = np.random.default_rng(4)
    others = [[site for site in range(n) if site != own] for own in range(n)]
    found = 0
    for _ in range(300):
        picks = [set(generator.choice(others[own], k, replace=False).tolist()) for own in range(n)]
        parts = (set(part) for part in combinations(range(n), size))
        found += sum(all(picks[site] & part for site in part) for part in parts)
    mean = math.comb(n, size) * (1 - float(choose(n - size, k) / choose(n - 1, k))) ** size
    assert found / 300 == pytest.approx(mean, rel=0.2), "by chance less than once in 10^6 times"
    bound = math.comb(n, size) * (k * (size - 1) / (threshold - 1)) ** size
    assert mean <= bound


def test_picks_are_the_sites_own_uniform_and_of_the_right_number():
    found = Graph(12, 9, 1, *SPARSE)
    drawn = [found.picked(range(1, 12)) for _ in range(2200)]
    assert {len(each) for each in drawn} == {6}
    counts = np.bincount(np.concatenate([sorted(each) for each in drawn]), minlength=12)[1:]
    assert (abs(counts - 1200) < 6.5 * math.sqrt(2200 * 6 / 11 * 5 / 11)).all(), "by chance once in 10^9 times"


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize(
    "gone", [(), ((SHARES, 2),), ((ROUND, 2), (ROUND, 7)), ((CHECK, 5),), ((UNMASK, 1), (ROUND, 0))], ids=str
)
def test_the_sum_is_that_of_those_who_sent(tiny, gone):
    cohort, values = tiny(), numbers()
    total = cohort.sum(values, gone)
    lost = [site for message, site in gone if message in (SHARES, ROUND)]
    assert (total == np.delete(values, lost, axis=0).sum(0)).all()
    assert not cohort.invalid
    assert not cohort.blamed


@pytest.mark.slow
def test_a_real_graph_with_a_third_gone():
    found = computed(105, 71, 1)
    cohort, values = Cohort(105, sparse=(found.neighbours, found.share_threshold)), numbers(105)
    total = cohort.sum(values, [(ROUND, site) for site in range(34)])
    assert (total == values[34:].sum(0)).all()


def test_too_few_give_no_sum_and_no_share(tiny):
    cohort = tiny()
    with pytest.raises(Failed, match=r"only 8 sites .*federation.threshold \(9\)"):
        cohort.sum(numbers(), [(ROUND, site) for site in range(4)])
    assert not cohort.sent(UNMASK)


@pytest.mark.slow
def test_a_site_deals_to_its_picks_and_learns_nothing_of_others(tiny):
    cohort = tiny()
    cohort.sum(numbers())
    for number, answer in cohort.sent(SHARES).items():
        holders = set(read_bytes(answer, "sealed"))
        assert len(holders) == 6
        assert number not in holders
        assert holders == set(read_bytes(answer, "commitments"))
        for holder in holders:
            assert number in read_shares(cohort.sent(UNMASK)[holder], "shares")


def test_fewer_neighbours_than_needed_leave_no_sum(tiny):
    """Four of a site's six neighbours are gone at the end: two shares are no secret."""
    cohort = tiny()
    lost: list[tuple[str, int]] = []

    def back(kind, number, answer):
        if (kind, number) == (SHARES, 0):
            lost.extend((UNMASK, holder) for holder in sorted(read_bytes(answer, "sealed"))[:4])
        return answer

    with pytest.raises(Failed, match=r"sites opened a share|fewer than"):
        cohort.sum(numbers(), lost, back=back)


@pytest.mark.slow
def test_a_wrong_share_and_false_shares_are_named_as_ever(tiny):
    cohort, values = tiny(), numbers()

    def lie(kind, number, answer):
        if (kind, number) != (UNMASK, 0):
            return answer
        return Payload(answer.values | {"shares": write_shares(dict.fromkeys(read_shares(answer, "shares"), 1))})

    assert (cohort.sum(values, back=lie) == values.sum(0)).all()
    assert [problem[:9] for problem in cohort.invalid] == ["0: the sh"]

    def false(kind, number, answer):
        return Payload(answer.values | {"seed": bytes(32)}) if (kind, number) == (SHARES, 1) else answer

    cohort = tiny()
    with pytest.raises(Failed, match="site 1 dealt false shares"):
        cohort.sum(values, back=false)
    assert [(site, certain) for site, _, certain in cohort.blamed] == [(1, True)]


# ---------------------------------------------------------------- a coordinator that breaks the protocol


def test_a_site_that_was_told_of_other_dealers_is_not_opened(tiny):
    """The attack that the signature prevents: tell a site that its neighbours are gone, so that it shares no mask
    with them, and have them open its seed."""
    cohort, told = tiny(), []

    def to(kind, number, message):
        if kind != ROUND or told:
            return message
        dealers = read_numbers(message, "dealers")
        if not (others := dealers - set(read_bytes(message, "sealed")) - {number}):  # all chose it
            return message
        told.append(number)
        fewer = write_numbers(dealers - set(sorted(others)[:2]))
        return Payload(message.values | {"dealers": fewer}, message.vectors)

    cohort.sum(numbers(), to=to)
    assert f"{told[0]}: its list of dealers: invalid signature" in cohort.invalid


def ready_to_open(cohort):
    """Sites that have signed the survivors, and the messages with which the coordinator asks them for shares."""
    kept = {}

    def to(kind, number, message):
        if kind == UNMASK:
            kept[number] = message
            raise InvalidMessage("kept back")
        return message

    with pytest.raises(Failed, match="revealed"):
        cohort.sum(numbers(), to=to)
    return kept


@pytest.mark.parametrize("what", ["missing", "of another site", "of another round", "no table"])
def test_no_seed_is_opened_without_its_sites_agreement(tiny, what):
    cohort = tiny()
    messages = ready_to_open(cohort)
    number = next(n for n, message in messages.items() if len(read_bytes(message, "agreements")) > 1)
    given = read_bytes(messages[number], "agreements")
    one, other = sorted(given)[:2]
    wrong = {
        "missing": write_bytes({n: given[n] for n in given if n != one}),
        "of another site": write_bytes(given | {one: given[other]}),
        "of another round": write_bytes(given | {one: read_bytes(messages[number], "signatures")[one]}),
        "no table": "[]",
    }[what]
    with pytest.raises(InvalidMessage, match=r"list of dealers|malformed"):
        cohort.desks[number].answer(UNMASK, Payload(messages[number].values | {"agreements": wrong}), NOW, number)


def test_a_site_that_was_shown_the_right_signatures_opens_and_one_that_was_shown_false_ones_never_does(tiny):
    """Else a coordinator could repeat false ones until the sample misses them."""
    cohort = tiny()
    messages = ready_to_open(cohort)
    assert cohort.desks[0].answer(UNMASK, messages[0], NOW, 0)
    false = Payload(messages[1].values | {"signatures": write_bytes(dict.fromkeys(range(12), b"0"))})
    for message, why in ((false, "invalid signature"), (false, "answered twice"), (messages[1], "answered twice")):
        with pytest.raises(InvalidMessage, match=why):
            cohort.desks[1].answer(UNMASK, message, NOW, 1)


def test_false_signatures_are_found_by_the_sample(tiny):
    """Of twelve all seven that matter are verified: no list with six valid ones passes."""
    cohort = tiny()
    messages = ready_to_open(cohort)
    signatures = read_bytes(messages[0], "signatures")
    false = {n: signature if n < 6 else b"0" for n, signature in signatures.items()}
    with pytest.raises(InvalidMessage, match="list of survivors: invalid signature"):
        cohort.desks[0].answer(UNMASK, Payload(messages[0].values | {"signatures": write_bytes(false)}), NOW, 0)
    assert cohort.plan.graph.sample(12) == 7


@pytest.mark.parametrize(
    ("dealers", "why"),
    [
        (lambda d: d - {0}, "not on the list"),
        (lambda d: d | {99}, "not on the list"),
        (lambda d: set(sorted(d)[:8]), r"not on the list|only 8 sites are left"),
    ],
    ids=["not itself", "a stranger", "too few"],
)
def test_a_list_of_dealers_that_does_not_fit_is_refused(tiny, dealers, why):
    cohort = tiny()

    def to(kind, number, message):
        if (kind, number) != (ROUND, 0):
            return message
        told = dealers(read_numbers(message, "dealers"))
        return Payload(message.values | {"dealers": write_numbers(told)}, message.vectors)

    cohort.sum(numbers(), to=to)
    (problem,) = cohort.invalid
    assert problem.startswith("0: ")
    assert re.search(why, problem)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{}", "[0, 0]", '["0"]', "[0.5]"])
def test_a_list_of_dealers_that_makes_no_sense_is_refused(tiny, text):
    cohort, values = tiny(), numbers()

    def to(kind, number, message):
        return Payload(message.values | {"dealers": text}) if (kind, number) == (ROUND, 0) else message

    assert (cohort.sum(values, to=to) == values[1:].sum(0)).all()
    assert cohort.invalid[0].startswith("0: malformed field 'dealers'")


def first_cards(cohort):
    """Site 0, waiting for the list of keys, and the list."""
    kept = {}

    def to(kind, number, message):
        if kind == SHARES:
            kept[number] = message.values["cards"]
            raise InvalidMessage("kept back")
        return message

    with pytest.raises(Failed):
        cohort.sum(numbers(), to=to)
    return kept[0]


def test_a_packed_list_is_read_as_it_was_written(tiny):
    packed = first_cards(tiny())
    found = BundleList(packed)
    assert list(found) == list(range(SITES))
    assert BundleList.of(dict(found)).packed == packed
    assert found.identities() == {found[n].identity for n in found} == {found.identity(n) for n in found}
    for number in found:
        assert len(found[number].sealing) == len(found[number].masking) == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p[:-1],
        lambda p: p + b"\x00",
        lambda p: p + p,
        lambda p: p[:5],
        lambda p: b"\xff" * 8 + p,
        lambda p: b"",
        lambda p: p.decode("latin1"),
    ],
    ids=["cut off", "too long", "twice", "a head only", "a huge length", "empty", "text"],
)
def test_a_packed_list_that_makes_no_sense_is_refused(tiny, change):
    cohort = tiny()
    packed = first_cards(cohort)
    with pytest.raises(InvalidMessage):
        cohort.desks[0].answer(SHARES, Payload({"cards": change(packed)}), NOW, 0)


@pytest.mark.slow
def test_a_site_picks_its_neighbours_once_however_often_it_is_shown_a_forged_list(tiny):
    """Its picks, six of eleven, miss the forged entry 5 times in 11: all of 25 sites do once in 10^8 times."""
    refused = 0
    for _ in range(25):
        cohort = tiny()
        found = dict(BundleList(first_cards(cohort)))
        forged = found | {1: replace(found[1], masking=bytes(31) + b"\x09")}
        message = Payload({"cards": BundleList.of(forged).packed})
        try:
            cohort.desks[0].answer(SHARES, message, NOW, 0)
        except InvalidMessage:
            refused += 1
            for again in (message, Payload({"cards": BundleList.of(found).packed})):
                with pytest.raises(InvalidMessage, match="no step is answered twice"):
                    cohort.desks[0].answer(SHARES, again, NOW, 0)
    assert refused


def test_a_forged_entry_is_refused_by_those_who_pick_it_and_nobody_is_on_the_list_twice(tiny):
    def forged(found):  # six picks of eleven, of which seven are forged
        return {n: replace(found[n], masking=bytes(31) + b"\x09") for n in range(1, 8)}

    changes = {
        "invalid signature": forged,
        "on the list twice": lambda found: {1: replace(found[2], number=1)},
        "known peers": lambda found: {1: replace(found[1], identity=b"x")},
    }
    for why, change in changes.items():
        cohort = tiny()
        found = dict(BundleList(first_cards(cohort)))
        with pytest.raises(InvalidMessage, match=why):
            cohort.desks[0].answer(SHARES, Payload({"cards": BundleList.of(found | change(found)).packed}), NOW, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda a, s: {"sealed": write_bytes(dict(list(s.items())[:5]))}, "wrong sites"),
        (lambda a, s: {"sealed": write_bytes(s | {1: bytes(82)})}, "wrong sites"),
        (lambda a, s: {"sealed": write_bytes({n + 100: c for n, c in s.items()})}, "wrong sites"),
        (lambda a, s: {"commitments": write_bytes({n: bytes(64) for n in [*s, 1]})}, "wrong sites"),
    ],
    ids=["too few", "itself", "strangers", "commitments to itself"],
)
def test_a_site_that_deals_to_others_than_it_may_is_a_drop_out(tiny, change, why):
    cohort, values = tiny(), numbers()

    def back(kind, number, answer):
        if (kind, number) != (SHARES, 1):
            return answer
        return Payload(answer.values | change(answer, read_bytes(answer, "sealed")))

    assert (cohort.sum(values, back=back) == np.delete(values, 1, axis=0).sum(0)).all()
    assert [why in problem for problem in cohort.invalid] == [True]


@pytest.mark.slow
def test_a_bad_signature_of_the_dealers_is_a_bad_answer(tiny):
    cohort, values = tiny(), numbers()

    def back(kind, number, answer):
        return Payload({"signature": b"0"}, answer.vectors) if (kind, number) == (ROUND, 1) else answer

    assert (cohort.sum(values, back=back) == np.delete(values, 1, axis=0).sum(0)).all()
    assert cohort.invalid == ["1: its list of dealers: invalid signature"]


def test_a_site_begins_no_more_rounds_than_the_probability_counts(tiny, monkeypatch):
    """Five rounds, of which each counts three times: a charge for a round covers all attempts at it."""
    monkeypatch.setattr(graph, "BEGUN", 17)
    cohort = tiny()
    for t in (0, 1):
        for attempt in range(3):
            cohort.desks[0].answer(KEYS, Payload({}), RoundIndex(t, 5, attempt), 0)
        with pytest.raises(InvalidMessage, match=r"as often as it may \(3 times\)"):
            cohort.desks[0].answer(KEYS, Payload({}), RoundIndex(t, 5, 3), 0)


@pytest.mark.parametrize("rounds", [1, 7, 1000, 10**5])
def test_what_rounds_are_charged_covers_every_attempt(rounds):
    found = computed(1000, 667, 1)
    each = found.failure / graph.BEGUN
    assert found.failure_of_round(rounds) == pytest.approx(each * graph.attempts(rounds), abs=0)
    assert rounds * graph.attempts(rounds) <= max(graph.BEGUN, rounds)


def test_every_list_that_a_large_federation_can_fill_counts():
    """Of 10,000 sites 1,000 are in a round: ten lists could hold the keys of one site, who is shown the best."""
    one, ten = Graph(1000, 667, 1, 49, 14), Graph(1000, 667, 1, 49, 14, lists=10)
    k, u = 49, ten.corrupt
    tail = sum(choose(1, i) * choose(665, k - i) for i in range(u + 1, k + 1)) / choose(666, k)
    fooled = ten._risk.fooled
    cut = math.exp(graph._log_cuts(1000, 667, 1, k, 14 - u - fooled)[ten.loose])
    q = ten.sample(667)
    missed = 1000 * choose(k, fooled + 1) * (choose(500, q) / choose(667, q)) ** (fooled + 1)
    assert ten.failure >= 10 * graph.BEGUN * (1000 * tail + cut + missed) * (1 - 1e-9)
    assert q > one.sample(667)
    given = {"algorithm": "trusted-curator", "federation.aggregation": "secure", "data.clients": 10_000}
    config = configure(given | {"clients.sampling": "fixed-size", "clients.cohort": 1000})
    setting = Setting(10_000, 1)
    section = with_graph(config.algorithm, config.federation, setting)
    assert Plan.of(config.algorithm, section, setting, 10, 0, 0.4).graph.lists == 10


@pytest.mark.slow
def test_the_best_of_several_lists_is_cut_more_often_than_one():
    """Why they count: the chance with ten lists is above the bound for one, and below ten times it."""
    n, k, threshold, inside, lists = 10, 5, 9, 3, 10
    generator = np.random.default_rng(5)
    others = [[site for site in range(n) if site != own] for own in range(n)]

    def cut():
        picks = [sum(1 << int(site) for site in generator.choice(others[own], k, replace=False)) for own in range(n)]
        return cuttable(picks, threshold, inside)

    bound = float(np.exp(graph._log_cuts(n, threshold, 0, k, inside)[0]))
    assert bound < sum(any(cut() for _ in range(lists)) for _ in range(20)) / 20 <= lists * bound
