"""The coordinator's part in one round of secure aggregation: it forwards sealed shares, and learns the sum.

A round has five messages; a site that does not answer one gets no more. A site that sent its masked numbers is in the
sum even if it disconnects afterwards; if it dealt shares and sent nothing, its masks with the others are removed.
Where fewer sites than the threshold are left at any step, there is no sum.

A lie is named where it can be proven (`commitments`). A share that does not open its dealer's commitment is its
holder's lie: the answer counts as bad, and other holders' shares are used. Shares that open their commitments but do
not give the secret are their dealer's lie: there is no sum. A share that its holder disputes is the lie of one of the
two: of the dealer if more than `colluding` holders dispute its shares, of the holder if it disputes those of more
than `colluding` dealers; otherwise both are named and neither is struck. Masked numbers that no honest site would
send spoil the sum, and nothing shows whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from shoal.errors import ShoalError
from shoal.federation.messages import InvalidMessage, Payload
from shoal.federation.secagg.bundle_list import BundleList
from shoal.federation.secagg.commitments import MASKING, SEED, Dealt, of_seed, opens
from shoal.federation.secagg.encoding import (
    BUNDLE,
    CHECK,
    KEYS,
    SHARES,
    UNMASK,
    read_bundle,
    read_dealt,
    read_numbers,
    read_shares,
    write_bundles,
    write_bytes,
    write_numbers,
)
from shoal.federation.secagg.masks import Keystream, add_masks, aes, chacha, from_vector, signed, unmask_pairs
from shoal.federation.secagg.round_keys import (
    KeyBundle,
    dealers_message,
    digest,
    mask_seed,
    survivors_message,
    verify,
)
from shoal.federation.secagg.round_plan import Plan
from shoal.federation.secagg.shamir import join
from shoal.federation.terms import ROUND
from shoal.random.discrete_gaussian import Whole

Take = Callable[[int, Payload], None]
Ask = Callable[[str, Mapping[int, Payload], set[str], Mapping[str, int], Take], None]
"""Sends messages of a type to sites, by number, with the values and vectors that each answer must hold; passes each
valid answer to Take, which may raise InvalidMessage."""


Blame = Callable[[int, str, bool], None]
"""Reports a site, by number, why, and whether it is certain that it lied."""


class Failed(ShoalError):
    """The round has no sum; the text says why."""


@dataclass
class SecureAggregator:
    """The state of one round; `known` checks that a public key is that of a site, `blame` reports one that lied."""

    plan: Plan
    context: bytes
    known: Callable[[int, bytes], bool] = lambda _number, _identity: True
    blame: Blame = lambda _number, _why, _certain: None
    bundles: dict[int, KeyBundle] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    _agreements: dict[int, bytes] = field(default_factory=dict)
    _shares: dict[int, dict[int, int]] = field(default_factory=dict)  # opened, by dealer
    _secrets: dict[int, bytes] = field(default_factory=dict)

    def gather(self, ask: Ask, numbers: Iterable[int], message: Payload) -> Whole:
        """Return the sum of what these sites send in answer to `message` (the model).

        Raises:
            Failed: There is no sum.
        """
        self._refuse_few(len(list(numbers)), "are connected")
        self._collect_bundles(ask, numbers)
        dealt = self._collect_shares(ask)
        self._collect_numbers(ask, dealt, message)
        signatures = self._collect_signatures(ask, set(dealt))
        self._collect_openings(ask, dealt, signatures)
        return self._unmask(dealt)

    def _collect_bundles(self, ask: Ask, numbers: Iterable[int]) -> None:
        def take(number: int, answer: Payload) -> None:
            bundle = read_bundle(answer, number)
            bundle.refuse_forged(self.context)
            bundle.refuse_unusable()
            if not self.known(number, bundle.identity):
                raise InvalidMessage("it signs with another key than the one that identifies it")
            self.bundles[number] = bundle

        ask(KEYS, {number: Payload({}) for number in numbers}, set(BUNDLE), {}, take)
        self._refuse_few(len(self.bundles), "sent their keys")
        self._listed = BundleList.of(self.bundles)
        self._digest = (
            self._listed.digest(self.context) if self.plan.graph.sparse else digest(self.bundles, self.context)
        )

    def _collect_shares(self, ask: Ask) -> dict[int, Dealt]:
        """The sealed shares and their commitments, by dealer."""
        dealt: dict[int, Dealt] = {}

        def take(number: int, answer: Payload) -> None:
            found, others = read_dealt(answer), set(self.bundles) - {number}
            holders, many = set(found.sealed), min(graph.neighbours or len(others), len(others))
            itself = set() if graph.sparse else {number}
            if not holders <= others or len(holders) != many or set(found.commitments) != holders | itself:
                raise InvalidMessage("it dealt shares to the wrong sites")
            dealt[number] = found

        graph = self.plan.graph
        bundles = Payload({"cards": self._listed.packed if graph.sparse else write_bundles(self.bundles)})
        ask(SHARES, dict.fromkeys(self.bundles, bundles), {"sealed", "commitments", "seed"}, {}, take)
        self._refuse_few(len(dealt), "dealt their shares")
        self._held: dict[int, set[int]] = {number: set() for number in self.bundles}  # dealers, by holder
        for dealer, each in dealt.items():
            for holder in each.commitments:
                self._held[holder].add(dealer)
        return dealt

    def _collect_numbers(self, ask: Ask, dealt: dict[int, Dealt], message: Payload) -> None:
        sparse = self.plan.graph.sparse
        agreed, dealers = dealers_message(self._digest, dealt), write_numbers(dealt)
        self._sum = np.zeros(self.plan.slots, np.uint32)

        def take(number: int, answer: Payload) -> None:
            if sparse:
                verify(self.bundles[number].identity, answer.raw("signature"), agreed, "its list of dealers")
                self._agreements[number] = answer.raw("signature")
            self._sum += from_vector(answer.vectors["masked"])
            self.sent.add(number)

        messages = {}
        for number in dealt:
            others = {dealer: dealt[dealer] for dealer in self._held[number] - {number}}
            sealed = write_bytes({dealer: each.sealed[number] for dealer, each in others.items()})
            commitments = write_bytes({dealer: each.commitments[number] for dealer, each in others.items()})
            values = {**message.values, "sealed": sealed, "commitments": commitments}
            if sparse:
                values["dealers"] = dealers
            messages[number] = Payload(values, message.vectors)
        ask(ROUND, messages, {"signature"} if sparse else set(), {"masked": self.plan.slots}, take)
        self._refuse_few(len(self.sent), "sent their numbers")

    def _collect_signatures(self, ask: Ask, agreed: set[int]) -> dict[int, bytes]:
        signed = survivors_message(self._digest, agreed, self.sent)
        found: dict[int, bytes] = {}

        def take(number: int, answer: Payload) -> None:
            verify(self.bundles[number].identity, answer.raw("signature"), signed, "its list of survivors")
            found[number] = answer.raw("signature")

        survivors = Payload({"survivors": write_numbers(self.sent)})
        ask(CHECK, dict.fromkeys(self.sent, survivors), {"signature"}, {}, take)
        self._refuse_few(len(found), "signed the list of survivors")
        return found

    def _collect_openings(self, ask: Ask, dealt: dict[int, Dealt], signatures: dict[int, bytes]) -> None:
        """The shares that open their commitments; a secret is used as soon as enough are there."""
        opened = 0
        disputes: dict[int, set[int]] = {}  # by dealer

        def take(number: int, answer: Payload) -> None:
            found, disputed = self._read_opening(number, answer, dealt)
            nonlocal opened
            opened += 1
            for dealer, share in found.items():
                self._open(dealer, number, share, dealt[dealer])
            for dealer in disputed:
                disputes.setdefault(dealer, set()).add(number)

        messages = {}
        signed = write_bytes(signatures)
        for number in signatures:
            messages[number] = Payload({"signatures": signed})
            if self.plan.graph.sparse:
                agreements = {dealer: self._agreements[dealer] for dealer in self._held[number] & self.sent}
                messages[number] = Payload({"signatures": signed, "agreements": write_bytes(agreements)})
        ask(UNMASK, messages, {"shares", "disputed"}, {}, take)
        self._judge(disputes)
        self._refuse_few(opened, "revealed their shares")

    def _read_opening(self, number: int, answer: Payload, dealt: dict[int, Dealt]) -> tuple[dict[int, int], set[int]]:
        """The shares that a site opens, by dealer, and the dealers whose shares it disputes."""
        found, disputed = read_shares(answer, "shares"), read_numbers(answer, "disputed")
        if found.keys() & disputed or found.keys() | disputed != self._held[number] or number in disputed:
            raise InvalidMessage("it revealed shares of the wrong sites")
        if len(disputed) > self.plan.colluding:
            raise InvalidMessage(f"it disputes the shares of {len(disputed)} sites, which cannot all lie")
        for dealer, share in found.items():
            kind = SEED if dealer in self.sent else MASKING
            if not opens(dealt[dealer].commitments[number], kind, share, self._digest, dealer, number):
                raise InvalidMessage(f"the share that it opened is not the one that site {dealer} dealt it")
        return found, disputed

    def _judge(self, disputes: dict[int, set[int]]) -> None:
        for dealer, holders in disputes.items():
            if certain := len(holders) > self.plan.graph.corrupt:
                why = f"{len(holders)} sites say that the shares it dealt them do not match its commitments"
            else:
                listed = ", ".join(map(str, sorted(holders)))
                why = f"it and site {listed} disagree about the share that it dealt: one of them lies"
            self.blame(dealer, why, certain)

    def _open(self, dealer: int, holder: int, share: int, dealt: Dealt) -> None:
        """Count a share; with the last that is needed, reconstruct the seed of a site in the sum, or the key of one
        that is not and remove its masks from the sum."""
        shares = self._shares.setdefault(dealer, {})
        shares[holder + 1] = share
        if len(shares) != self.plan.graph.shares:
            return
        secret = join(shares)
        if secret is None or not self._right(dealer, secret, dealt):
            self.blame(dealer, "the shares that it dealt do not give the secret to which it is committed", True)
            return
        self._secrets[dealer] = secret
        if dealer not in self.sent:
            senders = (self._held[dealer] | set(dealt.sealed)) & self.sent
            unmask_pairs(self._sum, dealer, self._seeds(dealer, secret, senders), self._cipher)

    def _right(self, dealer: int, secret: bytes, dealt: Dealt) -> bool:
        if dealer in self.sent:
            return of_seed(secret, self._digest, dealer) == dealt.seed
        key = X25519PrivateKey.from_private_bytes(secret)
        return key.public_key().public_bytes_raw() == self.bundles[dealer].masking

    def _seeds(self, gone: int, secret: bytes, senders: set[int]) -> dict[int, bytes]:
        """The seeds of the masks that these senders share with a site that sent nothing."""
        key, bound = X25519PrivateKey.from_private_bytes(secret), self.plan.bound
        return {
            number: mask_seed(key, self.bundles[number].masking, (number, gone), self._digest, bound)
            for number in senders
        }

    def _unmask(self, dealt: Iterable[int]) -> Whole:
        missing = []
        for dealer in dealt:
            if dealer in self._secrets:
                continue
            count = len(self._shares.get(dealer, ()))
            few = f"only {count} sites opened a share of site {dealer}'s secret"
            missing.append(few if count < self.plan.graph.shares else f"site {dealer} dealt false shares")
        if missing:
            raise Failed("; ".join(missing[:3]))
        add_masks(self._sum, (), [self._secrets[number] for number in self.sent], self._cipher)
        total = signed(self._sum)
        if (why := self.plan.implausible(total, len(self.sent))) is not None:
            raise Failed(f"a site sent values that the algorithm cannot produce, and masks hide which one: {why}")
        return total

    @property
    def _cipher(self) -> Keystream:
        return aes if self.plan.graph.sparse else chacha

    def _refuse_few(self, count: int, what: str) -> None:
        if count < self.plan.threshold:
            raise Failed(f"only {count} sites {what}, fewer than federation.threshold ({self.plan.threshold})")
