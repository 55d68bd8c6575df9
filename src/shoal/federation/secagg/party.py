"""A site's part in one round of secure aggregation: Bonawitz et al. 2017, Figure 4, with an untrusted coordinator.

    bundle    send its signed keys for the round
    deal      given all key bundles, send shares of its self-mask seed and its masking key, each sealed for its holder
              and with a commitment to it
    take      unseal the shares dealt to it, which fixes the sites with which it shares masks; it will dispute those
              that do not match their dealer's commitments
    send      send its numbers, masked
    sign      given the list of survivors (the sites in the sum), sign it, once, and only if it meets the threshold
    open      given a threshold of signatures on the same list, reveal one share of each site: that of its self-mask
              if it is in the sum, that of its masking key if not; never both, since it signs only one list; and name
              the sites whose shares it disputes

Each step happens once, in this order, and a site that refuses a message takes no further part in the round: else a
coordinator could repeat a false list until what the site draws at random misses what is false in it. In a sparse
round (`graph`) a site deals to the neighbours that it picks, is told which sites have dealt and signs that list with
its numbers; it opens the seed of a site only if that site signed the same list, and verifies the entries of the list
of keys, and the signatures, that concern its safety.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from shoal.federation.messages import InvalidMessage
from shoal.federation.secagg.bundle_list import BundleList
from shoal.federation.secagg.commitments import MASKING, SEED, Dealt, Shares, of_seed, of_shares
from shoal.federation.secagg.masks import Words, aes, chacha, masked, quantised
from shoal.federation.secagg.round_keys import (
    KeyBundle,
    Keys,
    dealers_message,
    digest,
    mask_seed,
    seal,
    sign,
    survivors_message,
    unseal,
    verify,
)
from shoal.federation.secagg.round_plan import Plan
from shoal.federation.secagg.shamir import PRIME, SECRET, SHARE, split
from shoal.random.discrete_gaussian import Whole
from shoal.random.secure_streams import SecureGenerator

STEPS = ("bundle", "deal", "take", "send", "sign", "open")


def contribution(plan: Plan, update: Tensor, below: bool, generator: SecureGenerator) -> Whole:
    """Return what a site adds to the sum: its clipped update in steps, the within-clip count, and its noise share."""
    numbers = quantised(update, plan.longest, plan.step)
    if plan.share:
        numbers = numbers + generator.whole_normal(plan.share, plan.parameters)
    if plan.count_noise is None:
        return numbers
    count = np.array([plan.half if below else -plan.half])
    if plan.count_share:
        count = count + generator.whole_normal(plan.count_share, 1)
    return np.concatenate([numbers, count])


class Party:
    """One site in one round; `peers` are the public keys (PEM) that may take part, None for any."""

    def __init__(
        self, number: int, context: bytes, key: ec.EllipticCurvePrivateKey, peers: Iterable[bytes] | None
    ) -> None:
        self.number = number
        self._context, self._key = context, key
        self._peers = None if peers is None else frozenset(peers)
        self._done = 0
        self._keys, self._own = Keys(), secrets.token_bytes(SECRET)

    def bundle(self) -> KeyBundle:
        """Return the site's signed keys for the round."""
        self._begin("bundle")
        self._bundle = self._keys.bundle(self.number, self._context, self._key)
        self._finish("bundle")
        return self._bundle

    def deal(self, bundles: Mapping[int, KeyBundle], plan: Plan) -> Dealt:
        """Return the sealed shares for the other sites, and the commitments to all shares."""
        self._begin("deal")
        self._refuse_bundles(bundles, plan)
        self._bundles, self._threshold, self._graph = bundles, plan.threshold, plan.graph
        self._digest = (
            bundles.digest(self._context) if isinstance(bundles, BundleList) else digest(bundles, self._context)
        )
        holders = [number + 1 for number in self._holders]
        masking = split(self._keys.masking.private_bytes_raw(), holders, plan.graph.shares)
        seed = split(self._own, holders, plan.graph.shares)
        dealt = {holder - 1: (masking[holder], seed[holder]) for holder in holders}
        self._shares = {self.number: dealt[self.number]} if self.number in dealt else {}
        self._finish("deal")
        return Dealt(
            {other: self._seal(other, shares) for other, shares in dealt.items() if other != self.number},
            {other: of_shares(shares, self._digest, self.number, other) for other, shares in dealt.items()},
            of_seed(self._own, self._digest, self.number),
        )

    def take(
        self, sealed: Mapping[int, bytes], commitments: Mapping[int, bytes], dealers: set[int] | None = None
    ) -> None:
        """Receive the shares dealt to this site, the commitments to them, and in a sparse round who has dealt."""
        self._begin("take")
        self._agreed = {self.number, *sealed} if dealers is None else dealers
        if self.number in sealed or not {self.number, *sealed} <= self._agreed <= set(self._bundles):
            raise InvalidMessage("it holds shares of sites that are not on the list")
        if set(commitments) != set(sealed):
            raise InvalidMessage("it holds commitments of other sites than those that dealt shares")
        self._refuse_few(len(self._agreed))
        self._dealers = set(sealed)
        for dealer, content in sealed.items():
            shares = self._unsealed(dealer, content)
            if shares and of_shares(shares, self._digest, dealer, self.number) == commitments[dealer]:
                self._shares[dealer] = shares
        self._finish("take")

    def send(self, numbers: Whole, bound: float) -> Words:
        """Return the site's numbers, made under this clip norm, masked."""
        self._begin("send")
        seeds = {
            other: mask_seed(
                self._keys.masking, self._bundles[other].masking, (self.number, other), self._digest, bound
            )
            for other in (self._holders & self._agreed | self._dealers) - {self.number}
        }
        self._finish("send")
        return masked(numbers, self.number, self._own, seeds, aes if self._graph.sparse else chacha)

    def sign_dealers(self) -> bytes:
        """Return the site's signature of the sites that have dealt shares, as it was told."""
        return sign(self._key, self._agreed_message)

    def sign_survivors(self, survivors: set[int]) -> bytes:
        """Return the site's signature of the list of survivors, the sites in the sum."""
        self._begin("sign")
        if not survivors <= self._agreed or self.number not in survivors:
            raise InvalidMessage("the list of survivors does not fit the sites that share masks")
        self._refuse_few(len(survivors))
        self._survivors = set(survivors)
        self._signed = survivors_message(self._digest, self._agreed, self._survivors)
        self._finish("sign")
        return sign(self._key, self._signed)

    def open(
        self, signatures: Mapping[int, bytes], agreements: Mapping[int, bytes] | None = None
    ) -> tuple[dict[int, int], set[int]]:
        """Return one share of each site that dealt some to this site, and the sites whose shares it disputes.

        Args:
            signatures: Those of the list of survivors.
            agreements: In a sparse round, those of the list of dealers, by each dealer in the sum.
        """
        self._begin("open")
        if not set(signatures) <= self._survivors:
            raise InvalidMessage("it holds signatures of sites that are not in the sum")
        self._refuse_few(len(signatures))
        for other in self._graph.sampled(signatures):
            self._verify(other, signatures[other], self._signed, "survivors")
        if self._graph.sparse:
            for dealer in self._dealers & self._survivors:
                self._verify(dealer, (agreements or {}).get(dealer, b""), self._agreed_message, "dealers")
        self._finish("open")
        shares, self._shares = self._shares, {}
        opened = {dealer: both[SEED if dealer in self._survivors else MASKING] for dealer, both in shares.items()}
        return opened, self._dealers - set(opened)

    @cached_property
    def _agreed_message(self) -> bytes:
        return dealers_message(self._digest, self._agreed)

    def _begin(self, step: str) -> None:
        """Raise InvalidMessage unless this is the next step; if the step fails, the round is over for this site."""
        if STEPS.index(step) < self._done:
            raise InvalidMessage(f"step '{step}' was already answered in this round; no step is answered twice")
        if STEPS.index(step) > self._done:
            raise InvalidMessage(f"step '{step}' was requested, but the next step is '{STEPS[self._done]}'")
        self._done = len(STEPS)

    def _finish(self, step: str) -> None:
        self._done = STEPS.index(step) + 1

    def _refuse_bundles(self, bundles: Mapping[int, KeyBundle], plan: Plan) -> None:
        if bundles.get(self.number) != self._bundle:
            raise InvalidMessage("the list of sites has the wrong keys for this site")
        if not plan.threshold <= len(bundles) <= plan.cohort:
            raise InvalidMessage(f"the list has {len(bundles)} sites, must be {plan.threshold} to {plan.cohort}")
        if isinstance(bundles, BundleList):
            identities = bundles.identities()
        else:
            identities = {bundle.identity for bundle in bundles.values()}
        if len(identities) < len(bundles):
            raise InvalidMessage("a site is on the list twice")
        others = set(bundles) - {self.number}
        self._holders = plan.graph.picked(others) if plan.graph.sparse else set(bundles)
        if self._peers is not None and not identities - {self._bundle.identity} <= self._peers:
            number = next(each for each in others if bundles[each].identity not in self._peers)
            raise InvalidMessage(f"site {number} is not among this site's known peers (--peers)")
        for number in self._holders:
            bundles[number].refuse_forged(self._context)

    def _refuse_few(self, count: int) -> None:
        if count < self._threshold:
            raise InvalidMessage(f"only {count} sites are left, fewer than the threshold {self._threshold}")

    def _verify(self, other: int, signature: bytes, content: bytes, what: str) -> None:
        bundles = self._bundles
        identity = bundles.identity(other) if isinstance(bundles, BundleList) else bundles[other].identity
        verify(identity, signature, content, f"site {other}'s list of {what}")

    def _seal(self, other: int, shares: Shares) -> bytes:
        bundle, content = self._bundles[other], b"".join(share.to_bytes(SHARE, "big") for share in shares)
        return seal(self._keys.sealing, bundle.sealing, (self.number, other), self._digest, content)

    def _unsealed(self, dealer: int, sealed: bytes) -> Shares | None:
        """The shares that a dealer sealed for this site; None where they are malformed or were modified."""
        bundle = self._bundles[dealer]
        content = unseal(self._keys.sealing, bundle.sealing, (dealer, self.number), self._digest, sealed)
        if content is None or len(content) != 2 * SHARE:
            return None
        masking, seed = (int.from_bytes(part, "big") for part in (content[:SHARE], content[SHARE:]))
        return (masking, seed) if max(masking, seed) < PRIME else None
