"""Draws docs/results/client-level.jsonl: the frontier of accuracy against proven epsilon, and 001's Figure 2.

python benchmarks/plot_client_level.py docs/results/client-level.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

PUBLISHED = {100: 0.78, 1000: 0.92, 10_000: 0.96}
COLOURS = {100: "#c2410c", 1000: "#0f766e", 10_000: "#4338ca"}


def frontier(lines: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.6, 4.4))
    for clients, colour in COLOURS.items():
        found = defaultdict(list)
        for line in lines:
            if line["cell"].startswith(f"geyer-private/{clients}/"):
                found[round(line["proven_epsilon"], 2)].append(line["accuracy"])
        points = sorted(found.items())
        xs, means = [x for x, _ in points], [sum(ys) / len(ys) for _, ys in points]
        spread = [
            [m - min(ys) for m, (_, ys) in zip(means, points, strict=True)],
            [max(ys) - m for m, (_, ys) in zip(means, points, strict=True)],
        ]
        axes.errorbar(
            xs,
            means,
            yerr=spread,
            fmt="o-",
            color=colour,
            capsize=3,
            markersize=5,
            label=f"{clients:,} clients, proven",
        )
        axes.plot(8, PUBLISHED[clients], "o", markersize=9, markerfacecolor="none", markeredgewidth=1.8, color=colour)
    axes.plot(
        [],
        [],
        "o",
        markersize=9,
        markerfacecolor="none",
        markeredgewidth=1.8,
        color="#555",
        label="published by 001 at 8, not proven",
    )
    plain = [line["accuracy"] for line in lines if line["cell"] == "geyer-table1/none"]
    axes.axhline(sum(plain) / len(plain), color="#777", linestyle=":", linewidth=1.2)
    axes.annotate(
        "001's network without privacy", (0.14, sum(plain) / len(plain) - 0.006), va="top", color="#555", fontsize=8.5
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("client-level epsilon (delta 1e-3, 1e-5, 1e-6 for 100, 1,000, 10,000 clients)")
    axes.set_ylabel("accuracy on MNIST's test set")
    axes.set_ylim(0.5, 1.0)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=160)


def variances(lines: list[dict[str, Any]], path: Path) -> None:
    """001 Figure 2: accuracy, V_c and U_s over the rounds, seed 0."""
    figure, rows = plt.subplots(3, 3, figsize=(9.6, 6.4), sharex="col")
    for column, (clients, colour) in enumerate(COLOURS.items()):
        line = next(line for line in lines if line["cell"] == f"geyer-table1/{clients}" and line["seed"] == 0)
        rounds, *curves = zip(*line["curve"], strict=True)
        names = ("accuracy", "V_c, between clients", "U_s, update scale")
        for row, (name, values) in enumerate(zip(names, curves, strict=True)):
            axes = rows[row][column]
            axes.plot(rounds, values, color=colour, linewidth=1.4)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            if row:
                axes.set_yscale("log")
            if column == 0:
                axes.set_ylabel(name, fontsize=9)
        rows[0][column].set_title(f"{clients:,} clients", fontsize=10)
        rows[2][column].set_xlabel("round")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    source = Path(sys.argv[1])
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    frontier(lines, source.with_name("frontier.png"))
    variances(lines, source.with_name("geyer-figure2.png"))


if __name__ == "__main__":
    main()
