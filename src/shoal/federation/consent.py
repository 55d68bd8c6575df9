"""What a site's owner agrees to, and the site's own ledger: its privacy need not rest on trusting the coordinator.

One ledger covers all runs on this site's data. Every round that the site is asked for is charged on its disk before
any record is touched, and so is every round in between, for which it might have been sampled. A round asked for again
is charged again, as it draws new noise, and so is one that the coordinator says it ran again without this site
(`repeats`): it drew its clients a second time. Charges follow from the algorithm's definition. The site must trust
the coordinator to add its own noise (`per_round`), to sample sites at random, and to say which rounds it ran, and how
often; it relies on the last two only where participation is hidden.
Where the observer sees whether the site took part, as the server always does, each round that the site answers costs
as much as without sampling, and the other rounds cost nothing.

Where clients may take part again only after some rounds, the site keeps to that itself: it refuses a round that comes
too early, or too often. With correlated noise (`dp-ftrl`) a round that it answers is charged what it costs this site
in that round and all later ones, given the rounds it answered before. A coordinator that restarts forgets its earlier
noise, so that no round run again costs the site more.

What is proven where sampling hides the site (zero-out). Let D be all draws since the site joined, of first and of
repeated rounds, up to the first that the caps of a run and in all do not pay for together with those before it. A
round costs the same whether the site is asked or not, and is counted before a later one is answered, so D follows
from what the coordinator says, not from who was drawn. The site answers within D alone, and charges all of D: when it
next hears from the coordinator, or at the end.

Which of D it answers may depend on earlier draws: by the cap of a month, which counts a round from when the site
hears of it, or by a write that failed. That costs no more than if it answered all of D. From the last draw to the
first, each output may be replaced by that of its dominating pair, which no other depends on. Let L be the likelihood
ratio of all outputs, with the site against without it, and l >= 0 that of one draw's own output, of mean 1. Given
the other outputs, L is linear in l, with slope E[W a]: W >= 0 is their ratio for one choice of who is drawn when (0
where the site is not drawn here), and a, 0 or 1, whether it then answers. With a = 1 the slope is no smaller, and
the mean the same: L spreads more (convex order), and every hockey-stick divergence, either way, is convex in L. So
each a may be replaced by 1, from the last draw to the first. Nor do any 30 days cost more than the cap of a month: a
draw is answered only if the cap pays for all that ran in the 30 days before it, and of those that may be answered in
these 30 days the last is such a draw.

Not proven: the second part under replace-one, where L is a ratio of two such; anything of a coordinator that does not
say which rounds it ran, or chooses by the outputs when to go back.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from shoal import release
from shoal.accounting import calibration
from shoal.accounting.calibration import Budget
from shoal.accounting.claims import Observer, Unit
from shoal.accounting.dominating import dominating
from shoal.accounting.events import NOTHING, Compose, Event, Gaussian, TwoLevel, Unbounded
from shoal.accounting.leaves import leaves
from shoal.accounting.privacy_ledger import Charge, Intent, Ledger
from shoal.accounting.rdp import Running
from shoal.accounting.theorems import Adjacency
from shoal.algorithms.base import Algorithm
from shoal.algorithms.charges import PAIRS, charges, event
from shoal.errors import ConfigError, ShoalError
from shoal.federation.site_progress import Progress
from shoal.federation.terms import Terms
from shoal.mechanisms.mechanism import ADJACENCIES
from shoal.mechanisms.sampling import Clients, participation
from shoal.mechanisms.schedules import parse
from shoal.mechanisms.setting import Setting
from shoal.training.budget import repeated

SEEDED = "its noise follows from a seed that every site receives, so it hides nothing"
MONTH = timedelta(days=30)
LONGEST_NAME = 64  # of a run, in every line of the ledger
WITHOUT_PLD = 3.0  # what by RDP costs more than this times the cap, plus 1, is refused without PLD, which is slow

CAPS = {
    "epsilon_per_run": "the run's epsilon",
    "epsilon_per_month": "the epsilon of 30 days",
    "epsilon": "the total epsilon",
}
"""The caps on epsilon, and what each bounds."""


Charged = tuple[int, tuple[Charge, ...]]
"""How many rounds, and their charges."""


def now() -> datetime:
    """The time, in the site's own zone."""
    return datetime.now().astimezone()


class Refused(ShoalError):
    """The site's owner has not agreed to this; the text says to what."""


class Unfit(Refused):
    """The site's data do not fit; the text may reveal something about them, and is for the owner alone."""


@dataclass(frozen=True)
class Requirements:
    """The privacy that the owner requires for `unit` against `observer`.

    Attributes:
        epsilon: The budget of the site's data over all runs.
        delta: The delta of every epsilon.
        noise: The least noise multiplier.
        unit: The unit to protect; None takes the one that the terms name.
        observer: Against whom. A guarantee against the server also holds against released models.
        epsilon_per_run: The budget of one run; a run that plans more is refused.
        epsilon_per_month: The budget of any 30 days.
        guarantee: Whether something must be proven even where no epsilon or noise is required.
        sources: Where the owner set each of these, for refusals.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    noise: float | None = None
    unit: Unit | None = None
    observer: Observer = "release"
    epsilon_per_run: float | None = None
    epsilon_per_month: float | None = None
    guarantee: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for cap in CAPS:
            if (most := getattr(self, cap)) is not None and not most > 0:
                raise ConfigError(f"{self._name(cap)} must be > 0, got {most}")
        if self.noise is not None and not self.noise >= 0:
            raise ConfigError(f"{self._name('noise')} must be >= 0, got {self.noise}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"{self._name('delta')} must be in (0, 1), got {self.delta}")

    @property
    def caps(self) -> dict[str, float]:
        """The caps on epsilon that are set."""
        return {cap: most for cap in CAPS if (most := getattr(self, cap)) is not None}

    @property
    def any(self) -> bool:
        """Whether the owner requires anything."""
        return bool(self.caps) or self.noise is not None or self.observer != "release" or self.guarantee

    def source(self, name: str) -> str:
        """Where a requirement was set, as the end of a refusal."""
        return f" ({self.sources[name]})" if name in self.sources else ""

    def _name(self, name: str) -> str:
        return self.sources.get(name, f"--require-{name}")


def least_noise(algorithm: Algorithm, setting: Setting, unit: Unit, observer: Observer = "release") -> float:
    """Return the smallest noise multiplier of any round, for one unit; 0 where there is no noise.

    All of a user's records may enter a step. Noise that the coordinator adds hides nothing from itself.
    """
    few = algorithm.alike or algorithm.priced
    rounds = algorithm.extreme_rounds(setting.rounds) if few else [*range(setting.rounds)]
    clip, per_step, batch = algorithm.per_record, algorithm.per_step, algorithm.records.batch
    if unit != "client" and per_step is not None and clip is not None:
        moved = clip.excess(setting.layers) * (1 if unit == "record" else algorithm.records.max_per_user or math.inf)
        least = min(per_step.multiplier(t, setting.rounds, batch) for t in rounds) / moved
        return least if per_step.test is None else min(least, per_step.test.noise_multiplier)
    if algorithm.priced and observer == "release":
        if algorithm.per_round is not None:
            rounds.append(
                algorithm.per_round.costliest(participation(algorithm.clients, setting.rounds, setting.clients))
            )
        alone = [event(algorithm, replace(setting, parameters=0), t, unit, observer, history=()) for t in rounds]
        return min(each.noise if isinstance(each, Gaussian) else 0.0 for each in alone)
    if algorithm.per_round is not None and (observer == "release" or algorithm.per_round.at == "shared"):
        return min(algorithm.per_round.multiplier(t, setting.rounds) for t in rounds)
    if algorithm.per_update is not None:
        return min(algorithm.per_update.multiplier(t, setting.rounds) for t in rounds)
    return 0.0


class SiteLedger:
    """The site's ledger, and its owner's privacy budget, in the run of these terms; `clock` says when a month ends.

    Attributes:
        requirements: What the owner requires.
        records: How many records the site has, which replacing one does not change; None until they are read.
        progress: How far the site is.
    """

    def __init__(
        self, path: Path, site: str, requirements: Requirements, terms: Terms, clock: Callable[[], datetime] = now
    ) -> None:
        self.requirements, self._clock = requirements, clock
        self.records: int | None = None
        self._pair = requirements.unit or terms.settings.budget.unit, requirements.observer
        self._run, self._seeded = terms.run[:LONGEST_NAME], terms.seed is not None
        self._algorithm, self._setting = terms.settings.algorithm, terms.charged
        self._ledger = Ledger(path)
        try:
            self._ledger.begin(site, "every run that this site took part in", "", note=release.SITE)
            self._written = Progress.read(self._ledger.progress)
            self.progress = self._written if self._ledger.progress else Progress.of_earlier_version(path.parent)
        except BaseException:
            self._ledger.close()
            raise
        self._accounts: dict[str, tuple[int, Running]] = {}

    @property
    def rounds(self) -> int:
        """The number of rounds charged so far."""
        return self._ledger.charged[-1].round if self._ledger.charged else 0

    @property
    def has_progress(self) -> bool:
        """Does a line of the ledger say how far the site is?"""
        return bool(self._ledger.progress)

    @property
    def head(self) -> str:
        """The hash of the ledger's last line."""
        return self._ledger.head

    @property
    def adjacency(self) -> Adjacency:
        """The adjacency of the unit that this ledger protects."""
        return ADJACENCIES[self._pair[0]]

    def epsilon(self) -> float | None:
        """The epsilon spent for the owner's unit and observer, by RDP; None where nothing is proven."""
        return self._account("epsilon").epsilon(self.requirements.delta)

    def agree(self) -> None:
        """Raise Refused where the planned run violates a requirement of the owner."""
        unit, observer = self._pair
        if self._seeded and self.requirements.any:
            raise Refused(SEEDED)
        if self.requirements.noise is not None:
            found = least_noise(self._algorithm, self._setting, unit, observer)
            if found < self.requirements.noise:
                raise Refused(
                    f"its least noise multiplier for a {unit} is {found:g}, "
                    f"the owner requires {self.requirements.noise:g}{self.requirements.source('noise')}"
                )
        if not self.requirements.any:
            return
        for t in self._algorithm.extreme_rounds(self._setting.rounds):
            planned = _wanted(self._charged(t, asked=True), self._pair)
            if isinstance(planned, Unbounded):
                raise Refused(
                    f"nothing is proven for a {unit} against the {observer}: {planned.because}"
                    f"{self.requirements.source('observer')}"
                )
            if t == 0 and (cap := self._over_budget(planned)) is not None:
                self.refuse_cap(cap)
        if self.requirements.epsilon_per_run is not None:
            self._refuse_long(self.requirements.epsilon_per_run)

    def charge(
        self,
        missed: range,
        asked: int | None = None,
        history: tuple[int, ...] = (),
        again: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Write to the ledger the charges of missed rounds, and of the round that the site is asked for.

        Raises Refused, and charges nothing, where this exceeds the budget; that of a month counts only where the site
        is asked. Equal rounds share one line of the ledger, so a million of them take no more space than one.
        Record-level charges use this site's own number of records. `history`: the rounds of this run that it
        answered; `again`: the round was run before. `progress` is that after the round.
        """
        if asked is not None and self._algorithm.clients.separated:
            refuse_early(self._algorithm, self._setting, asked, history)
        pending = list(self._missed(missed))
        if asked is not None:
            pending.append((1, self._charged(asked, asked=True, history=history, again=again)))
        if (cap := self._over_budget(_composed(pending, self._pair), past=asked is None)) is not None:
            self.refuse_cap(cap)
        for count, charged in pending:
            self._write(count, charged, progress or self.progress)

    def catch_up(self, again: range, begun: int, repeats: int, over: bool = False) -> str | None:
        """Charge the rounds since the last message, in which this site may have been drawn: all that left it then.

        They are charged in the order in which they ran, as far as the budget pays for them (or `over` it): the site
        would have refused the others. Each line says what it charges: wherever a write fails, the rest is still to be
        charged, and nothing twice. They may be of several months; against the cap of a month they count from now on.

        Args:
            again: The rounds that were run again, one after the other.
            begun: The number of rounds that have begun; those never charged came after the ones that ran `again`.
            repeats: How often a round was run again in this run. Of those that are neither charged nor named, each is
                charged what no round exceeds.
            over: Whether the budget does not count: it was another one when they ran.

        Returns:
            The cap that did not pay for all, if any: the site answers nothing more.
        """
        unnamed = repeats - self.progress.repeats - len(again)
        cap = self._catch_up(again, repeats, over, again=True)
        cap = cap or self._catch_up(range(self.progress.charged, begun), repeats, over)
        begun = self.progress.charged if cap else max(1, self.progress.charged)
        if unnamed > 0 and begun:
            worst = self._costliest_again(range(begun))
            short = None if over else self._over_budget(_wanted(_times(worst, unnamed), self._pair), past=True)
            count = unnamed if short is None else self.repeats_to_charge(range(begun), unnamed)
            if count:
                done = replace(self.progress, repeats=self.progress.repeats + count)
                self._write(count, _times(worst, count), done)
            cap = cap or short
        return cap

    def _catch_up(self, rounds: range, repeats: int, over: bool, again: bool = False) -> str | None:
        """Charge as many of these rounds as the budget pays for, from the first on; return the cap that ends it."""
        cap, count = None, len(rounds)
        while count := min(count, len(rounds)):
            pending = list(self._missed(rounds[:count], again))
            cap = None if over else self._over_budget(_composed(pending, self._pair), past=True)
            if cap is not None:
                count //= 2
                continue
            for many, charged in pending:
                done, rounds = self.progress, rounds[many:]
                if again:
                    counted = max(done.repeats, min(done.repeats + many, repeats))
                    done = replace(done, next=rounds.start, repeats=counted)
                else:
                    next, begun = (max(each, rounds.start) for each in (done.next, done.begun))
                    done = replace(done, next=next, begun=begun, charged=rounds.start)
                self._write(many, charged, done)
        return cap

    def keep(self, progress: Progress) -> None:
        """Write how far the site is, where that has changed, and charge nothing."""
        if changed := progress.changed(self._written):
            self._ledger.recover()
            self._ledger.note(changed)
            self._written = progress
        self.progress = progress

    def repeats_to_charge(self, rounds: range, count: int) -> int:
        """How many of `count` such rounds to charge: not those that the site would have refused.

        Where rounds differ in cost, the budget may have paid for other ones, of which less of it is left: one more is
        charged then, so that what the site answered did not cost more.
        """
        paid = self.affordable_repeats(rounds, count)
        if paid >= count or not rounds or self._over_budget(NOTHING, past=True):
            return paid
        begun = _extremes(self._algorithm, range(rounds.stop), self._setting)
        costs = {_wanted(self._charged(t, asked=False, again=a), self._pair) for t in begun for a in (False, True)}
        return paid + (len(costs) > 1)

    def affordable_repeats(self, rounds: range, count: int) -> int:
        """How many of `count` such rounds the budget pays for; the site would have refused the others."""
        if count < 1 or not rounds:
            return 0
        worst = _wanted(self._costliest_again(rounds), self._pair)
        caps = self._caps(past=True).items()
        return min((self._pays_for(cap, most, worst, count) for cap, most in caps), default=count)

    def _costliest_again(self, rounds: range) -> tuple[Charge, ...]:
        """Charges that cost no less than any of these rounds, run again without this site."""
        chosen = _extremes(self._algorithm, rounds, self._setting)
        each = [self._charged(t, asked=False, again=True) for t in chosen]
        columns = zip(*each, strict=True)
        return tuple(replace(column[0], event=dominating(charge.event for charge in column)) for column in columns)

    def close(self) -> None:
        """Close the ledger's file."""
        self._ledger.close()

    def _write(self, count: int, charged: tuple[Charge, ...], progress: Progress) -> None:
        """Write the charges of so many rounds, and the progress after them, in one line of the ledger."""
        self._ledger.recover()
        first, changed = self.rounds + 1, progress.changed(self._written)
        self._ledger.intend(self.rounds + count, charged, first, self._run, changed)
        self.progress = self._written = progress
        for _, account in self._accounts.values():
            self._add(account, charged)

    def _missed(self, rounds: range, again: bool = False) -> Iterator[Charged]:
        """The charges of rounds in which the site was not asked, for the first time or `again`."""
        if not rounds:
            return
        alike = self._algorithm.priced or len(self._algorithm.different_rounds(self._setting.rounds)) == 1
        each = (self._charged(t, asked=False, again=again) for t in rounds[: alike or None])
        for once, same in groupby(each):
            count = len(rounds) if alike else len(list(same))
            yield count, _times(once, count)

    def _charged(
        self, t: int, *, asked: bool, history: tuple[int, ...] = (), again: bool = False
    ) -> tuple[Charge, ...]:
        def of_round(setting: Setting) -> tuple[Charge, ...]:
            return _of_round(self._algorithm, setting, t, history, asked=asked, again=again)

        charged = of_round(self._setting)
        if self.records is not None:
            # where it was not asked, it may have had as many as when it last was
            sizes = {self.records} if asked else {self.records, self.progress.records or self.records}
            own = replace(self._setting, sizes=tuple(sorted(sizes)), bounds=False)
            both = zip(charged, of_round(own), strict=True)
            charged = tuple(own if own.unit == "record" else general for general, own in both)
        return tuple(replace(each, event=Unbounded(SEEDED)) for each in charged) if self._seeded else charged

    def _refuse_long(self, most: float) -> None:
        """Refuse a run whose planned rounds would certainly exceed the run's cap.

        With a schedule every round counts as the cheapest one. Where the observer sees who takes part, the site is
        assumed to take part as often as expected. Where several rounds are charged as one, only the first of them
        counts. Every round is checked again when it is charged.
        """

        algorithm, setting = self._algorithm, self._setting

        def planned(t: int) -> Event:
            (charge,) = (each for each in self._charged(t, asked=True) if _of(each, self._pair))
            if not algorithm.alike and _hidden(charge):
                return charge.event
            rate = 1.0 if _hidden(charge) else algorithm.clients.rate(t, setting.rounds, setting.clients)
            if algorithm.priced:
                rate = algorithm.clients.expected(t, setting.rounds, setting.clients) / setting.clients
            return repeated(charge.event, max(1, round(rate * setting.rounds)))

        fresh = Running(self.adjacency)
        if all(self._exceeds(fresh, [], planned(t), most) for t in algorithm.extreme_rounds(setting.rounds)):
            self.refuse_cap("epsilon_per_run")

    def _pays_for(self, cap: str, most: float, event: Event, count: int) -> int:
        """How often a cap pays for an event, `count` times at most."""
        account, counted = self._account(cap), self._counted(cap)
        if not self._exceeds(account, counted, repeated(event, count), most):
            return count
        if self._exceeds(account, counted, event, most):
            return 0
        spent = self._spent(counted)
        budget = Budget(most, self.requirements.delta, adjacency=self.adjacency)
        paid = int(calibration.rounds(lambda n: Compose((*spent, repeated(event, n))), budget, count).value)
        # what RDP alone refuses is refused when it is charged, whatever PLD says
        return bisect_left(
            range(1, paid + 1), True, key=lambda n: _far_over(self._by_rdp(account, repeated(event, n)), most)
        )

    def _caps(self, past: bool) -> dict[str, float]:
        """The caps on a charge; not that of a month for rounds of the `past`, which may be of several months."""
        caps = self.requirements.caps
        return {cap: most for cap, most in caps.items() if not (past and cap == "epsilon_per_month")}

    def _over_budget(self, event: Event, past: bool = False) -> str | None:
        """The first cap that this event would exceed."""
        for cap, most in self._caps(past).items():
            if self._exceeds(self._account(cap), self._counted(cap), event, most):
                return cap
        return None

    def refuse_cap(self, cap: str) -> NoReturn:
        """Raise Refused because of this cap; how much it would be depends on how many records are here."""
        most = self.requirements.caps[cap]
        words = f"{CAPS[cap]} would exceed the owner's {most:g} (delta {self.requirements.delta:g})"
        raise Refused(words + self.requirements.source(cap))

    def _exceeds(self, account: Running, counted: list[Intent], event: Event, most: float) -> bool:
        """Whether this costs too much, by RDP, which is quick and never too low, or else by PLD.

        `counted` is what was charged before, and `account` the same by RDP.
        """
        quick = self._by_rdp(account, event)
        if quick <= most or _far_over(quick, most):
            return quick > most
        budget = Budget(most, self.requirements.delta, adjacency=self.adjacency)
        exact = budget.cost(Compose((*self._spent(counted), event))).epsilon
        return exact is None or not exact <= most

    def _by_rdp(self, account: Running, event: Event) -> float:
        """What an account and this cost by RDP; infinite where RDP does not support the event, or has no bound."""
        try:
            found = account.epsilon_with(event, self.requirements.delta)
        except ConfigError:
            return math.inf
        return math.inf if found is None else found

    def _spent(self, counted: list[Intent]) -> tuple[Event, ...]:
        return tuple(_wanted(intent.charges, self._pair) for intent in counted)

    def _account(self, cap: str) -> Running:
        """What is spent of a cap, by RDP: kept from round to round until something leaves the window."""
        counted = self._counted(cap)
        outside = len(self._ledger.charged) - len(counted)
        if self._accounts.get(cap, (None,))[0] != outside:
            account = Running(self.adjacency)
            for intent in counted:
                self._add(account, intent.charges)
            self._accounts[cap] = outside, account
        return self._accounts[cap][1]

    def _counted(self, cap: str) -> list[Intent]:
        """The charges in the ledger that count for a cap."""
        if cap == "epsilon_per_run":
            return [intent for intent in self._ledger.charged if intent.run == self._run]
        if cap == "epsilon_per_month":
            return list(_since(self._ledger.charged, self._clock() - MONTH))
        return self._ledger.charged

    def _add(self, account: Running, charged: tuple[Charge, ...]) -> None:
        try:
            account.add(_wanted(charged, self._pair))
        except ConfigError as error:
            account.because = str(error)


def _far_over(by_rdp: float, most: float) -> bool:
    """Whether a cost is refused by RDP alone."""
    return WITHOUT_PLD * most + 1 < by_rdp < math.inf  # RDP may charge 0.6 for what costs 0.01


def _extremes(algorithm: Algorithm, rounds: range, setting: Setting) -> Iterable[int]:
    """Rounds that together dominate all: of each cohort size, the ends of the only other schedule that changes.

    Of each: a noise share may be proven for a cohort of 3 and one of 5, and not for one of 4. All, where noise is
    added in two places: what is charged is then for one of them, and for the other where that one has none.
    """
    clients, total = algorithm.clients, setting.rounds
    if algorithm.priced or len(algorithm.different_rounds(total)) == 1:
        return rounds[:1]
    changing = {schedule for schedule in algorithm.schedules[1:] if schedule.shape != "constant"}  # but the cohort's
    twice = algorithm.per_step is not None and algorithm.per_update is not None
    if len(changing) > 1 or not algorithm.alike or twice:
        return rounds
    alike: dict[tuple[float, float], list[int]] = {}
    for t in rounds:
        key = clients.expected(t, total, setting.clients), clients.rate(t, total, setting.clients)
        alike.setdefault(key, []).append(t)
    value = next(iter(changing), parse(0)).value
    return sorted({end(same, key=lambda t: value(t, total)) for same in alike.values() for end in (min, max)})


def _since(charged: list[Intent], start: datetime) -> Iterator[Intent]:
    """The charges after `start`. None is older than one before it, whatever the clock said: it had been set back."""
    latest = datetime.min.replace(tzinfo=UTC)
    for intent in charged:
        latest = max(latest, datetime.fromisoformat(intent.at)) if intent.at else latest
        if not intent.at or latest > start:
            yield intent


def refuse_early(algorithm: Algorithm, setting: Setting, t: int, history: tuple[int, ...]) -> None:
    """Raise Refused where a site that answered the rounds of `history` may not answer round t (from 0)."""
    why = algorithm.clients.participation(setting.rounds, setting.clients).refused(t, history)
    if why is not None:
        raise Refused(f"this site may not take part (clients.sampling={algorithm.clients.sampling}): {why}")


def _of_round(
    algorithm: Algorithm, setting: Setting, t: int, history: tuple[int, ...], *, asked: bool, again: bool
) -> tuple[Charge, ...]:
    """A round's charges: the coordinator's where sampling hides the site, else by whether the site was asked."""
    if algorithm.priced:
        return tuple(
            Charge(
                unit,
                who,
                event(algorithm, setting, t, unit, who, history=history) if asked else NOTHING,
                ADJACENCIES[unit],
            )
            for unit, who in PAIRS
        )
    always = replace(algorithm, clients=Clients("all"))
    return tuple(
        planned_charge
        if _hidden(planned_charge)
        else replace(
            planned_charge,
            event=event(always, setting, t, planned_charge.unit, planned_charge.observer)
            if asked or setting.holders(planned_charge.unit) > 1  # other sites that hold the user may be asked
            else NOTHING,
        )
        for planned_charge in charges(algorithm, setting, t, again)
    )


def _composed(pending: list[Charged], pair: tuple[Unit, Observer]) -> Event:
    return Compose(tuple(_wanted(charged, pair) for _, charged in pending))


def _times(charged: tuple[Charge, ...], count: int) -> tuple[Charge, ...]:
    """The charges of `count` equal rounds."""
    return tuple(replace(charge, event=repeated(charge.event, count)) for charge in charged)


def _hidden(charge: Charge) -> bool:
    """Whether the observer cannot see if the site took part."""
    visible = (isinstance(leaf, TwoLevel) and leaf.participation == "visible" for leaf in leaves(charge.event))
    return charge.observer == "release" and not any(visible)


def _wanted(charged: tuple[Charge, ...], pair: tuple[Unit, Observer]) -> Event:
    for charge in charged:
        if _of(charge, pair):
            return charge.covered
    return Unbounded(f"the algorithm makes no claim for a {pair[0]} against the {pair[1]}")


def _of(charge: Charge, pair: tuple[Unit, Observer]) -> bool:
    return (charge.unit, charge.observer) == pair
