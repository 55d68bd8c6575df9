"""Draw who sends what to whom in a round, plain and secure, for docs/explanation/rounds.md.

python benchmarks/plot_round.py docs/explanation/rounds.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

INK, LINE, SITE, SERVER = "#222222", "#9a9a9a", "#1b6ca8", "#b3541e"
WHO = ("site north", "coordinator", "site south")
PLAIN = (
    ("down", "model, round, terms' digest"),
    ("own", "charge own ledger, train, clip"),
    ("up", "clipped update (with noise, if the method adds it here)"),
    ("server", "check, sum, add noise, release the model"),
)
SECURE = (
    ("down", "1  begin the round"),
    ("up", "fresh public keys, signed"),
    ("down", "2  all public keys"),
    ("up", "shares of own secrets, sealed for other sites; commitments"),
    ("down", "3  model; the sealed shares for this site"),
    ("own", "charge own ledger, train, clip, add noise share, mask"),
    ("up", "masked update: looks random"),
    ("down", "4  list of the sites in the sum"),
    ("up", "signature of that list"),
    ("down", "5  signatures of the threshold"),
    ("up", "one share for each site: of its mask if it is in the sum, of its key if not"),
    ("server", "remove masks: the sum, and only the sum"),
)


def draw(axes: Axes, title: str, steps: tuple[tuple[str, str], ...]) -> None:
    """One round as a sequence of messages from top to bottom."""
    axes.set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold")
    axes.set_xlim(-0.35, 2.35)
    axes.set_ylim(len(steps) + 0.2, -1.1)
    axes.axis("off")
    for column, name in enumerate(WHO):
        colour = SERVER if column == 1 else SITE
        axes.plot([column] * 2, [-0.35, len(steps)], color=LINE, lw=1, zorder=0)
        box = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "none"}
        axes.text(column, -0.6, name, ha="center", va="center", color="white", fontsize=10, bbox=box)
    for row, (kind, words) in enumerate(steps):
        y = row + 0.55
        if kind in ("down", "up"):
            for site in (0, 2):
                ends = (1, site) if kind == "down" else (site, 1)
                style = {"arrowstyle": "-|>", "color": SERVER if kind == "down" else SITE, "lw": 1.4}
                axes.annotate("", xy=(ends[1], y), xytext=(ends[0], y), arrowprops=style)
            where, colour = 1, SERVER if kind == "down" else SITE
        else:
            where, colour = 1, SERVER if kind == "server" else SITE
        box = {"facecolor": "white", "edgecolor": colour if kind in ("own", "server") else "none", "pad": 2.5}
        if kind == "own":
            for site in (0, 2):
                axes.text(site, y, "at the site", ha="center", va="center", fontsize=8, color=colour, bbox=box)
            box = box | {"edgecolor": "none"}
        axes.text(where, y - (0.28 if kind in ("down", "up") else 0), words, ha="center", va="center", fontsize=8.5,
                  color=colour, bbox=box)  # fmt: skip


def main(target: Path) -> None:
    """Draw both rounds into one picture."""
    heights = [len(PLAIN) + 1.3, len(SECURE) + 1.3]
    figure, (plain, secure) = plt.subplots(
        2, 1, figsize=(9.5, 0.52 * sum(heights)), gridspec_kw={"height_ratios": heights}
    )
    draw(plain, "Plain: the coordinator sees each update", PLAIN)
    draw(secure, 'Secure (federation.aggregation = "secure"): the coordinator sees the sum', SECURE)
    figure.tight_layout(h_pad=1.5)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
