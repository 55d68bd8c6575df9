"""One audit: the game, the canaries and the checks on one claim, what they would have caught, and the verdict.

VIOLATED           something was seen that cannot be if the claim is true
consistent         nothing was, and a quarter of the noise would have been flagged
too weak to tell   nothing was, but neither would a quarter of the noise have been
no claim           there is nothing to hold the method to; the measurement is reported
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch

from shoal.accounting.claims import Unit
from shoal.algorithms.base import Algorithm
from shoal.audit import bounds, game, one_run
from shoal.audit.bounds import CONFIDENCE
from shoal.audit.broken import VARIANTS, Broken, whole
from shoal.audit.cases import DELTA, Case, cases
from shoal.audit.checks import Check, noise_checks, sensitivity_check
from shoal.audit.game import Game
from shoal.audit.one_run import Guesses
from shoal.audit.tails import sampler_checks
from shoal.random.secure_streams import SecureStreams
from shoal.random.streams import Streams

Verdict = Literal["consistent", "VIOLATED", "too weak to tell", "no claim"]
QUARTER = "noise x 1/4"
ROUNDS = 5  # of a run with client canaries, of which there are at most
CLIENTS = 4000  # they take as much memory and time as the square of their number
SAMPLED_ROUNDS, SAMPLED = 8, 2000  # of the same where clients are sampled as the method does
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much is tried: trials of each kind of a game, canaries, pairs of neighbours (0: no checks at all).

    `repeats`: of the runs with canaries, whose guesses are pooled. `clients`: the most canaries that are clients.
    """

    step_trials: int = 4000
    round_trials: int = 1200
    canaries: int = 10_000
    pairs: int = 500
    round_pairs: int = 60
    repeats: int = 1
    clients: int = CLIENTS

    def trials(self, case: Case) -> int:
        """Where a claim is far from true the bound is as large as the trials allow, so there are more of them.

        Not where each takes many steps.
        """
        trials = self.step_trials if case.where == "steps" else self.round_trials
        many = case.where == "steps" and case.record.local.steps != 1
        return trials * (3 if case.kind == "published" and not many else 1)

    def canaries_of(self, case: Case) -> int:
        """How many canaries a run has."""
        return self.canaries if case.where == "steps" else min(self.canaries, self.clients)

    def for_broken(self) -> Effort:
        """What is broken shows in fewer rounds, which are what takes time."""
        return replace(self, round_trials=min(self.round_trials, 500))


THOROUGH = Effort()
QUICK = Effort(step_trials=2000, round_trials=500, pairs=200, round_pairs=25)
FIRST_LOOK = Effort(step_trials=600, round_trials=150, clients=1500, pairs=60, round_pairs=8)
"""Enough for a verdict: of a few minutes for all claims, the most go to canaries, which tell most."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of auditing one claim."""

    algorithm: str
    case: Case
    game: Game
    guesses: Guesses | None
    sampled: Guesses | None
    checks: list[Check]
    verdict: Verdict
    flagged: list[str]
    power: dict[str, list[str]]
    seconds: float = 0.0

    @property
    def epsilon(self) -> float:
        """The greatest lower bound that was found, whatever the mechanism."""
        return max(self.game.epsilon(DELTA), self.guesses.epsilon if self.guesses else 0.0)

    @property
    def confidence(self) -> float:
        """With which that bound holds: the game's, less what the canaries may err."""
        return CONFIDENCE if self.guesses is None else CONFIDENCE - one_run.ALPHA

    def row(self) -> dict[str, Any]:
        """Everything, as JSON."""
        case, claim = self.case, self.case.claim
        return {
            "algorithm": self.algorithm,
            "unit": case.unit,
            "observer": case.observer,
            "kind": case.kind,
            "claimed": claim.epsilon if claim else None,
            "adjacency": claim.adjacency if claim else None,
            "delta": DELTA,
            "measured": self.epsilon,
            "confidence": self.confidence,
            "estimate": bounds.epsilon_of_shift(min(self.game.estimate, 1e3), DELTA) if case.true else None,
            "true_bound": case.true,
            "best_possible": self.game.best_possible,
            "trials": self.game.trials,
            "verdict": self.verdict,
            "flagged": self.flagged,
            "game": self.game.epsilon(DELTA),
            "one_run": vars(self.guesses) if self.guesses else None,
            "final_model": vars(self.sampled) if self.sampled else None,
            "checks": [vars(check) for check in self.checks],
            "would_catch": self.power,
            "setting": case.note,
            "seconds": round(self.seconds, 2),
        }


def audit(
    record: Algorithm,
    *,
    level: Unit | None = None,
    kind: str | None = None,
    epsilon: float = 1.0,
    effort: Effort = THOROUGH,
    seed: int = 0,
    power: bool = False,
    secure: bool = False,
    progress: Progress | None = None,
) -> Iterator[Outcome]:
    """Audit what a method claims of each unit, or of one; `kind` keeps to what is `proven` or `published`.

    With `secure` it is secure mode's random numbers, and its grid, that are audited.
    """
    for case in cases(record, level, epsilon):
        if kind in (None, case.kind):
            streams = SecureStreams(seed) if secure else Streams(seed)
            yield audit_case(record, case, epsilon, effort, streams, power, progress or (lambda _: None))


def audit_case(
    record: Algorithm, case: Case, epsilon: float, effort: Effort, streams: Streams, power: bool, progress: Progress
) -> Outcome:
    started = time.perf_counter()
    many = many_rounds(record, case, epsilon, streams)
    progress(f"{record.name}, {case.unit} level")
    played = _play(whole(case, streams), many, effort)
    caught: dict[str, list[str]] = {}
    if case.kind == "proven" or (case.kind == "published" and not played.flagged):
        for name in VARIANTS if power and case.kind == "proven" else (QUARTER,):
            progress(f"{record.name}, {case.unit} level, would it catch: {name}?")
            broken = VARIANTS[name](case, streams)
            if broken is not None:
                alike = None if many is None else VARIANTS[name](many.case, streams)
                caught[name] = _play(broken, alike, effort.for_broken(), hurry=not power).flagged
    assert played.game is not None
    if case.kind == "proven" and effort.pairs:
        tails = _tails(streams.mode, streams.seed)
        played.checks += tails
        played.flagged += [check.name for check in tails if check.flagged]
    sampled = _final_model(record, case, epsilon, streams, effort)
    verdict: Verdict = "consistent"
    if case.claim is None:
        verdict = "no claim"
    elif played.flagged:
        verdict = "VIOLATED"
    elif not _strong_enough(case, caught):
        verdict = "too weak to tell"
    return Outcome(
        record.name, case, played.game, played.guesses, sampled, played.checks, verdict,
        played.flagged if case.claim else [], caught, time.perf_counter() - started,
    )  # fmt: skip


@cache
def _tails(mode: str, seed: int) -> list[Check]:
    """Of the sampler itself, whatever the method: once is enough."""
    return sampler_checks(SecureStreams(seed) if mode == "secure" else Streams(seed), torch.device("cpu"))


def _strong_enough(case: Case, caught: dict[str, list[str]]) -> bool:
    """Would the audit have spoken up? It should have where the claim is known to be wrong."""
    if case.claim is not None and case.true is not None and case.true > case.claim.epsilon:
        return False
    return bool({"game", "canaries"} & set(caught[QUARTER]))


@dataclass
class _Played:
    game: Game | None = None
    guesses: Guesses | None = None
    checks: list[Check] = field(default_factory=list)
    flagged: list[str] = field(default_factory=list)


def _play(broken: Broken, many: Broken | None, effort: Effort, hurry: bool = False) -> _Played:
    """Canaries, game and checks on one form of a method; which of them flag it.

    In a `hurry`, for less noise alone: no game over rounds, which are slow, where canaries have shown it already, and
    no replay, which is without noise.
    """
    case, claim = broken.case, broken.case.claim
    found = _Played()
    if many is not None:
        canaries, runs = effort.canaries_of(case), effort.repeats
        found.guesses = one_run.guess(many, canaries, runs)
        if found.guesses.p_value <= one_run.FLAG:
            second = one_run.guess(one_run.anew(many, runs), canaries, runs)
            found.flagged += ["canaries"] if second.p_value <= one_run.AGAIN else []
    if not (hurry and found.flagged and case.where == "sum"):
        found.game = game.play(case, broken.played, effort.trials(case), broken.streams)
        if claim and bounds.passes(found.game.points, claim.tradeoff):
            found.flagged.insert(0, "game")
    if case.kind != "proven" or not effort.pairs:
        return found
    steps = case.where == "steps"
    found.checks += noise_checks(broken, 1000 if steps else 24)
    if not hurry:
        found.checks.append(sensitivity_check(broken, effort.pairs if steps else effort.round_pairs))
    found.flagged += [check.name for check in found.checks if check.flagged]
    return found


def many_rounds(record: Algorithm, case: Case, epsilon: float, streams: Streams) -> Broken | None:
    """The case that canaries are played on: one step for records, several rounds for clients."""
    if case.kind != "proven":
        return None
    if case.where == "steps":
        return whole(case, streams)
    record = replace(record, clients=record.clients.for_canaries())
    return whole(next(cases(record, case.unit, epsilon, ROUNDS)), streams)


def _final_model(record: Algorithm, case: Case, epsilon: float, streams: Streams, effort: Effort) -> Guesses | None:
    """Canaries of several rounds with the method's own sampling of clients, which the final model hides best."""
    if case.kind != "proven" or case.where == "steps":
        return None
    own = whole(next(cases(record, case.unit, epsilon, SAMPLED_ROUNDS)), streams)
    return one_run.guess(own, min(effort.canaries_of(case), SAMPLED), effort.repeats)
