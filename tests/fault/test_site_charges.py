"""A site is charged no less than what an observer who knows everything would charge, whatever fails and when.

A coordinator and a site live through a few dozen random events: the coordinator crashes, goes back to an older
checkpoint, drops the site, invites it again, or is never heard of again; the site disconnects, restarts, is killed
between its charge and its note of it, or takes part in another run in between. Messages are those of
`RemoteCohort`, and the site is a real one that is not trained. It is hidden by sampling, so that every round in which
it could be drawn costs it something, also where it is not asked.
"""

import os
import random
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

from shoal.accounting.events import Allocated
from shoal.accounting.leaves import leaves, without_sampler
from shoal.accounting.privacy_ledger import Record
from shoal.federation import site as site_module
from shoal.federation.messages import Payload
from shoal.federation.site import Owner, Site
from shoal.federation.site_progress import Progress
from shoal.federation.site_records import reader
from shoal.federation.terms import END, ROUND, TERMS, Terms
from shoal.mechanisms.schedules import parse
from support.federations import asked, curator, served

NOISE = "linear:1:4"
BLOCK = 4  # of random allocation: 4 sites, of which one takes part in a round
SAMPLING = {
    "poisson": curator(3, NOISE) | {"clients.sampling": "poisson", "clients.cohort": 2},
    "random-allocation": curator(6) | {"clients.sampling": "random-allocation", "clients.cohort": 1},
}
SEEDS = range(60)


class Killed(BaseException):
    """The site's process ends here."""


@pytest.fixture(scope="module", params=SAMPLING)
def federation(request, tmp_path_factory):
    """The terms, the first round's message, and a cohort that all sites share: it is never trained."""
    _, grid = served(tmp_path_factory.mktemp("served"), SAMPLING[request.param])
    terms = Terms.read(asked(grid, TERMS).text("terms"), ())
    message = next(payload for to, _, kind, payload in grid.wire if (to, kind) == ("to", ROUND))
    data = reader("digits", part=0)(terms)
    return terms, message, data, site_module._own_cohort(terms, data)


class World:
    """A coordinator, the site, and `drawable`: the rounds in which it could be drawn, and if they were run again."""

    def __init__(self, chance, folder, federation):
        self.chance, self.folder = chance, folder
        self.terms, self.message, data, _ = federation
        self.owner = Owner("site", folder, lambda _terms: data)
        self.site, self.drawable, self.killed = None, [], False
        self.charged, self.checkpoints, self.turns = [], [0], set()
        self.connected = self.agreed = self.dropped = self.place = False
        self.restart_coordinator(0)

    def restart_coordinator(self, done):
        """With the checkpoint of so many rounds; its ledger is the latest."""
        self.done = self.begun = done
        self.repeats = len(self.charged) - len(set(self.charged))
        self.furthest = max(self.charged, default=-1) + 1
        self.agreed = False

    def restart_site(self):
        if self.site is not None:
            self.site.close()
        self.site, self.agreed = Site(self.owner), False

    def send(self, kind, values, vectors=None):
        said = {"repeats": self.repeats} if self.repeats else {}
        try:
            return self.site.answer(kind, Payload(values | said, vectors or {})).values
        except Killed:
            self.restart_site()
            return {"refused": "killed"}

    def greet(self):
        if self.connected and not self.dropped and not self.agreed:
            said = {"charged": self.furthest} if self.furthest > self.begun else {}
            said |= {"member": 1} if self.furthest and self.place else {}
            self.agreed = "agreed" in self.send(TERMS, {"terms": self.terms.text, "round": self.begun} | said)

    def end(self):
        if self.connected:
            said = {"run": self.terms.run, "terms": self.terms.digest, "why": "over", "round": self.furthest}
            self.send(END, said if self.dropped else said | {"member": int(self.place)})

    def connect(self, restarted):
        if restarted or self.site is None:
            self.restart_site()
        self.connected, self.agreed = True, False
        self.end() if self.dropped else self.greet()

    def drop(self):
        self.dropped, self.agreed = True, False
        self.end()

    def round(self, crash=None, asks=True):
        """Charge the next round and run it; the coordinator may `crash` before any message, or in the round."""
        t, attempt, again = self.done, self.charged.count(self.done), self.done < self.furthest
        self.charged.append(t)
        if crash == "before":
            return self.restart_coordinator(t)
        self.begun, self.repeats, self.furthest = t + 1, self.repeats + again, max(self.furthest, t + 1)
        if self.connected and self.agreed and not self.dropped:
            self.place = True
            self.drawable.append((t, again))
            taken = not again and t // BLOCK in self.turns and not self.terms.settings.algorithm.clients.alike
            if asks and not taken and self.chance.random() < 0.25:
                self.turns.add(t // BLOCK)
                values = self.message.values | {"round": t, "attempt": attempt}
                self.agreed = "refused" not in self.send(ROUND, values, self.message.vectors)
        if asks and self.chance.random() < 0.05:
            self.chance.choice([self.drop, lambda: self.connect(False), lambda: self.connect(True)])()
        if crash is not None:
            return self.restart_coordinator(t)
        self.done = t + 1
        self.checkpoints.append(self.done)
        return None

    def other_run(self):
        """Another coordinator's run, which settles what this one left."""
        other = replace(self.terms, run=f"other {self.chance.random()}")
        self.restart_site()
        assert "agreed" in self.site.answer(TERMS, Payload({"terms": other.text, "round": 0})).values
        ended = {"run": other.run, "terms": other.digest, "why": "over", "round": 0}
        self.site.answer(END, Payload(ended))
        self.connected = self.agreed = False

    def step(self):
        self.killed = self.chance.random() < 0.01
        self.greet()
        event = self.chance.random()
        if self.done == self.terms.setting.rounds:
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
            self.connect(restarted=event > 0.77)
        elif self.dropped:
            self.dropped = False  # invited again
        elif event < 0.83:
            self.drop()
        elif event > 0.99:
            self.other_run()

    def live(self):
        if self.chance.random() < 0.8:
            self.connect(restarted=True)
        for _ in range(self.chance.randrange(8, 22)):
            self.step()
        self.killed = False
        if self.chance.random() < 0.8:
            self.greet()
            while self.done < self.terms.setting.rounds:
                self.round(asks=False)
                self.greet()
        if self.chance.random() < 0.3:
            self.end()  # else it is never heard of again
        self.other_run()
        self.site.close()


def missing(world):
    """What an observer who knows everything charges, and the site did not."""
    event = Record.read(world.folder / "ledger.jsonl")[1].charged_event("client", "release")
    ours = without_sampler(leaves(event))[0]
    total = world.terms.setting.rounds
    if world.terms.settings.algorithm.clients.alike:
        needed = sorted(parse(NOISE).value(t, total) for t, _ in world.drawable)
        found = sorted(leaf.event.noise for leaf, times in ours.items() for _ in range(times))
        found += [float("inf")] * len(needed)
        return [noise for noise, own in zip(needed, found, strict=False) if own > noise + 1e-6]
    blocks, poisson = Counter(), 0
    for t, again in world.drawable:  # a block begun again is allocated anew; any other round draws its clients again
        poisson += again and t % BLOCK > 0
        blocks[t // BLOCK] = max(blocks[t // BLOCK], 1) if not again else blocks[t // BLOCK] + (t % BLOCK == 0)
    allocated = sum(times for leaf, times in ours.items() if isinstance(leaf, Allocated))
    short = max(0, blocks.total() - allocated)
    return ["block"] * short + ["round"] * max(
        0, blocks.total() + poisson - sum(ours.values())
    )  # a block pays for it


@pytest.mark.slow
def test_a_site_is_charged_no_less_than_what_left_it(federation, tmp_path, monkeypatch):
    write, world = Progress.write, None

    def killed_before(progress, folder, ledger):
        if world.killed:
            world.killed = False
            raise Killed
        write(progress, folder, ledger)

    monkeypatch.setattr(Progress, "write", killed_before)
    monkeypatch.setattr(Site, "_learn", lambda *_: Payload({"answered": 1}))
    monkeypatch.setattr(site_module, "_own_cohort", lambda *_: federation[3])
    monkeypatch.setattr(os, "fsync", lambda _file: None)
    undercharged, drawable = {}, 0
    for seed in SEEDS:
        world = World(random.Random(seed), tmp_path / str(seed), federation)
        world.live()
        drawable += len(world.drawable)
        if found := missing(world):
            undercharged[seed] = found
    assert drawable > 4 * len(SEEDS), "and the site could be drawn"
    assert undercharged == {}
