"""A site's messages of secure aggregation: decoded, passed to the round's party, and answered.

A round begins once: a second request for keys in the same round and attempt is refused, and so is a message of any
round but the current one. Keys and shares are in memory only; a site that restarts skips the round.
"""

from __future__ import annotations

from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from shoal.federation.consent import Refused, Requirements
from shoal.federation.messages import InvalidMessage, Payload, Value
from shoal.federation.secagg.bundle_list import BundleList
from shoal.federation.secagg.encoding import (
    CHECK,
    KEYS,
    SHARES,
    bundle_values,
    dealt_values,
    read_bundles,
    read_bytes,
    read_numbers,
    write_numbers,
    write_shares,
)
from shoal.federation.secagg.graph import attempts
from shoal.federation.secagg.masks import as_vector
from shoal.federation.secagg.party import Party, contribution
from shoal.federation.secagg.round_keys import context
from shoal.federation.secagg.round_plan import Plan
from shoal.federation.terms import Terms
from shoal.random.secure_streams import SecureGenerator
from shoal.random.streams import Streams
from shoal.training.round_index import RoundIndex


class SecureAggregationClient:
    """One site's secure aggregation, for one run."""

    def __init__(
        self,
        terms: Terms,
        key: ec.EllipticCurvePrivateKey | None,
        peers: Iterable[bytes] | None,
        requirements: Requirements,
    ) -> None:
        if key is None:
            raise Refused("secure aggregation needs a long-lived site with a key: use `shoal join`")
        if peers is None and requirements.observer == "server" and requirements.any:
            raise Refused(
                "only the coordinator says who the other sites are, so it could impersonate all of them; "
                "collect their public keys and give --peers"
            )
        self._terms, self._key, self._peers = terms, key, peers
        self._begun: set[RoundIndex] = set()
        self._party: Party | None = None
        self._index: RoundIndex | None = None

    def answer(self, kind: str, message: Payload, index: RoundIndex, number: int) -> dict[str, Value]:
        """Return the values of the answer, besides those that it repeats."""
        if kind == KEYS:
            return dict(bundle_values(self._begin(index, number).bundle()))
        party = self._current(index, number)
        if kind == SHARES:
            plan = self._plan(index)
            sparse = plan.graph.sparse
            listed = BundleList(message.raw("cards")) if sparse else read_bundles(message, "cards")
            return dealt_values(party.deal(listed, plan))
        if kind == CHECK:
            return {"signature": party.sign_survivors(read_numbers(message, "survivors"))}
        agreements = read_bytes(message, "agreements") if self.sparse else None
        shares, disputed = party.open(read_bytes(message, "signatures"), agreements)
        return {"shares": write_shares(shares), "disputed": write_numbers(disputed)}

    def take(self, message: Payload, index: RoundIndex, number: int, bound: float) -> None:
        """Take the shares sent with the model; raise a ConfigError where the clip norm allows no sound plan."""
        self._plan(index, bound)
        dealers = read_numbers(message, "dealers") if self.sparse else None
        party = self._current(index, number)
        party.take(read_bytes(message, "sealed"), read_bytes(message, "commitments"), dealers)

    @property
    def sparse(self) -> bool:
        """Whether sites share with neighbours only."""
        return self._terms.settings.federation.neighbours is not None

    def words(self) -> str:
        """What to know of a sparse graph before one trusts it."""
        return f"secure aggregation: {self._plan(RoundIndex(0, self._terms.setting.rounds)).graph.words()}"

    @property
    def fields(self) -> set[str]:
        """What comes with the model."""
        return {"sealed", "commitments", "dealers"} if self.sparse else {"sealed", "commitments"}

    def values(self) -> dict[str, Value]:
        """Return what goes with the masked numbers."""
        assert self._party is not None
        return {"signature": self._party.sign_dealers()} if self.sparse else {}

    def send(self, update: Tensor, below: bool, bound: float, index: RoundIndex, streams: Streams) -> Tensor:
        """Return the clipped update with its noise share, masked."""
        assert self._party is not None
        name = "noise share", index.t, index.attempt, self._party.number
        numbers = contribution(self._plan(index, bound), update, below, SecureGenerator(streams.keystream(*name)))
        return as_vector(self._party.send(numbers, bound))

    def _begin(self, index: RoundIndex, number: int) -> Party:
        if index in self._begun:
            raise InvalidMessage(f"round {index.t + 1}, attempt {index.attempt + 1}, has already begun at this site")
        most = attempts(self._terms.setting.rounds)
        if self.sparse and sum(each.t == index.t for each in self._begun) >= most:
            raise InvalidMessage(f"this site has begun round {index.t + 1} as often as it may ({most:,} times)")
        self._begun.add(index)
        self._index = index
        round_context = context(self._terms.run, self._terms.digest, index.t, index.attempt)
        self._party = Party(number, round_context, self._key, self._peers)
        return self._party

    def _current(self, index: RoundIndex, number: int) -> Party:
        if self._party is None or self._index != index or self._party.number != number:
            raise InvalidMessage(f"round {index.t + 1} has not begun at this site, which skips the round")
        return self._party

    def _plan(self, index: RoundIndex, bound: float | None = None) -> Plan:
        settings, setting = self._terms.settings, self._terms.setting
        if bound is None:
            bound = settings.algorithm.bound({}, index.t, index.total)
        section, parameters = settings.federation, self._terms.parameters
        return Plan.of(settings.algorithm, section, setting, parameters, index.t, bound)
