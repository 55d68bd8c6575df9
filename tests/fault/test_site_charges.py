"""A site is charged no less than what an observer who knows everything would charge, whatever fails and when.

A coordinator and a site live through a few dozen random events: the coordinator crashes, goes back to an older
checkpoint, drops the site, invites it again, or is never heard of again; the site disconnects, restarts, takes part
in another run in between, has little budget left, in all or in a month. Any write to its disk may fail, halfway or
after all, or be the last thing its process does. Messages are those of `RemoteCohort`, and the site is a real one
that is not trained. It is hidden by sampling, so that every round in which it could be drawn costs it something, also
where it is not asked.

What it would answer, if it were drawn, is known from a twin, a site with the same budget which is asked in every
round in which the site might be; or, where writes fail, from a copy of its folder. SHOAL_SITE_LIVES=1000 lives more
of these lives, of each kind.
"""

import errno
import math
import os
import random
import shutil
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import zip_longest
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting import privacy_ledger
from shoal.accounting.events import Allocated, Sampled, Unbounded
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.privacy_ledger import Record
from shoal.config import configure, to_toml
from shoal.data import load
from shoal.federation import consent
from shoal.federation import site as site_module
from shoal.federation.consent import MONTH, Requirements, SiteLedger
from shoal.federation.messages import Payload
from shoal.federation.site import Owner, Site
from shoal.federation.site_policy import Bounds
from shoal.federation.site_records import reader
from shoal.federation.terms import END, ROUND, TERMS, Terms
from shoal.federation.validation import Request
from shoal.mechanisms.schedules import parse
from shoal.mechanisms.setting import Setting
from shoal.training.round_index import RoundIndex
from support.federations import curator

LIVES = int(os.environ.get("SHOAL_SITE_LIVES", "50"))
BLOCK = 4  # of random allocation: 4 sites, of which one takes part in a round
POISSON = {"clients.sampling": "poisson", "clients.cohort": 2}
KINDS = {
    "less costly every round": curator(3, "linear:1:4") | POISSON,
    "more costly every round": curator(4, "linear:4:1") | POISSON,
    "alike": curator(4, 2.0) | POISSON,
    "random-allocation": curator(6) | {"clients.sampling": "random-allocation", "clients.cohort": 1},
}
MODEL = {"model": torch.zeros(650)}


class Killed(BaseException):
    """The site's process ends here."""


class Disk:
    """Where each write fails with a probability of `rate`."""

    def __init__(self, patch):
        self.rate = 0.0
        write, whole = privacy_ledger._write_all, site_module.write_whole
        patch.setattr(privacy_ledger, "_write_all", lambda file, raw: self.fails(file, raw) or write(file, raw))
        patch.setattr(os, "fsync", self.fails)
        patch.setattr(site_module, "write_whole", lambda path, raw: self.fails() or whole(path, raw) or self.fails())

    @contextmanager
    def failing(self, rate):
        self.rate = rate
        try:
            yield
        finally:
            self.rate = 0.0

    def fails(self, file=None, raw=b""):
        if self.chance.random() < self.rate:
            if raw:
                os.write(file, raw[: self.chance.randrange(len(raw))])
            raise self.chance.choice([Killed(), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")])


class Additive:
    """An accountant that takes no time: its epsilon is the sum of 1 / noise^2."""

    because = None

    def __init__(self, _adjacency):
        self.spent = 0.0

    def add(self, event):
        self.spent += price(event)

    def epsilon(self, _delta):
        return self.spent

    def epsilon_with(self, event, _delta):
        return self.spent + price(event)


def price(event):
    counts = without_sampler(leaves(event))[0]
    if any(isinstance(leaf, Unbounded) for leaf in counts):
        return math.inf
    return sum(times / leaf.event.noise**2 for leaf, times in counts.items() if isinstance(leaf, Sampled))


def exceeds(_ledger, account, _counted, event, most):
    return account.epsilon_with(event, None) > most


def pays_for(ledger, cap, most, event, count):
    room = most - ledger._account(cap).spent
    return min(count, max(0, math.floor(room / price(event)))) if price(event) else count


@pytest.fixture(scope="module", params=KINDS)
def federation(request):
    """The terms, a model, the site's data, and a cohort that all sites share: it is never trained."""
    config, digits = configure(KINDS[request.param]), load("digits")
    setting = Setting(4, config.rounds, all_answer=False, secure=True)
    terms = Terms("run", to_toml(config), setting, digits.classes, digits.input_shape, 650, None)
    data = reader("digits", part=0)(terms)
    return terms, data, site_module._own_cohort(terms, data)


class Life:
    """A coordinator, a site and its twin.

    Attributes:
        drawable: The rounds in which the site could be drawn, and would answer: which, if run again, and when.
        draws: All rounds since the site joined: the most that each may be charged, and when the site heard of it.
        strange: What it refused though its budget paid for it, or its twin did not refuse; the latter but for months.
    """

    def __init__(self, chance, folder, federation, disk):
        self.chance, self.folder, self.disk, self.clock = chance, folder, disk, datetime(2026, 1, 1, tzinfo=UTC)
        self.terms, self.data, _ = federation
        self.alike, self.total = self.terms.settings.algorithm.clients.alike, self.terms.setting.rounds
        noise = parse(self.terms.settings.algorithm.per_round.noise_multiplier)
        self.prices = [1 / noise.value(t, self.total) ** 2 for t in range(self.total)]
        self.requirements, self.rate = self.some_budget(), chance.choice([0.0, 0.02, 0.1, 0.3])
        self.fails, self.asks = self.rate > 0, chance.choice([0.1, 0.25, 0.6])
        self.twin, self.site = Site(self.owner("twin")), None
        self.drawable, self.draws, self.strange, self.joined = [], [], [], None
        self.charged, self.checkpoints, self.turns = [], [0], set()
        self.connected = self.agreed = self.dropped = self.place = self.elsewhere = self.left_out = False
        self.restart_coordinator(0)

    def some_budget(self):
        """None, or just enough for a few rounds, or for half a round more."""
        if not self.alike or self.chance.random() < 0.3:
            return Requirements(unit="client")
        caps = self.chance.choice([["epsilon"], ["epsilon_per_run"], ["epsilon_per_month"], list(consent.CAPS)])
        return Requirements(unit="client", **{cap: self.some_rounds() for cap in caps})

    def some_rounds(self):
        """What the first round costs, and a few more; secure noise counts a little less than it is."""
        some = self.chance.randrange(8)
        more = sum(self.chance.choice([self.prices[1:some], self.chance.choices(self.prices, k=some)]))
        return (self.prices[0] + more + self.chance.choice([0, max(self.prices) / 2])) * (1 + 1e-5)

    def owner(self, name, **changes):
        given = {"folder": self.folder / name, "requirements": self.requirements, "clock": lambda: self.clock}
        return Owner(name, records=lambda _terms: self.data, **given | changes)

    def restart_coordinator(self, done):
        """With the checkpoint of so many rounds; its ledger is the latest."""
        self.done = self.begun = done
        self.repeats = len(self.charged) - len(set(self.charged))
        self.furthest = max(self.charged, default=-1) + 1
        self.agreed = False

    def restart_site(self, **changes):
        if self.site is not None:
            self.site.close()
        self.site, self.agreed = Site(self.owner("site", **changes)), False

    def send(self, kind, values, vectors=None):
        """What the site answers, whose disk may fail; all but rounds its twin hears too."""
        message = Payload(values | ({"repeats": self.repeats} if self.repeats else {}), vectors or {})
        if kind != ROUND:
            self.twin.answer(kind, message)
        try:
            with self.disk.failing(self.rate):
                found = self.site.answer(kind, message).values
        except Killed:
            self.restart_site()
            return {"refused": "killed"}
        if kind != END and ("refused" not in found or "would exceed" in found["refused"]):
            self.draws = [(cost, heard or self.clock) for cost, heard in self.draws]
        return found

    def greet(self):
        if self.connected and not self.dropped and not self.agreed:
            said = {"charged": self.furthest} if self.furthest > self.begun else {}
            said |= {"member": 1} if self.furthest and self.place else {}
            if self.joined is None:
                self.draws = []
            self.agreed = "agreed" in self.send(TERMS, {"terms": self.terms.text, "round": self.begun} | said)
            self.joined = self.joined or (self.furthest, self.repeats, self.agreed)

    def end(self):
        """Return whether the site has heard of it."""
        said = {"run": self.terms.run, "terms": self.terms.digest, "why": "over", "round": self.furthest}
        return self.connected and "head" in self.send(END, said if self.dropped else said | {"member": self.place})

    def connect(self, restarted):
        if restarted or self.site is None:
            self.restart_site()
        self.connected, self.agreed = True, False
        self.end() if self.dropped else self.greet()

    def drop(self):
        self.dropped, self.left_out, self.agreed = True, True, False
        self.end()

    def round(self, crash=None, asks=True):
        """Charge the next round and run it; the coordinator may `crash` before any message, or in the round."""
        t, attempt, again = self.done, self.charged.count(self.done), self.done < self.furthest
        self.charged.append(t)
        could = self.connected and self.agreed and not self.dropped and crash != "before"
        self.draws.append((self.prices[t] if could else max(self.prices), None))
        if crash == "before":
            return self.restart_coordinator(t)
        self.begun, self.repeats, self.furthest = t + 1, self.repeats + again, max(self.furthest, t + 1)
        if could:
            self.place = 1
            said = Request("run", self.terms.digest, 0, RoundIndex(t, self.total, attempt)).names
            taken = not again and t // BLOCK in self.turns and not self.alike
            asked = asks and not taken and self.chance.random() < self.asks
            if asked:
                self.turns.add(t // BLOCK)
            self.draw(t, again, said, asked)
        if asks and self.chance.random() < 0.05:
            self.chance.choice([self.drop, lambda: self.connect(False), lambda: self.connect(True)])()
        if crash is not None:
            return self.restart_coordinator(t)
        self.done = t + 1
        self.checkpoints.append(self.done)
        return None

    def draw(self, t, again, said, asked):
        """Ask the twin, and the site if it is drawn: whatever either was asked before, they answer alike."""
        found, would = "", self.would_refuse(said) if self.alike else ""
        if asked:
            found = self.send(ROUND, said, MODEL).get("refused", "")
            self.agreed = not found
            failed = found and "would exceed" not in found
            if not failed and found != would and self.requirements.epsilon_per_month is None:
                self.strange.append(f"the site says {found or 'yes'!r}, and its twin {would or 'yes'!r}")
            if found and not failed:
                self.note_needless(found)
        if not would or (asked and not found):
            self.drawable.append((t, again, self.clock))

    def would_refuse(self, said):
        """Why the twin refuses this round; where writes fail, a copy of the site as it is on its disk."""
        message = Payload(said | ({"repeats": self.repeats} if self.repeats else {}), MODEL)
        if not self.fails:
            return self.twin.answer(ROUND, message).values.get("refused", "")
        copy = shutil.copytree(self.folder / "site", self.folder / "copy")
        site = Site(self.owner("site", folder=copy), joins=False)
        with patch.object(SiteLedger, "agree"):  # it asks what the first round costs
            found = site.answer(ROUND, message).values.get("refused", "")
        site.close()
        shutil.rmtree(copy)
        return found

    def note_needless(self, found):
        """Note a refusal where all that was run since the site joined, and this round, were within the budget."""
        start, caps = self.clock - MONTH, self.requirements.caps
        recent = self.draws[-1][0] + sum(cost for cost, heard in self.draws[:-1] if heard is None or heard > start)
        spent = {cap: sum(cost for cost, _ in self.draws) for cap in caps} | {"epsilon_per_month": recent}
        if all(spent[cap] <= most for cap, most in caps.items()):
            self.strange.append(f"{found}, and it was {spent}")

    def other_run(self, **changes):
        """Another coordinator's run, which settles what this one left."""
        other = replace(self.terms, run=f"other {self.chance.random()}")
        self.elsewhere, self.connected = True, False
        self.twin.close()
        self.twin = Site(self.twin.owner)
        self.twin.answer(TERMS, Payload({"terms": other.text, "round": 0}))
        self.restart_site(**changes)
        assert "agreed" in self.site.answer(TERMS, Payload({"terms": other.text, "round": 0})).values
        ended = Payload({"run": other.run, "terms": other.digest, "why": "over", "round": 0})
        for site in (self.site, self.twin):
            site.answer(END, ended)
        self.twin.close()
        self.twin = Site(self.twin.owner)

    def step(self):
        self.clock += timedelta(days=self.chance.choice([0, 0, 1, 9, 25]))
        self.greet()
        event = self.chance.random()
        if self.done == self.total:
            if event < 0.1:
                self.end()
            self.restart_coordinator(self.chance.choice(self.checkpoints))
        elif event < 0.65:
            self.round()
        elif event < 0.72:
            self.round(crash=self.chance.choice(["before", "in it"]))
        elif event < 0.75:
            self.restart_coordinator(self.chance.choice(self.checkpoints))
        elif event < 0.79 and self.connected:
            self.connected = self.agreed = False
        elif event < 0.81:
            self.connect(restarted=event > 0.8)
        elif self.dropped:
            self.dropped = False  # invited again
        elif event < 0.83:
            self.drop()
        elif event > 0.99 and not self.requirements.caps:
            self.other_run()

    def live(self):
        """Return whether the site heard of the run's end; else another run settles it."""
        if self.chance.random() < 0.8:
            self.connect(restarted=True)
        for _ in range(self.chance.randrange(8, 22)):
            self.step()
        if self.chance.random() < 0.8:
            self.greet()
            while self.done < self.total:
                self.round(asks=False)
                self.greet()
        ended = False
        if self.joined and self.chance.random() < 0.6:
            self.connected = True
            for rate in (self.rate, self.rate, 0.0):
                self.rate = rate
                self.restart_site()
                ended = ended or self.end()
        self.rate = 0.0
        if not ended:
            self.other_run(requirements=Requirements(unit="client"))
        self.site.close()
        self.twin.close()
        return ended


def wrong(life, ended):
    """What is wrong with the site's ledger, by one who knows everything."""
    charged = Record.read(life.folder / "site" / "ledger.jsonl")[1]
    ours = Counter(without_sampler(leaves(charged.charged_event("client", "release")))[0])
    if not life.alike:
        return uncharged_blocks(life, ours)
    caps = life.requirements.caps
    most = min((caps[cap] for cap in caps if cap != "epsilon_per_month"), default=math.inf)
    needed, found = (
        [life.prices[t] for t, *_ in life.drawable],
        [1 / leaf.event.noise**2 for leaf in ours.elements()],
    )
    short = [one for one, own in zip_longest(sorted(needed)[::-1], sorted(found)[::-1][: len(needed)], fillvalue=0)
             if own < one * (1 - 1e-6)]  # fmt: skip
    problems = list(life.strange)
    if sum(found) < sum(needed) * (1 - 1e-6) or (short and sum(found) <= most * (1 + 1e-6)):
        problems.append(f"undercharged: {found} for {needed}")
    for _, _, start in life.drawable:
        month = sum(life.prices[t] for t, _, at in life.drawable if start <= at < start + MONTH)
        if month > caps.get("epsilon_per_month", math.inf) * (1 + 1e-6):
            problems.append(f"{month} left in 30 days")
    if ended and not life.elsewhere:
        if sum(found) > (most + max(life.prices)) * (1 + 1e-6):
            problems.append(f"{sum(found)} charged of a budget of {most}")
        first, repeats, heard = life.joined
        ran = life.furthest - first + life.repeats - repeats
        if len(found) > ran or (heard and not caps and not life.left_out and len(found) != ran):
            problems.append(f"{len(found)} rounds charged of {ran}")
    return problems


def uncharged_blocks(life, ours):
    blocks, poisson = Counter(), 0
    for (
        t,
        again,
        _,
    ) in life.drawable:  # a block begun again is allocated anew; any other round draws its clients again
        poisson += again and t % BLOCK > 0
        blocks[t // BLOCK] = max(blocks[t // BLOCK], 1) if not again else blocks[t // BLOCK] + (t % BLOCK == 0)
    allocated = sum(times for leaf, times in ours.items() if isinstance(leaf, Allocated))
    short = max(0, blocks.total() - allocated)
    return ["block"] * short + ["round"] * max(
        0, blocks.total() + poisson - sum(ours.values())
    )  # a block pays for it


@pytest.mark.slow
def test_a_site_is_charged_no_less_than_what_left_it(federation, tmp_path, monkeypatch):
    monkeypatch.setattr(Site, "_learn", lambda *_: Payload({"answered": 1}))
    monkeypatch.setattr(site_module, "_own_cohort", lambda *_: federation[2])
    monkeypatch.setattr(Terms, "read", lru_cache(Terms.read))
    monkeypatch.setattr(Bounds, "refuse", lambda *_: None)
    monkeypatch.setattr(consent, "_of_round", lru_cache(consent._of_round))
    monkeypatch.setattr(consent, "Running", Additive)
    monkeypatch.setattr(SiteLedger, "_exceeds", exceeds)
    monkeypatch.setattr(SiteLedger, "_pays_for", pays_for)
    disk, found, drawable = Disk(monkeypatch), {}, 0
    for seed in range(LIVES):
        disk.chance = random.Random(seed)
        life = Life(random.Random(seed), tmp_path / str(seed), federation, disk)
        monkeypatch.setattr(privacy_ledger, "datetime", SimpleNamespace(now=lambda _zone, life=life: life.clock))
        if problems := wrong(life, life.live()):
            found[seed] = problems
        drawable += len(life.drawable)
        shutil.rmtree(life.folder)
    assert drawable > LIVES, "and the site could be drawn"
    assert found == {}
