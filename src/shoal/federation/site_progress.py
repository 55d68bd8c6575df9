"""How far a site is in a run, on its disk: which rounds it has charged, and which of them it answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from shoal import release
from shoal.federation.terms import Terms
from shoal.files import write_whole

PROGRESS = "progress.json"
CHANGED = "changed"


class ReportedRepeats(NamedTuple):
    """How many rounds of a run its coordinator will have run again, when it has run again all that it planned to.

    Those that are not charged yet are from round `first` (from 0) on, and before round `charged`.
    """

    repeats: int = 0
    first: int = 0
    charged: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a site is in one run; the fields are the keys of progress.json.

    Attributes:
        run: The run's name.
        terms: The digest of its terms.
        next: The first round (from 0) that is not charged yet.
        ended: Whether the run's end was reported, so that no round of it is left to charge.
        furthest: The highest `next` so far: a coordinator that went back runs the rounds before it again.
        records: How many records the site has.
        turn: The first of the rounds, charged as one, of which this site was asked for one last.
        repeats: How many rounds that were run again are charged.
        reported_repeats: What the coordinator said of them when it last sent the terms, less what `next` covers.
        answered: The rounds that the site answered, each as often as it did; with correlated noise only.
        answered_before: The same of other runs, by their terms: a coordinator may go on with one, with its old noise.
        requirements: The owner's, as long as they are the same in all of the run; CHANGED where they are not.
        ledger: The hash of the ledger's last line.
    """

    run: str = ""
    terms: str = ""
    next: int = 0
    ended: bool = True
    furthest: int = 0
    records: int = 0
    turn: int | None = None
    repeats: int = 0
    reported_repeats: ReportedRepeats = field(default_factory=ReportedRepeats)
    answered: tuple[int, ...] = ()
    answered_before: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    requirements: str | None = None
    ledger: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Progress:
        """The progress in the last run that the site took part in."""
        path = folder / PROGRESS
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        kept = {each.name: found[each.name] for each in fields(cls) if each.name in found}
        reported = ReportedRepeats(*kept.pop("reported_repeats", ()))
        return cls(**kept | {"answered": tuple(kept.get("answered", ()))}, reported_repeats=reported)

    def of(self, terms: Terms, first: int) -> Progress:
        """The progress in the run of these terms, which begins at round `first` where it is new to this site."""
        if self.terms == terms.digest:
            return replace(self, ended=False, furthest=max(self.furthest, self.next))
        before = dict(self.left().answered_before)
        own = tuple(before.pop(terms.digest, ()))
        return Progress(terms.run, terms.digest, first, ended=False, answered=own, answered_before=before)

    def left(self) -> Progress:
        """The progress of a site that is in no run; if it returns to one, that is new to it."""
        answered = {**self.answered_before, self.terms: self.answered}
        return Progress(answered_before={digest: rounds for digest, rounds in answered.items() if rounds})

    def rerun(self, begun: int = 0) -> range:
        """The rounds of which some may have been run again and are not charged yet, where `begun` have begun."""
        _, first, charged = self.reported_repeats
        return range(first, max(1, begun, charged, self.furthest))

    def write(self, folder: Path, ledger: str) -> None:
        """Write the progress, after the charge: a crash in between charges a round twice, never zero times."""
        kept = {release.KEY: release.SITE, **asdict(self), "ledger": ledger}
        write_whole(folder / PROGRESS, json.dumps(kept).encode())
