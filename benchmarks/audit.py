"""Audits of every method over many seeds, and the tables of what they catch, of which docs/results/audit.md is made.

python benchmarks/audit.py --seeds 20 --out all.jsonl                        every method, quick, 20 seeds
python benchmarks/audit.py --power --kind proven --seeds 3 --out all.jsonl   their broken forms
python benchmarks/audit.py --show all.jsonl --out docs/results/audit.jsonl   the tables, and the figures in short
python benchmarks/audit.py --picture docs/results/audit.png                  the curves of some of them
python benchmarks/audit.py --one-run --out docs/results/audit_one_run.jsonl  how tight canaries are; resumes
python benchmarks/audit.py --show-one-run docs/results/audit_one_run.jsonl   their table
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shoal.accounting.claims import Unit
from shoal.algorithms import algorithms
from shoal.audit import one_run, one_run_bounds
from shoal.audit.audit_plot import picture
from shoal.audit.auditing import QUICK, THOROUGH, Effort, Outcome, audit
from shoal.audit.broken import Broken, with_noise
from shoal.audit.cases import DELTA, cases
from shoal.audit.one_run_bounds import Count
from shoal.mechanisms.sampling import Clients
from shoal.random.streams import Streams
from shoal.report.claim_rows import at_least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", help="only claims of this kind: proven or published")
    parser.add_argument("--power", action="store_true")
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--only", nargs="*", help="these methods; with --one-run: these canaries, such as dp-ftrl")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", help="print the tables of these files")
    parser.add_argument("--one-run", action="store_true", help="canaries alone, over many seeds")
    parser.add_argument("--show-one-run", type=Path, help="print the table of this file")
    parser.add_argument("--picture", type=Path, help="draw the curves of a few methods")
    given = parser.parse_args()
    if given.show:
        rows = sorted((short(row) for path in given.show for row in read(path)), key=place)
        print("\n".join([*table([row for row in rows if not row["power"]]), "", *power_table(rows)]))
        if given.out:
            given.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return
    if given.picture:
        given.picture.write_bytes(picture(list(_shown())))
        return
    if given.one_run:
        one_run_cells(given.out, given.only)
        return
    if given.show_one_run:
        print("\n".join(one_run_table(read(given.show_one_run))))
        return
    effort = THOROUGH if given.thorough else QUICK
    for seed in range(given.first, given.first + given.seeds):
        for name in given.only or algorithms():
            for outcome in audit(algorithms()[name], effort=effort, seed=seed, power=given.power, kind=given.kind):
                line = json.dumps({"seed": seed, "power": given.power} | outcome.row())
                print(f"{seed} {name} {outcome.case.unit} {outcome.verdict} {outcome.epsilon:.2f}", flush=True)
                if given.out:
                    with given.out.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")


@dataclass(frozen=True)
class Cell:
    """A claim, the share of its noise that is played, the runs that are pooled, and how many seeds."""

    claimed: float
    noise: float = 1.0
    runs: int = 1
    seeds: int = 20
    where: str = "records"
    """`records`: 10,000 in one step of dp-sgd; `dp-ftrl`: 4,000 clients of 5 rounds with its correlated noise; else
    2,000 clients of 8 rounds that are sampled so."""

    @property
    def canaries(self) -> int:
        return {"records": 10_000, "dp-ftrl": 4000}.get(self.where, 2000)

    def broken(self, seed: int) -> Broken:
        """What is charged, and what is played."""
        if self.where == "records":
            case = next(cases(algorithms()["dp-sgd"], "record", self.claimed))
        elif self.where == "dp-ftrl":
            case = next(cases(algorithms()["dp-ftrl"], "client", self.claimed, 5))
        else:
            method = replace(algorithms()["trusted-curator"], clients=Clients(self.where, 2))
            case = next(cases(method, "client", self.claimed, 8))
        return Broken(case, with_noise(case.record, self.noise), Streams(seed))


CELLS = (
    Cell(4, seeds=100), Cell(8), Cell(4, 0.5), Cell(4, 0.25), Cell(4, runs=10, seeds=10),
    *(Cell(claimed, noise, seeds=10, where=where) for claimed, noise in ((4, 1.0), (8, 1.0), (4, 0.25))
      for where in ("random-allocation", "poisson")),
    Cell(1), Cell(1, 0.5), Cell(1, 0.25), Cell(8, 0.5), Cell(8, 0.25),
    *(Cell(4, noise, where="dp-ftrl") for noise in (1.0, 0.5, 0.25)), Cell(8, where="dp-ftrl"),
)  # fmt: skip


def one_run_cells(out: Path, only: list[str] | None) -> None:
    """Play each cell and seed that the file does not have yet, or those of some canaries; a line each."""
    keys = (*Cell.__dataclass_fields__, "seed")
    done = {tuple(row[key] for key in keys) for row in (read(out) if out.exists() else [])}
    for seed in range(max(cell.seeds for cell in CELLS)):
        for cell in CELLS:
            if seed >= cell.seeds or (*vars(cell).values(), seed) in done or cell.where not in (only or [cell.where]):
                continue
            started, broken = time.perf_counter(), cell.broken(seed)
            found = one_run.guess(broken, cell.canaries, cell.runs)
            doubted = found.p_value <= one_run.FLAG
            again = one_run.anew(broken, cell.runs)
            flagged = doubted and one_run.guess(again, cell.canaries, cell.runs).p_value <= one_run.AGAIN
            row = vars(cell) | {"seed": seed} | vars(found) | {"flagged": flagged}
            if cell.runs == 1:
                count = Count(found.canaries, found.guesses, found.right)
                row["steinke"] = one_run_bounds.epsilon_at(count, DELTA, one_run.ALPHA)
            row["seconds"] = round(time.perf_counter() - started, 2)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def one_run_table(rows: list[dict[str, Any]]) -> list[str]:
    """A line a cell: medians over the seeds, and how often the claim was flagged."""
    lines = [
        "| canaries | claimed | noise | runs | seeds | at least | least, greatest | final model alone "
        "| independence assumed | by one (epsilon, delta) | flagged |",
        "|---" * 11 + "|",
    ]
    for cell in CELLS:
        found = [row for row in rows if all(row[key] == value for key, value in vars(cell).items())]
        if not found:
            continue

        def middle(key: str, found: list[dict[str, Any]] = found) -> str:
            return at_least(median(row[key] for row in found)) if key in found[0] else "–"

        values = sorted(row["epsilon"] for row in found)
        lines.append(
            f"| {found[0]['canaries']:,} {cell.where} | {cell.claimed:g} | {cell.noise:g} | {cell.runs} "
            f"| {len(found)} | {middle('epsilon')} | {at_least(values[0])}, {at_least(values[-1])} "
            f"| {'–' if cell.where == 'records' else middle('final')} | {middle('independent')} "
            f"| {middle('steinke')} "
            f"| {sum(row['flagged'] for row in found)} of {len(found)} |"
        )
    return lines


def _shown() -> Iterator[Outcome]:
    """Claims that fail, and some that hold; by the game alone, whose curves they are."""
    effort = Effort(round_trials=800, canaries=100, pairs=0)
    shown: tuple[tuple[str, Unit], ...] = (
        ("fed-alpha-cdp", "record"), ("geyer", "client"), ("end-to-end", "client"),
        ("fed-cdp-private", "record"), ("geyer-private", "client"), ("end-to-end-private", "client"),
    )  # fmt: skip
    for name, level in shown:
        yield from audit(algorithms()[name], level=level, effort=effort)


KEPT = (
    "algorithm", "unit", "kind", "seed", "power", "claimed", "delta", "measured", "estimate",
    "true_bound", "trials", "verdict", "flagged", "would_catch", "seconds",
)  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def short(row: dict[str, Any]) -> dict[str, Any]:
    """What the tables are made from."""
    return {key: round(row[key], 4) if isinstance(row[key], float) and key != "delta" else row[key] for key in KEPT}


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Claims that papers make without proof, then those that are proven, then none."""
    kinds = ("published", "proven", "none")
    return (row["power"], kinds.index(row["kind"]), row["algorithm"], row["unit"], row["seed"])


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line a claim: what was measured over the seeds, and how often each verdict came."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["algorithm"], row["unit"]].append(row)
    lines = [
        "| method | unit | claim | epsilon claimed | measured, at least: median (least to greatest) | verdict "
        "| 1/4 of the noise flagged by game or canaries | by the noise scale |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, unit), found in groups.items():
        first, measured = found[0], sorted(row["measured"] for row in found)
        verdicts = ", ".join(
            f"{verdict} {sum(row['verdict'] == verdict for row in found)} of {len(found)}"
            for verdict in dict.fromkeys(row["verdict"] for row in found)
        )
        caught = [row["would_catch"].get("noise x 1/4", []) for row in found]
        counts = [sum(bool(parts & set(by)) for by in caught) for parts in ({"game", "canaries"}, {"noise scale"})]
        flagged = [f"{count} of {len(found)}" if first["kind"] == "proven" else "–" for count in counts]
        claimed = "–" if first["claimed"] is None else f"{first['claimed']:.3g}"
        lines.append(
            f"| {name} | {unit} | {first['kind']} | {claimed} "
            f"| {at_least(median(measured))} ({at_least(measured[0])} to {at_least(measured[-1])}) "
            f"| {verdicts} | {' | '.join(flagged)} |"
        )
    return lines


def power_table(rows: list[dict[str, Any]]) -> list[str]:
    """A line a broken form: in how many methods it was tried, and how often each part of the audit caught it."""
    parts = ("game", "canaries", "noise scale", "noise beside data", "noise reused", "replay sensitivity")
    caught: dict[str, list[list[str]]] = defaultdict(list)
    for row in rows:
        if row["power"]:
            for name, by in row["would_catch"].items():
                caught[name].append(by)
    lines = [f"| broken form | caught | {' | '.join(parts)} |", "|---" * (len(parts) + 2) + "|"]
    for name, found in caught.items():
        counts = [sum(part in by for by in found) for part in parts]
        lines.append(f"| {name} | {sum(map(bool, found))} of {len(found)} | {' | '.join(map(str, counts))} |")
    return lines


if __name__ == "__main__":
    main()
