"""Random allocation: the bound against Monte Carlo with confidence limits, its time, and the noise that it saves.

    python benchmarks/random_allocation.py [--numbers 1e10] [--first 0] [--settings 20] [--out FILE.jsonl]
    python benchmarks/random_allocation.py --check

With x ~ N(0, 1)^t, y_i = exp(x_i/sigma - 1/(2 sigma^2)) and L the mean of y, multiplied over blocks, delta is
E[(L - e^eps)+] when a unit is left out, and E[(1 - e^eps L)+] when one is added. Both are estimated by importance
sampling with a mixture of proposals, weighed by their joint density (the balance heuristic of Veach & Guibas 1995):

    tilted   every x_i has a density proportional to phi(x) exp(theta y), on SLOTS slots of equal probability: within
             a slot x is normal, and a slot is drawn with a probability n/TABLE for a whole number n >= 1
    jumping  and, where a unit is left out, one coordinate of each block, whichever, is N(tau, 1) instead

It is unbiased, whatever theta, tau and n are, since the probability of each slot is exactly what the weights are
computed with; a pilot of its own random numbers chooses theta and tau. One proposal of each mixture has theta = 0
and tau = 1/sigma: it is the distribution with the unit (L) or without (1), so that no weighed value exceeds 1/SAFE.
So the variance is finite, and 3 standard errors are limits of 99.7% for many draws. Proposals have fixed numbers of
draws, which makes the variance smaller than the one that is computed. `--check` compares with settings whose delta is
known: one round in a block (a Gaussian mechanism) and two (an integral). Rounding in float64 is not counted.

Draws go on until 3 standard errors are below 1% of the estimate, or so many random numbers are drawn. `above`: by how
much the bound exceeds the estimate. The last columns are the noise that spends the same epsilon and delta under
Poisson sampling at the same rate, and how much less random allocation needs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import logsumexp, ndtr, ndtri
from scipy.stats import norm

from shoal.accounting import pld
from shoal.accounting.calibration import Budget, noise
from shoal.accounting.curves import Array
from shoal.accounting.events import Allocated, Gaussian, Repeat, Sampled

Random = np.random.Generator
Problem = tuple[int, int, float, float]
"""Rounds in a block, blocks, noise, epsilon."""
PRECISION = 0.01
SLOTS, TABLE = 4096, 65536
SAFE = 0.1  # the share of the proposal that bounds the weights
FURTHEST = 8.0
AT_ONCE = 250_000  # numbers
PILOT = 1_000_000
SETTINGS: list[Problem] = [
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
KNOWN: list[Problem] = [
    (1, 1, 1.0, 1.0),
    (1, 1, 0.5, 8.0),
    (1, 8, 2.0, 3.0),
    (2, 1, 1.0, 2.0),
    (2, 1, 0.5, 3.0),
    (2, 1, 2.0, 0.5),
]


@dataclass(frozen=True, eq=False)
class Proposal:
    """All coordinates tilted by theta; with `tau` one of each block is N(tau, 1) instead."""

    theta: float
    tau: float | None
    table: np.ndarray  # [TABLE]: slots, each as often as it is drawn
    log_ratio: Array  # [SLOTS]: of the density to the normal one

    @classmethod
    def of(cls, sigma: float, theta: float, tau: float | None) -> Proposal:
        """Whole numbers next to the tilted probabilities; what rounding leaves over goes to the commonest slots."""
        exponents = theta * _middles(sigma)
        shares = np.exp(exponents - exponents.max())
        counts = 1 + np.floor(shares / shares.sum() * (TABLE - SLOTS)).astype(int)
        counts[np.argsort(-shares)[: TABLE - counts.sum()]] += 1
        if theta == 0:
            counts[:] = TABLE // SLOTS
        return cls(theta, tau, np.repeat(np.arange(SLOTS), counts), np.log(counts * SLOTS / TABLE))

    def coordinates(self, shape: tuple[int, int], random: Random) -> tuple[Array, np.ndarray]:
        """Draws of x, and the slots that they are in; the upper tail is slot 0."""
        slots = self.table[random.integers(TABLE, size=shape, dtype=np.uint16)]
        x = -ndtri((slots + 1 - random.random(shape)) / SLOTS)
        if self.tau is not None:
            x[:, 0] = self.tau + random.standard_normal(len(x))
            slots[:, 0] = np.minimum(SLOTS * ndtr(-x[:, 0]), SLOTS - 1)
        return x, slots

    def log_density(self, x: Array, slots: np.ndarray) -> Array:
        """The logarithm of its density over that of N(0, 1)^t, for each row."""
        found: Array = self.log_ratio[slots].sum(1) if self.theta else np.zeros(len(x))
        if self.tau is None:
            return found
        jumps = np.exp(self.tau * x - self.tau**2 / 2)
        left = jumps * np.exp(-self.log_ratio)[slots] if self.theta else jumps
        total: Array = found + np.log(left.mean(1))
        return total


def _middles(sigma: float) -> Array:
    """y in the middle of each slot."""
    found: Array = np.exp(-ndtri((np.arange(SLOTS) + 0.5) / SLOTS) / sigma - 0.5 / sigma**2)
    return found


def _tilt(sigma: float, mean: float) -> float:
    """The theta that gives y this mean, or half of the greatest y."""
    y = _middles(sigma)
    mean = min(mean, y[0] / 2)

    def excess(theta: float) -> float:
        weights = np.exp(theta * y - (theta * y).max())
        return float(weights @ y / weights.sum()) - mean

    end = math.copysign(1.0, -excess(0.0))
    while excess(end) * end < 0:
        end *= 2
    return float(brentq(excess, 0.0, end))


def drawn(side: int, problem: Problem, proposals: Sequence[Proposal], counts: Sequence[int], random: Random) -> Array:
    """Weighed draws of delta, whose mean is unbiased, so many of each proposal; side 0: a unit is left out."""
    length, blocks, sigma, epsilon = problem
    values = []
    for proposal, count in zip(proposals, counts, strict=True):
        losses, densities = np.zeros(count), np.tile(np.log(np.array(counts) / sum(counts))[:, None], count)
        for _ in range(blocks):
            x, slots = proposal.coordinates((count, length), random)
            losses += np.log(np.exp(x / sigma - 0.5 / sigma**2).mean(1))
            densities += [other.log_density(x, slots) for other in proposals]
        over = np.exp(losses) - math.exp(epsilon) if side == 0 else 1 - np.exp(epsilon + losses)
        values.append(np.maximum(over, 0) * np.exp(-logsumexp(densities, axis=0)))
    return np.concatenate(values)


def mixtures(side: int, problem: Problem) -> list[list[Proposal]]:
    """Mixtures to choose from: the safe proposal, one that is tilted, and, on side 0, one that only jumps."""
    length, blocks, sigma, epsilon = problem
    target = math.exp((1 - 2 * side) * epsilon / blocks)
    theta, safe = _tilt(sigma, target), Proposal.of(sigma, 0.0, None if side else 1 / sigma)
    if side == 1:
        return [[safe, Proposal.of(sigma, share * theta, None)] for share in (0.5, 0.75, 0.9, 1.0, 1.1, 1.25)]
    alone = sigma * math.log(length * (target - 1) + 1) + 0.5 / sigma  # one coordinate that reaches the target
    jump = Proposal.of(sigma, 0.0, min(max(alone, 1 / sigma), FURTHEST))
    return [
        [safe, Proposal.of(sigma, share * theta, min(factor / sigma, FURTHEST)), jump]
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
        for factor in (1, 1.5, 2, 2.5, 3, 4)
    ]


def _counts(count: int, proposals: Sequence[Proposal]) -> list[int]:
    rest = max(2, round(SAFE * count))
    others = [rest] * (len(proposals) - 2)
    return [rest, max(2, count - rest - sum(others)), *others]


def estimate(side: int, problem: Problem, numbers: float, random: Random) -> tuple[float, float, float]:
    """(delta, standard error, random numbers drawn), with the mixture that was best in a pilot.

    A mixture that misses what matters has a small mean and a smaller variance: such are passed over.
    """
    each = problem[0] * problem[1]
    pilots = []
    for mixture in mixtures(side, problem):
        values = drawn(side, problem, mixture, _counts(max(500, PILOT // each), mixture), random)
        pilots.append((*_mean(_moments(values)), mixture))
    likely = max(mean for mean, _, _ in pilots) / 2
    best = min((pilot for pilot in pilots if pilot[0] >= likely), key=lambda pilot: pilot[1] / max(pilot[0], 1e-300))[
        2
    ]
    counts = _counts(max(100, AT_ONCE // problem[0]), best)
    sums, mean, error = np.zeros(3), 0.0, math.inf
    while sums[0] * each < numbers and (sums[0] < 30_000 or not 3 * error < PRECISION * mean):
        sums += _moments(drawn(side, problem, best, counts, random))
        mean, error = _mean(sums)
    return mean, error, sums[0] * each


def known(side: int, problem: Problem) -> float:
    """Delta where it can be computed: blocks of one round, or one block of two."""
    length, blocks, sigma, epsilon = problem
    if length == 1:
        shift = math.sqrt(blocks) / sigma
        return float(
            norm.cdf(shift / 2 - epsilon / shift) - math.exp(epsilon) * norm.cdf(-shift / 2 - epsilon / shift)
        )
    if (length, blocks) != (2, 1):
        raise ValueError(f"delta of blocks of {length} rounds is not known")
    sign = 1 - 2 * side
    level = 2 * math.exp(sign * epsilon)

    def given(x: float) -> float:
        """The integral over the other coordinate."""
        rest = level - math.exp(x / sigma - 0.5 / sigma**2)
        edge = sigma * math.log(rest) + 0.5 / sigma if rest > 0 else -math.inf
        inner = norm.sf(sign * (edge - 1 / sigma)) - rest * norm.sf(sign * edge)
        return float(norm.pdf(x) * sign * inner / 2 * (1.0 if side == 0 else math.exp(epsilon)))

    edge = sigma * math.log(level) + 0.5 / sigma
    return float(sum(quad(given, *part, epsabs=0, epsrel=1e-10, limit=500)[0] for part in ((-12, edge), (edge, 12))))


def check(numbers: float) -> None:
    """Print estimates of known deltas, and by how many standard errors they are off."""
    for seed, problem in enumerate(KNOWN):
        for side in (0, 1):
            random = np.random.Generator(np.random.SFC64([seed, side]))
            mean, error, _ = estimate(side, problem, numbers, random)
            true = known(side, problem)
            off = f"{(mean - true) / error:+.2f} standard errors ({error / mean:.2%})"
            print(problem, ("remove", "add")[side], f"{true:.6g} {mean:.6g} {off}", flush=True)


def _moments(values: Array) -> Array:
    """How many there are, their sum, and that of their squares."""
    return np.array([values.size, values.sum(), np.square(values).sum()])


def _mean(sums: Array) -> tuple[float, float]:
    """The mean, and its standard error."""
    count, mean = sums[0], sums[1] / sums[0]
    return float(mean), math.sqrt(max(sums[2] / count - mean**2, 0.0) / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Estimate deltas that are known, and end.")
    parser.add_argument("--numbers", type=float, default=1e10, help="Random numbers for each direction, at most.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--settings", type=int, default=len(SETTINGS))
    parser.add_argument("--out", help="A file to which a line of JSON is added for each setting.")
    given = parser.parse_args()
    if given.check:
        check(given.numbers)
        return
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
        random = np.random.Generator(np.random.SFC64(seed))
        found = [estimate(side, SETTINGS[seed], given.numbers, random)[:2] for side in (0, 1)]
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
