"""The coordinator: a simulator whose clients are elsewhere.

It plays the server's half of a round (engine/round.py). What a simulator does by itself, training clients, it asks
of sites: a letter to each of the cohort that is there, answers until all have come or the deadline has, the gate on
each. Whoever does not answer counts as zero; the sum is divided by the public expected cohort, and the noise is the
same. Folder, ledger, checkpoints and resuming are the simulator's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from shoal.config import Config
from shoal.deploy.gate import Answer, Gate, Question, stacked
from shoal.deploy.mail import Arrived, Mail
from shoal.deploy.parcel import Parcel, Spoilt
from shoal.deploy.roster import Member, Roster
from shoal.deploy.terms import END, ROUND, TERMS, Terms
from shoal.engine.folder import RunFolder
from shoal.engine.moment import Moment
from shoal.engine.round import State, Sum, Trained, invited, leaving, release
from shoal.engine.simulator import OnRound, Simulator
from shoal.engine.spending import Spending
from shoal.errors import ConfigError
from shoal.privacy.secure import SecureStreams, grid, toward_zero

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
    sites: set[tuple[str, int]] = field(default_factory=set)
    received: int = 0


class Coordinator(Simulator):
    """Plays rounds with sites over a grid."""

    def connect(self, config: Config, mail: Callable[[int], Mail], names: dict[str, str], tell: Tell) -> None:
        """Take up the post. `names` are those of sites whose keys are known, all who may come if there are any."""
        section = self.section = config.federation
        if self.settings.checkpoint_every != 1:
            raise ConfigError(
                f"engine.checkpoint_every must be 1 in a federation, got {self.settings.checkpoint_every}: "
                f"after a crash rounds would be played again whose models sites have seen"
            )
        if not section.seeded:
            if config.noise_seed is not None:
                raise ConfigError(
                    "noise_seed needs federation.seeded = true: what is drawn else follows from no seed"
                )
            self.draw_from(SecureStreams())
        elif config.random == "secure":
            raise ConfigError("federation.seeded and random=secure contradict each other: leave one of them out")
        seed = config.noise_seed if config.noise_seed is not None else config.seed
        self._seed = seed if section.seeded else None
        self._gate = Gate(self.stage.algorithm, self.state.model.numel(), section.largest, section.most_records)
        self._mail, self._names, self._tell = mail(self._most_bytes), names, tell
        self._greeted: dict[str, int] = {}
        self._identities: dict[int, str] = {}
        self._answered: set[tuple[str, int]] = set()
        self._turned_away: set[int] = set()

    @property
    def _most_bytes(self) -> int:
        """Of the vectors in an answer."""
        return self._gate.most_bytes

    def run(self, folder: RunFolder, spending: Spending, on_round: OnRound | None = None) -> str:
        dataset = self.stage.federation.dataset
        self._terms = Terms(
            run=folder.path.resolve().name,
            config=(folder.path / "config.toml").read_text(encoding="utf-8"),  # the same words after a resume
            setting=self.setting,
            classes=dataset.classes,
            shape=dataset.input_shape,
            parameters=self.state.model.numel(),
            seed=self._seed,
        )
        self._roster = Roster(folder.path, len(self.stage.federation), self.section.strikes)
        self._started, self._resumed = time.monotonic(), self.done > 0 or bool(self._roster.members)
        self._complete = False
        stopped = super().run(folder, spending, on_round)
        if stopped != "stopped":
            self._say_goodbye(stopped)
        return stopped

    def ready(self) -> bool:
        """Wait for enough sites: before the first round for all that shall be there, later for a few."""
        said = ""
        while not self._stop:
            self._listen(Heard(), {}, 0.0)
            here = len(self._roster.here(self._mail.here()))
            wanted = self._wanted()
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

    def _wanted(self) -> int:
        """After a restart sites are given a deadline's time to come back."""
        first = min(self.section.first or len(self.stage.federation), len(self.stage.federation))
        waited = time.monotonic() - self._started
        if self._complete or (self._resumed and waited > self.section.deadline):
            return min(self.section.least, first)
        return first

    def play(self, attempt: int) -> dict[str, Any]:
        """Play the next round with those sites that are there; it must have been charged before."""
        start = time.perf_counter()
        moment = Moment(self.done, self.rounds, attempt)
        memory = dict(self.state.memory)

        # clients: who takes part, and how many are expected to, which is public
        cohort, expected = invited(self.stage, moment)

        # everything up to per_update: at the sites
        per_update = self.stage.algorithm.per_update
        bound = math.inf
        if per_update is not None and not per_update.waits_for_cohort:
            bound = per_update.bound(memory, moment.t, moment.total, None)
        heard, asked, total, bound = self._gather(cohort, moment, memory, bound)
        self._tell_who(heard, asked)

        # aggregate, per_round, server, adapt
        model, noise, signal = self._release(memory, total, bound, expected, moment)
        self.state = State(model, memory)
        self.done += 1
        line: dict[str, Any] = {"round": self.done}
        if self.done % self.settings.evaluate_every == 0 or self.done == self.rounds:
            accuracy, loss = self.evaluate()
            line |= {"accuracy": accuracy, "loss": loss if math.isfinite(loss) else None}
        line |= {"clients": total.clients} | self._metrics(heard, asked, expected, bound, noise, signal, len(model))
        return line | {"seconds": time.perf_counter() - start}

    def _gather(
        self, cohort: np.ndarray, moment: Moment, memory: dict[str, Tensor], bound: float
    ) -> tuple[Heard, int, Sum, float]:
        """What came of the round's letters, how many were asked, their sum, and the clip that it is under."""
        heard, asked = Heard(), self._present(cohort)

        def take(question: Question, answer: Parcel) -> None:
            heard.answers.append(self._gate.check(question, answer, bound))

        self._exchange(heard, ROUND, dict.fromkeys(asked, self._letter()), moment, take)
        heard.answers.sort(key=lambda answer: answer.number)
        total, bound = self._sum(heard.answers, memory, bound, moment)
        return heard, len(asked), total, bound

    def _release(
        self, memory: dict[str, Tensor], total: Sum, bound: float, expected: float, moment: Moment
    ) -> tuple[Tensor, float, float]:
        return release(self.stage, self.state.model, memory, total, bound, expected, moment)

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

    def _letter(self) -> Parcel:
        clip = self.state.memory.get("clip")
        return Parcel({} if clip is None else {"clip": float(clip)}, {"model": self.state.model})

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
        self._tell(f"round {self.done + 1}: site {member.name} (node {member.node}): {what}: {why}")

    def _tell_who(self, heard: Heard, asked: int) -> None:
        """Who answered, if it is not the same as a round before; not in the run's folder, for sampling hides it."""
        if heard.sites != self._answered:
            self._answered = heard.sites
            names = sorted(name for name, _ in heard.sites)
            some = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
            self._tell(f"round {self.done + 1}: {len(names)} of {asked} answered: {some or 'nobody'}")

    def _greet(self, here: dict[int, str]) -> None:
        """Send the terms to those who have not seen them."""
        known = {member.node for member in self._roster.members.values() if member.agreed}
        busy = set(self._greeted.values())
        self._identities |= here
        self._turned_away &= set(here)
        letters = {}
        for node in here:
            if node not in known and node not in busy and node not in self._turned_away:
                letters[node] = Parcel({"terms": self._terms.text, "round": self.done})
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

    def _sum(
        self, answers: list[Answer], memory: dict[str, Tensor], bound: float, moment: Moment
    ) -> tuple[Sum, float]:
        """The sum of what left the sites; where the method clips at the server, that is done here."""
        updates, norms = stacked(answers, self.state.model)
        per_update = self.stage.algorithm.per_update
        if self._gate.raw and per_update is not None:
            if per_update.waits_for_cohort:
                bound = per_update.bound(memory, moment.t, moment.total, norms)
            part = Trained(np.array([answer.number for answer in answers]), updates, norms, [], None)
            updates = leaving(self.stage, part, bound, moment)
        elif self.stage.streams.mode == "secure" and self.stage.algorithm.per_round is not None:
            updates = toward_zero(updates, grid(bound))  # as sent, unless a site is up to something
        updates = updates.double() if self.stage.streams.mode == "secure" else updates
        weights = updates.new_tensor([answer.weight for answer in answers])
        total = Sum(
            update=weights @ updates,
            weight=sum(answer.weight for answer in answers),
            clients=len(answers),
            below=sum(answer.below for answer in answers),
            shares=sum(answer.share for answer in answers),
        )
        return total, bound

    def _metrics(
        self, heard: Heard, asked: int, expected: float, bound: float, noise: float, signal: float, size: int
    ) -> dict[str, Any]:
        bad = sum(report["what"] == "bad" for report in heard.reports)
        told: dict[str, Any] = {
            "asked": asked,
            "expected_clients": expected,
            "bad_updates": bad,
            "bytes_sent": 4 * size * asked,
            "bytes_received": heard.received,
        }
        if math.isfinite(bound):
            told |= {"clip": bound, "noise": noise}
            if noise > 0:
                told["snr"] = signal / (noise * size**0.5)
        return told | ({"reports": heard.reports} if heard.reports else {})

    def _say_goodbye(self, why: str) -> None:
        """Tell the sites that the run is over; those that are away have a moment to come back and hear it."""
        waiting: dict[str, int] = {}
        told: set[int] = set()
        said = {"run": self._terms.run, "terms": self._terms.digest, "why": why, "round": self.done}
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

    def without_privacy(self) -> Simulator:
        raise ConfigError("baseline: the training without privacy cannot be played here, where the data are not")
