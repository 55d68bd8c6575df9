"""Our LiRA beside its authors' own code, on the same losses of the same models.

    python benchmarks/attacks_lira.py --authors plot.py --algorithm dp-sgd --seeds 8 --out lira.jsonl
    python benchmarks/attacks_lira.py --show lira.jsonl

plot.py is research/mi_lira_2021/plot.py of github.com/tensorflow/privacy (Carlini et al. 2022), which is not part of
this project: its `generate_ours` and `generate_ours_offline` are called as they are, for every model in turn with all
others as its shadows. They take medians for means, the spread of each record or one for all, and no allowance for the
error of a mean; offline their test is two-sided. Each seed is a line of the file; those that it has are not repeated.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score, roc_curve

from shoal.attacks.membership import membership
from shoal.config import configure

TRAINING = {
    "fedavg": ("clients.sampling=all", "records.batch=50", "local.lr=0.5", "local.epochs=5"),
    "dp-sgd": (
        "records.rate=0.25", "records.nominal_records=100", "local.steps=5", "local.lr=1.0",
        "per_record.clip_norm=1.0", "per_step.noise_multiplier=2.0",
    ),
}  # fmt: skip


FIGURES = ("auc", "tpr_at_0_1_percent_fpr", "tpr_at_1_percent_fpr")


def functions(path: Path) -> dict[str, Callable[..., Any]]:
    """The functions of a Python file, without what else it does when it is run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kept = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)]
    found: dict[str, Any] = {}
    exec(compile(ast.Module(kept, []), str(path), "exec"), found)
    return found


def theirs(attack: Callable[..., Any], losses: np.ndarray, member: np.ndarray, fixed: bool) -> dict[str, float]:
    """The authors' figures, over every model in turn."""
    p = np.exp(-np.clip(losses.astype(np.float64), 1e-7, 50))
    scores = (np.log(p) - np.log1p(-p))[:, :, None]
    predictions, answers = [], []
    for target in range(len(scores)):
        rest = np.delete(np.arange(len(scores)), target)
        found = attack(member[rest], scores[rest], member[[target]], scores[[target]], fix_variance=fixed)
        predictions += found[0]
        answers += found[1]
    fpr, tpr, _ = roc_curve(answers, -np.array(predictions), drop_intermediate=False)
    return {
        "auc": float(roc_auc_score(answers, -np.array(predictions))),
        "tpr_at_0_1_percent_fpr": float(tpr[fpr <= 0.001].max()),
        "tpr_at_1_percent_fpr": float(tpr[fpr <= 0.01].max()),
    }


def compared(authors: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One seed: both implementations on the same losses."""
    base = {"algorithm": settings["algorithm"], "data.name": settings["dataset"], "model": settings["model"],
            "data.clients": 1, "rounds": settings["rounds"], "seed": settings["seed"], "engine.device": "cpu",
            "engine.threads": 1}  # fmt: skip
    named = functions(authors)
    config = configure(base, TRAINING[settings["algorithm"]])
    found = membership(config, models=settings["models"], records=settings["records"])
    rows = {f"ours, {row['attack']}": {key: row.get(key) for key in FIGURES} for row in found.rows()}
    for way, function in (("online", "generate_ours"), ("offline", "generate_ours_offline")):
        for fixed in (True, False):
            spread = "one spread" if fixed else "spread of each record"
            rows[f"theirs, {way}, {spread}"] = theirs(named[function], found.losses, found.member, fixed)
    return {
        "settings": dict(settings),
        "accuracy": [found.train_accuracy, found.test_accuracy],
        "seconds": found.seconds,
        "epsilon": (found.facts()["claim"] or {}).get("epsilon"),
        "rows": rows,
    }


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """A table for each method: the median over the seeds, and the range."""
    for name in TRAINING:
        held = [line for line in lines if line["settings"]["algorithm"] == name]
        if not held:
            continue
        inside, outside = np.median([line["accuracy"] for line in held], axis=0)
        print(f"\n{name}, {len(held)} seeds, accuracy on members {inside:.3f}, on held-out records {outside:.3f}\n")
        print("| attack | area under ROC | TPR at 0.1% FPR | TPR at 1% FPR |\n| --- | --- | --- | --- |")
        for attack in held[0]["rows"]:
            found = np.array([[line["rows"][attack][key] for key in FIGURES] for line in held])
            cells = [
                f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
                for digits, middle, low, high in zip(
                    (3, 4, 4), np.median(found, axis=0), found.min(0), found.max(0), strict=True
                )
            ]
            name = attack.removeprefix("ours, ") if "most at" in attack else attack
            print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", type=Path, help="The authors' plot.py.")
    parser.add_argument("--out", type=Path, default=Path("lira.jsonl"))
    parser.add_argument("--show", type=Path, help="Print the tables of such a file.")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--model", default="digits-mlp")
    parser.add_argument("--algorithm", default="fedavg", choices=list(TRAINING))
    parser.add_argument("--models", type=int, default=33)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1, help="From 0 on.")
    options = vars(parser.parse_args())
    authors, out, shown, seeds = (options.pop(key) for key in ("authors", "out", "show", "seeds"))
    if shown is not None:
        show([json.loads(line) for line in shown.read_text(encoding="utf-8").splitlines()])
        return
    if authors is None:
        parser.error("--authors is the authors' plot.py, which is not part of this project")
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    done = [json.loads(line)["settings"] for line in lines]
    for seed in range(seeds):
        settings = {**options, "seed": seed}
        if settings not in done:
            line = json.dumps(compared(authors, settings))
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
