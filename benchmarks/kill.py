"""Two hundred kills: private runs are killed with SIGKILL at random moments and resumed each time.

    python benchmarks/kill.py [--kills 200] [--seed 0] [--results FILE]

After each kill tests/support/kill_run.py checks: the ledger's chain holds; the model on the disk is one that the
ledger knows; no file is damaged; epsilon has not gone down; rounds played again were charged again, under a new
number and with noise that was never drawn before. The first check that fails ends the script with its traceback.
With `--results` what was seen of each run is appended to that file, and the same command goes on where an earlier one
was interrupted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "kill_run.py"


def experiment(name: str, *options: str) -> Iterator[dict[str, Any]]:
    """What was seen, of each run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), name, folder, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            yield from map(json.loads, child.stdout)
    if child.returncode:
        sys.exit(f"{name}: a promise was broken, see above")


def kills(name: str, count: int, seed: int, results: Path | None) -> dict[str, Any]:
    """What was seen of so many kills; runs that are in the file are not played again."""
    wanted = {"experiment": name, "of": count, "seed": seed}
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results and results.exists() else []
    found = [line for line in lines if line.items() >= wanted.items()]
    options = ("--kills", str(count), "--seed", str(seed), "--first", str(len(found)))
    for facts in experiment(name, *options):
        found.append(wanted | facts)
        if results is not None:
            with results.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    return total([{key: value for key, value in line.items() if key not in wanted} for line in found])


def total(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over runs, and the largest of what is called most; epsilons are of one run each, and left out."""
    facts: dict[str, Any] = {"runs": len(found)}
    for key, value in found[0].items():
        values = [line[key] for line in found]
        if key.startswith("epsilon"):
            continue
        if isinstance(value, dict):
            facts[key] = dict(sum(map(Counter, values), Counter()))
        else:
            facts[key] = max(values) if key.startswith("most") else round(sum(values), 1)
    return facts


def show(title: str, facts: dict[str, Any]) -> None:
    print(title)
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}: {number:.4g}" for key, number in value.items())
        print(f"    {name:<32}{value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, metavar="FILE", help="go on with what is there")
    given = parser.parse_args()
    show("private runs, killed at random moments", kills("random", given.kills, given.seed, given.results))
    show("a private run, killed at each step of writing", *experiment("steps"))
    show("fedavg, killed at random moments: the same model in the end", *experiment("same", "--kills", "20"))


if __name__ == "__main__":
    main()
