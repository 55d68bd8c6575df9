"""Our LiRA beside its authors' own code, on the same losses of the same models.

    python benchmarks/attacks_lira.py --authors plot.py [--algorithm dp-sgd] [--models 33] [--records 200]

plot.py is research/mi_lira_2021/plot.py of github.com/tensorflow/privacy (Carlini et al. 2022), which is not part of
this project: its `generate_ours` and `generate_ours_offline` are called as they are, for every model in turn with all
others as its shadows. They take medians for means, the spread of each record or one for all, and no allowance for the
error of a mean; offline their test is two-sided. One JSON object is printed.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", type=Path, required=True, help="The authors' plot.py.")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--model", default="digits-mlp")
    parser.add_argument("--algorithm", default="fedavg", choices=list(TRAINING))
    parser.add_argument("--models", type=int, default=33)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    base = {"algorithm": options.algorithm, "data.name": options.dataset, "model": options.model,
            "data.clients": 1, "rounds": options.rounds, "seed": options.seed, "engine.device": "cpu",
            "engine.threads": 1}  # fmt: skip
    named = functions(options.authors)
    found = membership(configure(base, TRAINING[options.algorithm]), models=options.models, records=options.records)
    line = {
        "settings": {key: str(value) for key, value in vars(options).items()},
        "accuracy": [found.train_accuracy, found.test_accuracy],
        "seconds": found.seconds,
        "claim": found.facts()["claim"],
        "ours": found.rows(),
        "theirs": {
            f"{way}, {'one spread' if fixed else 'spread of each record'}": theirs(
                named[function], found.losses, found.member, fixed
            )
            for way, function in (("online", "generate_ours"), ("offline", "generate_ours_offline"))
            for fixed in (True, False)
        },
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
