"""Audits of every method over many seeds, and the table of what they catch: docs/results/audit.md is made from it.

python benchmarks/audit.py --seeds 20 --out docs/results/audit.jsonl      every method, quick, 20 seeds
python benchmarks/audit.py --power --out docs/results/audit-power.jsonl   broken forms of every method, once
python benchmarks/audit.py --show docs/results/audit.jsonl                the tables
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.algorithms import algorithms
from shoal.audit.auditing import QUICK, THOROUGH, audit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", help="only claims of this kind: proven or published")
    parser.add_argument("--power", action="store_true")
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--adversary", action="store_true", help="only the game and the canaries, not the checks")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path)
    given = parser.parse_args()
    if given.show:
        rows = [json.loads(line) for line in given.show.read_text(encoding="utf-8").splitlines()]
        print("\n".join(power_table(rows) if any(len(row["would_catch"]) > 1 for row in rows) else table(rows)))
        return
    effort = THOROUGH if given.thorough or given.power else QUICK
    effort = replace(effort, pairs=0) if given.adversary else effort
    for seed in range(given.first, given.first + given.seeds):
        for name in given.only or algorithms():
            for outcome in audit(algorithms()[name], effort=effort, seed=seed, power=given.power, kind=given.kind):
                line = json.dumps({"seed": seed} | outcome.row())
                print(f"{seed} {name} {outcome.case.unit} {outcome.verdict} {outcome.epsilon:.2f}", flush=True)
                if given.out:
                    with given.out.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line a claim: what was measured over the seeds, and how often each verdict came."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["algorithm"], row["unit"]].append(row)
    lines = [
        "| method | unit | claim | epsilon | at least (median, greatest) | verdict | 1/4 of the noise flagged |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, unit), found in groups.items():
        first, measured = found[0], sorted(row["measured"] for row in found)
        verdicts = ", ".join(
            f"{verdict} {sum(row['verdict'] == verdict for row in found)}/{len(found)}"
            for verdict in dict.fromkeys(row["verdict"] for row in found)
        )
        caught = [bool({"game", "canaries"} & set(row["would_catch"].get("noise x 1/4", []))) for row in found]
        flagged = f"{sum(caught)}/{len(found)}" if first["kind"] == "proven" else "–"
        claimed = "–" if first["claimed"] is None else f"{first['claimed']:.3g}"
        lines.append(
            f"| {name} | {unit} | {first['kind']} | {claimed} "
            f"| {measured[len(measured) // 2]:.2f}, {measured[-1]:.2f} | {verdicts} | {flagged} |"
        )
    return lines


def power_table(rows: list[dict[str, Any]]) -> list[str]:
    """A line a broken form: in how many methods it was tried, and how often each part of the audit caught it."""
    parts = ("game", "canaries", "noise scale", "noise beside data", "noise reused", "replay sensitivity")
    caught: dict[str, list[list[str]]] = defaultdict(list)
    for row in rows:
        for name, by in row["would_catch"].items():
            caught[name].append(by)
    lines = [f"| broken form | caught | {' | '.join(parts)} |", "|---" * (len(parts) + 2) + "|"]
    for name, found in caught.items():
        counts = [sum(part in by for by in found) for part in parts]
        lines.append(f"| {name} | {sum(map(bool, found))} of {len(found)} | {' | '.join(map(str, counts))} |")
    return lines


if __name__ == "__main__":
    main()
