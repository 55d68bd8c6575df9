"""Random allocation: the bound against Monte Carlo with confidence limits, its time, and the noise that it saves.

    python benchmarks/random_allocation.py [--numbers 4e7] [--settings 20]

For each setting delta is estimated in both directions by importance sampling of the likelihood ratio. The limits are
3 standard errors (99.7%). `above`: by how much the bound exceeds the estimate, where that is known to 2%. The last
columns are the noise that spends the same epsilon and delta under Poisson sampling at the same rate, and how much
less random allocation needs.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np

from shoal.accounting import pld
from shoal.accounting.calibration import Budget, noise
from shoal.accounting.curves import Array
from shoal.accounting.events import Allocated, Gaussian, Repeat, Sampled

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
    length: int, blocks: int, sigma: float, epsilon: float, trials: int, tilt: float, random: np.random.Generator
) -> tuple[Array, Array]:
    """Unbiased draws of H(P||Q) and of H(Q||P), by importance sampling: Q's numbers are shifted, and reweighted.

    For P||Q one round of each block, whichever, is shifted up by `tilt`; for Q||P all are shifted down together.
    """
    losses, weights = np.zeros((2, trials)), np.zeros((2, trials))
    for _ in range(blocks):
        x = random.standard_normal((2, trials, length))
        x[0, :, 0] += tilt
        x[1] -= tilt / math.sqrt(length)
        weights[0] -= np.log(np.exp(tilt * x[0] - tilt**2 / 2).mean(1))
        weights[1] += tilt * x[1].sum(1) / math.sqrt(length) + tilt**2 / 2
        losses += np.log(np.exp(x / sigma - 0.5 / sigma**2).mean(2))
    forward = np.maximum(np.exp(losses[0]) - math.exp(epsilon), 0)
    backward = np.maximum(1 - np.exp(epsilon + losses[1]), 0)
    return forward * np.exp(weights[0]), backward * np.exp(weights[1])


def estimates(
    length: int, blocks: int, sigma: float, epsilon: float, trials: int, seed: int
) -> list[tuple[float, float]]:
    """(delta, standard error) of H(P||Q) and of H(Q||P), each with the tilt that was best in a pilot."""
    random = np.random.Generator(np.random.Philox(key=seed))
    setting = length, blocks, sigma, epsilon
    tilts = [*(factor / sigma for factor in (1, 1.25, 1.5, 2, 3)), *(tilt / math.sqrt(blocks) for tilt in range(6))]
    pilots = [[_mean(part) for part in drawn(*setting, 4000, tilt, random)] for tilt in tilts]
    found = []
    for side in (0, 1):
        usable = [place for place, pilot in enumerate(pilots) if pilot[side][0] > 0]
        best = tilts[min(usable, key=lambda place: pilots[place][side][1] / pilots[place][side][0], default=0)]
        chunk = max(1000, 2_000_000 // length)
        parts = [drawn(*setting, min(chunk, trials - start), best, random)[side] for start in range(0, trials, chunk)]
        found.append(_mean(np.concatenate(parts)))
    return found


def _mean(values: Array) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(values.size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", type=float, default=4e7, help="Random numbers for each direction of a setting.")
    parser.add_argument("--settings", type=int, default=len(SETTINGS))
    given = parser.parse_args()
    heads = "block, blocks, noise, epsilon, delta remove, Monte Carlo, delta add, Monte Carlo, above, seconds"
    print(f"| {' | '.join(heads.split(', '))} | Poisson's noise | less |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    worst, outside = 0.0, 0
    for seed, (length, blocks, sigma, epsilon) in enumerate(SETTINGS[: given.settings]):
        started = time.process_time()
        whole = pld.profile({Allocated(((sigma, length),)): blocks}, "zero-out")
        seconds = time.process_time() - started
        halves = whole.distribution._pmf_remove, whole.distribution._pmf_add
        bounds = [half.get_delta_for_epsilon(epsilon) for half in halves]
        trials = min(int(given.numbers / length / blocks), 4_000_000)
        found = estimates(length, blocks, sigma, epsilon, trials, seed)
        shares = []
        for bound, (mean, error) in zip(bounds, found, strict=True):
            if 3 * error < 0.1 * mean:  # else so few trials say nothing
                outside += not mean - 3 * error <= bound <= 1.01 * (mean + 3 * error)
            if 3 * error < 0.02 * mean:
                shares.append(bound / mean - 1)
        worst = max([worst, *shares])
        delta = whole.delta(epsilon)
        budget = Budget(epsilon, delta, adjacency="zero-out")
        poisson = noise(lambda z: Repeat(Sampled("poisson", 1 / length, Gaussian(z)), length * blocks), budget).value  # noqa: B023
        cells = [
            f"{bound:.4g} | {mean:.4g} ± {3 * error:.1g}" for bound, (mean, error) in zip(bounds, found, strict=True)
        ]
        above = ", ".join(f"{share:+.2%}" for share in shares) or "-"
        print(f"| {length} | {blocks} | {sigma:g} | {epsilon:g} | {cells[0]} | {cells[1]} | {above} | {seconds:.2f} "
              f"| {poisson:.4f} | {1 - sigma / poisson:.1%} |", flush=True)  # fmt: skip
    print(f"\nLargest excess over an estimate known to 2%: {worst:.2%}. Beyond 3 standard errors and 1% "
          f"of one known to 10%: {outside}.")  # fmt: skip


if __name__ == "__main__":
    main()
