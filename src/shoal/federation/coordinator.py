"""The clients of a real federation: sites over a Flower grid.

Where a simulated cohort trains its clients itself, this one sends a message to each sampled site that is connected,
collects answers until all have arrived or the deadline has passed, and validates each. A site that does not answer
contributes zero. The coordinator is a trainer with this cohort.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shoal.accounting.privacy_ledger import FILE, Record
from shoal.config import Config
from shoal.data.dataset import Dataset
from shoal.errors import ConfigError, RunError, listed
from shoal.federation import canary_clients
from shoal.federation.flower.transport import Reply, Transport
from shoal.federation.messages import InvalidMessage, Payload, Value
from shoal.federation.operations.monitor import Monitor
from shoal.federation.operations.site_commands import SiteCommands
from shoal.federation.operations.status import Status, site_statuses
from shoal.federation.roster import Member, Roster
from shoal.federation.terms import END, OLDER_COPY, ROUND, TERMS, Terms, schema_digest
from shoal.federation.validation import Request, SiteUpdate, Validator, stacked
from shoal.gradients import Layout
from shoal.mechanisms.setting import Setting
from shoal.prepare import streams_of
from shoal.random.secure_streams import grid, toward_zero
from shoal.training.cohort import Cohort, Population, State, Sum
from shoal.training.round import Updates, protected_updates
from shoal.training.round_index import RoundIndex

Log = Callable[[str], None]
Take = Callable[[Request, Payload], None]
MOST_NAMES = 12  # site names in one log line
LONGEST_REASON = 500  # characters of a refusal
LISTEN = 0.01  # seconds between checks for answers
CHECK_SITES = 0.2  # seconds between checks for connected sites
JOINING = 600.0  # seconds for a site to load its data and agree
LINGER = 10.0  # seconds at the end of a run for sites that are reconnecting
SPARE = 30.0  # seconds that a message outlives its deadline, so that a late answer is recognised
AFTER_TERMS = 30.0  # seconds, at least, until a site that did not agree is sent the terms again
TOO_FEW = "; too few are left: invite another site, or end the run (shoal sites drop NAME --end)"
LONGEST_PAUSE = 600.0  # seconds, at most, until a site that refuses again and again is sent the terms again


@dataclass
class Replies:
    """The answers and problem reports of one round; `counted` are the numbers of the sites in its sum."""

    answers: list[SiteUpdate] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    sites: set[tuple[str, int | None]] = field(default_factory=set)
    counted: set[int] = field(default_factory=set)
    received: int = 0


class RemoteCohort(Cohort):
    """Sites that train on records they hold."""

    def __init__(
        self,
        config: Config,
        population: Population,
        setting: Setting,
        layout: Layout,
        dataset: Dataset,
        transport: Callable[[int], Transport],
        names: dict[str, str],
        log: Log,
        frozen: str = "",
        monitor: Monitor | None = None,
    ) -> None:
        """Check the configuration and create the transport.

        Args:
            config: The configuration.
            population: The public facts about the sites.
            setting: What accounting needs; part of the terms.
            layout: The position of each layer in the model's parameters, without personal layers.
            dataset: Held-out rows, and the shape and classes that all sites share.
            transport: Makes the transport, given the most bytes that the vectors of an answer may have.
            names: The names of sites with known keys, by identity; if there are any, only these may join. It may
                change during the run.
            log: Called with one line for each event, unless there is a `monitor`.
            frozen: The digest of the model's frozen part, which sites build themselves.
            monitor: Receives events and the status, and has the operators' commands.

        Raises:
            ConfigError: The configuration cannot be run with sites.
        """
        section, self._budget = config.federation, config.budget
        self.section = section
        if config.engine.checkpoint_every != 1:
            raise ConfigError(
                f"engine.checkpoint_every must be 1 in a federation, got {config.engine.checkpoint_every}: "
                f"after a crash, rounds whose models sites have already seen would be run again"
            )
        if not section.seeded and config.noise_seed is not None:
            raise ConfigError("noise_seed needs federation.seeded = true: without it no random number is seeded")
        if section.seeded and config.random == "secure":
            raise ConfigError("federation.seeded and random=secure contradict each other: remove one of them")
        canary_clients.refuse_unfit(config.algorithm, section.canaries)
        self.algorithm, self.streams, self.setting = config.algorithm, streams_of(config), setting
        self._population, self._layout, self._dataset = population, layout, dataset
        self._seed, self._frozen = self.streams.seed if section.seeded else None, frozen
        self._schema = schema_digest(config)
        self._validator = Validator(config.algorithm, layout.size, section.max_update_norm, section.max_records)
        self._transport, self._names = transport(self._most_bytes), names
        self._monitor = monitor or Monitor(lambda level, words, _: log(words) if level >= logging.INFO else None)
        self._doing, self._problems = "starting", dict[str, str]()
        self._dismissed: set[int] = set()  # connected nodes of dropped sites
        self._over = ""
        self._done = self._begun = self._repeats = self._furthest = 0
        self._terms_sent: dict[str, int] = {}
        self._identities: dict[int, str] = {}
        self._answered: set[tuple[str, int | None]] = set()
        self._refusals: Counter[int] = Counter()  # of each connected node, in a row
        self._greet_at: dict[int, float] = {}  # when a node that refused is sent the terms again

    @property
    def layout(self) -> Layout:
        """The position of each layer in the model's parameters."""
        return self._layout

    @property
    def population(self) -> Population:
        """The public facts about the sites."""
        return self._population

    @property
    def _most_bytes(self) -> int:
        """The most bytes that the vectors of an answer may have."""
        return self._validator.most_bytes

    def begin(self, run: Path, done: int) -> None:
        """Set up the terms and the roster of a run with `done` rounds behind it."""
        config = (run / "config.toml").read_text(encoding="utf-8")  # the same text after a resume
        self._terms = self.terms(run.resolve().name, config)
        self._roster = Roster(run, self.population.clients, self.section.strikes)
        self._done = self._begun = done
        self._repeats, self._furthest = _charged_before(run / FILE)
        self._may_be_restored = (run / "metrics.jsonl").exists()  # so that no site can stop a new run
        self._monitor.begin(run)
        count = self.section.canaries
        self._canaries = canary_clients.CanaryClients(self, run, count) if count else None
        self._commands = SiteCommands(
            self._roster, self._names, self._transport, self._monitor, lambda: (self._done, self._wanted(*self._now))
        )
        self._started, self._resumed = time.monotonic(), done > 0 or bool(self._roster.members)
        self._complete = False

    def terms(self, run: str, config: str) -> Terms:
        """The terms of a run with this name and configuration (TOML)."""
        return Terms(
            run=run,
            config=config,
            setting=self.setting,
            classes=self._dataset.classes,
            shape=self._dataset.input_shape,
            parameters=self.layout.size,
            seed=self._seed,
            features=self._dataset.features,
            schema=self._schema,
            frozen=self._frozen,
        )

    def ready(self, state: State, index: RoundIndex, stopped: Callable[[], bool]) -> bool:
        """Wait for enough sites: `min_sites_to_start` before the first round, `min_sites` later."""
        status, self._done, self._now = "", index.t, (state, index)
        while not stopped() and not self._over:
            self._listen(Replies(), {}, 0.0)
            present = len(self._roster.connected(self._transport.connected()))
            wanted = self._wanted(state, index)
            too_few = self._commands.left < wanted
            if too_few and self._commands.end_if_too_few and index.t:
                self._over = "sites"
                return False
            if present >= wanted:
                self._complete = True
                self._roster.assign_numbers()
                return True
            limited = self._resumed and not self._complete
            limit = f", for at most {self.section.deadline:g} s" if limited else ""
            hint = TOO_FEW if too_few and self._names else ""
            self._doing = f"waiting for sites: {present} of {wanted} connected{limit}{hint}"
            if status != (status := self._doing):
                self._event("waiting", status)
            time.sleep(0.05)
        return False

    def _wanted(self, state: State, index: RoundIndex) -> int:
        """How many sites to wait for; after a restart, sites have `deadline` seconds to reconnect."""
        left = max(self.population.clients - self._roster.dropped, 1)
        first = min(self.section.min_sites_to_start or left, left)
        waited = time.monotonic() - self._started
        if self._complete or (self._resumed and waited > self.section.deadline):
            return min(self.section.min_sites, first)
        return first

    def train(self, clients: np.ndarray, params: Tensor, state: State, index: RoundIndex) -> Sum:
        """Ask the connected sites among these clients to train, and return the sum of their updates."""
        replies, asked, self._done, self._doing = Replies(), self._present(clients), index.t, f"round {index.t + 1}"
        self._begun, self._repeats = index.t + 1, self._repeats + (index.t < self._furthest)
        self._furthest = max(self._furthest, self._begun)
        self._roster.forget_heads()
        if self._canaries is not None:
            self._canaries.note(params, index)
        total = self._gather(replies, asked, params, state, index)
        if self._canaries is not None:
            self._canaries.take_part(total, index)
        self._log_respondents(replies, len(asked))
        total.metrics = {
            "asked": len(asked),
            "bad_updates": sum(report["what"] == "bad" for report in replies.reports),
            "bytes_sent": 4 * len(params) * len(asked),
            "bytes_received": replies.received,
        }
        if replies.reports:
            total.metrics["reports"] = replies.reports
        return total

    def _gather(self, replies: Replies, asked: list[int], params: Tensor, state: State, index: RoundIndex) -> Sum:
        """The sum of the answers of the sites asked."""
        clip_norm = self._clip_norm(state, index)

        def take(request: Request, answer: Payload) -> None:
            replies.answers.append(self._validator.check(request, answer, clip_norm))

        self._exchange(replies, ROUND, dict.fromkeys(asked, self._message(params, state)), index, take)
        replies.answers.sort(key=lambda answer: answer.number)
        return self._sum(replies.answers, params, state, clip_norm, index)

    def _clip_norm(self, state: State, index: RoundIndex) -> float:
        """The bound on an update, infinite where it depends on the updates themselves."""
        per_update = self.algorithm.per_update
        if per_update is None or per_update.needs_cohort_norms:
            return math.inf
        return self.algorithm.bound(state, index.t, index.total)

    def present(self) -> npt.NDArray[np.int64]:
        """The numbers of the connected sites."""
        self._roster.assign_numbers()
        connected = self._roster.connected(self._transport.connected())
        return np.array([each.number for each in connected if each.number is not None], dtype=np.int64)

    def _present(self, cohort: np.ndarray) -> list[int]:
        """The numbers of the cohort's connected sites."""
        wanted = set(cohort.tolist())
        return [number for number in self.present().tolist() if number in wanted]

    def _exchange(
        self, replies: Replies, kind: str, messages: Mapping[int, Payload], index: RoundIndex, take: Take
    ) -> None:
        """Send messages to sites, by number, and pass each answer that arrives by the deadline to `take`."""
        outgoing: dict[int, Payload] = {}
        requests: dict[int, tuple[Request, Member]] = {}
        for member in self._roster.connected(self._transport.connected()):
            number, node = member.number, member.node
            if number is not None and node is not None and number in messages:
                request = Request(self._terms.run, self._terms.digest, number, index, kind)
                known = {"answered": member.answered} if kind == ROUND and member.answered else {}
                outgoing[node] = Payload(
                    {**request.names, **messages[number].values, **known}, messages[number].vectors
                )
                requests[node] = request, member
        sent = self._transport.send(outgoing, kind, self.section.deadline + SPARE)
        waiting = {message: requests[node] for message, node in sent.items()}
        self._listen(replies, waiting, self.section.deadline, take)
        for request, member in waiting.values():
            self._report(replies, member, "late", f"no answer to round {request.index.t + 1} by the deadline")
        self._transport.cancel(waiting)

    def _message(self, params: Tensor, state: State) -> Payload:
        clip = state.get("clip")
        return Payload(({} if clip is None else {"clip": float(clip)}) | self._repeated, {"model": params})

    @property
    def _repeated(self) -> dict[str, Value]:
        """How many rounds were run again so far: sites whom sampling hides are charged for these too."""
        return {"repeats": self._repeats} if self._repeats else {}

    def _listen(
        self,
        replies: Replies,
        waiting: dict[str, tuple[Request, Member]],
        timeout: float,
        take: Take = lambda _request, _answer: None,
    ) -> None:
        """Handle answers until all have arrived or the timeout; meanwhile send new sites the terms."""
        until, next_check = time.monotonic() + timeout, 0.0
        connected: dict[int, str] = {}
        while True:
            if time.monotonic() >= next_check:
                connected, next_check = self._transport.connected(), time.monotonic() + CHECK_SITES
                self._monitor.carry_out(self._commands)
                self._send_terms(connected)
                self._dismiss(connected)
                self._monitor.publish(self._status(connected))
            for reply in self._transport.replies():
                if reply.message_id in self._terms_sent:
                    self._terms_sent.pop(reply.message_id)
                    self._admit(reply)
                elif reply.message_id in waiting:
                    self._handle(replies, reply, *waiting.pop(reply.message_id), take)
            for message, (_, member) in list(waiting.items()):
                if member.dropped or member.node not in connected:
                    del waiting[message]
                    self._transport.cancel([message])
                    why = "an operator dropped the site" if member.dropped else "the site disconnected"
                    self._report(replies, member, "gone", f"{why} during the round")
            if not waiting or time.monotonic() >= until:
                return
            time.sleep(LISTEN)

    def _handle(self, replies: Replies, reply: Reply, request: Request, member: Member, take: Take) -> None:
        """Count an answer, or report what is wrong with it."""
        replies.received += reply.size
        if reply.lost:
            self._report(replies, member, "gone", reply.problem or "the message was lost")
            return
        try:
            if reply.payload is None:
                raise InvalidMessage(reply.problem or "it is unreadable")
            if "refused" in reply.payload.values:
                self._report(replies, member, "refused", reply.payload.text("refused")[:LONGEST_REASON])
                if request.number not in replies.counted:  # else it knows the terms
                    member.agreed = False
                    self._greet_later(reply.node)
                return
            if request.kind == ROUND:
                member.answered = max(member.answered, request.index.t + 1)
            take(request, reply.payload)
            replies.sites.add((member.name, member.node))
            if request.kind == ROUND:
                replies.counted.add(request.number)
                self._refusals.pop(reply.node, None)
        except InvalidMessage as problem:
            self._strike(replies, member, str(problem))

    def _strike(self, replies: Replies, member: Member, why: str) -> None:
        """Record and report a bad answer."""
        self._roster.strike(member)
        out = "; the site is excluded from now on" if self._roster.excluded(member) else ""
        self._report(replies, member, "bad", why + out)

    def _report(self, replies: Replies, member: Member, what: str, why: str) -> None:
        number = self._done + 1
        replies.reports.append({"site": member.name, "node": str(member.node), "what": what, "why": why})
        words = f"round {number}: site {member.name} (node {member.node}): {what}: {why}"
        if what != "bad" and member.number in replies.counted and self.algorithm.clients.secret:
            self._event("answered", words, logging.DEBUG)  # it is in the sum, which sampling must hide
            return
        kind = "strike" if what == "bad" else what
        self._event(kind, words, logging.WARNING, site=member.name, round=number, why=why, strikes=member.strikes)
        identity = next((key for key, each in self._roster.members.items() if each is member), "")
        self._problems[identity] = f"round {number}: {what}: {why}"

    def _log(self, words: str) -> None:
        self._event("log", words)

    def _event(self, kind: str, message: str, level: int = logging.INFO, **facts: Value) -> None:
        self._monitor.on_event(kind, {"message": message, "level": level, **facts})

    def _status(self, connected: dict[int, str]) -> Status:
        return Status(
            run=self._terms.run,
            algorithm=self.algorithm.name,
            done=self._done,
            rounds=self.setting.rounds,
            places=self._roster.places,
            doing=self._doing,
            sites=site_statuses(self._roster, self._names, connected, self._greet_at, self._problems),
            hidden=self.algorithm.clients.secret,
            unit=self._budget.unit,
            observer=self._budget.observer,
            budget=self._budget.epsilon,
        )

    @property
    def ledger_heads(self) -> list[tuple[str, str]]:
        """The sites' names, and the heads of their ledgers, of those that sent theirs."""
        return self._roster.heads

    @property
    def over(self) -> str:
        """`sites` where an operator let the run end because too few sites are left."""
        return self._over

    def _log_respondents(self, replies: Replies, asked: int) -> None:
        """Log who answered, where that has changed; never saved with the run, as sampling must hide it.

        Where it does, only of level debug: logs are kept and read by others.
        """
        if replies.sites != self._answered:
            self._answered = replies.sites
            names = sorted(name for name, _ in replies.sites)
            level = logging.DEBUG if self.algorithm.clients.secret else logging.INFO
            words = f"round {self._done + 1}: {len(names)} of {asked} answered: {listed(names, MOST_NAMES) or 'none'}"
            self._event("answered", words, level)

    def _send_terms(self, connected: dict[int, str]) -> None:
        """Send the terms to the sites that have not seen them."""
        known = {member.node for member in self._roster.members.values() if member.agreed}
        busy = set(self._terms_sent.values())
        self._identities |= connected
        for node in self._greet_at.keys() - connected.keys():
            del self._greet_at[node], self._refusals[node]
        messages, now = {}, time.monotonic()
        for node, identity in connected.items():
            if self._commands.is_dropped(identity):
                continue
            if node not in known and node not in busy and now >= self._greet_at.get(node, 0.0):
                facts: dict[str, Value] = {"charged": self._furthest} if self._furthest > self._begun else {}
                if self._furthest and self._roster.may_have_been_asked(identity, self._names.get(identity)):
                    facts["member"] = 1
                facts |= self._answered_by(identity)
                messages[node] = Payload({"terms": self._terms.text, "round": self._begun, **facts, **self._repeated})
        self._terms_sent |= self._transport.send(messages, TERMS, JOINING)

    def _answered_by(self, identity: str) -> dict[str, Value]:
        """The last round that a site answered: it knows less where its folder is an older copy."""
        answered = self._roster.answered(identity, self._names.get(identity))
        return {"answered": answered} if answered else {}

    def _dismiss(self, connected: dict[int, str]) -> None:
        """Notify dropped sites that the run is over for them."""
        dropped = {node for node, identity in connected.items() if self._commands.is_dropped(identity)}
        values = self._ended("dropped by the coordinator's operator")
        self._transport.send({node: Payload(values) for node in dropped - self._dismissed}, END, SPARE)
        self._dismissed = dropped

    def _ended(self, why: str) -> dict[str, Value]:
        """The end of the run: all rounds in the ledger count, also where the last model is of an earlier one."""
        names = {"run": self._terms.run, "terms": self._terms.digest}
        return {**names, "why": why, "round": self._furthest, **self._repeated}

    def _greet_later(self, node: int, least: float = 0.0) -> None:
        """Send a site that refused the terms again: its disk may have been full, or its folder may be new.

        At once after its first refusal of a round, then after pauses that double.
        """
        pause = min(max(least, 2.0 ** self._refusals[node] - 1), LONGEST_PAUSE)
        self._refusals[node] = min(self._refusals[node] + 1, 10)
        self._greet_at[node] = time.monotonic() + pause

    def _admit(self, reply: Reply) -> None:
        """Admit a site that agreed to the terms, or log why it does not take part."""
        if reply.lost:
            return
        identity = self._identities[reply.node]
        if self._commands.is_dropped(identity):
            return
        name, kind = self._names.get(identity, ""), "not-admitted"
        try:
            if reply.payload is None:
                raise InvalidMessage(reply.problem or "it is unreadable")
            if "refused" in reply.payload.values:
                kind, why = "refused", reply.payload.text("refused")[:LONGEST_REASON]
                if why == OLDER_COPY and self._may_be_restored:
                    raise RunError(f"site {name or identity} says: {why} (if it is wrong, revoke its key)")
                raise InvalidMessage(f"it refused: {why}")
            reply.payload.require({"agreed", "name"}, {})
            if reply.payload.text("agreed") != self._terms.digest:
                raise InvalidMessage("it agreed to other terms")
            known, name = bool(name), name or reply.payload.text("name")[:64]
            if self._roster.admit(identity, name, reply.node, rotated=known) is None:
                raise InvalidMessage(f"all {self._roster.places} places (data.clients) are taken")
            self._event("joined", f"site {name} (node {reply.node}) has joined", site=name, key=identity)
        except InvalidMessage as problem:
            self._greet_later(reply.node, AFTER_TERMS)
            self._problems[identity] = f"round {self._done + 1}: did not take part: {problem}"
            words = f"site {name or identity} (node {reply.node}) does not take part: {problem}"
            self._event(kind, words, logging.WARNING, site=name or identity, key=identity, why=str(problem))

    def _sum(
        self, answers: list[SiteUpdate], params: Tensor, state: State, clip_norm: float, index: RoundIndex
    ) -> Sum:
        """The sum of the updates, clipped here where the method clips at the server."""
        updates, norms = stacked(answers, params)
        per_update, secure = self.algorithm.per_update, self.streams.mode == "secure"
        if self._validator.raw and per_update is not None:
            if per_update.needs_cohort_norms:
                clip_norm = per_update.bound(state, index.t, index.total, norms)
            numbers = np.array([answer.number for answer in answers])
            updates = protected_updates(self, Updates(numbers, updates, norms), clip_norm, index)
        elif secure and self.algorithm.per_round is not None:
            updates = toward_zero(updates, grid(clip_norm))  # a no-op unless a site is malicious
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
        """Notify the sites that the run is over; those that are away have LINGER seconds to reconnect."""
        waiting: dict[str, int] = {}
        notified: set[int] = set()
        values, self._done, self._doing = self._ended(why), done, f"ended: {why}"
        until = time.monotonic() + LINGER
        while time.monotonic() < until:
            connected = self._transport.connected()
            self._identities |= connected
            places = {key for key, member in self._roster.members.items() if member.number is not None}
            left = connected.keys() - notified - self._dismissed
            messages = {
                node: Payload(values | {"member": int(key in places)} | self._answered_by(key))
                for node, key in connected.items()
                if node in left
            }
            notified |= set(messages)
            waiting |= self._transport.send(messages, END, SPARE)
            for reply in self._transport.replies():
                node, payload = waiting.pop(reply.message_id, None), reply.payload
                if node is not None and payload is not None and payload.values.keys() == {"name", "head"}:
                    # a site leaves as soon as it has answered
                    self._roster.keep_head(self._identities[node], str(payload.values["head"]))
            waiting = {message: node for message, node in waiting.items() if node in connected}
            self._monitor.publish(self._status(connected))
            if not waiting and len(notified) >= self._roster.taken:
                return
            time.sleep(LISTEN)


def _charged_before(ledger: Path) -> tuple[int, int]:
    """How many rounds a run has run again so far, and the last one (from 1) that it has charged."""
    charged = Record.read(ledger)[1].charged if ledger.exists() else []
    rounds = [number for intent in charged for number in range(intent.first, intent.round + 1)]
    return len(rounds) - len(set(rounds)), max(rounds, default=0)
