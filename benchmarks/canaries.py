"""How often canary clients flag the Gaussian mechanism with the noise that is claimed, and with half or a quarter.

    python benchmarks/canaries.py [--canaries 400] [--rounds 20] [--parameters 2000]

The mechanism is played in numpy, without a federation: every canary that is included takes part in every round. One
line is printed for each noise multiplier and share of the noise: what is proven, the verdicts, and the 10th, 50th and
90th percentile of the estimate for the final model.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np

from shoal.accounting.accountants import epsilon
from shoal.accounting.events import Gaussian, Repeat
from shoal.audit.federated_canaries import measured
from shoal.training.canaries import Canaries, Noted

DELTA = 1e-5
SEEDS = {1.0: range(1000, 1100), 0.5: range(1000, 1020), 0.25: range(1000, 1020)}


def played(seed: int, noise: float, share: float, options: argparse.Namespace) -> Noted:
    """One run: the models along the canaries' directions."""
    canaries, size = Canaries(seed, options.canaries, options.parameters), options.parameters
    directions = np.stack([each.numpy() for each in canaries.directions()]).astype(np.float64)
    draw = np.random.default_rng(seed)
    model = draw.normal(size=(2, size))[0]
    along = [directions @ model]
    for _ in range(options.rounds):
        model = model + directions[canaries.included].sum(0) + share * noise * draw.normal(size=size)
        along.append(directions @ model)
    return Noted(canaries, np.array(along), np.ones(options.rounds), np.full(options.rounds, noise))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canaries", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parameters", type=int, default=2000)
    options = parser.parse_args()
    for share, seeds in SEEDS.items():
        for noise in (16.0, 8.0, 4.0):
            claimed = epsilon(Repeat(Gaussian(noise), options.rounds), DELTA, adjacency="zero-out").epsilon
            found = [measured(played(seed, noise, share, options), claimed, DELTA) for seed in seeds]
            estimates = np.quantile([each.seen[0].estimate for each in found], [0.1, 0.5, 0.9])
            verdicts = dict(Counter(each.verdict for each in found))
            said = f"noise {noise:g} x {share:g}, proven {claimed:.2f}: {verdicts}"
            print(f"{said}, estimate {estimates.round(2)}", flush=True)


if __name__ == "__main__":
    main()
