"""The claims of a run as rows of a table and as sentences; the command line and the page print the same."""

from __future__ import annotations

import math
from typing import Any

from shoal.accounting.claims import Proven
from shoal.accounting.rounding import IN_NAME_ONLY, plain, up
from shoal.html_text import html_table
from shoal.report.plots import OBSERVERS, UNITS, observers_in_words, whose
from shoal.report.run_reader import Run
from shoal.report.scores import number
from shoal.report.series import figure

HEAD = ("unit", "observer", "epsilon", "delta", "")
WEAK = 10.0
"""An epsilon above this is proven, but not shown in green."""
FAINT = 1e-9
"""A smaller share of delta for the noise sampler is left out of tables; JSON and certificates have it."""
TESTER = {
    "release": "Someone who sees the released models",
    "server": "The server, who sees every client's message",
    "client-process": "Someone inside the client process, who sees every noisy local step,",
}


class Claims(list[dict[str, Any]]):
    """Claims as `Proven.to_json` writes them: a list of mappings that is shown in words."""

    def __repr__(self) -> str:
        return f"Claims({'; '.join(Proven(**claim).brief() for claim in self)})"

    def _repr_html_(self) -> str:
        return html_table("proven", shown_rows(self), HEAD)

    @property
    def least(self) -> list[Proven]:
        """Of each unit for which something is proven the claim with the least epsilon."""
        proving = [Proven(**claim) for claim in self if claim["epsilon"] is not None]
        ordered = sorted(proving, key=lambda claim: claim.epsilon or 0.0, reverse=True)
        return list({claim.unit: claim for claim in ordered}.values())


def shown_rows(proven: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of `proven_rows` as words, in the order of `HEAD`."""
    rows = proven_rows(proven)
    return [(row["unit"], row["observer"], row["epsilon"] or "none", row["delta"], row["note"]) for row in rows]


def proven_rows(proven: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Claims as rows: first the bounds, then what is not proven and why; equal claims share a row.

    Args:
        proven: Claims as `Proven.to_json` writes them.

    Returns:
        Rows with unit, observer, epsilon, delta, note and tone (`yes`, `weak`, `void`, `no`).
    """
    proving = [claim for claim in proven if number(claim.get("epsilon")) is not None]
    return [*_bounds(proving), *_reasons([claim for claim in proven if claim not in proving], len(proven))]


def _bounds(proving: list[dict[str, Any]]) -> list[dict[str, str]]:
    same: dict[tuple[str, float, str, str], list[str]] = {}
    for claim in proving:
        key = (whose(claim), float(claim["epsilon"]), up(claim.get("delta") or 0, 6), _note(claim))
        same.setdefault(key, []).append(str(claim.get("observer")))
    return [
        {
            "unit": unit,
            "observer": observers_in_words(observers),
            "epsilon": up(epsilon, 2) if epsilon > IN_NAME_ONLY else figure(epsilon),
            "delta": delta,
            "note": note,
            "tone": "yes" if epsilon <= WEAK else "weak" if epsilon <= IN_NAME_ONLY else "void",
        }
        for (unit, epsilon, delta, note), observers in same.items()
    ]


def _note(claim: dict[str, Any]) -> str:
    """The accountant, the sampler's part of delta, and the assumptions."""
    sampler = number(claim.get("sampler_delta"))
    parts = [str(claim.get("accountant") or "rdp").upper()]
    if sampler and sampler > FAINT * (number(claim.get("delta")) or 0.0):
        parts += [f"{up(sampler, 1)} of delta is for the noise sampler"]
    parts += [str(claim["because"])] if claim.get("because") else []
    return "; ".join(parts)


def _reasons(unproven: list[dict[str, Any]], of: int) -> list[dict[str, str]]:
    reasons: dict[str, list[tuple[str, str]]] = {}
    for claim in unproven:
        pair = (whose(claim | {"adjacency": None}), str(claim.get("observer")))
        reasons.setdefault(str(claim.get("because")), []).append(pair)
    rows = []
    for because, pairs in reasons.items():
        units = " and ".join(dict.fromkeys(unit for unit, _ in pairs))
        observers = ", ".join(dict.fromkeys(OBSERVERS.get(who, who) for _, who in pairs))
        row = {"unit": units, "observer": "all" if len(pairs) == of else observers, "epsilon": "", "delta": ""}
        rows.append(row | {"note": because, "tone": "no"})
    return rows


def shared_notes(rows: list[dict[str, str]]) -> tuple[list[dict[str, str]], str]:
    """Take out the notes that all bounds have in common, so that they can be printed once.

    Args:
        rows: From `proven_rows`.

    Returns:
        The rows without these notes, and the notes.
    """
    bounds = [row["note"].split("; ") for row in rows if row["epsilon"]]
    if len(bounds) < 2:
        return rows, ""
    shared = [note for note in bounds[0] if all(note in other for other in bounds)]

    def own(note: str) -> str:
        return "; ".join(part for part in note.split("; ") if part not in shared)

    return [row | {"note": own(row["note"])} for row in rows], "; ".join(shared)


def published_rows(published: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What the method's paper claims, as rows with unit, epsilon, delta and recipe."""
    return [
        {
            "unit": UNITS.get(str(claim.get("unit")), str(claim.get("unit"))),
            "epsilon": plain(number(claim.get("epsilon")) or 0.0, 3),
            "delta": plain(claim.get("delta") or 0.0),
            "recipe": str(claim.get("recipe")),
        }
        for claim in published
    ]


def at_least(bound: float) -> str:
    """A lower bound with two decimals, rounded down."""
    return f"{math.floor(100 * bound) / 100:.2f}" if math.isfinite(bound) else str(bound)


def audit_rows(audit: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What an audit of the run's method measured, as rows of a table."""
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
    """The claim of the headline: the budget's, or else the one with the least epsilon."""
    proving = [claim for claim in run.proven if number(claim.get("epsilon")) is not None]
    asked = (run.budget.get("unit", "client"), run.budget.get("observer", "release"))
    about = [claim for claim in proving if (claim.get("unit"), claim.get("observer")) == asked]
    if about and (run.budget.get("epsilon") is not None or about[0]["epsilon"] <= IN_NAME_ONLY):
        return about[0]
    return min(proving, key=lambda claim: float(claim["epsilon"]), default=None)


def in_words(run: Run) -> str:
    """What the headline's (epsilon, delta) means, in a sentence."""
    claim = main_claim(run)
    return _unproven(run) if claim is None else meaning(claim)


def _unproven(run: Run) -> str:
    if run.state == "running" and not run.metrics:
        return "Nothing is known yet."
    because = next((str(each["because"]) for each in run.proven if each.get("because")), "")
    return "Nothing is proven about what this model reveals" + (f": {because}." if because else ".")


def meaning(claim: dict[str, Any]) -> str:
    """What an (epsilon, delta) means, in a sentence."""
    epsilon, delta = float(claim["epsilon"]), number(claim.get("delta")) or 0.0
    power = f"{math.ceil(epsilon / math.log(10))}".translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    times = up(math.exp(epsilon), 3) if epsilon < 9 else f"10{power}"
    client = "simulated client" if claim.get("simulated") else "client"
    asked = {
        "client": f"whether one {client}'s data were used",
        "record": "which of two records was used",
        "user": "whether one user's records were used",
    }
    return (
        f"{TESTER[str(claim['observer'])]} and tests {asked[claim['unit']]} has a true-positive rate of at most "
        f"{times} times the false-positive rate, plus {up(delta, 6)}."
    )
