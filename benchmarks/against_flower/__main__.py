"""Seconds a round of example-level DP: Shoal's simulator against Flower's, with Opacus in its clients, in one run.

Flower wants an environment of its own (torch first and by its exact version, as in the Makefile):

    python3 -m venv FLOWER && FLOWER/bin/pip install torch==2.13.0
    FLOWER/bin/pip install 'flwr[simulation]==1.41.0' torch==2.13.0
    FLOWER/bin/pip install numpy scipy opt_einsum && FLOWER/bin/pip install --no-deps 'opacus==1.6.*'
    python benchmarks/against_flower --flower-python FLOWER/bin/python [--task mlp] [--steps 10] [--repeats 5]

The tasks and the rules are those of against_opacus. A round of Flower is FedAvg's messages to all nodes, training in
Ray's actors, the replies and their mean. The actors keep data and wrapped network from message to message, and the
server looks for replies every 5 ms instead of Flower's 100. Settings: one actor for each core or one with all of
them, threads, mkldnn on and off, channels last, and all of Opacus' modes; what is slow in a few steps gets no full
round. No telemetry is sent. Each task prints one JSON object, in which `ratio` is Flower's seconds over Shoal's.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from against_opacus.compare import parser, run
from against_opacus.ours import Bench
from against_opacus.processes import Processes, versions
from against_opacus.rivals import Choice, Size

WORKER = Path(__file__).with_name("worker.py")


class Flower:
    """Flower's simulation; a change of the number of actors starts it anew, with a step to warm up."""

    private, trial_clients = True, 10

    def __init__(self, bench: Bench, python: str, modes: tuple[str, ...]) -> None:
        self.bench, self.python, self.modes = bench, python, modes
        self.actors, self.running = 0, Processes([], 0, bench.folder)

    def play(self, choice: Choice, size: Size, **more: Any) -> dict[str, Any]:
        order = asdict(choice) | asdict(size) | more
        if choice.processes != self.actors:
            self._start(choice.processes)
            self.running.ask([order | {"steps": 1}])
        return self.running.ask([order])[0]

    def _start(self, actors: int) -> None:
        self.close()
        quiet = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(self.bench.folder / "flower"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.running = Processes([self.python, str(WORKER), str(actors)], 1, self.bench.folder, quiet)
        self.running.ask([self.bench.told])
        self.actors = actors

    def close(self) -> None:
        self.running.close()
        self.actors = 0


def main() -> None:
    option = "--flower-python"
    chosen = parser(__doc__, option, "Flower").parse_args()
    found = versions(chosen.python, option, "flwr", "ray", "opacus", "torch") | {"shoal_torch": torch.__version__}
    run(chosen, {"flower": lambda bench: Flower(bench, chosen.python, tuple(chosen.modes))}, found)


if __name__ == "__main__":
    main()
