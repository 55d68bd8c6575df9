"""The clients of a real federation: sites over a grid.

What a simulated cohort does by itself, training clients, is asked of sites: a letter to each of those drawn that is
there, answers until all have come or the deadline has, the gate on each. Whoever does not answer counts as zero. The
coordinator is a trainer with this cohort.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shoal.config import Config
from shoal.data.dataset import Dataset
from shoal.errors import ConfigError
from shoal.federation.flower.transport import Arrived, Mail
from shoal.federation.messages import Parcel, Spoilt, Value
from shoal.federation.roster import Member, Roster
from shoal.federation.terms import END, ROUND, TERMS, Terms
from shoal.federation.validation import Answer, Gate, Question, stacked
from shoal.gradients import Layout
from shoal.mechanisms.setting import Setting
from shoal.prepare import streams_of
from shoal.random.secure_streams import grid, toward_zero
from shoal.training.cohort import Cohort, Population, State, Sum
from shoal.training.round import Updates, leaving
from shoal.training.round_index import Moment

Tell = Callable[[str], None]
Take = Callable[[Question, Parcel], None]
MOST_NAMES = 12  # in one line of words
LISTEN = 0.01  # seconds between two looks at what has come
LOOK = 0.2  # seconds between two looks at who is there
GREETING = 600.0  # seconds that a site may take to read its data and agree
LINGER = 10.0  # seconds at the end of a run for sites that are just coming back
SPARE = 30.0  # seconds that a letter is kept beyond its deadline, so that a late answer is known as one


@dataclass
class Heard:
    """What came of the letters of one round."""

    answers: list[Answer] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    sites: set[tuple[str, int | None]] = field(default_factory=set)
    received: int = 0


class RemoteCohort(Cohort):
    """Sites that train where their records are."""

    def __init__(
        self,
        config: Config,
        population: Population,
        setting: Setting,
        layout: Layout,
        dataset: Dataset,
        mail: Callable[[int], Mail],
        names: dict[str, str],
        tell: Tell,
    ) -> None:
        """Take up the post.

        Args:
            config: The configuration.
            population: What is public of the sites.
            setting: What accounting needs to know, which is part of the terms.
            layout: Where each layer lies in the model's parameters.
            dataset: Held-out rows, and the shape and classes of everybody's.
            mail: Makes what carries letters, given the most bytes that the vectors of an answer may have.
            names: Those of sites whose keys are known, all who may come if there are any.
            tell: Is told in words what happens.

        Raises:
            ConfigError: The configuration cannot be played with sites.
        """
        section = self.section = config.federation
        if config.engine.checkpoint_every != 1:
            raise ConfigError(
                f"engine.checkpoint_every must be 1 in a federation, got {config.engine.checkpoint_every}: "
                f"after a crash rounds would be played again whose models sites have seen"
            )
        if not section.seeded and config.noise_seed is not None:
            raise ConfigError("noise_seed needs federation.seeded = true: what is drawn else follows from no seed")
        if section.seeded and config.random == "secure":
            raise ConfigError("federation.seeded and random=secure contradict each other: leave one of them out")
        self.algorithm, self.streams, self.setting = config.algorithm, streams_of(config), setting
        self._population, self._layout, self._dataset = population, layout, dataset
        self._seed = self.streams.seed if section.seeded else None
        self._gate = Gate(config.algorithm, setting.parameters, section.largest, section.most_records)
        self._mail, self._names, self._tell = mail(self._most_bytes), names, tell
        self._done = 0
        self._greeted: dict[str, int] = {}
        self._identities: dict[int, str] = {}
        self._answered: set[tuple[str, int | None]] = set()
        self._turned_away: set[int] = set()

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def population(self) -> Population:
        return self._population

    @property
    def _most_bytes(self) -> int:
        """Of the vectors in an answer."""
        return self._gate.most_bytes

    def begin(self, run: Path, done: int) -> None:
        self._terms = Terms(
            run=run.resolve().name,
            config=(run / "config.toml").read_text(encoding="utf-8"),  # the same words after a resume
            setting=self.setting,
            classes=self._dataset.classes,
            shape=self._dataset.input_shape,
            parameters=self.setting.parameters,
            seed=self._seed,
        )
        self._roster = Roster(run, self.population.clients, self.section.strikes)
        self._started, self._resumed = time.monotonic(), done > 0 or bool(self._roster.members)
        self._complete = False

    def ready(self, state: State, moment: Moment, stopped: Callable[[], bool]) -> bool:
        """Wait for enough sites: before the first round for all that shall be there, later for a few."""
        said, self._done = "", moment.t
        while not stopped():
            self._listen(Heard(), {}, 0.0)
            here = len(self._roster.here(self._mail.here()))
            wanted = self._wanted(state, moment)
            if here >= wanted:
                self._complete = True
                self._roster.place()
                return True
            limited = self._resumed and not self._complete
            limit = f", for {self.section.deadline:g} s at most" if limited else ""
            if said != (said := f"waiting for sites: {here} of {wanted} are there{limit}"):
                self._tell(said)
            time.sleep(0.05)
        return False

    def _wanted(self, state: State, moment: Moment) -> int:
        """After a restart sites are given a deadline's time to come back."""
        first = min(self.section.first or self.population.clients, self.population.clients)
        waited = time.monotonic() - self._started
        if self._complete or (self._resumed and waited > self.section.deadline):
            return min(self.section.least, first)
        return first

    def train(self, clients: np.ndarray, params: Tensor, state: State, moment: Moment) -> Sum:
        heard, asked, self._done = Heard(), self._present(clients), moment.t
        total = self._gather(heard, asked, params, state, moment)
        self._tell_who(heard, len(asked))
        total.metrics = {
            "asked": len(asked),
            "bad_updates": sum(report["what"] == "bad" for report in heard.reports),
            "bytes_sent": 4 * len(params) * len(asked),
            "bytes_received": heard.received,
        }
        if heard.reports:
            total.metrics["reports"] = heard.reports
        return total

    def _gather(self, heard: Heard, asked: list[int], params: Tensor, state: State, moment: Moment) -> Sum:
        """The sum of what those who are asked answer."""
        clip_norm = self._clip_norm(state, moment)

        def take(question: Question, answer: Parcel) -> None:
            heard.answers.append(self._gate.check(question, answer, clip_norm))

        self._exchange(heard, ROUND, dict.fromkeys(asked, self._letter(params, state)), moment, take)
        heard.answers.sort(key=lambda answer: answer.number)
        return self._sum(heard.answers, params, state, clip_norm, moment)

    def _clip_norm(self, state: State, moment: Moment) -> float:
        """The bound on an update, as far as it is known before any has come."""
        per_update = self.algorithm.per_update
        if per_update is None or per_update.waits_for_cohort:
            return math.inf
        return per_update.bound(state, moment.t, moment.total, None)

    def _present(self, cohort: np.ndarray) -> list[int]:
        """Those of the cohort who are there."""
        self._roster.place()
        wanted = set(cohort.tolist())
        return [m.number for m in self._roster.here(self._mail.here()) if m.number is not None and m.number in wanted]

    def _exchange(self, heard: Heard, kind: str, letters: Mapping[int, Parcel], moment: Moment, take: Take) -> None:
        """Letters to sites, by number, and their answers by the deadline, each of which is handed over."""
        posted: dict[int, Parcel] = {}
        questions: dict[int, tuple[Question, Member]] = {}
        for member in self._roster.here(self._mail.here()):
            number, node = member.number, member.node
            if number is not None and node is not None and number in letters:
                question = Question(self._terms.run, self._terms.digest, number, moment, kind)
                posted[node] = Parcel({**question.names, **letters[number].values}, letters[number].vectors)
                questions[node] = question, member
        sent = self._mail.send(posted, kind, self.section.deadline + SPARE)
        waiting = {letter: questions[node] for letter, node in sent.items()}
        self._listen(heard, waiting, self.section.deadline, take)
        for question, member in waiting.values():
            self._report(heard, member, "late", f"no answer to round {question.moment.t + 1} by the deadline")
        self._mail.give_up(waiting)

    def _letter(self, params: Tensor, state: State) -> Parcel:
        clip = state.get("clip")
        return Parcel({} if clip is None else {"clip": float(clip)}, {"model": params})

    def _listen(
        self,
        heard: Heard,
        waiting: dict[str, tuple[Question, Member]],
        patience: float,
        take: Take = lambda _question, _answer: None,
    ) -> None:
        """Take what arrives until nobody is waited for, or the time is over; newcomers are greeted meanwhile."""
        until, look = time.monotonic() + patience, 0.0
        here: dict[int, str] = {}
        while True:
            if time.monotonic() >= look:
                here, look = self._mail.here(), time.monotonic() + LOOK
                self._greet(here)
            for arrived in self._mail.arrived():
                if arrived.letter in self._greeted:
                    self._greeted.pop(arrived.letter)
                    self._welcome(arrived)
                elif arrived.letter in waiting:
                    self._hear(heard, arrived, *waiting.pop(arrived.letter), take)
            for letter, (_, member) in list(waiting.items()):
                if member.node not in here:
                    del waiting[letter]
                    self._mail.give_up([letter])
                    self._report(heard, member, "gone", "the site went away in the middle of the round")
            if not waiting or time.monotonic() >= until:
                return
            time.sleep(LISTEN)

    def _hear(self, heard: Heard, arrived: Arrived, question: Question, member: Member, take: Take) -> None:
        """One answer: it counts, or it is told of."""
        heard.received += arrived.size
        if arrived.lost:
            self._report(heard, member, "gone", arrived.problem or "the letter was lost")
            return
        try:
            if arrived.parcel is None:
                raise Spoilt(arrived.problem or "it cannot be read")
            if "refused" in arrived.parcel.values:
                self._report(heard, member, "refused", arrived.parcel.text("refused"))
                if question.kind == ROUND:
                    member.agreed = False  # it is asked again for its consent
                    self._turned_away.add(member.node or 0)
                return
            take(question, arrived.parcel)
            heard.sites.add((member.name, member.node))
        except Spoilt as problem:
            self._roster.strike(member)
            out = "; it is left out from now on" if self._roster.left_out(member) else ""
            self._report(heard, member, "bad", f"{problem}{out}")

    def _report(self, heard: Heard, member: Member, what: str, why: str) -> None:
        heard.reports.append({"site": member.name, "node": str(member.node), "what": what, "why": why})
        self._tell(f"round {self._done + 1}: site {member.name} (node {member.node}): {what}: {why}")

    def _tell_who(self, heard: Heard, asked: int) -> None:
        """Who answered, if it is not the same as a round before; not in the run's folder, for sampling hides it."""
        if heard.sites != self._answered:
            self._answered = heard.sites
            names = sorted(name for name, _ in heard.sites)
            some = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
            self._tell(f"round {self._done + 1}: {len(names)} of {asked} answered: {some or 'nobody'}")

    def _greet(self, here: dict[int, str]) -> None:
        """Send the terms to those who have not seen them."""
        known = {member.node for member in self._roster.members.values() if member.agreed}
        busy = set(self._greeted.values())
        self._identities |= here
        self._turned_away &= set(here)
        letters = {}
        for node in here:
            if node not in known and node not in busy and node not in self._turned_away:
                letters[node] = Parcel({"terms": self._terms.text, "round": self._done})
        self._greeted |= self._mail.send(letters, TERMS, GREETING)

    def _welcome(self, arrived: Arrived) -> None:
        """A site's word on the terms; one that refuses may be gone by now."""
        if arrived.lost:
            return
        identity = self._identities[arrived.node]
        name = self._names.get(identity, "")
        try:
            if arrived.parcel is None:
                raise Spoilt(arrived.problem or "it cannot be read")
            if "refused" in arrived.parcel.values:
                raise Spoilt(f"it refused: {arrived.parcel.text('refused')}")
            arrived.parcel.require({"agreed", "name"}, {})
            if arrived.parcel.text("agreed") != self._terms.digest:
                raise Spoilt("it agreed to other terms")
            name = name or arrived.parcel.text("name")[:64]
            if self._roster.welcome(identity, name, arrived.node) is None:
                raise Spoilt(f"all {self._roster.places} places (data.clients) are taken")
            self._tell(f"site {name} (node {arrived.node}) has joined")
        except Spoilt as problem:
            self._turned_away.add(arrived.node)
            self._tell(f"site {name or identity} (node {arrived.node}) does not take part: {problem}")

    def _sum(self, answers: list[Answer], params: Tensor, state: State, clip_norm: float, moment: Moment) -> Sum:
        """The sum of what left the sites; where the method clips at the server, that is done here."""
        updates, norms = stacked(answers, params)
        per_update, secure = self.algorithm.per_update, self.streams.mode == "secure"
        if self._gate.raw and per_update is not None:
            if per_update.waits_for_cohort:
                clip_norm = per_update.bound(state, moment.t, moment.total, norms)
            numbers = np.array([answer.number for answer in answers])
            updates = leaving(self, Updates(numbers, updates, norms), clip_norm, moment)
        elif secure and self.algorithm.per_round is not None:
            updates = toward_zero(updates, grid(clip_norm))  # as sent, unless a site is up to something
        updates = updates.double() if secure else updates
        weights = updates.new_tensor([answer.weight for answer in answers])
        return Sum(
            update=weights @ updates,
            clip_norm=clip_norm,
            weight=sum(answer.weight for answer in answers),
            clients=len(answers),
            below=sum(answer.below for answer in answers),
            shares=sum(answer.share for answer in answers),
        )

    def end(self, why: str, done: int) -> None:
        """Tell the sites that the run is over; those that are away have a moment to come back and hear it."""
        waiting: dict[str, int] = {}
        told: set[int] = set()
        said: dict[str, Value] = {"run": self._terms.run, "terms": self._terms.digest, "why": why, "round": done}
        until = time.monotonic() + LINGER
        while time.monotonic() < until:
            here = self._mail.here()
            letters = {node: Parcel(said) for node in here if node not in told}
            told |= set(letters)
            waiting |= self._mail.send(letters, END, SPARE)
            for arrived in self._mail.arrived():
                waiting.pop(arrived.letter, None)
            waiting = {letter: node for letter, node in waiting.items() if node in here}
            if not waiting and len(told) >= len(self._roster.members):
                return
            time.sleep(LISTEN)
