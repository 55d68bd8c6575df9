"""Sites and a coordinator under secure aggregation, without a network or a model: what they send is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.config import configure, to_toml
from shoal.federation.consent import Wishes
from shoal.federation.keys import public_pem
from shoal.federation.messages import Parcel, Spoilt, pack, unpack
from shoal.federation.secagg.aggregator import Tally
from shoal.federation.secagg.client import Desk
from shoal.federation.secagg.masks import as_vector
from shoal.federation.secagg.round_keys import context
from shoal.federation.secagg.round_plan import Plan
from shoal.federation.terms import ROUND, Terms
from shoal.mechanisms.setting import Setting
from shoal.training.round_index import Moment

ROUNDS = 5
NOW = Moment(0, ROUNDS)
Change = Callable[[str, int, Parcel], Parcel]


def unchanged(_kind: str, _number: int, parcel: Parcel) -> Parcel:
    return parcel


@dataclass
class Cohort:
    """So many sites that send `slots` numbers; `wire` keeps all that passes. `bounds`: the clip that a site was told,
    where it is another than the plan's."""

    count: int
    slots: int = 6
    threshold: int | None = None
    noise: float = 1.0
    known: bool = True
    wire: list[tuple[str, str, int, Parcel]] = field(default_factory=list)
    spoilt: list[str] = field(default_factory=list)
    bounds: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {
            "algorithm": "trusted-curator",
            "rounds": ROUNDS,
            "data.clients": self.count,
            "clients.sampling": "all",
            "per_round.noise": self.noise,
            "per_round.at": "shared",
            "federation.aggregation": "secure",
        }
        if self.threshold is not None:
            given["federation.threshold"] = self.threshold
        self.config = configure(given)
        setting = Setting(self.count, ROUNDS)
        self.terms = Terms("run", to_toml(self.config), setting, ("a", "b"), (1,), self.slots, None)
        algorithm, section = self.config.algorithm, self.config.federation
        bound = algorithm.per_update.bound({}, 0, ROUNDS, None)
        self.plan = Plan.of(algorithm, section, setting, self.slots, 0, bound)
        self.keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(self.count)]
        self.peers = [public_pem(key.public_key()) for key in self.keys]
        self.desks = [self.desk(number) for number in range(self.count)]

    def desk(self, number: int) -> Desk:
        """A site that has just started."""
        return Desk(self.terms, self.keys[number], self.peers if self.known else None, Wishes())

    def tally(self, moment: Moment = NOW) -> Tally:
        return Tally(self.plan, context(self.terms.run, self.terms.digest, moment.t, moment.attempt))

    def sum(
        self,
        inputs: np.ndarray,
        gone: Iterable[tuple[str, int]] = (),
        *,
        to: Change = unchanged,
        back: Change = unchanged,
        moment: Moment = NOW,
    ) -> np.ndarray:
        """The sum that the coordinator learns. `gone`: from which letter on a site answers no more; `to` and `back`
        tamper with letters and with answers."""
        silent: set[int] = set()

        def ask(kind, letters, values, vectors, take):
            for number, letter in letters.items():
                silent.update(site for what, site in gone if what == kind)
                if number in silent:
                    continue
                letter = to(kind, number, unpack(pack(letter), 10**9))
                self.wire.append(("to", kind, number, letter))
                try:
                    answer = back(kind, number, self.answer(kind, number, letter, inputs[number], moment))
                    self.wire.append(("from", kind, number, answer))
                    answer = unpack(pack(answer), 10**9)
                    answer.require(values, vectors)
                    take(number, answer)
                except Spoilt as problem:
                    self.spoilt.append(f"{number}: {problem}")

        return self.tally(moment).gather(ask, range(self.count), Parcel({}))

    def answer(self, kind: str, number: int, letter: Parcel, numbers: np.ndarray, moment: Moment = NOW) -> Parcel:
        desk = self.desks[number]
        if kind != ROUND:
            return Parcel(desk.answer(kind, letter, moment, number))
        desk.take(letter, moment, number, self.bound_of(number))
        return Parcel({}, {"masked": as_vector(desk._party.send(numbers, self.bound_of(number)))})

    def bound_of(self, number: int) -> float:
        return self.bounds.get(number, self.plan.bound)

    def sent(self, kind: str, way: str = "from") -> dict[int, Parcel]:
        """What passed that way under letters of this kind, by site; the last, where there were several."""
        return {number: parcel for to, what, number, parcel in self.wire if (to, what) == (way, kind)}
