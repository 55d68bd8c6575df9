"""Random allocation: the bound against Monte Carlo with confidence limits, its time, and the noise that it saves.

    python benchmarks/random_allocation.py [--numbers 4e8] [--first 0] [--settings 20] [--out FILE.jsonl]

For each setting delta is estimated in both directions by importance sampling of the likelihood ratio, until 3
standard errors (99.7%) are below 1%, or so many random numbers are drawn. `above`: by how much the bound
exceeds the estimate. The last columns are the noise that spends the same epsilon and delta under Poisson sampling at
the same rate, and how much less random allocation needs.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import numpy as np

from shoal.accounting import pld
from shoal.accounting.calibration import Budget, noise
from shoal.accounting.curves import Array
from shoal.accounting.events import Allocated, Gaussian, Repeat, Sampled

Random = np.random.Generator
PRECISION = 0.01
FURTHEST = 8.0  # with longer shifts the weights would overflow
SETTINGS = [  # rounds in a block, blocks, noise, epsilon
    (2, 1, 1.0, 2.0),
    (3, 1, 0.7, 3.0),
    (5, 1, 1.0, 2.0),
    (10, 1, 1.0, 2.19),
    (10, 1, 2.0, 0.5),
    (20, 1, 0.8, 2.0),
    (50, 1, 1.0, 0.8),
    (100, 1, 1.0, 0.5),
    (100, 1, 2.0, 0.15),
    (100, 1, 0.5, 5.0),
    (1000, 1, 0.6, 1.5),
    (1000, 1, 1.0, 0.12),
    (5, 4, 1.0, 4.0),
    (5, 10, 2.0, 2.5),
    (10, 10, 1.0, 5.0),
    (10, 20, 2.0, 1.5),
    (20, 5, 1.0, 2.5),
    (100, 10, 1.0, 1.5),
    (100, 10, 0.7, 4.0),
    (50, 20, 1.0, 3.0),
]


def drawn(
    side: int, length: int, blocks: int, sigma: float, epsilon: float, trials: int, tilt: float, random: Random
) -> Array:
    """Unbiased draws of H(P||Q) (side 0) or H(Q||P), by importance sampling: Q's numbers are shifted, and reweighted.

    For P||Q one round of each block, whichever, is shifted up by `tilt`; for Q||P all are shifted down together.
    """
    losses, weights = np.zeros(trials), np.zeros(trials)
    for _ in range(blocks):
        x = random.standard_normal((trials, length), dtype=np.float32)  # half the time; 1e-7 of a likelihood ratio
        if side == 0:
            x[:, 0] += tilt
            weights -= np.log(np.exp(tilt * x - tilt**2 / 2).mean(1, dtype=np.float64))
        else:
            x -= tilt / math.sqrt(length)
            weights += tilt * x.sum(1, dtype=np.float64) / math.sqrt(length) + tilt**2 / 2
        losses += np.log(np.exp(x / sigma - 0.5 / sigma**2).mean(1, dtype=np.float64))
    over = np.exp(losses) - math.exp(epsilon) if side == 0 else 1 - np.exp(epsilon + losses)
    found: Array = np.maximum(over, 0) * np.exp(weights)
    return found


def estimates(
    length: int, blocks: int, sigma: float, epsilon: float, numbers: float, seed: int
) -> list[tuple[float, float]]:
    """(delta, standard error) of H(P||Q) and of H(Q||P), each with the tilt that was best in a pilot."""
    random = np.random.Generator(np.random.SFC64(seed))
    setting = length, blocks, sigma, epsilon
    tilts = [*(factor / sigma for factor in (1, 1.25, 1.5, 2, 3)), *(tilt / math.sqrt(blocks) for tilt in range(13))]
    tilts = [tilt for tilt in tilts if tilt <= FURTHEST]
    found, chunk = [], max(1000, 1_000_000 // length)
    for side in (0, 1):
        pilots = {tilt: _mean(_moments(drawn(side, *setting, 4000, tilt, random))) for tilt in tilts}
        usable = [tilt for tilt, (mean, _) in pilots.items() if mean > 0]
        best = min(usable, key=lambda tilt: pilots[tilt][1] / pilots[tilt][0], default=tilts[0])
        sums, mean, error = np.zeros(3), 0.0, math.inf
        while sums[0] * length * blocks < numbers and not 3 * error < PRECISION * mean:
            sums += _moments(drawn(side, *setting, chunk, best, random))
            mean, error = _mean(sums)
        found.append((mean, error))
    return found


def _moments(values: Array) -> Array:
    """How many there are, their sum, and that of their squares."""
    return np.array([values.size, values.sum(), np.square(values).sum()])


def _mean(sums: Array) -> tuple[float, float]:
    """The mean, and its standard error."""
    count, mean = sums[0], sums[1] / sums[0]
    return float(mean), math.sqrt(max(sums[2] / count - mean**2, 0.0) / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", type=float, default=4e8, help="Random numbers for each direction, at most.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--settings", type=int, default=len(SETTINGS))
    parser.add_argument("--out", help="A file to which a line of JSON is added for each setting.")
    given = parser.parse_args()
    heads = "block, blocks, noise, epsilon, delta remove, Monte Carlo, delta add, Monte Carlo, above, seconds"
    print(f"| {' | '.join(heads.split(', '))} | Poisson's noise | less |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    worst, widest, outside = 0.0, 0.0, 0
    for seed in range(given.first, given.settings):
        length, blocks, sigma, epsilon = SETTINGS[seed]
        started = time.process_time()
        whole = pld.profile({Allocated(((sigma, length),)): blocks}, "zero-out")
        seconds = time.process_time() - started
        halves = whole.distribution._pmf_remove, whole.distribution._pmf_add
        bounds = [half.get_delta_for_epsilon(epsilon) for half in halves]
        found = estimates(length, blocks, sigma, epsilon, given.numbers, seed)
        shares = [bound / mean - 1 for bound, (mean, _) in zip(bounds, found, strict=True)]
        for bound, (mean, error) in zip(bounds, found, strict=True):
            outside += not mean - 3 * error <= bound <= 1.01 * (mean + 3 * error)
            widest = max(widest, 3 * error / mean)
        worst = max([worst, *shares])
        delta = whole.delta(epsilon)
        budget = Budget(epsilon, delta, adjacency="zero-out")
        poisson = noise(lambda z: Repeat(Sampled("poisson", 1 / length, Gaussian(z)), length * blocks), budget).value  # noqa: B023
        cells = [
            f"{bound:.4g} | {mean:.4g} ± {3 * error:.1g}" for bound, (mean, error) in zip(bounds, found, strict=True)
        ]
        above = ", ".join(f"{share:+.2%}" for share in shares)
        print(f"| {length} | {blocks} | {sigma:g} | {epsilon:g} | {cells[0]} | {cells[1]} | {above} | {seconds:.2f} "
              f"| {poisson:.4f} | {1 - sigma / poisson:.1%} |", flush=True)  # fmt: skip
        if given.out:
            (remove, remove_error), (add, add_error) = found
            line = {
                "block": length, "blocks": blocks, "noise": sigma, "epsilon": epsilon, "seed": seed,
                "remove": bounds[0], "remove_estimate": remove, "remove_limit": 3 * remove_error,
                "add": bounds[1], "add_estimate": add, "add_limit": 3 * add_error, "poisson_noise": poisson,
            }  # fmt: skip
            with open(given.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print(f"\nLargest excess over an estimate: {worst:.2%}. Widest limit: {widest:.2%} of the estimate. Beyond 3 "
          f"standard errors, or more than 1% above them: {outside}.")  # fmt: skip


if __name__ == "__main__":
    main()
