"""Our LiRA beside another reading of it, on the same losses of the same models.

    python benchmarks/attacks_lira.py [--algorithm dp-sgd] [--models 33] [--records 200] [--out lira.json]

The other is written here from Carlini et al. (2022), with the choices of the authors' published analysis
(tensorflow/privacy, research/mi_lira_2021): medians for means, a normal for each record with its own spread or one
spread for all, SciPy's densities, scikit-learn's ROC, no allowance for the error of a mean. Offline it is the paper's
one-sided test. It shares no line with shoal.attacks. One JSON object is printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from scipy.stats import norm
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


def reference(
    losses: np.ndarray, member: np.ndarray, online: bool, own_spread: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and answers for every model in turn, all others being its shadows."""
    p = np.exp(-np.clip(losses.astype(np.float64), 1e-7, 50))
    phi = np.log(p) - np.log1p(-p)
    scores, answers = [], []
    for target in range(len(phi)):
        rest = np.delete(np.arange(len(phi)), target)
        shadows, trained = phi[rest], member[rest]
        inside, outside = np.where(trained, shadows, np.nan), np.where(trained, np.nan, shadows)
        spreads = [np.nanstd(side, axis=0) if own_spread else np.nanstd(side) for side in (inside, outside)]
        out = norm(np.nanmedian(outside, axis=0), spreads[1] + 1e-30)
        if online:
            scores.append(norm.logpdf(phi[target], np.nanmedian(inside, axis=0), spreads[0] + 1e-30)
                          - out.logpdf(phi[target]))  # fmt: skip
        else:
            scores.append(out.logcdf(phi[target]))
        answers.append(member[target])
    return np.concatenate(scores), np.concatenate(answers)


def figures(scores: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    fpr, tpr, _ = roc_curve(answers, scores, drop_intermediate=False)
    return {
        "auc": float(roc_auc_score(answers, scores)),
        "tpr_at_0_1_percent_fpr": float(tpr[fpr <= 0.001].max()),
        "tpr_at_1_percent_fpr": float(tpr[fpr <= 0.01].max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--model", default="digits-mlp")
    parser.add_argument("--algorithm", default="fedavg", choices=list(TRAINING))
    parser.add_argument("--models", type=int, default=33)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    base = {"algorithm": options.algorithm, "data.name": options.dataset, "model": options.model,
            "data.clients": 1, "rounds": options.rounds, "seed": options.seed, "engine.device": "cpu",
            "engine.threads": 1}  # fmt: skip
    config = configure(base, TRAINING[options.algorithm])
    found = membership(config, models=options.models, records=options.records)
    line = {
        "settings": vars(options) | {"out": None},
        "accuracy": [found.train_accuracy, found.test_accuracy],
        "seconds": found.seconds,
        "claim": found.facts()["claim"],
        "ours": found.rows(),
        "reference": {
            f"{'online' if online else 'offline'}, {'spread of each record' if own else 'one spread'}": figures(
                *reference(found.losses, found.member, online, own)
            )
            for online in (True, False)
            for own in (False, True)
        },
    }
    print(json.dumps(line))
    if options.out:
        options.out.write_text(json.dumps(line | {"roc": found.facts()["roc"]}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
