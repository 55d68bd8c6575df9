"""`shoal audit --all --budget`: every claim once, then more runs with canaries where they tell most.

After the first audit of each claim, runs with canaries are added where the gap between what is proven and what was
measured is widest for the time that they take. Their number is 4 times as many each time: after 4^j runs the pooled
bound holds but for ALPHA / 2^(j + 1), so that all bounds of a claim hold together but for ALPHA, whenever one stops
and why.
Each piece of work is a line of audit.jsonl, from which a later call goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal import release
from shoal.algorithms.base import Algorithm
from shoal.audit import bounds, one_run, one_run_bounds
from shoal.audit.auditing import THOROUGH, Effort, audit_case, many_rounds
from shoal.audit.broken import Broken
from shoal.audit.cases import Case, cases
from shoal.audit.one_run_bounds import Count
from shoal.errors import ConfigError, RunError
from shoal.random.streams import Streams

LINES = "audit.jsonl"
MOST_RUNS = 64
GROWTH = 4  # from one bound of a claim to the next: twice as many runs rarely make up for the smaller alpha
LEVEL = 1e-3  # how often pooled canaries may flag a claim that is true
Say = Callable[[str], None]


@dataclass(eq=False)
class Standing:
    """One claim, and what is known of it so far."""

    record: Algorithm
    case: Case
    epsilon: float
    streams: Streams
    row: dict[str, Any] | None = None
    counts: list[Count] = field(default_factory=list)
    seconds: float = 1.0
    """That the last run with canaries took; before there is one, all of the first look."""

    @cached_property
    def many(self) -> Broken | None:
        """What canaries are played on, and the claim that they are held against."""
        return many_rounds(self.record, self.case, self.epsilon, self.streams)

    def take(self, line: Mapping[str, Any]) -> None:
        """One line of the file: the first audit, or one more run with canaries."""
        if "row" in line:
            self.row = dict(line["row"])
            self.seconds = max(self.row["seconds"], 1e-3)
            first = self.row["one_run"]
            self.counts = [Count(*(first[key] for key in ("canaries", "guesses", "right")))] if first else []
        else:
            self.counts.append(Count(*line["count"]))
            self.seconds = max(line["seconds"], 1e-3)
        self._pool()

    def _pool(self) -> None:
        """Pool the runs whenever there are GROWTH times as many."""
        runs = len(self.counts)
        claim = self.many.case.claim if self.many is not None else None
        if self.row is None or claim is None or not _pooled(runs):
            return
        share = 0.5 ** (1 + round(math.log(runs, GROWTH)))
        epsilon = one_run_bounds.epsilon(self.counts, claim.delta, share * one_run.ALPHA)
        first = self.row["game"] if runs == 1 else self.row["measured"]
        found = dict(self.row["one_run"])
        found |= {"runs": runs, "epsilon": max(epsilon, 0.0 if runs == 1 else found["epsilon"])}
        found |= {key: sum(getattr(count, key) for count in self.counts) for key in ("guesses", "right")}
        found["p_value"] = one_run_bounds.p_value_of(bounds.tradeoff(claim.event, claim.adjacency), self.counts)
        self.row |= {"measured": max(first, epsilon), "one_run": found}
        if runs > 1 and found["p_value"] <= share * LEVEL:
            flagged = dict.fromkeys([*self.row["flagged"], "canaries"])
            self.row |= {"verdict": "VIOLATED", "flagged": list(flagged)}

    def promise(self) -> float:
        """What the next piece of work may tell for its time: the gap over the seconds until runs are pooled again."""
        runs = len(self.counts)
        if self.row is None:
            return float("inf")
        if not 0 < runs < MOST_RUNS or self.case.claim is None or self.row["verdict"] == "VIOLATED":
            return 0.0
        if not _pooled(runs):
            return float("inf")  # finish what was begun
        more = (GROWTH - 1) * runs * self.seconds
        return max(self.case.claim.epsilon - float(self.row["measured"]), 0.0) / more


@dataclass(eq=False)
class Campaign:
    """All claims, the settings they are audited with, and the file of what was found."""

    path: Path
    standings: dict[str, Standing]
    effort: Effort
    power: bool
    more: Effort = THOROUGH
    """Whose canaries later runs have."""

    def spend(self, seconds: float, say: Say) -> None:
        """Work until the time is over; what is under way then is finished."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            key, best = max(self.standings.items(), key=lambda item: item[1].promise())
            if best.promise() <= 0:
                return
            line = {"claim": key} | (self._first(best, say) if best.row is None else self._one_more(best, say))
            _append(self.path, line)
            best.take(line)

    def _first(self, standing: Standing, say: Say) -> dict[str, Any]:
        outcome = audit_case(
            standing.record, standing.case, standing.epsilon, self.effort, standing.streams, self.power, say
        )
        return {"row": outcome.row()}

    def _one_more(self, standing: Standing, say: Say) -> dict[str, Any]:
        started, number = time.perf_counter(), len(standing.counts)
        say(f"{standing.record.name}, {standing.case.unit} level, canaries, run {number + 1}")
        assert standing.many is not None
        run = one_run.play(one_run.anew(standing.many, number), self.more.canaries_of(standing.case))
        return {"count": list(astuple(run.every_round)), "seconds": round(time.perf_counter() - started, 3)}

    def rows(self) -> list[dict[str, Any]]:
        """The claims that were audited."""
        return [standing.row for standing in self.standings.values() if standing.row is not None]

    @property
    def left(self) -> int:
        """How many claims were not reached."""
        return sum(standing.row is None for standing in self.standings.values())


def start(
    folder: Path,
    records: Sequence[Algorithm],
    settings: Mapping[str, Any],
    effort: Effort,
    resume: bool = False,
) -> Campaign:
    """Begin an audit of these methods in a folder, or go on with the one that is there.

    Args:
        folder: Where audit.jsonl is.
        records: The methods.
        settings: `epsilon`, `seed`, `power`, `level` and `claim`, as given.
        effort: How much is tried at first, of each claim.
        resume: Go on with what is there.

    Raises:
        ConfigError: Where it was begun with other settings.
        RunError: Where its file cannot be read.
    """
    found = dict(_claims(records, settings))
    campaign = Campaign(folder / LINES, found, effort, settings["power"])
    if not resume:
        _append(campaign.path, {release.KEY: release.AUDIT, "settings": dict(settings)})
        return campaign
    head, *lines = _read(campaign.path)
    for key, value in settings.items():
        if (before := head["settings"].get(key)) != value:
            raise ConfigError(f"--{key} is {value}, and {folder} was begun with {before}: use that to resume it")
    for line in lines:
        if line.get("claim") in found:
            found[line["claim"]].take(line)
    return campaign


def newest(runs: Path) -> Path:
    """The folder of the last audit of all methods that was begun with a budget.

    Raises:
        ConfigError: Where there is none.
    """
    found = sorted(path.parent for path in runs.glob(f"audit-*-all/{LINES}"))
    if not found:
        raise ConfigError(f"--resume: there is no audit with a budget in {runs}; omit --resume to begin one")
    return found[-1]


def _claims(records: Sequence[Algorithm], settings: Mapping[str, Any]) -> Iterator[tuple[str, Standing]]:
    """What is proven first, and what takes little time first."""
    found = [
        Standing(record, case, settings["epsilon"], Streams(settings["seed"]))
        for record in records
        for case in cases(record, settings["level"], settings["epsilon"])
        if settings["claim"] in (None, case.kind)
    ]
    kinds = ("proven", "published", "none")
    seen: set[str] = set()
    for standing in sorted(found, key=lambda each: (kinds.index(each.case.kind), each.case.where != "steps")):
        key = f"{standing.record.name} {standing.case.unit}"
        key += f" {standing.case.kind}" if key in seen else ""  # of one unit a method may have both
        seen.add(key)
        yield key, standing


def _pooled(runs: int) -> bool:
    """Is this a power of GROWTH?"""
    return runs in (GROWTH**j for j in range(8))


def _append(path: Path, line: Mapping[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from None


def _read(path: Path) -> list[dict[str, Any]]:
    """All whole lines: the last one may have been cut off, and the next must not be joined to it."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise RunError(f"{path} is malformed: {error}; begin anew without --resume") from None
    if not all(isinstance(line, dict) for line in lines) or not lines or "settings" not in lines[0]:
        raise RunError(f"{path} does not begin with its settings; begin anew without --resume")
    return lines
