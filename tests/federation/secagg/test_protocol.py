"""Secure aggregation: masks cancel whoever drops out, the coordinator sees only the sum, and sites give no more."""

from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import chi2

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.federation.messages import InvalidMessage, Payload
from shoal.federation.secagg import commitments, party, round_keys, shamir
from shoal.federation.secagg.aggregator import Failed
from shoal.federation.secagg.encoding import (
    CHECK,
    KEYS,
    SHARES,
    UNMASK,
    bundle_values,
    read_bundles,
    read_bytes,
    read_shares,
    write_bundles,
    write_bytes,
    write_numbers,
    write_shares,
)
from shoal.federation.secagg.masks import add_masks, from_vector
from shoal.federation.terms import ROUND
from shoal.training.round_index import RoundIndex
from support.secure_cohort import NOW, Cohort

LETTERS = (KEYS, SHARES, ROUND, CHECK, UNMASK)
ALPHA = 1e-6  # how often a statistical test may fail by chance


def numbers(sites, slots=6, most=1000, seed=0):
    return np.random.default_rng(seed).integers(-most, most, (sites, slots))


# ---------------------------------------------------------------- the protocol


@pytest.mark.slow
@pytest.mark.parametrize("gone", [(), (2,), (0, 4)], ids=str)
@pytest.mark.parametrize("message", LETTERS)
def test_the_sum_is_that_of_those_who_sent(message, gone):
    """Up to two of seven drop out, at any message: whoever sent its numbers is in the sum, gone or not after that."""
    cohort, values = Cohort(7), numbers(7)
    total = cohort.sum(values, [(message, site) for site in gone])
    lost = gone if LETTERS.index(message) <= LETTERS.index(ROUND) else ()
    assert (total == np.delete(values, lost, axis=0).sum(0)).all()
    assert not cohort.invalid


def test_drop_outs_at_several_letters():
    cohort, values = Cohort(10), numbers(10)
    total = cohort.sum(values, [(SHARES, 1), (ROUND, 9), (UNMASK, 4)])
    assert (total == np.delete(values, (1, 9), axis=0).sum(0)).all()


@pytest.mark.parametrize("message", LETTERS)
def test_too_few_give_no_sum(message):
    """Five of seven must; the fifth is gone, and nobody gives away a share."""
    cohort = Cohort(7)
    with pytest.raises(Failed, match=r"only 4 sites .*federation.threshold \(5\)"):
        cohort.sum(numbers(7), [(message, site) for site in (0, 3, 6)])
    assert len(cohort.sent(UNMASK)) == (4 if message == UNMASK else 0)


def test_rounds_follow_one_another_with_fresh_masks():
    cohort, values = Cohort(4), numbers(4)
    seen = []
    for t in range(3):
        assert (cohort.sum(values, index=RoundIndex(t, 5)) == values.sum(0)).all()
        seen.append(from_vector(cohort.sent(ROUND)[0].vectors["masked"]).tolist())
    assert len({tuple(each) for each in seen}) == 3


# ---------------------------------------------------------------- what the coordinator sees


def uniform(words):
    """Chi-square on all bytes."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), 255)


@pytest.mark.parametrize("gone", [(), ((ROUND, 3),)], ids=["all", "a drop-out"])
@pytest.mark.statistical(false_alarm=2 * ALPHA)
def test_what_is_seen_of_one_site_is_any_number(gone):
    """All that a coordinator can take off a masked update by what it learns in a round, it takes off: the site's own
    mask, and the masks with a site that dropped out. What is left of an update of zeros is uniform (alpha 1e-6)."""
    cohort = Cohort(4, slots=50_000)
    cohort.sum(np.zeros((4, 50_000), np.int64), gone)
    words = from_vector(cohort.sent(ROUND)[0].vectors["masked"]).copy()
    assert uniform(words) > ALPHA
    party, bound = cohort.desks[0]._party, cohort.plan.bound
    add_masks(words, (), [party._own])
    if gone:
        lost = cohort.desks[3]._party._keys.masking
        seed = round_keys.mask_seed(lost, party._bundle.masking, (0, 3), party._digest, bound)
        add_masks(words, (), [seed])
    assert uniform(words) > ALPHA
    for other in (1, 2) if gone else (1, 2, 3):  # with the masks that it cannot know the zeros would be plain
        seed = round_keys.mask_seed(
            party._keys.masking, party._bundles[other].masking, (0, other), party._digest, bound
        )
        add_masks(words, (), [seed])
    assert not words.any()


def played(monkeypatch, values, gone=()):
    """A round whose keys, shares and signatures follow from a counter: the same each time it is played."""
    fresh = count(1)
    monkeypatch.setattr(party.secrets, "token_bytes", lambda size: next(fresh).to_bytes(size, "big"))
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda most: next(fresh) * 2**200 % most)
    made = lambda: X25519PrivateKey.from_private_bytes(next(fresh).to_bytes(32, "big"))  # noqa: E731
    monkeypatch.setattr(party, "Keys", lambda: round_keys.Keys(made(), made()))
    always = lambda key, words: key.sign(words, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))  # noqa: E731
    monkeypatch.setattr(round_keys, "sign", always)
    monkeypatch.setattr(party, "sign", always)
    with monkeypatch.context() as patch:
        numbered = (ec.derive_private_key(next(fresh), ec.SECP256R1()) for _ in range(100))
        patch.setattr(ec, "generate_private_key", lambda _curve: next(numbered))
        cohort = Cohort(5)
    return cohort, cohort.sum(values, gone)


@pytest.mark.parametrize("gone", [(), ((ROUND, 4),), ((UNMASK, 2),)], ids=str)
def test_two_inputs_of_one_sum_differ_on_the_wire_in_masked_numbers_only(monkeypatch, gone):
    values = numbers(5)
    others = values.copy()
    others[0] += 1000
    others[1] -= 1000
    one, first = played(monkeypatch, values, gone)
    two, second = played(monkeypatch, others, gone)
    assert (first == second).all()
    assert len(one.wire) == len(two.wire)
    for (way, kind, number, mine), (*_, theirs) in zip(one.wire, two.wire, strict=True):
        assert mine.values == theirs.values
        same = all((from_vector(mine.vectors[key]) == from_vector(theirs.vectors[key])).all() for key in mine.vectors)
        assert same == ((way, kind) != ("from", ROUND) or number not in (0, 1))


def test_shares_of_a_site_are_read_by_their_holder_alone():
    cohort = Cohort(4)
    cohort.sum(numbers(4))
    one, two, three = (cohort.desks[n]._party for n in (1, 2, 3))
    sealed = read_bytes(cohort.sent(ROUND, "to")[1], "sealed")[2]
    assert one._unsealed(2, sealed)
    assert three._unsealed(2, sealed) is None
    assert one._unsealed(2, sealed[:-1] + bytes([sealed[-1] ^ 1])) is None
    assert one._unsealed(3, sealed) is None
    assert one._unsealed(2, b"") is None
    assert two._bundle.sealing != one._bundle.sealing


# ---------------------------------------------------------------- what a site refuses


def cards_changed(change):
    """A coordinator that changes the list of sites that site 0 is shown."""

    def to(kind, number, message):
        if kind != SHARES or number != 0:
            return message
        return Payload({"cards": write_bundles(change(read_bundles(message, "cards")))})

    return to


def forged(cohort, number):
    """Keys for a site that somebody else made and signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    return round_keys.Keys().bundle(number, cohort.aggregator().context, key)


def replayed(cohort, number, t=1):
    """Keys that the site itself made and signed, for another round."""
    where = round_keys.context("run", cohort.terms.digest, t, 0)
    return round_keys.Keys().bundle(number, where, cohort.keys[number])


LISTS = {
    "the coordinator's own key for another site": (
        lambda c, bundles: bundles | {2: forged(c, 2)},
        "not among this site's known peers",
    ),
    "its own keys, with another's name on them": (
        lambda c, bundles: bundles | {2: replace(forged(c, 2), identity=bundles[2].identity)},
        "invalid signature",
    ),
    "keys of another round": (lambda c, bundles: bundles | {2: replayed(c, 2)}, "invalid signature"),
    "keys under another number": (lambda c, bundles: bundles | {2: replace(bundles[3], number=2)}, "twice"),
    "other keys for this very site": (
        lambda c, bundles: bundles | {0: replayed(c, 0, t=0)},
        "wrong keys for this site",
    ),
    "this site is not on it": (lambda c, bundles: {n: bundles[n] for n in (1, 2, 3)}, "wrong keys for this site"),
    "too few": (lambda c, bundles: {n: bundles[n] for n in (0, 1)}, "must be 3 to 4"),
    "a key that shares no secret": (
        lambda c, bundles: bundles | {2: _signed(c, 2, sealing=bytes(32))},
        "not a valid X25519 public key",
    ),
    "a key that is too short": (lambda c, bundles: bundles | {2: _signed(c, 2, sealing=b"1")}, "not X25519 keys"),
    "an identity that is no key": (
        lambda c, bundles: bundles | {2: replace(bundles[2], identity=b"x")},
        "not among this site's known peers",
    ),
}


def _signed(cohort, number, **changes):
    bundle = replace(cohort.desks[number]._party._bundle, **changes)
    words = round_keys.encoded("keys", cohort.aggregator().context, number, bundle.sealing, bundle.masking)
    return replace(bundle, signature=round_keys.sign(cohort.keys[number], words))


@pytest.mark.parametrize("what", LISTS)
def test_a_false_list_of_sites_is_refused(what):
    change, why = LISTS[what]
    cohort, values = Cohort(4), numbers(4)
    total = cohort.sum(values, to=cards_changed(lambda bundles: change(cohort, bundles)))
    assert any(problem.startswith("0: ") and why in problem for problem in cohort.invalid)
    assert 0 not in cohort.sent(ROUND)
    assert (total == values[1:].sum(0)).all()


def test_without_peers_keys_are_the_coordinators_word():
    """What --peers is for: a site that does not know the others takes the coordinator for one of them."""
    for known, asked in ((True, False), (False, True)):
        cohort = Cohort(4, known=known)
        swap = cards_changed(lambda bundles, cohort=cohort: bundles | {2: forged(cohort, 2)})
        with suppress(Failed):
            cohort.sum(numbers(4), to=swap)
        assert (0 in cohort.sent(SHARES)) is asked


def test_one_false_key_among_right_ones_gets_no_share():
    """Sites sign the list that they saw: to open shares a coordinator must be, or have on its side, a threshold."""
    cohort = Cohort(4, known=False)
    with pytest.raises(Failed):
        cohort.sum(numbers(4), to=cards_changed(lambda bundles: bundles | {2: forged(cohort, 2)}))
    assert 0 not in cohort.sent(UNMASK)


def ready_to_check(sites=4, gone=()):
    """Sites that have sent their numbers, and wait to hear who is in the sum."""
    cohort = Cohort(sites)
    with pytest.raises(Failed, match="signed"):
        cohort.sum(numbers(sites), [*gone, *((CHECK, site) for site in range(sites))])
    return cohort


def survivors(*sites):
    return Payload({"survivors": write_numbers(sites)})


def test_a_site_signs_one_list_only():
    cohort = ready_to_check()
    cohort.desks[0].answer(CHECK, survivors(0, 1, 2), NOW, 0)
    with pytest.raises(InvalidMessage, match="no step is answered twice"):
        cohort.desks[0].answer(CHECK, survivors(0, 1, 2, 3), NOW, 0)


@pytest.mark.parametrize(
    ("sites", "why"),
    [
        ((0, 1), "only 2 sites are left, fewer than the threshold 3"),
        ((1, 2, 3), "does not fit"),
        ((0, 1, 2, 9), "does not fit"),
    ],
)
def test_a_list_of_too_few_or_of_others_is_not_signed(sites, why):
    cohort = ready_to_check()
    with pytest.raises(InvalidMessage, match=why):
        cohort.desks[0].answer(CHECK, survivors(*sites), NOW, 0)


def test_both_kinds_of_share_of_one_site_are_not_to_be_had():
    """A coordinator tells some sites that site 3 is in the sum, and the others that it is not: whichever list it asks
    for, too few have signed it, and nobody opens a share. With three of four needed no split gets two signed.
    """
    for told in (1, 2):  # how many hear that site 3 is gone
        cohort = ready_to_check()
        lists = {n: survivors(0, 1, 2) if n < told else survivors(0, 1, 2, 3) for n in range(3)}
        signed = {n: cohort.desks[n].answer(CHECK, lists[n], NOW, n)["signature"] for n in range(3)}
        for n in range(3):
            for some in (signed, {k: signed[k] for k in range(told)}, {k: signed[k] for k in range(told, 3)}):
                with pytest.raises(InvalidMessage):
                    cohort.desks[n].answer(UNMASK, Payload({"signatures": write_bytes(some)}), NOW, n)


@pytest.mark.parametrize("told", [(0,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("gone", [(), ((ROUND, 3),)], ids=["all", "a drop-out"])
def test_no_sum_is_unmasked_where_sites_were_told_different_clips(told, gone):
    """A site's noise is in units of its clip: that of others, made for a small one, would not hide a large update."""
    cohort = Cohort(5, slots=1000, bounds=dict.fromkeys(told, 100.0))
    with pytest.raises(Failed, match="masks hide which one"):
        cohort.sum(np.zeros((5, 1000), np.int64), gone)


def test_each_site_opens_one_kind_of_share_of_another():
    """Of a site in the sum that of its own mask, of one that is not that of its key; and of each only once."""
    cohort = ready_to_check(5, gone=[(ROUND, 4)])
    before = {n: cohort.desks[n]._party for n in range(4)}
    signed = {n: cohort.desks[n].answer(CHECK, survivors(0, 1, 2, 3), NOW, n)["signature"] for n in range(4)}
    dealt = dict(before[0]._shares)
    message = Payload({"signatures": write_bytes(signed)})
    assert before[0].open(signed) == ({n: dealt[n][0 if n == 4 else 1] for n in range(5)}, set())
    with pytest.raises(InvalidMessage, match="no step is answered twice"):
        cohort.desks[0].answer(UNMASK, message, NOW, 0)


@pytest.mark.parametrize("what", ["too few", "another's signature", "of a site that is not in the sum"])
def test_signatures_must_be_enough_and_right(what):
    cohort = ready_to_check()
    signed = {n: cohort.desks[n].answer(CHECK, survivors(0, 1, 2), NOW, n)["signature"] for n in range(3)}
    wrong = {
        "too few": {n: signed[n] for n in (0, 1)},
        "another's signature": signed | {2: signed[1]},
        "of a site that is not in the sum": signed | {3: signed[0]},
    }[what]
    with pytest.raises(InvalidMessage):
        cohort.desks[0].answer(UNMASK, Payload({"signatures": write_bytes(wrong)}), NOW, 0)


@pytest.mark.parametrize("message", LETTERS)
def test_a_letter_that_was_answered_is_answered_no_more(message):
    cohort = Cohort(4)
    cohort.sum(numbers(4))
    again = cohort.sent(message, "to")[0]
    with pytest.raises(InvalidMessage, match=r"already begun at this site|no step is answered twice"):
        cohort.answer(message, 0, again, numbers(4)[0])


def test_letters_come_in_order_and_of_the_round_in_hand():
    cohort = Cohort(4)
    with pytest.raises(InvalidMessage, match="has not begun at this site"):
        cohort.desks[0].answer(CHECK, survivors(0, 1, 2), NOW, 0)
    cohort.desks[0].answer(KEYS, Payload({}), NOW, 0)
    with pytest.raises(InvalidMessage, match="the next step is 'deal'"):
        cohort.desks[0].answer(CHECK, survivors(0, 1, 2), NOW, 0)
    with pytest.raises(InvalidMessage, match="round 2 has not begun at this site"):
        cohort.desks[0].answer(SHARES, Payload({"cards": "{}"}), RoundIndex(1, 5), 0)
    with pytest.raises(InvalidMessage, match="has not begun at this site"):
        cohort.desks[0].answer(SHARES, Payload({"cards": "{}"}), NOW, 1)


@pytest.mark.parametrize("text", ["", "[", "[]", "1", "null", '{"0": 1}', '{"-1": "00"}', '{"01": "00"}', "[" * 9999])
@pytest.mark.parametrize(("message", "key"), [(SHARES, "cards"), (CHECK, "survivors"), (UNMASK, "signatures")])
def test_letters_that_make_no_sense_are_refused(message, key, text):
    cohort = ready_to_check() if message != SHARES else Cohort(4)
    if message == SHARES:
        cohort.desks[0].answer(KEYS, Payload({}), NOW, 0)
    if message == UNMASK:
        cohort.desks[0].answer(CHECK, survivors(0, 1, 2), NOW, 0)
    with pytest.raises(InvalidMessage):
        cohort.desks[0].answer(message, Payload({key: text}), NOW, 0)


# ---------------------------------------------------------------- what the coordinator refuses


def answers_changed(which, change):
    return lambda kind, number, answer: change(answer) if (kind, number) == (which, 1) else answer


BAD = {
    "a card that somebody else signed": (KEYS, lambda a: Payload(a.values | {"signature": b"0"}), "signature"),
    "a key that shares no secret": (KEYS, None, "not a valid X25519 public key"),
    "shares for nobody": (SHARES, lambda a: Payload(a.values | {"sealed": "{}"}), "wrong sites"),
    "no commitments": (SHARES, lambda a: Payload(a.values | {"commitments": "{}"}), "wrong sites"),
    "commitments to one too many": (SHARES, lambda a: _committed(a, {9: bytes(64)}), "wrong sites"),
    "a commitment that is too short": (SHARES, lambda a: _committed(a, {0: bytes(63)}), "SHA-256"),
    "a commitment that is no text": (SHARES, lambda a: Payload(a.values | {"commitments": b""}), "not of type str"),
    "a commitment to no seed": (SHARES, lambda a: Payload(a.values | {"seed": b""}), "SHA-256"),
    "a seed that is text": (SHARES, lambda a: Payload(a.values | {"seed": "0" * 32}), "not of type bytes"),
    "too few numbers": (ROUND, lambda a: Payload({}, {"masked": torch.zeros(3)}), "shape"),
    "one vector more": (ROUND, lambda a: Payload({}, dict(a.vectors) | {"more": torch.zeros(1)}), "unexpected"),
    "a signature of nothing": (CHECK, lambda a: Payload({"signature": b""}), "signature"),
    "a share that is none": (UNMASK, lambda a: Payload(a.values | {"shares": '{"0": "-1"}'}), "out of range"),
    "shares of others": (UNMASK, lambda a: Payload(a.values | {"shares": '{"0": "1"}'}), "wrong sites"),
    "a share it disputes": (UNMASK, lambda a: Payload(a.values | {"disputed": "[0]"}), "wrong sites"),
    "its own share disputed": (UNMASK, lambda a: _disputing(a, {1}), "wrong sites"),
    "a dispute with nobody": (UNMASK, lambda a: Payload(a.values | {"disputed": "[9]"}), "wrong sites"),
    "a dispute twice": (UNMASK, lambda a: Payload(a.values | {"disputed": "[0, 0]"}), "distinct"),
    "a dispute that is no list": (UNMASK, lambda a: Payload(a.values | {"disputed": "{}"}), "malformed"),
    "a dispute with all": (UNMASK, lambda a: _disputing(a, {0, 2, 3}), "which cannot all lie"),
    "a wrong share": (UNMASK, lambda a: _opening(a, 2, 1), "not the one that site 2 dealt"),
}


def _committed(answer, others):
    return Payload(answer.values | {"commitments": write_bytes(read_bytes(answer, "commitments") | others)})


def _disputing(answer, dealers):
    kept = {dealer: share for dealer, share in read_shares(answer, "shares").items() if dealer not in dealers}
    return Payload({"shares": write_shares(kept), "disputed": write_numbers(dealers)})


def _opening(answer, dealer, share):
    return Payload(answer.values | {"shares": write_shares(read_shares(answer, "shares") | {dealer: share})})


@pytest.mark.parametrize("what", BAD)
def test_a_bad_answer_is_that_of_a_drop_out(what):
    message, change, why = BAD[what]
    cohort, values = Cohort(4), numbers(4)
    change = change or (lambda a: Payload(bundle_values(_signed(cohort, 1, masking=bytes(32)))))
    total = cohort.sum(values, back=answers_changed(message, change))
    assert [why in problem for problem in cohort.invalid] == [True]
    kept = values if message in (CHECK, UNMASK) else np.delete(values, 1, axis=0)
    assert (total == kept.sum(0)).all()


def test_a_sum_that_no_honest_sites_can_have_is_none():
    cohort, values = Cohort(4), numbers(4)
    values[1, 0] = 2**30
    with pytest.raises(Failed, match="masks hide which one"):
        cohort.sum(values)


# ---------------------------------------------------------------- who lied


@pytest.mark.parametrize("gone", [(), ((ROUND, 2),)], ids=["of a seed", "of a key"])
def test_a_wrong_share_is_its_holders_lie_and_the_others_shares_are_enough(gone):
    """Site 0's shares would be among the first ones used: the sum is right without them."""

    def lie(kind, number, answer):
        return _opening(answer, 2, 7) if (kind, number) == (UNMASK, 0) else answer

    cohort, values = Cohort(7), numbers(7)
    total = cohort.sum(values, gone, back=lie)
    assert (total == (np.delete(values, 2, axis=0) if gone else values).sum(0)).all()
    assert cohort.invalid == ["0: the share that it opened is not the one that site 2 dealt it"]
    assert not cohort.blamed


@pytest.mark.parametrize("gone", [(), ((ROUND, 1),)], ids=["of a seed", "of a key"])
def test_shares_of_another_secret_are_their_dealers_lie(gone, monkeypatch):
    """All shares open their commitments: nobody else can be to blame."""
    cohort, kept = Cohort(5), shamir.split

    def split(secret, holders, threshold):
        liar = cohort.desks[1]._party
        mine = secret in (liar._own, liar._keys.masking.private_bytes_raw())
        return kept(bytes(32) if mine else secret, holders, threshold)

    monkeypatch.setattr(party, "split", split)
    with pytest.raises(Failed, match="site 1 dealt false shares"):
        cohort.sum(numbers(5), gone)
    assert cohort.blamed == [(1, "the shares that it dealt do not give the secret to which it is committed", True)]
    assert not cohort.invalid


def sealed_wrongly(holders):
    """Site 1 seals rubbish for these holders, in place of the shares to which it is committed."""

    def back(kind, number, answer):
        if (kind, number) != (SHARES, 1):
            return answer
        sealed = read_bytes(answer, "sealed")
        return Payload(answer.values | {"sealed": write_bytes(sealed | {h: bytes(82) for h in holders})})

    return back


@pytest.mark.parametrize("gone", [(), ((ROUND, 1),)], ids=["in the sum", "gone"])
def test_a_share_that_one_holder_disputes_is_somebodys_lie_and_does_no_harm(gone):
    cohort, values = Cohort(7), numbers(7)
    total = cohort.sum(values, gone, back=sealed_wrongly({3}))
    assert (total == (np.delete(values, 1, axis=0) if gone else values).sum(0)).all()
    assert [(site, certain) for site, _, certain in cohort.blamed] == [(1, False)]
    assert "site 3 disagree" in cohort.blamed[0][1]


def test_a_dealer_whom_more_dispute_than_can_lie_is_the_liar():
    """Two of five cannot read their shares, and at most one site lies; four shares are needed."""
    cohort = Cohort(5)
    with pytest.raises(Failed, match="only 3 sites opened a share of site 1's secret"):
        cohort.sum(numbers(5), back=sealed_wrongly({2, 3}))
    assert [(site, certain) for site, _, certain in cohort.blamed] == [(1, True)]
    assert not cohort.invalid


def test_a_false_dispute_does_no_harm_and_condemns_nobody():
    """It cannot be told from that of a holder that was dealt a wrong share."""
    cohort, values = Cohort(5), numbers(5)

    def back(kind, number, answer):
        return _disputing(answer, {4}) if (kind, number) == (UNMASK, 0) else answer

    assert (cohort.sum(values, back=back) == values.sum(0)).all()
    assert [(site, certain) for site, _, certain in cohort.blamed] == [(4, False)]


def test_wrong_numbers_within_the_bound_are_nobodys_lie():
    """The limit: masks hide a single update, so a false one that honest sites could send is part of the sum."""
    cohort, values = Cohort(5), numbers(5)
    false = values.copy()
    false[1] += 500
    assert (cohort.sum(false) == values.sum(0) + 500).all()
    assert not cohort.invalid
    assert not cohort.blamed


def test_a_commitment_that_the_coordinator_changed_is_disputed_and_nothing_is_opened():
    def to(kind, number, message):
        return _committed(message, {2: bytes(64)}) if (kind, number) == (ROUND, 0) else message

    cohort, values = Cohort(5), numbers(5)
    assert (cohort.sum(values, to=to) == values.sum(0)).all()
    assert 2 not in read_shares(cohort.sent(UNMASK)[0], "shares")


@pytest.mark.parametrize("text", ["", "[", "{}", '{"1": "00"}', '{"9": "00"}'])
def test_commitments_that_make_no_sense_are_refused_by_a_site(text):
    def to(kind, number, message):
        return Payload(message.values | {"commitments": text}) if (kind, number) == (ROUND, 0) else message

    cohort, values = Cohort(4), numbers(4)
    assert (cohort.sum(values, to=to) == values[1:].sum(0)).all()
    assert cohort.invalid[0].startswith("0: ")


def test_commitments_are_bound_to_round_dealer_holder_and_kind():
    places = ((b"a", 1, 2), (b"b", 1, 2), (b"a", 2, 1))
    both = commitments.of_shares((5, 5), *places[0])
    assert len({both[32:], *(commitments.of_shares((5, 5), *place)[:32] for place in places)}) == 4
    assert commitments.opens(both, commitments.SEED, 5, *places[0])
    assert not commitments.opens(both, commitments.SEED, 6, *places[0])
    assert not commitments.opens(both[:32] * 2, commitments.SEED, 5, *places[0])
