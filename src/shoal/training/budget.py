"""The privacy budget of a run: what each round is charged, what is spent, when the budget ends.

The ledger is on disk before any noise is drawn. During the run RDP counts, in milliseconds per round; the claims at
the end are by PLD.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from shoal.accounting import calibration
from shoal.accounting.calibration import Budget
from shoal.accounting.claims import Observer, Proven, Unit, prove, stated
from shoal.accounting.events import NOTHING, Compose, Event, Repeat, Unbounded
from shoal.accounting.privacy_ledger import Charge, Intent, Ledger, verify
from shoal.accounting.rdp import Running
from shoal.accounting.rounding import up
from shoal.algorithms.base import Algorithm
from shoal.algorithms.charges import charges, event, pairs
from shoal.errors import ConfigError, LedgerError
from shoal.mechanisms.mechanism import ADJACENCIES
from shoal.mechanisms.setting import Setting

MOST_CLIENTS = 20
"""The most clients for which the cost of a record is reported: those where it is highest."""
_RECORD: tuple[Unit, Observer] = ("record", "release")


@dataclass(frozen=True)
class Limit:
    """What a run may spend (`epsilon`, where there is a limit), and the delta of all claims."""

    delta: float
    epsilon: float | None = None
    unit: Unit = "client"
    observer: Observer = "release"

    def budget(self) -> Budget | None:
        """The budget, or None where there is no limit."""
        if self.epsilon is None:
            return None
        return Budget(self.epsilon, self.delta, adjacency=ADJACENCIES[self.unit])


class Spending:
    """Charges rounds to a ledger and knows what they cost.

    Attributes:
        limit: What may be spent.
        furthest: The last round that was ever charged; a round up to here is run again.
    """

    def __init__(self, algorithm: Algorithm, setting: Setting, limit: Limit, ledger: Ledger) -> None:
        self._algorithm, self._setting, self.limit, self._ledger = algorithm, setting, limit, ledger
        self._kept: tuple[Unit, Observer] | None = None
        self._running = {pair: Running(ADJACENCIES[pair[0]]) for pair in pairs(setting)}
        self.furthest = 0
        for intent in ledger.charged:
            self._count(intent)

    def affordable(self, done: int) -> int:
        """The last round that the budget pays for, given what was charged before; rounds count from 1."""
        if self.limit.epsilon is not None:
            self._kept = (self.limit.unit, self.limit.observer)
        spent = self._ledger.charged_event(self.limit.unit, self.limit.observer)
        return affordable(self._algorithm, self._setting, self.limit, done, spent, self.furthest)

    def intend(self, first: int, last: int) -> int:
        """Charge the rounds first..last (from 1), on disk; returns how many attempts at them came before."""
        by_round = (charges(self._algorithm, self._setting, t, t < self.furthest) for t in range(first - 1, last))
        intent = self._ledger.intend(last, _composed(by_round), first)
        self._count(intent)
        return intent.attempt - 1

    def commit(self, last: int, model: str) -> None:
        """Record that the model of the rounds up to `last` is released; `model` is the hash of its file."""
        self._ledger.commit(last, model)

    @property
    def head(self) -> str:
        """The hash of the ledger's last line, which a checkpoint stores to detect a truncated ledger."""
        return self._ledger.head

    def recognise(self, done: int, model: str, head: str) -> None:
        """Check that the ledger knows a checkpoint; commit it where a crash came just before its commit."""
        if not verify(self._ledger.path, head).whole:
            raise LedgerError(
                f"the checkpoint of round {done} was written after a line that is no longer in {self._ledger.path}: "
                f"the end of the ledger was cut off, so nothing can be proven; put the whole ledger back"
            )
        if any(commit.round == done and commit.model == model for commit in self._ledger.commits):
            return
        pending = self._ledger.pending
        if pending is not None and (pending.round, pending.hash) == (done, head):
            self._ledger.commit(done, model)
        else:
            raise LedgerError(
                f"the checkpoint of round {done} is not the one that {self._ledger.path} says was released; "
                f"put the right one back, or start a new run"
            )

    def refuse_cut(self, run: int) -> None:
        """Raise a LedgerError where rounds were run (`run`: the last one) that the ledger did not charge."""
        if run > self.furthest:
            raise LedgerError(
                f"round {run} was run, and {self._ledger.path} has no charge for it: the end of the ledger was cut "
                f"off, so nothing can be proven; put the whole ledger back, or start a new run"
            )

    def spent(self) -> list[dict[str, Any]]:
        """What is proven so far, by RDP, for the units and observers for which something is."""
        claims = []
        for (unit, observer), running in self._running.items():
            epsilon = running.epsilon(self.limit.delta)
            if epsilon is not None and self._kept == (unit, observer):
                epsilon = min(epsilon, self.limit.epsilon or epsilon)  # PLD has found that no round passes it
            if epsilon is not None and epsilon < math.inf:
                claims.append(
                    {
                        "unit": unit,
                        "observer": observer,
                        "epsilon": epsilon,
                        "delta": self.limit.delta,
                        "adjacency": ADJACENCIES[unit],
                    }
                )
                if unit == "client" and self._setting.simulated:
                    claims[-1]["simulated"] = True
        return claims

    def proven(self) -> list[Proven]:
        """What is proven of all charges, by PLD, for every unit and observer."""
        return [self._prove(unit, who) for unit, who in pairs(self._setting)]

    def _prove(self, unit: Unit, who: Observer) -> Proven:
        spent = self._ledger.charged_event(unit, who)
        return _claim(self._setting, unit, who, spent, self.limit.delta, self._ledger.opened or {})

    def by_client(self, sizes: np.ndarray) -> list[tuple[int, Proven]]:
        """What is proven for a record of each client, against released models: (client, claim), the worst first.

        Empty where all clients' records cost the same; only the worst clients, where there are many.
        """
        if self._setting.bounds or self._setting.multiplicity > 1:
            return []
        settings = {size: replace(self._setting, sizes=(size,)) for size in np.unique(sizes).tolist()}
        first = {size: event(self._algorithm, setting, 0, *_RECORD) for size, setting in settings.items()}
        if len(set(first.values())) == 1 or any(isinstance(each, Unbounded) for each in first.values()):
            return []
        times = Counter(t for intent in self._ledger.charged for t in range(intent.first - 1, intent.round))
        spent = {size: self._done(settings[size], times) for size in settings}
        by_rdp = {size: self._record_by_rdp(spent[size]) for size in settings}
        by_cost = sorted(range(len(sizes)), key=lambda client: (-by_rdp[int(sizes[client])], sizes[client]))
        worst = by_cost[:MOST_CLIENTS]
        proven = {size: self._record_claim(spent[size], "pld") for size in {int(sizes[client]) for client in worst}}
        found = [(client, proven[int(sizes[client])]) for client in worst]
        return sorted(found, key=lambda row: -(row[1].epsilon or math.inf))

    def _done(self, setting: Setting, times: Counter[int]) -> Event:
        """The charged rounds, each as often as it was charged, in another setting."""
        rounds = ((event(self._algorithm, setting, t, *_RECORD), count) for t, count in sorted(times.items()))
        return Compose(tuple(Repeat(Compose((each,)), count) for each, count in rounds))

    def _record_by_rdp(self, spent: Event) -> float:
        """What a record costs by RDP; infinite where that has no bound, so that the smallest clients come first."""
        try:
            return self._record_claim(spent, "rdp").epsilon or math.inf
        except ConfigError:  # RDP does not understand it
            return math.inf

    def _record_claim(self, spent: Event, accountant: str) -> Proven:
        return prove(*_RECORD, spent, self.limit.delta, accountant, adjacency=ADJACENCIES["record"])

    def _count(self, intent: Intent) -> None:
        self.furthest = max(self.furthest, intent.round)
        for charge in intent.charges:
            pair = charge.unit, charge.observer
            try:
                if pair in self._running:
                    self._running[pair].add(charge.covered)
            except ConfigError:  # RDP does not support this event: PLD reports its cost at the end
                del self._running[pair]


def affordable(
    algorithm: Algorithm, setting: Setting, limit: Limit, done: int = 0, spent: Event = NOTHING, furthest: int = 0
) -> int:
    """The last round that a budget pays for, after `done` that cost `spent`; those up to `furthest` are repeats."""
    budget, rounds = limit.budget(), setting.rounds
    if budget is None:
        return rounds
    ahead = [event(algorithm, setting, t, limit.unit, limit.observer, t < furthest) for t in range(done, rounds)]
    found = calibration.rounds(lambda n: Compose((spent, *ahead[:n])), budget, most=max(1, len(ahead)))
    return done + min(int(found.value), len(ahead))


def refuse_budget(algorithm: Algorithm, setting: Setting, limit: Limit) -> None:
    """Raise a ConfigError where the method cannot keep the budget, or it pays for no round at all."""
    budget, pair = limit.budget(), (limit.unit, limit.observer)
    if budget is None:
        return
    first = event(algorithm, setting, 0, *pair)
    if isinstance(first, Unbounded):
        raise ConfigError(
            f"budget.epsilon cannot be kept by {algorithm.name} for a {pair[0]} against the {pair[1]}: "
            f"nothing is proven, because {first.because}"
        )
    cost = budget.cost(first).epsilon
    if cost is None or cost > budget.epsilon:
        needed = "no budget does" if cost is None else f"it costs {up(cost)}"
        records_only = pair[0] == "client" and algorithm.per_step is not None and algorithm.per_round is None
        meant = f" ({algorithm.name} protects records: budget.unit=record)" if records_only else ""
        raise ConfigError(
            f"budget.epsilon {budget.epsilon:g} does not pay for the first round ({needed}); raise it, add noise, or "
            f"let budget.calibrate=true choose the noise{meant}"
        )


@lru_cache(maxsize=16)
def planned_claims(
    algorithm: Algorithm, setting: Setting, charged: tuple[tuple[int, int], ...], delta: float
) -> tuple[Proven, ...]:
    """What is proven of rounds that are charged as (first, last), from 1, one span after the other; none is run."""
    by_round, furthest = [], 0
    of_round = cache(lambda t, again: charges(algorithm, setting, t, again))
    alike = len(algorithm.different_rounds(setting.rounds)) <= 1
    for first, last in charged:
        by_round += [of_round(0 if alike else t, t < furthest) for t in range(first - 1, last)]
        furthest = max(furthest, last)
    spent = _composed(by_round)
    return tuple(_claim(setting, charge.unit, charge.observer, charge.event, delta, {}) for charge in spent)


def _claim(
    setting: Setting, unit: Unit, who: Observer, spent: Event, delta: float, opened: Mapping[str, Any]
) -> Proven:
    found = prove(unit, who, spent, delta, adjacency=ADJACENCIES[unit], clients=setting.clients)
    return stated(found, {**opened, **assumed_facts(setting)})


def assumed_facts(setting: Setting) -> dict[str, Any]:
    """What claims assume besides what was charged (claims.stated), for the first line of the ledger."""
    facts: dict[str, Any] = {"clients": setting.clients, "simulated": setting.simulated}
    facts["random"] = "secure" if setting.secure else "research"
    facts |= {"sparse_graph": True} if setting.graph_failure else {}
    return facts | ({"users": users_said(setting)} if setting.user_columns else {})


def users_said(setting: Setting) -> str:
    """What a claim for users assumes."""
    several = setting.clients_per_user
    where = f"no user has records at more than {several:,} clients" if several > 1 else "no user is at two clients"
    return f"{where}; it is public whose each record is" if setting.user_columns > 1 else where


def _composed(by_round: Iterable[tuple[Charge, ...]]) -> tuple[Charge, ...]:
    """The charges of several rounds as those of one."""
    columns = zip(*by_round, strict=True)
    return tuple(
        replace(column[0], event=_one_after_the_other([charge.event for charge in column])) for column in columns
    )


def _one_after_the_other(events: list[Event]) -> Event:
    """Several rounds as one event; equal ones in a row are counted, so that a ledger line stays short."""
    parts = tuple(repeated(event, len(list(same))) for event, same in groupby(events))
    return parts[0] if len(parts) == 1 else Compose(parts)


def repeated(event: Event, count: int) -> Event:
    """The same round this many times."""
    if count == 1 or event == NOTHING or isinstance(event, Unbounded):
        return event
    # Compose inside Repeat: right around a shuffled step a Repeat would mean one unbroken pass.
    return Repeat(Compose((event,)), count)
