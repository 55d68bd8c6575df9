"""The three ways to measure a cell: a normal run, a published recipe for epsilon, an attack."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shoal.papers.base import Job, Line, begun

EVALUATIONS = 20  # over a long run; each costs as much as a round
EVERY_ROUND = 100  # runs up to this long are evaluated in every round: some figures are about a certain one
QUICK_VICTIMS, VICTIMS = 2, 100


@dataclass(frozen=True)
class Run:
    """A run of this configuration (flat keys); `small` are the changes of its quick version.

    `at`: the accuracy after that round. `target`: the rounds until that accuracy.
    """

    config: Mapping[str, Any]
    small: Mapping[str, Any] = field(default_factory=dict)
    at: int | None = None
    target: float | None = None
    seeded, instant = True, False

    def settings(self, quick: bool) -> dict[str, Any]:
        return dict(self.config) | (dict(self.small) if quick else {})

    def key(self, quick: bool) -> str:
        return _digest(self.settings(quick))

    def needs(self, quick: bool) -> str:
        return str(self.settings(quick).get("data.name", ""))

    def measure(self, job: Job) -> Line:
        """The run; one that was stopped half way goes on from its checkpoint.

        Its folder is for the caller to remove, once the line is written.
        """
        import shoal

        given = self.settings(job.quick)
        rounds = given["rounds"]
        often = 1 if rounds <= EVERY_ROUND else rounds // EVALUATIONS
        given |= {"seed": job.seed, "engine.evaluate_every": often}
        given |= {"engine.checkpoint_every": max(1, rounds // EVALUATIONS)}
        folder = begun(job.unfinished, self.key(job.quick), job.seed)
        kept = sorted(path.parent for path in folder.glob("*/checkpoint"))
        source: dict[str, Any] = {"resume": kept[-1]} if kept else {"config": given}
        result = shoal.run(
            **source,
            device=job.device,
            runs=folder,
            no_guarantee=True,
            on_round=lambda line: job.told(line["round"] / rounds),
        )
        return _kept(result, given.get("local.steps"))

    def figures(self, line: Line) -> dict[str, float]:
        found: dict[str, float] = {
            name: line[name] for name in ("accuracy", "rounds", "communication", "step_seconds") if name in line
        }
        curve = [point for point in line.get("curve", ()) if point[1] is not None]
        if self.at is not None:
            within = [accuracy for number, accuracy, *_ in curve if number <= self.at]
            found |= {"accuracy": within[-1]} if within else {}
        if self.target is not None:
            reached = [number for number, accuracy, *_ in curve if accuracy >= self.target]
            found["rounds"] = reached[0] if reached else float("inf")
        return found


def _kept(result: Any, local_steps: int | None) -> Line:
    metrics = result.metrics
    updates = sum(line["clients"] for line in metrics)
    line: Line = {
        "accuracy": result.accuracy,
        "rounds": result.rounds,
        "proven": [[each["unit"], each["observer"], each["epsilon"], each["because"]] for each in result.proven],
        "delta": next((each["delta"] for each in result.proven if each["delta"] is not None), None),
        "published": [[each["unit"], each["epsilon"], each["recipe"]] for each in result.published],
        "communication": updates,
        "curve": [
            [each["round"], *(_short(each[name]) for name in ("accuracy", "v_c", "u_s"))]
            for each in metrics
            if "accuracy" in each
        ],
    }
    if local_steps and updates:
        usual = median(each["seconds"] for each in metrics)
        line["step_seconds"] = usual * len(metrics) / (updates * local_steps)
    return line


def _short(value: float | None) -> float | None:
    """Enough digits for a picture: a file of results stays small."""
    return None if value is None else float(f"{value:.4g}")


@dataclass(frozen=True)
class Account:
    """A figure that a paper's own recipe gives: arithmetic, the same every time, and no proof."""

    measure_name: str
    recipe: Callable[..., float]
    arguments: tuple[Any, ...]
    seeded, instant = False, True

    def key(self, quick: bool) -> str:
        return f"{self.recipe.__name__}{self.arguments}"

    def needs(self, quick: bool) -> str:
        return ""

    def measure(self, job: Job | None = None) -> Line:
        return {self.measure_name: float(self.recipe(*self.arguments))}

    def figures(self, line: Line) -> dict[str, float]:
        return {self.measure_name: line[self.measure_name]}


@dataclass(frozen=True)
class Leak:
    """An attack on 100 victims (004 Tables 1 and 3, Figure 3); its quick version on two digits."""

    attack: str
    algorithm: str
    changes: tuple[str, ...]
    data: str
    kind: Any
    seeded, instant = False, False

    def key(self, quick: bool) -> str:
        given = [self.attack, self.algorithm, *self.changes, self.needs(quick), self.kind]
        return _digest({"attack": given})

    def needs(self, quick: bool) -> str:
        return "digits" if quick else self.data

    def measure(self, job: Job) -> Line:
        from shoal.attacks import Aim, attack, recipe
        from shoal.config import configure

        victims = QUICK_VICTIMS if job.quick else VICTIMS
        named = {"algorithm": self.algorithm, "data.name": self.needs(job.quick)}
        given = named | {"seed": job.seed, "engine.device": job.device}
        outcome = attack(configure(given, self.changes), recipe(self.attack), Aim(self.kind, victims))
        return outcome.row()

    def figures(self, line: Line) -> dict[str, float]:
        """As 004 counts: error and iterations of those that succeeded; where none did, all, and the limit."""
        from shoal.attacks import recipe
        from shoal.attacks.matrix import LEAKS

        some = line["iterations_to_success"] is not None
        return {
            "success": line["success"],
            "resilient": float(line["success"] < LEAKS),
            "rmse": line["rmse_of_successes"] if some else line["rmse"],
            "iterations": line["iterations_to_success"] if some else recipe(self.attack).iterations,
        }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
