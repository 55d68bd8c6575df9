"""Sites and a coordinator under secure aggregation, without a network or a model: what they send is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.config import configure, to_toml
from shoal.federation.consent import Requirements
from shoal.federation.key_files import public_pem
from shoal.federation.messages import InvalidMessage, Payload, pack, unpack
from shoal.federation.secagg.aggregator import SecureAggregator
from shoal.federation.secagg.client import SecureAggregationClient
from shoal.federation.secagg.masks import as_vector
from shoal.federation.secagg.round_keys import context
from shoal.federation.secagg.round_plan import Plan
from shoal.federation.terms import ROUND, Terms, population
from shoal.mechanisms.setting import Setting
from shoal.training.round_index import RoundIndex

ROUNDS = 5
NOW = RoundIndex(0, ROUNDS)
Change = Callable[[str, int, Payload], Payload]


def unchanged(_kind: str, _number: int, payload: Payload) -> Payload:
    return payload


@dataclass
class Cohort:
    """So many sites that send `slots` numbers; `wire` keeps all that passes. `bounds`: the clip that a site was told,
    where it is another than the plan's."""

    count: int
    slots: int = 6
    threshold: int | None = None
    colluding: int = 1
    sparse: tuple[int, int] | None = None
    noise: float = 1.0
    known: bool = True
    wire: list[tuple[str, str, int, Payload]] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    bounds: dict[int, float] = field(default_factory=dict)
    blamed: list[tuple[int, str, bool]] = field(default_factory=list)
    changes: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {
            "algorithm": "trusted-curator",
            "rounds": ROUNDS,
            "data.clients": self.count,
            "clients.sampling": "all",
            "per_round.noise_multiplier": self.noise,
            "per_round.at": "shared",
            "federation.aggregation": "secure",
            "federation.colluding": self.colluding,
        }
        if self.threshold is not None:
            given["federation.threshold"] = self.threshold
        if self.sparse is not None:
            given["federation.neighbours"], given["federation.share_threshold"] = self.sparse
        self.config = configure(given | self.changes)
        setting = Setting(self.count, ROUNDS, sizes=population(self.config).sizes, bounds=True)
        self.terms = Terms("run", to_toml(self.config), setting, ("a", "b"), (1,), self.slots, None)
        algorithm, section = self.config.algorithm, self.config.federation
        bound = algorithm.bound({}, 0, ROUNDS)
        self.plan = Plan.of(algorithm, section, setting, self.slots, 0, bound)
        self.keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(self.count)]
        self.peers = [public_pem(key.public_key()) for key in self.keys]
        self.desks = [self.secure(number) for number in range(self.count)]

    def secure(self, number: int) -> SecureAggregationClient:
        """A site that has just started."""
        return SecureAggregationClient(
            self.terms, self.keys[number], self.peers if self.known else None, Requirements()
        )

    def aggregator(self, index: RoundIndex = NOW) -> SecureAggregator:
        where = context(self.terms.run, self.terms.digest, index.t, index.attempt)
        return SecureAggregator(self.plan, where, blame=lambda *told: self.blamed.append(told))

    def sum(
        self,
        inputs: np.ndarray,
        gone: Iterable[tuple[str, int]] = (),
        *,
        to: Change = unchanged,
        back: Change = unchanged,
        index: RoundIndex = NOW,
    ) -> np.ndarray:
        """The sum that the coordinator learns. `gone`: from which message on a site answers no more; `to` and `back`
        tamper with messages and with answers."""
        silent: set[int] = set()

        def ask(kind, messages, values, vectors, take):
            for number, message in messages.items():
                silent.update(site for what, site in gone if what == kind)
                if number in silent:
                    continue
                try:
                    message = to(kind, number, unpack(pack(message), 10**9))
                    self.wire.append(("to", kind, number, message))
                    answer = back(kind, number, self.answer(kind, number, message, inputs[number], index))
                    self.wire.append(("from", kind, number, answer))
                    answer = unpack(pack(answer), 10**9)
                    answer.require(values, vectors)
                    take(number, answer)
                except InvalidMessage as problem:
                    self.invalid.append(f"{number}: {problem}")

        return self.aggregator(index).gather(ask, range(self.count), Payload({}))

    def answer(
        self, kind: str, number: int, message: Payload, numbers: np.ndarray, index: RoundIndex = NOW
    ) -> Payload:
        secure = self.desks[number]
        if kind != ROUND:
            return Payload(secure.answer(kind, message, index, number))
        secure.take(message, index, number, self.bound_of(number))
        words = secure._party.send(numbers, self.bound_of(number))
        return Payload(secure.values(), {"masked": as_vector(words)})

    def bound_of(self, number: int) -> float:
        return self.bounds.get(number, self.plan.bound)

    def sent(self, kind: str, way: str = "from") -> dict[int, Payload]:
        """What passed that way under messages of this kind, by site; the last, where there were several."""
        return {number: payload for to, what, number, payload in self.wire if (to, what) == (way, kind)}
