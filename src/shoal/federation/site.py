"""A site keeps its records, accepts or refuses the terms, and answers each round with only what may leave the site.

It runs the client's half of a round (training/round.py) with the same random streams as the simulator, or with its
own. It never executes code from the coordinator: models are built by name from what is installed at the site.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from shoal import release
from shoal.accounting.hash_chain import Line, verify
from shoal.accounting.privacy_ledger import Record
from shoal.accounting.rounding import up
from shoal.data.dataset import Dataset
from shoal.data.partitions import ListedPartition
from shoal.errors import ConfigError, LedgerError, ShoalError, listed
from shoal.federation.consent import LONGEST_NAME, Refused, Requirements, SiteLedger, Unfit, now
from shoal.federation.messages import InvalidMessage, Payload, Value, printable
from shoal.federation.secagg.client import SecureAggregationClient
from shoal.federation.secagg.encoding import CHECK, KEYS, SHARES, UNMASK
from shoal.federation.secagg.round_plan import refuse_unfit
from shoal.federation.site_policy import Bounds
from shoal.federation.site_progress import DAMAGED, EARLIER, Progress
from shoal.federation.site_records import columns_read
from shoal.federation.terms import (
    END,
    FOLDER_LOST,
    FOLDER_OLD,
    OLDER_COPY,
    ROUND,
    TERMS,
    Crossing,
    Terms,
    frozen_digest,
    population,
)
from shoal.files import write_whole
from shoal.mechanisms.sampling import LARGEST_BATCH, joined_from
from shoal.models import build
from shoal.prepare import fitted
from shoal.random.platform_checks import require_platform
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams
from shoal.training.budget import users_said
from shoal.training.cohort import State
from shoal.training.engine_settings import Settings, cores
from shoal.training.local_training import KEPT
from shoal.training.round import SimulatedCohort, protected_updates
from shoal.training.round_index import RoundIndex

Log = Callable[[str], None]
USERS = ("user_columns", "clients_per_user", "public_ownership")
REPEATED = ("run", "terms", "number", "round", "attempt", "nonce")
INTERNAL_ERROR = "internal error at {site}; see its log"
LEDGER, HEAD, AGREED = "ledger.jsonl", "head.json", "terms.json"
COMPARED, STATE = "compared.json", "memory.safetensors"
MOST_REPEATS = 10_000  # rounds that a coordinator ran again, in one run; the cost of many more takes seconds


@dataclass(frozen=True)
class Owner:
    """A site's configuration, set by its owner.

    Attributes:
        name: The site's name.
        folder: Where the site keeps its ledger and the terms it agreed to.
        records: Loads the site's data for given terms.
        requirements: The privacy guarantees that the owner requires.
        model: The only module outside Shoal that may be used as the model.
        key: The private key that identifies the site.
        peers: The public keys (PEM) of the sites it may aggregate with securely; None accepts any site that the
            coordinator names.
        bounds: The range of values that the owner accepts for each term.
        plugins: The packages and modules, besides Shoal, from which algorithms may be imported.
        clock: The time, for the hours and the month of the owner's policy.
    """

    name: str
    folder: Path
    records: Callable[[Terms], Dataset]
    requirements: Requirements = field(default_factory=Requirements)
    model: str | None = None
    key: ec.EllipticCurvePrivateKey | None = None
    peers: frozenset[bytes] | None = None
    bounds: Bounds = field(default_factory=Bounds)
    plugins: tuple[str, ...] = ()
    clock: Callable[[], datetime] = now


class Site:
    """Answers the coordinator's messages; `log` is called with one line for each event.

    `joins`: its owner has just let it join, so that it may answer any terms; else it goes on after a restart.
    """

    def __init__(self, owner: Owner, log: Log = lambda _words: None, joins: bool = True) -> None:
        require_platform()
        self.owner, self._log = owner, printable(log)
        self.ended: str | None = None
        self.refused: str | None = None
        self._terms: Terms | None = None
        self._site_ledger: SiteLedger | None = None
        self._cohort: SimulatedCohort | None = None
        self._secure: SecureAggregationClient | None = None
        self._state: State = {}
        owner.folder.mkdir(parents=True, exist_ok=True)
        if joins:
            (owner.folder / COMPARED).unlink(missing_ok=True)
        self._compared = self._kept_compared()

    def answer(self, kind: str, message: Payload) -> Payload:
        """Return the answer to a message; a refusal is also an answer, and gives the reason."""
        try:
            if kind == TERMS:
                return self._agree(message)
            if kind == ROUND:
                return self._train(message)
            if kind in (KEYS, SHARES, CHECK, UNMASK):
                return self._aggregate(kind, message)
            if kind == END:
                return self._finish(message)
            raise InvalidMessage(f"unknown message type {kind[:40]!r}")
        except Exception as error:  # no message may stop the site
            known = isinstance(error, ShoalError | OSError)
            self._log(f"refused: {error}" if known else f"refused: {type(error).__name__}: {error}")
            self.refused = str(error) if kind == TERMS else None
            repeated = {key: message.values[key] for key in ("nonce",) if key in message.values}
            may_cross = isinstance(error, InvalidMessage | Refused | ConfigError) and not isinstance(error, Unfit)
            site = "the site" if self._terms is None else f"site {self.owner.name}"  # unnamed until it agrees
            refused = str(error)[:500] if may_cross else INTERNAL_ERROR.format(site=site)
            return Payload({"refused": refused, **repeated})

    def close(self) -> None:
        """Close the site's ledger."""
        if self._site_ledger is not None:
            self._site_ledger.close()
            self._site_ledger = None

    def _agree(self, message: Payload) -> Payload:
        """Check the terms against the data, the model and the owner's requirements."""
        message.require({"terms", "round", *({"charged", "repeats", "member", "answered"} & set(message.values))}, {})
        terms = Terms.read(message.text("terms"), self.owner.plugins)
        first = message.number("round")
        charged = message.number("charged") if "charged" in message.values else first
        if not 0 <= first <= charged <= terms.setting.rounds:
            raise InvalidMessage(f"there is no round {first}, or {charged} cannot have been charged")
        if self._compared not in (None, terms.digest):
            # Each answer reveals one bit about the data (do they fit?), so a site gives only one per join.
            self._log(f"{self.owner.folder / COMPARED} names the last terms: remove it, and others are answered")
            raise Refused("this site has answered other terms; it must join again to take part in another run")
        last, said = self._progress, _said_repeats(message)
        self._refuse_restored(last, terms, charged, said)
        new = last.terms != terms.digest
        if new and "member" in message.values and message.number("member"):
            self._refuse_lost(terms)
        self._refuse_old(last, terms, message)
        if new:
            self._terms = None
        if self._terms is None:
            self._accept(terms, new)
            kept = {release.KEY: terms.label, "terms": terms.text}
            write_whole(self.owner.folder / AGREED, json.dumps(kept).encode())
            about = f", schema {terms.schema[:12]}" if terms.schema else ""
            words = f"{terms.settings.algorithm.name}, {terms.setting.rounds} rounds{about}"
            self._log(f"agreed to run {terms.run}: {words}")
            if count := terms.settings.federation.canaries:
                self._log(f"the coordinator adds {count} canary clients, random updates that are nobody's data")
            if self._secure is not None and self._secure.sparse:
                self._log(self._secure.words())
        if new:
            joined = joined_from(terms.settings.algorithm.clients, charged, terms.setting.clients)
            self._keep(self._progress.of(terms, first, joined, charged, said))
        else:
            self._catch_up(self._progress.run_again(said), charged, said)
            self._keep(replace(self._progress, next=first, begun=charged, reported=said, ended=False))
        return Payload({"agreed": terms.digest, "name": self.owner.name})

    def _refuse_restored(self, last: Progress, terms: Terms, charged: int, repeats: int) -> None:
        """Refuse a coordinator whose ledger lacks rounds that this site knows of.

        It runs them again and cannot say so, and sites whom sampling hides would not be charged for that.
        """
        if last.terms == terms.digest and (charged < last.begun or repeats < last.repeats):
            raise Refused(OLDER_COPY)

    def _refuse_lost(self, terms: Terms) -> None:
        """Refuse to go on with a run, in which this site has a place, where its ledger has no charge of it.

        After another run in between it has some: the rest of this run was charged then.
        """
        path = self.owner.folder / LEDGER
        charged = Record.read(path)[1].charged if path.exists() else []
        if not any(intent.run == terms.run[:LONGEST_NAME] for intent in charged):
            raise Refused(FOLDER_LOST)

    def _refuse_old(self, last: Progress, terms: Terms, message: Payload) -> None:
        """Refuse to go on where the coordinator has an answer of this site to a round that its folder lacks."""
        if last.terms == terms.digest and "answered" in message.values and message.number("answered") > last.begun:
            raise Refused(FOLDER_OLD)

    def _accept(self, terms: Terms, new: bool = False) -> None:
        self.owner.bounds.refuse(terms)
        settings = terms.settings
        algorithm = settings.algorithm
        if ":" in settings.model and settings.model != self.owner.model:
            raise Refused(
                f"the model {settings.model!r} would be imported at this site; to allow it: --model {settings.model}"
            )
        _refuse_other_numbers(terms)
        self._open(terms).agree()
        refuse_unfit(algorithm, settings.federation, terms.setting, terms.parameters)
        secure = settings.federation.aggregation == "secure"
        secagg = (
            SecureAggregationClient(terms, self.owner.key, self.owner.peers, self.owner.requirements)
            if secure
            else None
        )
        self._compared = terms.digest
        if new:  # on disk before the data are looked at
            kept = {release.KEY: release.SITE, "terms": terms.digest}
            write_whole(self.owner.folder / COMPARED, json.dumps(kept).encode())
        try:
            dataset = self.owner.records(terms)
            self._refuse_unfit(terms, dataset)
            self._log(columns_read(terms, dataset))
            if terms.setting.user_columns:
                self._log(f"the terms say, and this site's claims for users rest on it: {users_said(terms.setting)}")
            for note in dataset.notes:
                self._log(f"note: {note}")
        except (ShoalError, OSError) as error:
            raise Unfit(str(error)) from error
        cohort = _own_cohort(terms, dataset)
        if self._settle(terms):
            self._open(terms).agree()
        self._ledger.records = len(dataset.train_y)
        self._terms, self._cohort, self._secure = terms, cohort, secagg
        self._state = self._kept_state(terms)

    def _open(self, terms: Terms) -> SiteLedger:
        """Open the ledger for these terms."""
        self.close()
        path = self.owner.folder / LEDGER
        self._refuse_cut(path)
        self._site_ledger = SiteLedger(path, self.owner.name, self.owner.requirements, terms, self.owner.clock)
        return self._site_ledger

    def _settle(self, terms: Terms) -> bool:
        """Charge the remaining rounds of an earlier run whose end was never reported; return whether there were any.

        All of them may have been run, and those before which its coordinator went back again.
        """
        last = self._progress
        if last.ended or last.terms == terms.digest:
            return False
        try:
            old = self._kept_terms()
            readable = old is not None and old.settings is not None
        except ShoalError:
            old, readable = None, False
        if old is None or not readable or old.digest != last.terms:
            raise LedgerError(
                f"run {last.run} has rounds that are not charged yet, and {self.owner.folder / AGREED} cannot be "
                f"read or is of another run: restore the file, or use the version of Shoal that wrote it"
            )
        self._open(old).records = last.records
        again = range(last.next, last.begun)
        self._catch_up(again, old.setting.rounds, max(last.reported, last.repeats) + len(again))
        words = f"charged its rounds {last.charged + 1} to {self._progress.charged}"
        self._log(f"run {old.run} never reported its end: {words}")
        self._keep(self._progress.left())
        return True

    def _refuse_unfit(self, terms: Terms, dataset: Dataset) -> None:
        if dataset.input_shape != terms.shape:
            raise Refused(f"the site's rows have shape {dataset.input_shape}, the federation's have {terms.shape}")
        if dataset.classes != terms.classes:
            raise Refused(
                f"the site's classes are {listed(dataset.classes, 5)}, the federation's {listed(terms.classes, 5)}"
            )
        section, rows = terms.settings.federation, len(dataset.train_y)
        few, many = section.min_records or 1, section.max_records or rows
        if not few <= rows <= many:
            raise Refused(f"the site has {rows} records, the federation accepts {few} to {many}")
        algorithm = terms.settings.algorithm
        largest = max(algorithm.records.batch, LARGEST_BATCH)
        if not terms.setting.sizes and algorithm.records.varies:
            widest = algorithm.records.widest(rows)
            if (algorithm.per_step is not None or algorithm.sums_gradients) and widest > largest:
                raise Refused(
                    f"a step at this site may draw {widest:,} records, more than {largest:,}: "
                    f"the coordinator must set federation.min_records and max_records"
                )
        steps = algorithm.local.steps or algorithm.records.steps(rows, algorithm.local.epochs)
        self.owner.bounds.refuse_value("steps", "local steps a round", steps)

    def _train(self, message: Payload) -> Payload:
        """Charge the round, train, and return what may leave the site."""
        terms = self._agreed(message)
        if self._secure is None:
            self.owner.bounds.refuse_hour(self.owner.clock())
        index, number = self._round_index(message, terms)
        message.require(
            {
                *REPEATED,
                *({"clip", "repeats", "answered"} & set(message.values)),
                *(self._secure.fields if self._secure else ()),
            },
            {"model": terms.parameters},
        )
        self._refuse_old(self._progress, terms, message)
        assert self._cohort is not None
        cohort = replace(self._cohort, client_data=replace(self._cohort.client_data, first=number))
        if terms.seed is None:
            cohort = replace(cohort, streams=SecureStreams())  # a round requested twice never reuses its noise
        state, algorithm = self._carried(message), cohort.algorithm
        algorithm.refuse_unfit(index.t, index.total, terms.setting.clients)
        if self._secure is not None and algorithm.per_update is not None:
            bound = algorithm.bound(state, index.t, index.total)
            self._secure.take(message, index, number, bound)
        self._charge(message, terms, index)
        if self._kept_compared() == terms.digest:  # a round was charged for that bit
            (self.owner.folder / COMPARED).unlink()
        answer = self._learn(terms, cohort, message, state, index, number)
        spent, delta = self._ledger.epsilon(), self.owner.requirements.delta
        cost = (
            f", epsilon {up(spent, 3)} spent at delta {delta:g} ({self._ledger.adjacency})"
            if spent is not None
            else ""
        )
        self._log(f"round {index.t + 1}: answered{cost}")
        return answer

    def _charge(self, message: Payload, terms: Terms, index: RoundIndex) -> None:
        """Charge what was run since the last message, and this round; raise Refused, and charge only the former."""
        t, last, algorithm = index.t, self._progress, terms.settings.algorithm
        begun = max(last.begun, t + (index.attempt > 0))
        again, said = t < begun, _said_repeats(message)
        turn = algorithm.clients.charged_from(t, terms.setting.clients)
        cycle = algorithm.clients.cycle_length(terms.setting.clients)
        if cycle > 1 and turn == last.turn and not again:
            raise Refused(f"this site has already taken its turn in rounds {turn + 1} to {turn + cycle}")
        passed = range(min(last.next, t), min(last.begun, t))
        cap = self._catch_up(passed, begun, said - again)
        if cap is not None:
            self._ledger.refuse_cap(cap)
        progress = replace(
            self._as_of_now(self._progress),
            next=t + 1,
            begun=max(begun, t + 1),
            charged=max(begun, t + 1),
            reported=max(said, last.reported),
            repeats=max(said, self._progress.repeats),
            ended=False,
            # a block begun again allocates all of it anew
            turn=last.turn if again and t > turn else turn,
            answered=(*last.answered, t) if algorithm.priced else (),
        )
        try:
            self._ledger.charge(range(0), t, last.answered, again, progress)
        except Refused:
            if algorithm.clients.secret:  # asked in other rounds before, it might have answered
                self._catch_up(range(t, t + again), max(begun, t + 1), said)
            raise
        self._keep_head()

    def _catch_up(self, again: range, begun: int, repeats: int) -> str | None:
        """Charge what was run since the last message; all of it, where the owner required something else then."""
        self._keep_head()  # which must name this run before it is charged
        changed = self._progress.requirements != self._as_of_now(self._progress).requirements
        cap = self._ledger.catch_up(again, begun, repeats, over=changed)
        self._keep(self._progress)
        return cap

    def _finish(self, message: Payload) -> Payload:
        """End the run, and charge the rounds since the last one that this site was asked for."""
        self.ended = message.text("why")
        message.require(
            {"run", "terms", "why", "round", *({"repeats", "member", "answered"} & set(message.values))}, {}
        )
        terms = self._agreed(message, ends=True)
        last = self._progress
        self._refuse_old(last, terms, message)
        done, said = min(message.number("round"), terms.setting.rounds), _said_repeats(message)
        self._refuse_restored(last, terms, done, said)
        place = "member" in message.values and message.number("member")  # else it was asked for nothing since
        if not last.ended or place:
            self._catch_up(last.run_again(said), done, said)
            self._keep(replace(self._progress, reported=said, ended=True))
        return Payload({"name": self.owner.name, "head": self._ledger.head})

    def _aggregate(self, kind: str, message: Payload) -> Payload:
        """Answer the messages of secure aggregation that do not use the data."""
        terms = self._agreed(message)
        index, number = self._round_index(message, terms)
        if self._secure is None:
            raise InvalidMessage("the terms do not include secure aggregation")
        if kind == KEYS:  # a round that has begun is not left
            self.owner.bounds.refuse_hour(self.owner.clock())
        return Payload(_repeated(message) | self._secure.answer(kind, message, index, number))

    def _agreed(self, message: Payload, ends: bool = False) -> Terms:
        """The terms that this site agreed to, if the message is of their run; the end of a run needs no data."""
        digest, last, terms = message.text("terms"), self._progress, self._terms
        if terms is None and (kept := self._kept_terms()) is not None and kept.digest == digest == last.terms:
            terms = kept
            if ends:
                self._open(kept).records = last.records
            else:
                self._accept(kept)
        if terms is None or not terms.digest == digest == last.terms or message.text("run") != terms.run:
            raise InvalidMessage("these are not the terms that this site agreed to")
        return terms

    def _round_index(self, message: Payload, terms: Terms) -> tuple[RoundIndex, int]:
        t, attempt, number = (message.number(key) for key in ("round", "attempt", "number"))
        if not (0 <= t < terms.setting.rounds and attempt >= 0 and 0 <= number < terms.setting.clients):
            raise InvalidMessage(f"there is no round {t}, attempt {attempt}, for client {number}")
        message.raw("nonce")
        return RoundIndex(t, terms.setting.rounds, attempt), number

    def _carried(self, message: Payload) -> State:
        """The state at the start of the round; raise InvalidMessage or Refused for an unusable model or clip norm."""
        if not torch.isfinite(message.vectors["model"]).all():
            raise InvalidMessage("the model contains NaN or Inf")
        self.owner.bounds.refuse_model(message.vectors["model"])
        if "clip" not in message.values:
            return dict(self._state)
        clip = message.real("clip")
        self.owner.bounds.refuse_value("clip_norm", "this round's clip norm", clip)
        return self._state | {"clip": torch.tensor(clip, dtype=torch.float64)}

    def _learn(
        self, terms: Terms, cohort: SimulatedCohort, message: Payload, state: State, index: RoundIndex, number: int
    ) -> Payload:
        crossing, client = Crossing.of(cohort.algorithm), np.array([number])
        params = message.vectors["model"].to(cohort.client_data.device)
        (part,) = cohort.workers.map(lambda own: cohort.updates(own, params, state, index), [client])
        self._keep_state(terms, state)
        extras: dict[str, Value] = {}
        update, bound = part.updates, float("inf")
        if not crossing.raw:
            bound = cohort.algorithm.bound(state, index.t, index.total)
            if crossing.below:
                extras["below"] = int(part.norms[0] <= bound)
            update = protected_updates(cohort, part, bound, index)
        if self._secure is not None:
            below = bool(extras.get("below"))
            masked = self._secure.send(update[0], below, bound, index, cohort.streams)
            return Payload(_repeated(message) | self._secure.values(), {"masked": masked})
        if crossing.share:
            extras["share"] = float(part.shares[0])
        if crossing.records:
            extras["records"] = self._records
        return Payload(_repeated(message) | extras, {"update": update[0]})

    @property
    def _ledger(self) -> SiteLedger:
        assert self._site_ledger is not None
        return self._site_ledger

    @property
    def _records(self) -> int:
        assert self._ledger.records is not None
        return self._ledger.records

    def _kept_terms(self) -> Terms | None:
        """The terms agreed to before a restart; stock Flower starts a process for every message."""
        path = self.owner.folder / AGREED
        if not path.exists():
            return None
        try:
            text = path.read_text(encoding="utf-8")
            text = json.loads(text).get("terms", text)  # earlier versions wrote the terms alone
            return Terms.read(text, self.owner.plugins)
        except (ValueError, TypeError, AttributeError, RecursionError, InvalidMessage):
            fix = "restore it from the latest copy, or let the coordinator resume the run"
            raise LedgerError(f"{path} is damaged or of another version of Shoal; {fix}") from None

    def _kept_compared(self) -> str | None:
        """The last terms that the data were compared with, where no round of them has been charged since."""
        path = self.owner.folder / COMPARED
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["terms"]) if path.exists() else None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise LedgerError(f"{path} is damaged; remove it, or join again") from None

    @property
    def _progress(self) -> Progress:
        """How far this site is, by its ledger."""
        path = self.owner.folder / LEDGER
        if self._site_ledger is not None:
            return self._site_ledger.progress
        changes = Record.read(path)[1].progress if path.exists() else []
        return Progress.read(changes) if changes else Progress.of_earlier_version(self.owner.folder)

    def _as_of_now(self, progress: Progress) -> Progress:
        """The progress, with the site's records and its owner's requirements."""
        return replace(
            progress, records=self._records, requirements=str(replace(self.owner.requirements, sources={}))
        )

    def _keep(self, progress: Progress) -> None:
        self._ledger.keep(self._as_of_now(progress))
        self._keep_head()

    def _keep_head(self) -> None:
        """Write the ledger's last hash beside it, so that a truncated or outdated ledger is noticed.

        What an earlier version wrote there stays until a line of the ledger says the same.
        """
        if self._ledger.has_progress and self._kept_head()[0] != self._ledger.head:
            kept = {release.KEY: release.SITE, "ledger": self._ledger.head}
            write_whole(self.owner.folder / HEAD, json.dumps(kept).encode())
            (self.owner.folder / EARLIER).unlink(missing_ok=True)

    def _kept_head(self) -> tuple[str | None, str]:
        """The hash beside the ledger; an earlier version also wrote the run that its last line is of."""
        paths = [path for name in (HEAD, EARLIER) if (path := self.owner.folder / name).exists()]
        try:
            found = json.loads(paths[0].read_text(encoding="utf-8")) if paths else {}
            return found.get("ledger"), str(found.get("run", ""))
        except (ValueError, AttributeError):
            raise LedgerError(DAMAGED.format(path=paths[0])) from None

    def _refuse_cut(self, ledger: Path) -> None:
        """Refuse a truncated or outdated ledger, which would let the budget be spent twice."""
        (head, own), runs = self._kept_head(), set[str]()  # charged after the line with this hash
        run = own

        def look(line: Line) -> None:
            nonlocal run, own
            run = str(line.body.get("progress", {}).get("run", run))
            if line.kind == "intent":
                runs.add(str(line.body.get("run", "")))
            if line.hash == head:
                runs.clear()
                own = run

        whole = verify(ledger, head, look).whole if ledger.exists() else head is None
        if not whole:
            raise LedgerError(
                f"the ledger {ledger} is not the one last written: it was truncated or replaced by an older copy; "
                f"restore the latest one"
            )
        if runs - {own[:LONGEST_NAME]}:  # of its own run there may be some, after a crash
            raise LedgerError(
                f"{self.owner.folder / HEAD} is missing or an older copy, so it cannot be known whether {ledger} "
                f"is the latest one; restore the whole folder as it was last"
            )

    def _kept_state(self, terms: Terms) -> State:
        path = self.owner.folder / STATE
        if not terms.settings.algorithm.local.remembers or not path.exists():
            return {}
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("terms") != terms.digest:  # it may hold what another method left raw
                    return {}
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError:
            raise LedgerError(f"{path} is damaged; restore it from the latest copy") from None

    def _keep_state(self, terms: Terms, state: State) -> None:
        self._state = {key: value for key, value in state.items() if key.startswith(KEPT)}
        if self._state:
            notes = {"terms": terms.digest, release.KEY: release.SITE}
            write_whole(self.owner.folder / STATE, save(self._state, metadata=notes))


def _said_repeats(message: Payload) -> int:
    """How many rounds the coordinator says that it has run again in this run; left out where there are none."""
    found = message.number("repeats") if "repeats" in message.values else 0
    if not 0 <= found <= MOST_REPEATS:
        raise InvalidMessage(f"field 'repeats' must be from 0 to {MOST_REPEATS:,}, got {found}")
    return found


def _own_engine(asked: Settings) -> Settings:
    """How this site runs: on its own device, in memory of its own measure, with no more threads than it has cores,
    whatever the terms ask for.

    It compiles nothing for others.
    """
    threads = None if asked.threads is None else min(asked.threads, cores())
    way = "vmap" if asked.way == "compiled" else asked.way
    device = "cpu" if asked.device == "cpu" else "auto"
    return replace(asked, device=device, memory=None, threads=threads, way=way)


def _repeated(message: Payload) -> dict[str, Value]:
    """The values of a message that its answer repeats."""
    return {key: message.values[key] for key in REPEATED}


def _refuse_other_numbers(terms: Terms) -> None:
    """Raise Refused where the terms say other than their configuration of clients, rounds, sites or users."""
    settings, sites = terms.settings, population(terms.settings)
    if (terms.setting.clients, terms.setting.rounds) != (settings.data.clients, settings.rounds):
        raise Refused("the terms' numbers of clients or rounds differ from those of their configuration")
    only_two_sizes = len(sites.sizes) > 1 and not terms.setting.bounds  # sites may have any size in between
    if terms.setting.sizes != sites.sizes or terms.setting.all_answer or only_two_sizes:
        raise Refused("the terms' site sizes differ from those of their configuration")
    if any(getattr(terms.setting, name) != getattr(sites, name) for name in USERS):
        raise Refused("what the terms say of users differs from their configuration")


def _own_cohort(terms: Terms, dataset: Dataset) -> SimulatedCohort:
    """A site as a cohort of one client; raise where it could not train what the terms describe."""
    settings, rows, rounds = terms.settings, len(dataset.train_y), terms.setting.rounds
    algorithm = settings.algorithm
    seed = Streams(settings.seed).number("model")  # for frozen and personal layers alone
    module = build(settings.model, terms.shape, dataset.task.outputs, seed=seed)
    dataset = fitted(module, dataset, algorithm)
    for t in algorithm.different_rounds(rounds):
        algorithm.refuse_unfit(t, rounds, terms.setting.clients)
    engine = _own_engine(settings.engine)
    if algorithm.sums_gradients and terms.seed is not None:  # its noise is on a grid, to which CUDA rounds no record
        engine = replace(engine, device="cpu")
    cohort = SimulatedCohort.of(
        algorithm,
        module,
        dataset,
        ListedPartition(np.arange(rows, dtype=np.int32), np.array([0, rows])),
        streams=SecureStreams() if terms.seed is None else Streams(terms.seed),
        settings=engine,
    )
    layout, charged = cohort.network.layout, terms.charged.parameters
    if (layout.shared.size, layout.size) != (terms.parameters, charged):
        raise Refused(
            f"the model has {layout.size} parameters at the site, {layout.shared.size} of them shared; at the "
            f"coordinator {charged} and {terms.parameters}"
        )
    if len(layout.layers) != terms.setting.layers:
        raise Refused(
            f"the model has {len(layout.layers)} layers at the site, {terms.setting.layers} at the coordinator"
        )
    if frozen_digest(module, layout) != terms.frozen:
        raise Refused(
            f"the frozen part of model {settings.model} is not the same at the site and the coordinator: use one "
            f"version or checkpoint of it everywhere"
        )
    return cohort
