"""What is proven of a run and what its paper claims, in rows and in words."""

from __future__ import annotations

import math
from typing import Any

from shoal.accounting.rounding import up
from shoal.report.folder import Run, number
from shoal.report.plots import OBSERVERS, UNITS, observers_in_words, whose
from shoal.report.series import figure

WEAK = 10.0
"""An epsilon above this is proven, but nothing to be shown in green."""
IN_NAME_ONLY = 100.0


def proven_rows(proven: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What is proven of whom against whom, then what is not, because ...; who learns the same shares a row."""
    proving = [claim for claim in proven if number(claim.get("epsilon")) is not None]
    return [*_bounds(proving), *_reasons([claim for claim in proven if claim not in proving], len(proven))]


def _bounds(proving: list[dict[str, Any]]) -> list[dict[str, str]]:
    same: dict[tuple[str, float, str, str], list[str]] = {}
    for claim in proving:
        note = f"by {str(claim.get('accountant') or 'rdp').upper()}"
        if sampler := number(claim.get("sampler_delta")):
            note = f"{note}; {up(sampler, 1)} of delta is for the noise sampler"
        note = f"{note}; {claim['because']}" if claim.get("because") else note
        key = (whose(claim), float(claim["epsilon"]), up(claim.get("delta") or 0, 6), note)
        same.setdefault(key, []).append(str(claim.get("observer")))
    return [
        {
            "unit": unit,
            "observer": observers_in_words(observers),
            "epsilon": figure(epsilon),
            "delta": delta,
            "note": f"{note}; a bound in name only" if epsilon > IN_NAME_ONLY else note,
            "tone": "yes" if epsilon <= WEAK else "weak",
        }
        for (unit, epsilon, delta, note), observers in same.items()
    ]


def _reasons(unproven: list[dict[str, Any]], of: int) -> list[dict[str, str]]:
    reasons: dict[str, list[tuple[str, str]]] = {}
    for claim in unproven:
        pair = (str(claim.get("unit")), str(claim.get("observer")))
        reasons.setdefault(str(claim.get("because")), []).append(pair)
    rows = []
    for because, pairs in reasons.items():
        units = " and ".join(dict.fromkeys(UNITS.get(unit, unit) for unit, _ in pairs))
        observers = ", ".join(dict.fromkeys(OBSERVERS.get(who, who) for _, who in pairs))
        whom = "anybody" if len(pairs) == of else observers
        row = {"unit": units, "observer": whom, "epsilon": "", "delta": ""}
        rows.append(row | {"note": f"because {because}", "tone": "no"})
    return rows


def published_rows(published: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [
        {
            "unit": UNITS.get(str(claim.get("unit")), str(claim.get("unit"))),
            "epsilon": f"{number(claim.get('epsilon')) or 0:.3g}",
            "delta": f"{claim.get('delta') or 0:g}",
            "recipe": str(claim.get("recipe")),
        }
        for claim in published
    ]


def at_least(bound: float) -> str:
    """A lower bound in two digits: never rounded up."""
    return f"{math.floor(100 * bound) / 100:.2f}" if math.isfinite(bound) else str(bound)


def audit_rows(audit: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What an audit of the run's method measured, in a small setting of its own."""
    tones = {"consistent": "yes", "VIOLATED": "no"}
    return [
        {
            "unit": UNITS.get(str(row.get("unit")), str(row.get("unit"))),
            "kind": str(row.get("kind")),
            "claimed": "–" if (claimed := number(row.get("claimed"))) is None else up(claimed, 3),
            "measured": at_least(number(row.get("measured")) or 0.0),
            "verdict": str(row.get("verdict")),
            "setting": str(row.get("setting")),
            "tone": tones.get(str(row.get("verdict")), "weak"),
        }
        for row in audit
    ]


def main_claim(run: Run) -> dict[str, Any] | None:
    """The claim of the headline: the one that the budget is about, else the first that is more than a name."""
    proving = [claim for claim in run.proven if number(claim.get("epsilon")) is not None]
    asked = (run.budget.get("unit", "client"), run.budget.get("observer", "release"))
    about = [claim for claim in proving if (claim.get("unit"), claim.get("observer")) == asked]
    if about and (run.budget.get("epsilon") is not None or about[0]["epsilon"] <= IN_NAME_ONLY):
        return about[0]
    return min(proving, key=lambda claim: float(claim["epsilon"]), default=None)


def in_words(run: Run) -> str:
    """What the headline's (epsilon, delta) means, for people who do not read Greek."""
    claim = main_claim(run)
    if claim is None:
        if run.state == "running" and not run.metrics:
            return "Nothing is known yet."
        because = next((str(each["because"]) for each in run.proven if each.get("because")), "")
        return "Nothing is proven about what this model reveals" + (f": {because}." if because else ".")
    epsilon, delta = float(claim["epsilon"]), number(claim.get("delta")) or 0.0
    power = f"{math.ceil(epsilon / math.log(10))}".translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    times = up(math.exp(epsilon), 3) if epsilon < 9 else f"10{power}"
    simulated = "simulated " if claim.get("simulated") else ""
    asked = f"whether one {simulated}client's data were there"
    asked = asked if claim["unit"] == "client" else "which of two records was there"
    who = OBSERVERS.get(str(claim["observer"]), str(claim["observer"]))
    return (
        f"Whatever test {who} makes of {asked}: its rate of true positives is at most {times} times its rate of "
        f"false positives, plus {up(delta, 6)}."
    )
