"""The coordinator's part in one round of secure aggregation: it forwards sealed shares, and learns the sum.

A round has five messages; a site that does not answer one gets no more. A site that sent its masked numbers is in the
sum even if it disconnects afterwards; if it dealt shares and sent nothing, its masks with the others are removed.
Where fewer sites than the threshold are left at any step, there is no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from shoal.errors import ShoalError
from shoal.federation.messages import InvalidMessage, Payload
from shoal.federation.secagg.encoding import (
    BUNDLE,
    CHECK,
    KEYS,
    SHARES,
    UNMASK,
    read_bundle,
    read_bytes,
    read_shares,
    write_bundles,
    write_bytes,
    write_numbers,
)
from shoal.federation.secagg.masks import Words, from_vector, unmasked
from shoal.federation.secagg.round_keys import KeyBundle, digest, mask_seed, survivors_message, verify
from shoal.federation.secagg.round_plan import Plan
from shoal.federation.secagg.shamir import join
from shoal.federation.terms import ROUND
from shoal.random.discrete_gaussian import Whole

Take = Callable[[int, Payload], None]
Ask = Callable[[str, Mapping[int, Payload], set[str], Mapping[str, int], Take], None]
"""Sends messages of a type to sites, by number, with the values and vectors that each answer must hold; passes each
valid answer to Take, which may raise InvalidMessage."""


class Failed(ShoalError):
    """The round has no sum; the text says why."""


@dataclass
class SecureAggregator:
    """The state of one round; `known` checks that a public key is that of a site."""

    plan: Plan
    context: bytes
    known: Callable[[int, bytes], bool] = lambda _number, _identity: True
    bundles: dict[int, KeyBundle] = field(default_factory=dict)
    sent: dict[int, Words] = field(default_factory=dict)

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
        return self._unmask(ask, set(dealt), signatures)

    def _collect_bundles(self, ask: Ask, numbers: Iterable[int]) -> None:
        def take(number: int, answer: Payload) -> None:
            bundle = read_bundle(answer, number)
            bundle.refuse_forged(self.context)
            if not self.known(number, bundle.identity):
                raise InvalidMessage("it signs with another key than the one that identifies it")
            self.bundles[number] = bundle

        ask(KEYS, {number: Payload({}) for number in numbers}, set(BUNDLE), {}, take)
        self._refuse_few(len(self.bundles), "sent their keys")
        self._digest = digest(self.bundles, self.context)

    def _collect_shares(self, ask: Ask) -> dict[int, dict[int, bytes]]:
        """The sealed shares, by dealer and holder."""
        dealt: dict[int, dict[int, bytes]] = {}

        def take(number: int, answer: Payload) -> None:
            sealed = read_bytes(answer, "sealed")
            if set(sealed) != set(self.bundles) - {number}:
                raise InvalidMessage("it dealt shares to the wrong sites")
            dealt[number] = sealed

        bundles = Payload({"cards": write_bundles(self.bundles)})
        ask(SHARES, dict.fromkeys(self.bundles, bundles), {"sealed"}, {}, take)
        self._refuse_few(len(dealt), "dealt their shares")
        return dealt

    def _collect_numbers(self, ask: Ask, dealt: dict[int, dict[int, bytes]], message: Payload) -> None:
        def take(number: int, answer: Payload) -> None:
            self.sent[number] = from_vector(answer.vectors["masked"])

        messages = {}
        for number in dealt:
            sealed = write_bytes({other: shares[number] for other, shares in dealt.items() if other != number})
            messages[number] = Payload({**message.values, "sealed": sealed}, message.vectors)
        ask(ROUND, messages, set(), {"masked": self.plan.slots}, take)
        self._refuse_few(len(self.sent), "sent their numbers")

    def _collect_signatures(self, ask: Ask, agreed: set[int]) -> dict[int, bytes]:
        signed = survivors_message(self._digest, agreed, set(self.sent))
        found: dict[int, bytes] = {}

        def take(number: int, answer: Payload) -> None:
            verify(self.bundles[number].identity, answer.raw("signature"), signed, "its list of survivors")
            found[number] = answer.raw("signature")

        survivors = Payload({"survivors": write_numbers(self.sent)})
        ask(CHECK, dict.fromkeys(self.sent, survivors), {"signature"}, {}, take)
        self._refuse_few(len(found), "signed the list of survivors")
        return found

    def _unmask(self, ask: Ask, agreed: set[int], signatures: dict[int, bytes]) -> Whole:
        shares: dict[int, dict[int, int]] = {}

        def take(number: int, answer: Payload) -> None:
            found = read_shares(answer, "shares")
            if set(found) != agreed:
                raise InvalidMessage("it revealed shares of the wrong sites")
            shares[number] = found

        signed = Payload({"signatures": write_bytes(signatures)})
        ask(UNMASK, dict.fromkeys(signatures, signed), {"shares"}, {}, take)
        self._refuse_few(len(shares), "revealed their shares")
        holders = sorted(shares)[: self.plan.threshold]
        secrets = {number: join({holder + 1: shares[holder][number] for holder in holders}) for number in agreed}
        own = [self._whole(number, secrets[number]) for number in self.sent]
        open_pairs = [pair for gone in agreed - set(self.sent) for pair in self._pairs_of(gone, secrets[gone])]
        total = unmasked(self.sent.values(), self.plan.slots, own, open_pairs)
        if (why := self.plan.implausible(total, len(self.sent))) is not None:
            raise Failed(f"a site sent values that the algorithm cannot produce, and masks hide which one: {why}")
        return total

    def _pairs_of(self, gone: int, secret: bytes | None) -> list[tuple[int, int, bytes]]:
        """The masks that senders share with a site that sent nothing."""
        key = X25519PrivateKey.from_private_bytes(self._whole(gone, secret))
        if key.public_key().public_bytes_raw() != self.bundles[gone].masking:
            raise Failed(f"the shares of site {gone}'s key do not reconstruct it")
        return [
            (
                number,
                gone,
                mask_seed(key, self.bundles[number].masking, (number, gone), self._digest, self.plan.bound),
            )
            for number in self.sent
        ]

    def _whole(self, number: int, secret: bytes | None) -> bytes:
        if secret is None:
            raise Failed(f"the shares of site {number}'s secret are inconsistent")
        return secret

    def _refuse_few(self, count: int, what: str) -> None:
        if count < self.plan.threshold:
            raise Failed(f"only {count} sites {what}, fewer than federation.threshold ({self.plan.threshold})")
