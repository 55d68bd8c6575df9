"""Two hundred kills: a private run is killed with SIGKILL at random moments and resumed each time.

    python benchmarks/kill.py [--kills 200] [--seed 0]

After each kill tests/support/kill_run.py checks: the ledger's chain holds; the model on the disk is one that the
ledger knows; no file is damaged; epsilon has not gone down; rounds played again were charged again, under a new
number and with noise that was never drawn before. The first check that fails ends the script with its traceback.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "kill_run.py"


def experiment(name: str, *options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), name, folder, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{name}: a promise was broken, see above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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
    given = parser.parse_args()
    options = ("--kills", str(given.kills), "--seed", str(given.seed))
    show("a private run, killed at random moments", experiment("random", *options))
    show("a private run, killed at each step of writing", experiment("steps"))
    show("fedavg, killed at random moments: the same model in the end", experiment("same", "--kills", "20"))


if __name__ == "__main__":
    main()
