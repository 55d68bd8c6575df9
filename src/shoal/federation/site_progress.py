"""How far a site is in a run: which rounds it has charged, and which of them it answered.

It stands in the lines of the site's ledger, each of which says what has changed since the one before: what a line
charges, and that this is charged, are on disk together or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shoal.errors import LedgerError
from shoal.federation.terms import Terms

EARLIER = "progress.json"
"""The file in which earlier versions kept it."""
DAMAGED = "{path} is damaged; restore it and the ledger from the latest copy"


@dataclass(frozen=True)
class Progress:
    """How far a site is in one run; rounds count from 0.

    Attributes:
        run: The run's name.
        terms: The digest of its terms.
        next: The round that the coordinator runs next, as far as the site knows.
        begun: How many different rounds have begun, as far as it knows: those from `next` to here are run again.
        charged: The first round that is not charged yet. All that have begun are, unless the budget is spent.
        reported: How often the coordinator says it ran a round again.
        repeats: How many of these are charged.
        ended: Whether the run's end was reported, so that no round of it is left to charge.
        records: How many records the site has.
        turn: The first of the rounds, charged as one, of which this site was asked for one last.
        answered: The rounds that the site answered, each as often as it did; with correlated noise only.
        answered_before: The same of other runs, by their terms: a coordinator may go on with one, with its old noise.
        requirements: The owner's at the last message.
    """

    run: str = ""
    terms: str = ""
    next: int = 0
    begun: int = 0
    charged: int = 0
    reported: int = 0
    repeats: int = 0
    ended: bool = True
    records: int = 0
    turn: int | None = None
    answered: tuple[int, ...] = ()
    answered_before: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    requirements: str = ""

    @classmethod
    def read(cls, changes: Iterable[Mapping[str, Any]]) -> Progress:
        """The progress that these changes, one after the other, lead to; keys of later versions are left out."""
        found, known = cls(), {each.name for each in fields(cls)}
        for changed in changes:
            changed = {name: value for name, value in changed.items() if name in known}
            before = found.answered if changed.get("terms", found.terms) == found.terms else ()
            others = {**found.answered_before, **changed.get("answered_before", {})}
            changed |= {"answered": (*before, *changed.get("answered", ())), "answered_before": _some(others)}
            found = replace(found, **changed)
        return found

    @classmethod
    def of_earlier_version(cls, folder: Path) -> Progress:
        """What an earlier version of Shoal wrote beside the ledger; what it does not say is charged."""
        path = folder / EARLIER
        try:
            return cls._of_earlier(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
        except (ValueError, TypeError, AttributeError):
            raise LedgerError(DAMAGED.format(path=path)) from None

    @classmethod
    def _of_earlier(cls, found: dict[str, Any]) -> Progress:
        same = ("run", "terms", "ended", "records", "turn", "repeats", "answered_before")
        kept = {name: found[name] for name in same if name in found}
        following = found.get("next", 0)
        furthest = max(found.get("furthest", 0), following)
        reported, _, begun = found.get("reported_repeats", (0, 0, 0))
        begun = max(begun, furthest)
        requirements = found.get("requirements") or ""
        kept |= {"requirements": "" if requirements == "changed" else requirements}
        return cls(
            **kept | {"answered": tuple(found.get("answered", ()))},
            next=begun, begun=begun, charged=furthest,
            reported=max(reported, found.get("repeats", 0)) + furthest - following,
        )  # fmt: skip

    def changed(self, before: Progress) -> dict[str, Any]:
        """What has changed since an earlier progress; of the answered rounds, those that came after.

        Of other runs those that changed, without rounds where a run is not one of them any more: a line has a
        greatest length.
        """
        kept = before.answered if before.terms == self.terms else ()
        own = {name: value for name, value in vars(self).items() if value != getattr(before, name)}
        own.pop("answered", None)
        if "answered_before" in own:
            mine, theirs = self.answered_before, before.answered_before
            changed = [digest for digest in (*mine, *theirs) if mine.get(digest) != theirs.get(digest)]
            own["answered_before"] = {digest: mine.get(digest, ()) for digest in changed}
        return own | ({"answered": self.answered[len(kept) :]} if self.answered != kept else {})

    def of(self, terms: Terms, next: int, charged: int, begun: int, repeats: int) -> Progress:
        """The progress of a site that is new to the run of these terms, with what the coordinator says of it."""
        before = dict(self.left().answered_before)
        own = tuple(before.pop(terms.digest, ()))
        return Progress(
            terms.run, terms.digest, next, begun, charged, repeats, repeats,
            ended=False, answered=own, answered_before=before,
        )  # fmt: skip

    def left(self) -> Progress:
        """The progress of a site that is in no run; if it returns to one, that is new to it."""
        return Progress(answered_before=_some({**self.answered_before, self.terms: self.answered}))

    def run_again(self, repeats: int) -> range:
        """The rounds from `next` on that were run again, where `repeats` were in all: one after the other."""
        return range(self.next, max(self.next, min(self.begun, self.next + repeats - self.repeats)))


def _some(answered: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    """Those of runs in which some rounds were answered."""
    return {digest: tuple(rounds) for digest, rounds in answered.items() if rounds}
