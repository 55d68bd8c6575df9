"""How the cost of a round of example-level DP grows with clients, steps and batch, and the memory that it takes.

    python benchmarks/scaling.py [--quick] [--repeats 3] [--plot docs/results/performance-scaling.png]

For an MLP of 795,010 parameters and a CNN of 34,720 each of the three is varied alone; all sizes are timed in turns,
the fastest round counts, and a straight line is fitted. The memory is the greatest resident size of a fresh process
that plays one round of the CNN with 100 clients x 100 steps of 5, everything included. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from against_opacus.ours import TASKS, Bench, Shoal, Task, machine

BASES = {"mlp": TASKS["mlp"], "cnn": replace(TASKS["cnn"], clients=20, steps=20)}
"""The sizes of what is not varied."""
FACTORS = {"clients": (0.5, 1, 2, 3, 4), "steps": (0.5, 1, 2, 3, 4), "batch": (1, 2, 3, 4)}
QUICK = (1, 2, 3)
ALLOWED = 3.0
"""GB that the round of 100 clients may take."""


@dataclass(frozen=True)
class Line:
    """seconds = start + slope x size; `off` is the greatest distance of a point, as a share of its seconds."""

    start: float
    slope: float
    off: float

    @classmethod
    def through(cls, sizes: list[int], seconds: list[float]) -> Line:
        slope, start = (float(value) for value in np.polyfit(sizes, seconds, 1))
        apart = [abs(start + slope * size - took) / took for size, took in zip(sizes, seconds, strict=True)]
        return cls(start, slope, max(apart))


def base_of(name: str, quick: bool) -> Task:
    return replace(BASES[name], clients=4, steps=2) if quick else BASES[name]


def sizes(task: Task, what: str, quick: bool) -> list[int]:
    return [round(getattr(task, what) * factor) for factor in (QUICK if quick else FACTORS[what])]


def measured(name: str, quick: bool, repeats: int) -> dict[str, dict[int, float]]:
    """For each thing that is varied, the seconds by its size."""
    base = base_of(name, quick)
    points = [(what, size) for what in FACTORS for size in sizes(base, what, quick)]
    best: dict[tuple[str, int], float] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shoals = {
            point: stack.enter_context(closing(Shoal(Bench.of(replace(base, **dict([point])), 0, folder))))
            for point in points
        }
        for turn in range(repeats + 1):
            for point, shoal in shoals.items():
                took = shoal.play()
                if turn:
                    best[point] = min(took, best.get(point, took))
    return {what: {size: best[what, size] for size in sizes(base, what, quick)} for what in FACTORS}


def told(found: dict[int, float]) -> dict[str, Any]:
    line = Line.through(list(found), list(found.values()))
    return {
        "seconds": {size: round(took, 4) for size, took in found.items()},
        "line": {
            "start": round(line.start, 4),
            "slope": round(line.slope, 6),
            "greatest_distance": round(line.off, 3),
        },
    }


def draw(found: dict[str, dict[str, dict[int, float]]], path: Path, quick: bool) -> None:
    """A row a network, a column for each thing that is varied."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(len(found), len(FACTORS), figsize=(10, 5.2), squeeze=False, layout="constrained")
    for row, (name, by_what) in zip(grid, found.items(), strict=True):
        for axes, (what, points) in zip(row, by_what.items(), strict=True):
            line = Line.through(list(points), list(points.values()))
            far = max(points)
            axes.plot([0, far], [line.start, line.start + line.slope * far], color="#4477aa", linewidth=1.2)
            axes.plot(list(points), list(points.values()), "o", color="#223355", markersize=4.5)
            each = what.removesuffix("s") if what != "batch" else "record of a batch"
            label = f"{line.start:.2g} s + {1000 * line.slope:.3g} ms a {each}"
            axes.text(0.04, 0.92, label, transform=axes.transAxes, va="top", fontsize=9, color="#4477aa")
            axes.set_xlim(0, 1.06 * far)
            axes.set_ylim(0, 1.3 * max(points.values()))
            axes.set_xlabel(what)
            axes.xaxis.set_major_locator(pyplot.MaxNLocator(5, integer=True))
            axes.spines[["top", "right"]].set_visible(False)
        base = base_of(name, quick)
        row[0].set_ylabel("seconds a round")
        row[0].set_title(
            f"{base.name}: {base.clients} clients x {base.steps} steps of {base.batch}, one of them varied",
            loc="left",
            fontsize=10,
        )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def memory_of_round(task: Task) -> float:
    """GB resident at most, of this process, after one round."""
    with tempfile.TemporaryDirectory() as folder, closing(Shoal(Bench.of(task, 0, Path(folder)))) as shoal:
        shoal.play()
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024 / 1e9  # ru_maxrss would hold the size of the process that started this one


def memory_in_fresh_process(quick: bool) -> float:
    command = [sys.executable, __file__, "--memory-only", *(["--quick"] if quick else [])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--plot", type=Path, default=Path(__file__).parents[1] / "docs" / "results" / "performance-scaling.png"
    )
    parser.add_argument("--memory-only", action="store_true", help="print the GB of one round in this process")
    chosen = parser.parse_args()
    if chosen.memory_only:
        print(memory_of_round(replace(TASKS["cnn"], steps=2) if chosen.quick else TASKS["cnn"]))
        return
    memory = memory_in_fresh_process(chosen.quick)
    found = {name: measured(name, chosen.quick, chosen.repeats) for name in BASES}
    draw(found, chosen.plot, chosen.quick)
    lines = {name: {what: told(points) for what, points in by_what.items()} for name, by_what in found.items()}
    print(json.dumps({"machine": machine(), "memory_gb": round(memory, 3), "allowed_gb": ALLOWED, **lines}))
    if memory > ALLOWED:
        raise SystemExit(f"the round took {memory:.2f} GB, more than {ALLOWED:g}")


if __name__ == "__main__":
    main()
