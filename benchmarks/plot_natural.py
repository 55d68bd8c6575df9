"""The tables and the picture of docs/results/natural.md, from the lines that benchmarks/natural.py wrote.

    python benchmarks/plot_natural.py [natural.jsonl ...]

The tables replace all that is below the line `MARK` of the page.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from natural import EPSILONS, MODELS, ROOT, read

RESULTS = ROOT / "docs" / "results"
MARK = "<!-- tables: benchmarks/plot_natural.py -->"
SHOWN = {
    "heart": {"auroc": "AUROC", "accuracy": "accuracy"},
    "insteval": {"rmse": "RMSE", "mae": "MAE"},
    "movielens": {"rmse": "RMSE", "mae": "MAE"},
    "shakespeare": {"accuracy": "accuracy", "perplexity": "perplexity"},
}
TITLES = {
    "heart": "Heart disease, 4 hospitals, a record",
    "insteval": "Lectures, 2,972 students, a client",
    "movielens": "Films, 671 users, a client",
    "shakespeare": "Next character, 800 speakers, a client",
}
Figures = dict[tuple[str, str, str], list[dict[str, Any]]]
"""The lines of (task, model, epsilon), a seed each."""


def grouped(lines: list[dict[str, Any]]) -> tuple[Figures, dict[str, dict[str, float]]]:
    """The federated lines, and the figures of pooled training by task."""
    found: Figures = defaultdict(list)
    pooled = {}
    for line in lines:
        task, model, *rest = line["cell"].split("/")
        if rest:
            found[task, model, rest[0]].append(line)
        else:
            pooled[task] = line["figures"]
    return found, pooled


def spread(lines: list[dict[str, Any]], figure: str) -> str:
    """Mean and range over the seeds."""
    values = [line["figures"][figure] for line in lines]
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(task: str, found: Figures, pooled: dict[str, dict[str, float]]) -> list[str]:
    shown = SHOWN[task]
    rows = [f"## {TITLES[task]}", "", f"| model | epsilon | seeds | {' | '.join(shown.values())} | device |"]
    rows.append("|---" * (4 + len(shown)) + "|")
    for model in MODELS[task]:
        for epsilon in map(str, EPSILONS):
            if lines := found.get((task, model, epsilon)):
                figures = " | ".join(spread(lines, figure) for figure in shown)
                devices = ", ".join(sorted({line["device"] for line in lines}))
                rows.append(f"| {model} | {epsilon} | {len(lines)} | {figures} | {devices} |")
    if task in pooled:
        figures = " | ".join(f"{pooled[task][name]:.3f}" if name in pooled[task] else "" for name in shown)
        rows.append(f"| pooled records | none | | {figures} | cpu |")
    return [*rows, ""]


def picture(found: Figures, pooled: dict[str, dict[str, float]], path: Path) -> None:
    tasks = [task for task in SHOWN if any(key[0] == task for key in found)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(3.6 * len(tasks), 3.2), squeeze=False)
    places = {str(epsilon): place for place, epsilon in enumerate(EPSILONS)}
    for axis, task in zip(axes[0], tasks, strict=True):
        name, label = next(iter(SHOWN[task].items()))
        for model in MODELS[task]:
            there = {
                epsilon: [line["figures"][name] for line in lines]
                for (its, other, epsilon), lines in found.items()
                if (its, other) == (task, model)
            }
            if not there:
                continue
            means = {places[epsilon]: mean(values) for epsilon, values in sorted(there.items())}
            (line,) = axis.plot(sorted(means), [means[place] for place in sorted(means)], marker="o", label=model)
            for epsilon, values in there.items():
                axis.vlines(places[epsilon], min(values), max(values), color=line.get_color(), alpha=0.5)
        if name in pooled.get(task, {}):
            axis.axhline(pooled[task][name], linestyle=":", color="grey", label="pooled records, no privacy")
        axis.set_xticks(list(places.values()), list(places))
        axis.set(title=TITLES[task], xlabel="proven epsilon", ylabel=label)
        axis.title.set_fontsize(9)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    paths = [Path(word) for word in sys.argv[1:]] or [RESULTS / "natural.jsonl"]
    found, pooled = grouped([line for path in paths for line in read(path)])
    rows = [row for task in SHOWN if any(key[0] == task for key in found) for row in table(task, found, pooled)]
    page = RESULTS / "natural.md"
    above = page.read_text(encoding="utf-8").partition(MARK)[0]
    page.write_text(f"{above}{MARK}\n\n" + "\n".join(rows), encoding="utf-8")
    picture(found, pooled, RESULTS / "natural.png")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
