"""What a site's owner agrees to, and the site's own ledger: its privacy need not rest on trusting the coordinator.

One ledger covers all runs on this site's data. Every round that the site is asked for is charged on its disk before
any record is touched, and so is every round in between, for which it might have been sampled. A round asked for again
is charged again. Charges follow from the algorithm's definition. The site must trust the coordinator to add its own
noise (`per_round`) and to sample sites at random, but relies on the sampling only where participation is hidden.
Where the observer sees whether the site took part, as the server always does, each round that the site answers costs
as much as without sampling, and the other rounds cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shoal import release
from shoal.accounting.calibration import Budget
from shoal.accounting.claims import Observer, Unit
from shoal.accounting.events import NOTHING, Compose, Event, TwoLevel, Unbounded, leaves
from shoal.accounting.ledger import Charge, Ledger
from shoal.accounting.rdp import Running
from shoal.algorithms.base import Algorithm
from shoal.algorithms.charges import charges, event
from shoal.errors import ConfigError, ShoalError
from shoal.mechanisms.mechanism import ADJACENCIES
from shoal.mechanisms.sampling import Clients
from shoal.mechanisms.setting import Setting
from shoal.training.budget import repeated

SEEDED = "its noise follows from a seed that every site receives, so it hides nothing"


class Refused(ShoalError):
    """The site's owner has not agreed to this; the text says to what."""


class Unfit(Refused):
    """The site's data do not fit; the text may reveal something about them, and is for the owner alone."""


@dataclass(frozen=True)
class Requirements:
    """The owner's requirements; `epsilon` is the budget of the site's data over all runs, at `delta`."""

    epsilon: float | None = None
    delta: float = 1e-5
    noise: float | None = None
    unit: Unit | None = None
    observer: Observer = "release"

    def __post_init__(self) -> None:
        if self.epsilon is not None and not self.epsilon > 0:
            raise ConfigError(f"--require-epsilon must be > 0, got {self.epsilon}")
        if self.noise is not None and not self.noise >= 0:
            raise ConfigError(f"--require-noise must be >= 0, got {self.noise}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"--require-delta must be in (0, 1), got {self.delta}")

    @property
    def any(self) -> bool:
        """Whether the owner requires anything."""
        return self.epsilon is not None or self.noise is not None or self.observer != "release"


def least_noise(algorithm: Algorithm, setting: Setting, unit: Unit) -> float:
    """Return the smallest noise multiplier of any round, for one record or client; 0 where there is no noise."""
    rounds = algorithm.extreme_rounds(setting.rounds)
    clip, per_step, batch = algorithm.per_record, algorithm.per_step, algorithm.records.batch
    if unit == "record" and per_step is not None and clip is not None:
        return min(per_step.multiplier(t, setting.rounds, batch) for t in rounds) / clip.excess(setting.layers)
    if algorithm.per_round is not None:
        return min(algorithm.per_round.multiplier(t, setting.rounds) for t in rounds)
    if algorithm.per_update is not None:
        return min(algorithm.per_update.multiplier(t, setting.rounds) for t in rounds)
    return 0.0


class SiteLedger:
    """The site's ledger, and its owner's privacy budget."""

    def __init__(self, path: Path, site: str, requirements: Requirements, unit: Unit) -> None:
        self.requirements, self._pair = requirements, (requirements.unit or unit, requirements.observer)
        self._seeded = False
        self._ledger = Ledger(path)
        try:
            self._ledger.begin(site, "every run that this site took part in", "", note=release.SITE)
        except BaseException:
            self._ledger.close()
            raise
        self._running = Running(ADJACENCIES[self._pair[0]])
        for intent in self._ledger.charged:
            self._count(intent.charges)

    @property
    def rounds(self) -> int:
        """The number of rounds charged so far."""
        return self._ledger.charged[-1].round if self._ledger.charged else 0

    @property
    def head(self) -> str:
        """The hash of the ledger's last line."""
        return self._ledger.head

    @property
    def adjacency(self) -> str:
        """The adjacency of the unit that this ledger protects."""
        return ADJACENCIES[self._pair[0]]

    def epsilon(self) -> float | None:
        """The epsilon spent for the owner's unit and observer, by RDP; None where nothing is proven."""
        return self._running.epsilon(self.requirements.delta)

    def agree(self, algorithm: Algorithm, setting: Setting, seeded: bool) -> None:
        """Raise Refused where the planned run violates a requirement of the owner."""
        unit, observer = self._pair
        if seeded and self.requirements.any:
            raise Refused(SEEDED)
        if self.requirements.noise is not None:
            found = least_noise(algorithm, setting, unit)
            if found < self.requirements.noise:
                raise Refused(
                    f"its least noise multiplier for a {unit} is {found:g}, "
                    f"the owner requires {self.requirements.noise:g}"
                )
        self._seeded = seeded
        if not self.requirements.any:
            return
        for t in algorithm.extreme_rounds(setting.rounds):
            planned = _wanted(self._charged(algorithm, setting, t, asked=True), self._pair)
            if isinstance(planned, Unbounded):
                raise Refused(f"nothing is proven for a {unit} against the {observer}: {planned.because}")
            if t == 0 and self.requirements.epsilon is not None:
                self._refuse_over_budget(planned)

    def charge(
        self,
        algorithm: Algorithm,
        setting: Setting,
        missed: range,
        asked: int | None = None,
        records: int | None = None,
    ) -> None:
        """Write to the ledger the charges of missed rounds, and of the round that the site is asked for.

        Raises Refused, and charges nothing, where this exceeds the budget. Equal rounds share one line of the ledger,
        so a million of them take no more space than one. Record-level charges use this site's own number of records,
        `records`, which replacing one record does not change.
        """
        self._ledger.recover()
        pending = list(self._missed(algorithm, setting, missed, records))
        if asked is not None:
            pending.append((1, self._charged(algorithm, setting, asked, asked=True, records=records)))
        if self.requirements.epsilon is not None:
            self._refuse_over_budget(Compose(tuple(_wanted(charged, self._pair) for _, charged in pending)))
        for count, charged in pending:
            self._ledger.intend(self.rounds + count, charged, self.rounds + 1)
            self._count(charged)

    def close(self) -> None:
        """Close the ledger's file."""
        self._ledger.close()

    def _missed(
        self, algorithm: Algorithm, setting: Setting, rounds: range, records: int | None
    ) -> Iterator[tuple[int, tuple[Charge, ...]]]:
        """The charges of rounds in which the site was not asked: how many rounds, and their charges."""
        if not rounds:
            return
        if len(algorithm.different_rounds(setting.rounds)) == 1:
            once = self._charged(algorithm, setting, rounds[0], asked=False, records=records)
            yield len(rounds), tuple(replace(each, event=repeated(each.event, len(rounds))) for each in once)
        else:
            yield from ((1, self._charged(algorithm, setting, t, asked=False, records=records)) for t in rounds)

    def _charged(
        self, algorithm: Algorithm, setting: Setting, t: int, *, asked: bool, records: int | None = None
    ) -> tuple[Charge, ...]:
        charged = _charged(algorithm, setting, t, asked=asked)
        if records is not None:
            own_setting = replace(setting, sizes=(records,), bounds=False)
            both = zip(charged, _charged(algorithm, own_setting, t, asked=asked), strict=True)
            charged = tuple(own if own.unit == "record" else general for general, own in both)
        return tuple(replace(each, event=Unbounded(SEEDED)) for each in charged) if self._seeded else charged

    def _refuse_over_budget(self, event: Event) -> None:
        """Check the budget with RDP, which is quick and never too low, then with PLD where RDP exceeds it."""
        most, delta = self.requirements.epsilon, self.requirements.delta
        assert most is not None
        try:
            quick = self._running.epsilon_with(event, delta)
        except ConfigError:  # RDP does not support this event
            quick = None
        if quick is not None and quick <= most:
            return
        budget = Budget(most, delta, adjacency=ADJACENCIES[self._pair[0]])
        exact = budget.cost(Compose((self._ledger.charged_event(*self._pair), event))).epsilon
        if exact is None or exact > most:  # how much it would be depends on how many records are here
            raise Refused(f"the total epsilon would exceed the owner's {most:g} (delta {delta:g})")

    def _count(self, charged: tuple[Charge, ...]) -> None:
        try:
            self._running.add(_wanted(charged, self._pair))
        except ConfigError as error:
            self._running.because = str(error)


def _charged(algorithm: Algorithm, setting: Setting, t: int, *, asked: bool) -> tuple[Charge, ...]:
    """A round's charges: the coordinator's where sampling hides the site, else by whether the site was asked."""
    always = replace(algorithm, clients=Clients("all"))
    return tuple(
        planned_charge
        if _hidden(planned_charge)
        else replace(
            planned_charge,
            event=event(always, setting, t, planned_charge.unit, planned_charge.observer) if asked else NOTHING,
        )
        for planned_charge in charges(algorithm, setting, t)
    )


def _hidden(charge: Charge) -> bool:
    """Whether the observer cannot see if the site took part."""
    visible = (isinstance(leaf, TwoLevel) and leaf.participation == "visible" for leaf in leaves(charge.event))
    return charge.observer == "release" and not any(visible)


def _wanted(charged: tuple[Charge, ...], pair: tuple[Unit, Observer]) -> Event:
    for charge in charged:
        if (charge.unit, charge.observer) == pair:
            return charge.event
    return Unbounded(f"the algorithm makes no claim for a {pair[0]} against the {pair[1]}")
