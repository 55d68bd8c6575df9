"""A site's part in one round of secure aggregation: Bonawitz et al. 2017, Figure 4, with an untrusted coordinator.

    bundle    send its signed keys for the round
    deal      given all key bundles, send shares of its self-mask seed and its masking key, each sealed for its holder
    take      receive the sealed shares dealt to it, which fixes the sites with which it shares masks
    send      send its numbers, masked
    sign      given the list of survivors (the sites in the sum), unseal the shares and sign the list, once, and only
              if it meets the threshold
    open      given a threshold of signatures on the same list, reveal one share of each site: that of its self-mask
              if it is in the sum, that of its masking key if not; never both, since it signs only one list

Each step happens once, in this order.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from shoal.federation.messages import InvalidMessage
from shoal.federation.secagg.masks import Words, masked, quantised
from shoal.federation.secagg.round_keys import (
    KeyBundle,
    Keys,
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
    numbers = quantised(update, plan.bound, plan.step)
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
        self._require_step("bundle")
        self._bundle = self._keys.bundle(self.number, self._context, self._key)
        self._done += 1
        return self._bundle

    def deal(self, bundles: Mapping[int, KeyBundle], plan: Plan) -> dict[int, bytes]:
        """Return the sealed shares for the other sites."""
        self._require_step("deal")
        self._refuse_bundles(bundles, plan)
        self._bundles, self._threshold, self._digest = dict(bundles), plan.threshold, digest(bundles, self._context)
        holders = [number + 1 for number in bundles]
        masking = split(self._keys.masking.private_bytes_raw(), holders, plan.threshold)
        own = split(self._own, holders, plan.threshold)
        self._shares = {self.number: (masking[self.number + 1], own[self.number + 1])}
        self._done += 1
        return {
            other: self._seal(
                other, masking[other + 1].to_bytes(SHARE, "big") + own[other + 1].to_bytes(SHARE, "big")
            )
            for other in bundles
            if other != self.number
        }

    def take(self, sealed: Mapping[int, bytes]) -> None:
        """Receive the sealed shares of the sites with which this site shares masks."""
        self._require_step("take")
        if self.number in sealed or not set(sealed) <= set(self._bundles):
            raise InvalidMessage("it holds shares of sites that are not on the list")
        self._refuse_few(len(sealed) + 1)
        self._sealed = dict(sealed)
        self._done += 1

    def send(self, numbers: Whole, bound: float) -> Words:
        """Return the site's numbers, made under this clip norm, masked."""
        self._require_step("send")
        self._done += 1
        seeds = {
            other: mask_seed(
                self._keys.masking, self._bundles[other].masking, (self.number, other), self._digest, bound
            )
            for other in self._sealed
        }
        return masked(numbers, self.number, self._own, seeds)

    def sign_survivors(self, survivors: set[int]) -> bytes:
        """Return the site's signature of the list of survivors, the sites in the sum."""
        self._require_step("sign")
        if not survivors <= {self.number, *self._sealed} or self.number not in survivors:
            raise InvalidMessage("the list of survivors does not fit the sites that share masks")
        self._refuse_few(len(survivors))
        self._shares |= {other: self._unsealed(other, content) for other, content in self._sealed.items()}
        self._survivors = set(survivors)
        self._signed = survivors_message(self._digest, set(self._shares), self._survivors)
        self._done += 1
        return sign(self._key, self._signed)

    def open(self, signatures: Mapping[int, bytes]) -> dict[int, int]:
        """Return one share of each site with which this site shares masks."""
        self._require_step("open")
        if not set(signatures) <= self._survivors:
            raise InvalidMessage("it holds signatures of sites that are not in the sum")
        self._refuse_few(len(signatures))
        for other, signature in signatures.items():
            verify(self._bundles[other].identity, signature, self._signed, f"site {other}'s list of survivors")
        self._done += 1
        shares, self._shares = self._shares, {}
        return {other: own if other in self._survivors else masking for other, (masking, own) in shares.items()}

    def _require_step(self, step: str) -> None:
        """Raise InvalidMessage unless this is the next step."""
        if STEPS.index(step) < self._done:
            raise InvalidMessage(f"step '{step}' was already answered in this round; no step is answered twice")
        if STEPS.index(step) > self._done:
            raise InvalidMessage(f"step '{step}' was requested, but the next step is '{STEPS[self._done]}'")

    def _refuse_bundles(self, bundles: Mapping[int, KeyBundle], plan: Plan) -> None:
        if bundles.get(self.number) != self._bundle:
            raise InvalidMessage("the list of sites has the wrong keys for this site")
        if not plan.threshold <= len(bundles) <= plan.cohort:
            raise InvalidMessage(f"the list has {len(bundles)} sites, must be {plan.threshold} to {plan.cohort}")
        if len({bundle.identity for bundle in bundles.values()}) < len(bundles):
            raise InvalidMessage("a site is on the list twice")
        for number, bundle in bundles.items():
            known = self._peers is None or number == self.number or bundle.identity in self._peers
            if not known:
                raise InvalidMessage(f"site {number} is not among this site's known peers (--peers)")
            bundle.refuse_forged(self._context)

    def _refuse_few(self, count: int) -> None:
        if count < self._threshold:
            raise InvalidMessage(f"only {count} sites are left, fewer than the threshold {self._threshold}")

    def _seal(self, other: int, content: bytes) -> bytes:
        bundle = self._bundles[other]
        return seal(self._keys.sealing, bundle.sealing, (self.number, other), self._digest, content)

    def _unsealed(self, other: int, sealed: bytes) -> tuple[int, int]:
        bundle = self._bundles[other]
        content = unseal(self._keys.sealing, bundle.sealing, (other, self.number), self._digest, sealed)
        masking, own = (int.from_bytes(part, "big") for part in (content[:SHARE], content[SHARE:]))
        if len(content) != 2 * SHARE or max(masking, own) >= PRIME:
            raise InvalidMessage(f"site {other} dealt a malformed share")
        return masking, own
