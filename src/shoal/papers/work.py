"""The three ways to measure a cell: a run, a paper's own recipe for epsilon, an attack."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.papers.table import Job, Line, unfinished_folder
from shoal.renamed import earlier_key, earlier_word

if TYPE_CHECKING:
    from shoal.data import Dataset

EVALUATIONS = 20  # of a long run; each costs as much as a round
EVERY_ROUND = 100  # runs up to this long are evaluated in every round, since some figures need a certain one
QUICK_VICTIMS, VICTIMS = 2, 100


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        config: Its configuration, as flat keys.
        small: What its quick version changes.
        at: The round whose accuracy counts; the last by default.
        target: The accuracy up to which rounds are counted.
    """

    config: Mapping[str, Any]
    small: Mapping[str, Any] = field(default_factory=dict)
    at: int | None = None
    target: float | None = None
    seeded, instant = True, False

    def settings(self, quick: bool) -> dict[str, Any]:
        """The configuration, of the quick version where asked."""
        return dict(self.config) | (dict(self.small) if quick else {})

    def key(self, quick: bool) -> str:
        """A digest of the configuration."""
        settings = self.settings(quick).items()
        return _digest({earlier_key(name): earlier_word(value) for name, value in settings})

    def needs(self, quick: bool) -> str:
        """The data set."""
        return str(self.settings(quick).get("data.name", ""))

    def measure(self, job: Job) -> Line:
        """Run it, or resume it from its checkpoint; the caller removes its folder once the line is written."""
        import shoal

        given = self.settings(job.quick)
        rounds = given["rounds"]
        often = 1 if rounds <= EVERY_ROUND else rounds // EVALUATIONS
        given |= {"seed": job.seed, "engine.evaluate_every": often}
        given |= {"engine.checkpoint_every": max(1, rounds // EVALUATIONS)}
        folder = unfinished_folder(job.unfinished, self.key(job.quick), job.seed)
        kept = sorted(path.parent for path in folder.glob("*/checkpoint"))
        source: dict[str, Any] = {"resume": kept[-1]} if kept else {"config": given}
        result = shoal.run(
            **source,
            device=job.device,
            runs=folder,
            no_guarantee=True,
            on_round=lambda line: job.progress(line["round"] / rounds),
        )
        line = _line(result, given.get("local.steps")) | _charged(result)
        return line | ({"calibrated": _noise(result.run)} if given.get("budget.calibrate") else {})

    def proven_again(self, line: Line, data: Dataset | None = None) -> Line:
        """A line with what this version proves of its run, which is not run again.

        Never less than the line says, which may count rounds that were repeated before lines held those. A line from
        before lines held the noise that was calibrated stays as it is.

        Raises:
            ValueError: Its charged rounds cannot be those of this run.
        """
        from shoal.config import configure, to_dict
        from shoal.prepare import limit_of, planned
        from shoal.training.budget import planned_claims

        given = self.settings(line.get("quick", False)) | {"seed": line.get("seed", 0)}
        if given.get("budget.calibrate"):
            if not line.get("calibrated"):
                return line
            given |= {"budget.calibrate": False} | line["calibrated"]
        config, setting = planned(configure(given), data)
        if "calibrated" in line and line["calibrated"].keys() != _noises(to_dict(config)).keys():
            return line
        charged = tuple((first, last) for first, last in line.get("charged", [[1, line["rounds"]]]))
        within = line["rounds"] >= 1 and all(1 <= first <= last <= config.rounds for first, last in charged)
        if not within or line["rounds"] > len({t for first, last in charged for t in range(first, last + 1)}):
            raise ValueError(f"its {line['rounds']} rounds cannot have been charged as {list(map(list, charged))}")
        found = planned_claims(config.algorithm, setting, charged, limit_of(config).delta)
        again = _claims([claim.to_json() for claim in found])
        said = {(unit, who): epsilon for unit, who, epsilon, _ in line["proven"]}
        for claim in again["proven"]:
            if claim[2] is not None:
                claim[2] = max(claim[2], said.get((claim[0], claim[1])) or 0.0)
        return line | again

    def figures(self, line: Line) -> dict[str, float]:
        """Accuracy, rounds, communication and the seconds of a step, where the line has them."""
        found: dict[str, float] = {
            name: line[name] for name in ("accuracy", "rounds", "communication", "step_seconds") if name in line
        }
        curve = [point for point in line.get("curve", ()) if point[1] is not None]
        return found | self._accuracy_at(curve) | self._rounds_to(curve)

    def _accuracy_at(self, curve: list[list[float]]) -> dict[str, float]:
        within = [accuracy for number, accuracy, *_ in curve if self.at is not None and number <= self.at]
        return {"accuracy": within[-1]} if within else {}

    def _rounds_to(self, curve: list[list[float]]) -> dict[str, float]:
        if self.target is None:
            return {}
        return {"rounds": next((number for number, accuracy, *_ in curve if accuracy >= self.target), math.inf)}


def _line(result: Any, local_steps: int | None) -> Line:
    metrics = result.metrics
    updates = sum(each["clients"] for each in metrics)
    line: Line = {
        "accuracy": result.accuracy,
        "rounds": result.rounds,
        **_claims(result.proven),
        "published": [[each["unit"], each["epsilon"], each["recipe"]] for each in result.published],
        "communication": updates,
        "curve": [
            [each["round"], *(_short(each[name]) for name in ("accuracy", "v_c", "u_s"))]
            for each in metrics
            if "accuracy" in each
        ],
    }
    if local_steps and updates:
        line["step_seconds"] = median(each["seconds"] for each in metrics) * len(metrics) / (updates * local_steps)
    return line


def _claims(proven: Sequence[Mapping[str, Any]]) -> Line:
    return {
        "proven": [[each["unit"], each["observer"], each["epsilon"], each["because"]] for each in proven],
        "delta": next((each["delta"] for each in proven if each["delta"] is not None), None),
    }


def _charged(result: Any) -> Line:
    """The rounds that were charged, as [first, last], unless each of those that were run was, once."""
    from shoal.accounting.privacy_ledger import FILE, Record

    charged = Record.read(result.run / FILE)[1].charged
    once = sum(intent.rounds for intent in charged) == result.rounds
    return {} if once else {"charged": [[intent.first, intent.round] for intent in charged]}


def _noise(run: Path) -> dict[str, Any]:
    """The noise that was calibrated, as the configuration of a run states it."""
    from shoal.config import read_toml

    return _noises(read_toml(run / "config.toml"))


def _noises(config: Mapping[str, Any]) -> dict[str, Any]:
    """The noise multipliers of a configuration."""
    from shoal.toml_text import flat

    return {key: value for key, value in flat(config).items() if key.endswith(".noise_multiplier")}


def _short(value: float | None) -> float | None:
    """Enough digits for a plot, which keeps results files small."""
    return None if value is None else float(f"{value:.4g}")


@dataclass(frozen=True)
class Account:
    """A figure by a paper's own recipe: arithmetic, and no proof.

    Attributes:
        measure_name: The measure.
        recipe: The function that computes it.
        arguments: What it is called with.
    """

    measure_name: str
    recipe: Callable[..., float]
    arguments: tuple[Any, ...]
    seeded, instant = False, True

    def key(self, quick: bool) -> str:
        """The recipe's name and arguments."""
        return f"{self.recipe.__name__}{self.arguments}"

    def needs(self, quick: bool) -> str:
        """No data set."""
        return ""

    def measure(self, job: Job | None = None) -> Line:
        """Compute it."""
        return {self.measure_name: _computed(self.recipe, self.arguments)}

    def figures(self, line: Line) -> dict[str, float]:
        """The one figure."""
        return {self.measure_name: line[self.measure_name]}


@cache
def _computed(recipe: Callable[..., float], arguments: tuple[Any, ...]) -> float:
    """Once: a table is compared, counted and drawn."""
    return float(recipe(*arguments))


@dataclass(frozen=True)
class Leak:
    """An attack on 100 victims (Wei et al. (2023), Tables 1 and 3, Figure 3); the quick version attacks two digits.

    Attributes:
        attack: The attack's name.
        algorithm: The method attacked.
        changes: Its settings, as `key=value`.
        data: The data set.
        kind: The attack type, 0 to 2.
    """

    attack: str
    algorithm: str
    changes: tuple[str, ...]
    data: str
    kind: Any
    seeded, instant = False, False

    def key(self, quick: bool) -> str:
        """A digest of attack, method and data set."""
        changes = (word.partition("=") for word in self.changes)
        given = [self.attack, self.algorithm, *(earlier_key(key) + dot + value for key, dot, value in changes)]
        given += [self.needs(quick), self.kind]
        return _digest({"attack": given})

    def needs(self, quick: bool) -> str:
        """The data set."""
        return "digits" if quick else self.data

    def measure(self, job: Job) -> Line:
        """Attack."""
        from shoal.attacks import Aim, attack, recipe
        from shoal.config import configure

        victims = QUICK_VICTIMS if job.quick else VICTIMS
        named = {"algorithm": self.algorithm, "data.name": self.needs(job.quick)}
        given = named | {"seed": job.seed, "engine.device": job.device}
        outcome = attack(configure(given, self.changes), recipe(self.attack), Aim(self.kind, victims))
        return outcome.row()

    def figures(self, line: Line) -> dict[str, float]:
        """As the paper counts: error and iterations of successes; where there is none, of all, and the limit."""
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
