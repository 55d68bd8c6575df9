"""Random allocation: the bound against Monte Carlo with confidence limits, its time, and the noise that it saves.

    python benchmarks/random_allocation.py [--numbers 1e10] [--first 0] [--settings 20] [--out FILE.jsonl]
    python benchmarks/random_allocation.py --check

With x ~ N(0, 1)^t, y_i = exp(x_i/sigma - 1/(2 sigma^2)) and L the mean of y, multiplied over blocks, delta is
E[(L - e^eps)+] when a unit is left out, and E[(1 - e^eps L)+] when one is added. Both are estimated by importance
sampling with a mixture of proposals, weighed by their joint density (the balance heuristic of Veach & Guibas 1995):

    tilted   every x_i has a density proportional to phi(x) exp(theta y), on SLOTS slots of equal probability: within
             a slot x is normal, and a slot is drawn with a probability n/TABLE for a whole number n >= 1
    jumping  and, where a unit is left out, one coordinate of each block, whichever, is N(tau, 1) instead, for one
             of a few tau by chance

The draws of a block, each with its weight, are an unbiased estimate of the measure of its loss, log L, whatever
theta, tau and n are: the probability of each slot is exactly what the weights are computed with. A pilot of its own
random numbers chooses theta and tau. Each block has draws of its own, so that the convolution of these measures is an
unbiased estimate of that of the sum: one replicate uses all combinations of draws. Losses are rounded down to a grid
for it, and delta is monotone in them: with the grid as it is, and shifted by a step for each block, it lies on either
side. A single block needs no grid. One proposal of each mixture has theta = 0 and tau = 1/sigma, and is the
distribution itself, with the unit or without: no weight exceeds 1/SAFE, so that variances are finite. The limits are
Student's, 99.7%, from independent replicates, at least ENOUGH of them; they rest on means of many draws being nearly
normal. `--check` compares with deltas that are known: of one round in a block (a Gaussian mechanism) and of two (an
integral). Rounding in float64 is not counted.

Replicates go on until the limits are within 1% of the estimate, or so many random numbers are drawn. `above`: by how
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
from scipy.fft import irfft, next_fast_len, rfft
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import logsumexp, ndtr, ndtri
from scipy.stats import norm
from scipy.stats import t as student

from shoal.accounting import pld
from shoal.accounting.calibration import Budget, noise
from shoal.accounting.curves import Array
from shoal.accounting.events import Allocated, Gaussian, Repeat, Sampled

Random = np.random.Generator
Problem = tuple[int, int, float, float]
"""Rounds in a block, blocks, noise, epsilon."""
PRECISION = 0.01
SLOTS, TABLE = 4096, 2**20
SAFE = 0.1  # the share of the proposal that bounds the weights
FURTHEST = 8.0
AT_ONCE = 250_000  # numbers
PILOT, REPLICATE = 300_000, 300_000  # numbers of a pilot, and of each block of a replicate
FEWEST, ENOUGH = 6, 30  # replicates, of a pilot and of an estimate
GRID, ROUGH = 5e-5, 1e-3  # the latter in a pilot
SMALLEST = 1e-14  # of probabilities in float64; a bound is not compared with less
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
    """All coordinates tilted by theta; with `taus` one of each block is N(tau, 1) instead, for one of these."""

    theta: float
    taus: tuple[float, ...]
    table: np.ndarray  # [TABLE]: slots, each as often as it is drawn
    log_ratio: Array  # [SLOTS]: of the density to the normal one

    @classmethod
    def of(cls, sigma: float, theta: float, *taus: float) -> Proposal:
        """Whole numbers next to the tilted probabilities; what rounding leaves over goes to the commonest slots."""
        exponents = theta * _middles(sigma)
        shares = np.exp(exponents - exponents.max())
        counts = 1 + np.floor(shares / shares.sum() * (TABLE - SLOTS)).astype(int)
        counts[np.argsort(-shares)[: TABLE - counts.sum()]] += 1
        if theta == 0:
            counts[:] = TABLE // SLOTS
        return cls(theta, taus, np.repeat(np.arange(SLOTS, dtype=np.uint16), counts), np.log(counts * SLOTS / TABLE))

    def coordinates(self, shape: tuple[int, int], random: Random) -> tuple[Array, np.ndarray]:
        """Draws of x, and the slots that they are in; the upper tail is slot 0."""
        slots = self.table[random.integers(TABLE, size=shape, dtype=np.uint32)]
        x = -ndtri((slots + 1 - random.random(shape)) / SLOTS)
        if self.taus:
            x[:, 0] = random.choice(self.taus, len(x)) + random.standard_normal(len(x))
            slots[:, 0] = np.minimum(SLOTS * ndtr(-x[:, 0]), SLOTS - 1)
        return x, slots

    def log_density(self, x: Array, slots: np.ndarray) -> Array:
        """The logarithm of its density over that of N(0, 1)^t, for each row."""
        found: Array = self.log_ratio[slots].sum(1) if self.theta else np.zeros(len(x))
        if not self.taus:
            return found
        jumps = sum(np.exp(tau * x - tau**2 / 2) for tau in self.taus) / len(self.taus)
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


def drawn(
    side: int, problem: Problem, proposals: Sequence[Proposal], counts: Sequence[int], random: Random
) -> tuple[Array, Array]:
    """Losses of a block, so many of each proposal, and their weights: side 0 with the unit, side 1 without it."""
    length, _, sigma, _ = problem
    losses, weights = [], []
    for proposal, count in zip(proposals, counts, strict=True):
        x, slots = proposal.coordinates((count, length), random)
        losses.append(np.log(np.exp(x / sigma - 0.5 / sigma**2).mean(1)))
        shares = np.log(np.array(counts) / sum(counts))
        densities = [share + other.log_density(x, slots) for share, other in zip(shares, proposals, strict=True)]
        weights.append(np.exp((1 - side) * losses[-1] - logsumexp(densities, axis=0)))
    return np.concatenate(losses), np.concatenate(weights) / sum(counts)


def replicate(
    side: int,
    problem: Problem,
    proposals: Sequence[Proposal],
    counts: Sequence[int],
    random: Random,
    grid: float = GRID,
) -> tuple[float, float]:
    """One estimate of delta, from draws of its own for each block, with losses rounded down and up to a grid."""
    blocks, epsilon = problem[1], problem[3]
    found = [_pieces(side, problem, proposals, counts, random) for _ in range(blocks)]
    if blocks == 1:
        losses, weights = found[0]
        value = float(weights @ _delta(side, losses, epsilon))
        return value, value
    steps = [np.floor(losses / grid).astype(int) for losses, _ in found]
    lowest = [int(each.min()) for each in steps]
    size = next_fast_len(sum(int(each.max()) - low for each, low in zip(steps, lowest, strict=True)) + 1, real=True)
    product: np.ndarray | float = 1.0
    for each, low, (_, weights) in zip(steps, lowest, found, strict=True):
        product = product * rfft(np.bincount(each - low, weights), size)
    measure = irfft(product, size)
    total = grid * (np.arange(size) + sum(lowest))
    low, high = (float(measure @ _delta(side, total + shift, epsilon)) for shift in (0.0, blocks * grid))
    return min(low, high), max(low, high)


def _pieces(
    side: int, problem: Problem, proposals: Sequence[Proposal], counts: Sequence[int], random: Random
) -> tuple[Array, Array]:
    """As `drawn`, in pieces that fit into a processor's cache."""
    parts = max(1, sum(counts) * problem[0] // AT_ONCE)
    pieces = [drawn(side, problem, proposals, [max(1, n // parts) for n in counts], random) for _ in range(parts)]
    losses, weights = zip(*pieces, strict=True)
    return np.concatenate(losses), np.concatenate(weights) / parts


def _delta(side: int, losses: Array, epsilon: float) -> Array:
    """What a loss adds to delta."""
    found: Array = np.maximum(-np.expm1(np.minimum(epsilon - losses if side == 0 else epsilon + losses, 1.0)), 0)
    return found


def mixtures(side: int, problem: Problem) -> list[list[Proposal]]:
    """Mixtures to choose from: the safe proposal, one that is tilted, and, on side 0, one that only jumps."""
    length, blocks, sigma, epsilon = problem
    target = math.exp((1 - 2 * side) * epsilon / blocks)
    theta = _tilt(sigma, target)
    if side == 1:
        shares = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25)
        return [[Proposal.of(sigma, 0.0), Proposal.of(sigma, share * theta)] for share in shares]
    safe = Proposal.of(sigma, 0.0, 1 / sigma)
    alone = sigma * math.log(length * (target - 1) + 1) + 0.5 / sigma  # one coordinate that reaches the target
    jump = Proposal.of(sigma, 0.0, min(max(alone, 1 / sigma), FURTHEST))
    further = [min(factor / sigma, FURTHEST) for factor in (1.5, 2, 2.5, 3, 4)]
    taus = [(1 / sigma,), *((1 / sigma, tau) if blocks > 1 else (tau,) for tau in further)]
    shares = (0.0, 0.25, 0.5) if blocks > 1 else (0.0, 0.25, 0.5, 0.75, 1.0)
    return [[safe, Proposal.of(sigma, share * theta, *each), jump] for share in shares for each in taus]


def _counts(count: int, proposals: Sequence[Proposal]) -> list[int]:
    rest = max(2, round(SAFE * count))
    others = [rest] * (len(proposals) - 2)
    return [rest, max(2, count - rest - sum(others)), *others]


def estimate(side: int, problem: Problem, numbers: float, random: Random) -> tuple[float, float]:
    """Limits of delta, with the mixture whose replicates were closest to each other in a pilot.

    A mixture that misses what matters has a small mean and a smaller variance: such are passed over.
    """
    each = problem[0] * problem[1]
    pilots = []
    for mixture in mixtures(side, problem):
        counts = _counts(max(200, PILOT // each // FEWEST), mixture)
        values = np.array([replicate(side, problem, mixture, counts, random, ROUGH)[0] for _ in range(FEWEST)])
        pilots.append((float(values.mean()), float(values.std()), mixture))
    likely = max(mean for mean, _, _ in pilots) / 2
    usable = [pilot for pilot in pilots if pilot[0] >= likely]
    best = min(usable, key=lambda pilot: pilot[1] / max(pilot[0], 1e-300))[2]
    counts = _counts(REPLICATE // problem[0], best)
    found: list[tuple[float, float]] = []
    while True:
        found.append(replicate(side, problem, best, counts, random))
        low, high = limits(found)
        spent = len(found) * sum(counts) * each
        if len(found) >= ENOUGH and (spent >= numbers or high - low < 2 * PRECISION * low):
            return low, high


def limits(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of 99.7%, by Student's t: below the mean of what was rounded down, above that of what was rounded up."""
    values = np.array(found)
    if len(values) < 2:
        return 0.0, math.inf
    wide = student.isf(0.00135, len(values) - 1) * values.std(0, ddof=1) / math.sqrt(len(values))
    mean = values.mean(0)
    return float(mean[0] - wide[0]), float(mean[1] + wide[1])


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
    """Print estimates of known deltas, and how far between the limits they are."""
    for seed, problem in enumerate(KNOWN):
        for side in (0, 1):
            random = np.random.Generator(np.random.SFC64([seed, side]))
            low, high = estimate(side, problem, numbers, random)
            true, middle = known(side, problem), (low + high) / 2
            off = f"{2 * (true - middle) / (high - low):+.2f} of the limits (± {(high - low) / 2 / middle:.2%})"
            print(problem, ("remove", "add")[side], f"{true:.6g} {middle:.6g} {off}", flush=True)


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
        found = [estimate(side, SETTINGS[seed], given.numbers, random) for side in (0, 1)]
        middles = [(low + high) / 2 for low, high in found]
        shares = [bound / middle - 1 for bound, middle in zip(bounds, middles, strict=True)]
        for share, bound, (low, high) in zip(shares, bounds, found, strict=True):
            widest = max(widest, (high - low) / (high + low))
            if high > SMALLEST:
                worst, outside = max(worst, share), outside + (not low <= bound <= 1.01 * high)
        delta = whole.delta(epsilon)
        budget = Budget(epsilon, delta, adjacency="zero-out")
        poisson = noise(lambda z: Repeat(Sampled("poisson", 1 / length, Gaussian(z)), length * blocks), budget).value  # noqa: B023
        cells = [
            f"{bound:.4g} | {middle:.4g} ± {high - middle:.1g}"
            for bound, middle, (_, high) in zip(bounds, middles, found, strict=True)
        ]
        above = ", ".join(
            f"{share:+.2%}" if high > SMALLEST else "–" for share, (_, high) in zip(shares, found, strict=True)
        )
        print(f"| {length} | {blocks} | {sigma:g} | {epsilon:g} | {cells[0]} | {cells[1]} | {above} | {seconds:.2f} "
              f"| {poisson:.4f} | {1 - sigma / poisson:.1%} |", flush=True)  # fmt: skip
        if given.out:
            line = {
                "block": length, "blocks": blocks, "noise": sigma, "epsilon": epsilon, "seed": seed,
                "remove": bounds[0], "remove_estimate": middles[0], "remove_limit": found[0][1] - middles[0],
                "add": bounds[1], "add_estimate": middles[1], "add_limit": found[1][1] - middles[1],
                "poisson_noise": poisson,
            }  # fmt: skip
            with open(given.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    print(f"\nLargest excess over an estimate: {worst:.2%}. Widest limit: {widest:.2%} of the estimate. Below the "
          f"limits, or more than 1% above them: {outside}. Deltas below {SMALLEST:g} are left out.")  # fmt: skip


if __name__ == "__main__":
    main()
