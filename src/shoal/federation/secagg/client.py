"""A site's letters of secure aggregation: read, given to its party of that round, and answered.

A round is begun once: a second set of keys for the same round and attempt is refused, and so is a letter of a round
that is not the one in hand. Keys and shares are in memory only; a site that starts anew sits out the round.
"""

from __future__ import annotations

from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from shoal.federation.consent import Refused, Wishes
from shoal.federation.messages import Parcel, Spoilt, Value
from shoal.federation.secagg.encoding import (
    CHECK,
    KEYS,
    SHARES,
    card_values,
    read_bytes,
    read_cards,
    read_numbers,
    write_bytes,
    write_shares,
)
from shoal.federation.secagg.masks import as_vector
from shoal.federation.secagg.party import Party, contribution
from shoal.federation.secagg.round_keys import context
from shoal.federation.secagg.round_plan import Plan
from shoal.federation.terms import Terms
from shoal.random.secure_streams import SecureGenerator
from shoal.random.streams import Streams
from shoal.training.round_index import Moment


class Desk:
    """One site's, for one run."""

    def __init__(
        self,
        terms: Terms,
        key: ec.EllipticCurvePrivateKey | None,
        peers: Iterable[bytes] | None,
        wishes: Wishes,
    ) -> None:
        if key is None:
            raise Refused("secure aggregation needs a site that stays and has a key: `shoal join`")
        if peers is None and wishes.observer == "server" and wishes.any:
            raise Refused(
                "who the other sites are is the coordinator's word alone, so that it could be all of them itself; "
                "collect their public keys and give --peers"
            )
        self._terms, self._key, self._peers = terms, key, peers
        self._begun: set[Moment] = set()
        self._party: Party | None = None
        self._moment: Moment | None = None

    def answer(self, kind: str, letter: Parcel, moment: Moment, number: int) -> dict[str, Value]:
        """What is answered besides the letter's own names."""
        if kind == KEYS:
            return dict(card_values(self._begin(moment, number).card()))
        party = self._in_hand(moment, number)
        if kind == SHARES:
            return {"sealed": write_bytes(party.deal(read_cards(letter, "cards"), self._plan(moment)))}
        if kind == CHECK:
            return {"signature": party.vouch(read_numbers(letter, "survivors"))}
        return {"shares": write_shares(party.open(read_bytes(letter, "signatures")))}

    def take(self, letter: Parcel, moment: Moment, number: int, bound: float) -> None:
        """The shares that come with the model; a ConfigError where no sound plan has the round's clip."""
        self._plan(moment, bound)
        self._in_hand(moment, number).take(read_bytes(letter, "sealed"))

    def send(self, update: Tensor, below: bool, bound: float, moment: Moment, streams: Streams) -> Tensor:
        """The clipped update, with a share of noise, masked."""
        assert self._party is not None
        name = "noise share", moment.t, moment.attempt, self._party.number
        numbers = contribution(self._plan(moment, bound), update, below, SecureGenerator(streams.keystream(*name)))
        return as_vector(self._party.send(numbers, bound))

    def _begin(self, moment: Moment, number: int) -> Party:
        if moment in self._begun:
            raise Spoilt(f"round {moment.t + 1}, attempt {moment.attempt + 1}, was begun here before")
        self._begun.add(moment)
        self._moment = moment
        where = context(self._terms.run, self._terms.digest, moment.t, moment.attempt)
        self._party = Party(number, where, self._key, self._peers)
        return self._party

    def _in_hand(self, moment: Moment, number: int) -> Party:
        if self._party is None or self._moment != moment or self._party.number != number:
            raise Spoilt(f"round {moment.t + 1} was not begun here: this site sits it out")
        return self._party

    def _plan(self, moment: Moment, bound: float | None = None) -> Plan:
        settings, setting = self._terms.settings, self._terms.setting
        per_update = settings.algorithm.per_update
        assert per_update is not None
        if bound is None:
            bound = per_update.bound({}, moment.t, moment.total, None)
        section, parameters = settings.federation, self._terms.parameters
        return Plan.of(settings.algorithm, section, setting, parameters, moment.t, bound)
