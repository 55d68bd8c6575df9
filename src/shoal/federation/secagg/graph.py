"""Who shares with whom: all sites with all, or each with a few neighbours (after Bell et al. 2020).

In a sparse round each site picks `neighbours` of the listed sites itself, at random, once the list is fixed. It deals
its shares to them alone, and shares masks with those it picked and those that picked it. Nobody is trusted with the
draw, and nobody can steer it: a site's safety rests on its own picks. Which sites collude must not depend on the
picks; which sites drop out may: a dishonest coordinator sees the picks and chooses.

Let n be the sites in the cohort, T = `threshold` the fewest in a sum, c = `colluding`, k = `neighbours` and t =
`share_threshold`. Each honest site signs one list of survivors. Three things can fail:

1. Corruption. A site picks more than u colluding neighbours, so that fewer than m = t - u honest ones suffice to open
   its secrets: at most n P[H > u], H hypergeometric, k draws from T - 1 sites of which c collude.
2. Signatures. Of all lists of survivors at most one, A, has more than e = floor((n + c)/2) valid signatures. A site
   is fooled if it opens shares on another. It verifies a random sample of q of the s signatures that it is shown,
   once: it is fooled with probability p = C(e, q)/C(s, q) at most, whoever was fooled before. That more than `fooled`
   = f < m of the neighbours that some site picked are fooled has probability n C(k, f + 1) p^(f + 1) at most.
   Otherwise no site in A has its key opened, and no other site its seed: that takes m honest neighbours, all fooled.
3. A cut. The coordinator unmasks the sum of a part Q of the honest sites in A. A holder opens a site's seed only if
   the site signed the same list of dealers as the holder did. So the seed of a site in Q was opened by d = m - f or
   more honest neighbours that are in A, with the list of dealers of A. And a mask between a site of Q and one that it
   picked can be removed only if that one is in Q or not in A. Hence each site of Q picked d or more others of Q, and
   none of the r others: honest sites in A, or forged entries of the list, which a site that picks them refuses. And
   |Q| + r >= T - c. For each r > loose this has at most the probability

       C(n, r) P[B >= T - c - r],  B binomial, n trials of probability C(n - 1 - r, k)/C(n - 1, k),

   by the choices of the r others, and where |Q| = T - c - r is small also, by the choices of Q, at most

       C(n, |Q|) (C(k, d) C(|Q| - 1, d)/C(T - 1, d))^|Q|.

   The probability that r exceeds `loose` is at most the sum of the smaller of the two.

So every sum that can be unmasked has the noise of at least T - c - loose honest sites, and shares of the noise are
made for that number. The bounds hold for every length of the list from T to n: (1) grows as the list gets shorter,
(2) as it gets longer; in (3) the first grows as it gets longer, and the second is for a list as short as T in its
picks and as long as n in the choices of Q.

`failure` adds the three up over a run. A coordinator may begin a round again and again until it likes the picks, so
that a site begins each round `attempts` times at most, and every attempt counts: BEGUN of them in a run. And where a
federation has N > n sites, the coordinator may show different lists, all with one site's keys, to different sites,
and show that site the list whose picks it likes best: N sites fill `lists` = N/n of them, and each counts.

Delivery is not a matter of privacy: with n - T drop-outs, drawn at random, some site has fewer than t neighbours left
with probability at most n P[H' > k - t], H' hypergeometric, k draws from n - 1 sites of which n - T are gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import SystemRandom

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError

SPARSE_ABOVE = 100  # sites in a cohort
MOST_SITES = 3000  # whose keys fit into one message
BEGUN = 2**14  # attempts at rounds that count in one run
FAILURE = 1e-9  # the largest probability that the graph breaks the guarantee in a run
UNDELIVERED = 1e-5  # the largest probability that drop-outs up to the threshold leave a round without a sum
FOOLED = 3  # of the honest neighbours who can open a secret, one in FOOLED may be fooled by false signatures
MOST_LOOSE = 20  # `loose` is at most one in MOST_LOOSE noise shares
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Graph:
    """A round's graph; with `neighbours` None all sites share with all."""

    cohort: int
    threshold: int
    colluding: int
    neighbours: int | None = None
    share_threshold: int | None = None
    lists: int = 1

    @property
    def sparse(self) -> bool:
        """Whether sites share with neighbours only."""
        return self.neighbours is not None

    @property
    def shares(self) -> int:
        """How many shares reconstruct a secret."""
        return self.share_threshold or self.threshold

    @property
    def loose(self) -> int:
        """The most honest sites of a sum whose noise may be missing from what is unmasked."""
        return self._risk.loose if self.sparse else 0

    @property
    def corrupt(self) -> int:
        """The most colluding sites among those that hold a site's shares."""
        return self._risk.corrupt if self.sparse else self.colluding

    @property
    def failure(self) -> float:
        """The probability that the graph breaks the guarantee in some round of a run."""
        return self._risk.failure if self.sparse else 0.0

    def failure_of_round(self, rounds: int) -> float:
        """The same for each round of a run of this many."""
        return self.failure / BEGUN * attempts(rounds)

    @property
    def undelivered(self) -> float:
        """The probability that a round has no sum though as many sites as the threshold answer."""
        return self._risk.undelivered if self.sparse else 0.0

    def words(self) -> str:
        """What to know of a sparse graph before one trusts it."""
        return (
            f"each site shares with {self.neighbours} others, {self.shares} of whom can replace it; this breaks the "
            f"guarantee of a run with probability {self.failure:.1e} at most (which is added to delta), and leaves a "
            f"round without a sum with probability {self.undelivered:.1e}"
        )

    def picked(self, others: Iterable[int]) -> set[int]:
        """Pick a site's neighbours among the other sites on the list."""
        numbers = sorted(others)
        if self.neighbours is None or len(numbers) <= self.neighbours:
            return set(numbers)
        return set(SystemRandom().sample(numbers, self.neighbours))

    def sampled(self, signers: Iterable[int]) -> set[int]:
        """Pick the signatures to verify."""
        numbers = sorted(signers)
        return set(SystemRandom().sample(numbers, self.sample(len(numbers)))) if self.sparse else set(numbers)

    def sample(self, shown: int) -> int:
        """How many of the signatures shown must be verified."""
        invalid_list = (self.cohort + self.colluding) // 2
        size = np.arange(min(invalid_list, shown) + 1)
        fooled = self._risk.fooled + 1
        log = fooled * (_log_choose(invalid_list, size) - _log_choose(shown, size))
        log += math.log(self.cohort) + _log_choose(self.neighbours or 0, fooled)
        enough = np.flatnonzero(log <= math.log(_EACH / self.lists))
        return int(enough[0]) if len(enough) else min(invalid_list + 1, shown)

    def refuse_unsafe(self) -> None:
        """Raise a ConfigError where the graph could break the guarantee too easily."""
        if (self.neighbours is None) != (self.share_threshold is None):
            raise ConfigError("federation.neighbours and federation.share_threshold must be given together, or not")
        if self.neighbours is None or self.share_threshold is None:
            return
        if self.cohort > MOST_SITES:
            raise ConfigError(
                f"secure aggregation works with at most {MOST_SITES:,} sites in a round, got {self.cohort:,}; "
                f"set clients.cohort"
            )
        if not 1 <= self.share_threshold <= self.neighbours < self.threshold:
            raise ConfigError(
                f"federation.share_threshold must be 1 to federation.neighbours ({self.neighbours}), which must be "
                f"less than federation.threshold ({self.threshold}), got {self.share_threshold}"
            )
        if not self.failure <= FAILURE:
            raise ConfigError(
                f"federation.neighbours {self.neighbours} with share_threshold {self.share_threshold} could break "
                f"the guarantee with probability {self.failure:.2g}, more than {FAILURE:g}; leave both out to have "
                f"them computed"
            )

    @cached_property
    def _risk(self) -> Risk:
        assert self.neighbours is not None
        assert self.share_threshold is not None
        return _risk(self.cohort, self.threshold, self.colluding, self.neighbours, self.share_threshold, self.lists)


@dataclass(frozen=True)
class Risk:
    """What the module's docstring derives."""

    corrupt: int
    fooled: int
    loose: int
    failure: float
    undelivered: float


_EACH = FAILURE / BEGUN / 8  # for each of the three ways to fail, so that rounding cannot decide


def attempts(rounds: int) -> int:
    """How often a site begins each round of a run of this many."""
    return max(BEGUN // rounds, 1)


def computed(cohort: int, threshold: int, colluding: int, lists: int = 1) -> Graph:
    """Return the graph with the fewest neighbours that is safe and delivers; all with all where none is."""
    for neighbours in range(2, threshold if cohort > SPARSE_ABOVE else 0):
        gone = _log_tail(cohort - 1, cohort - threshold, neighbours)
        fits = np.flatnonzero(gone[::-1] + math.log(cohort) <= math.log(UNDELIVERED))
        if not len(fits):  # of arange(neighbours + 1): more than neighbours - t are gone
            continue
        graph = Graph(cohort, threshold, colluding, neighbours, int(fits[-1]), lists)
        if graph.shares and graph.failure <= FAILURE / 2:
            return graph
    return Graph(cohort, threshold, colluding)


@lru_cache(256)
def _risk(n: int, threshold: int, colluding: int, k: int, t: int, lists: int) -> Risk:
    each = _EACH / lists
    corruption = n * np.exp(_log_tail(threshold - 1, colluding, k))
    corrupt = _first(corruption[:t], each)
    fooled = (t - corrupt) // FOOLED
    cuts = np.exp(np.minimum(_log_cuts(n, threshold, colluding, k, t - corrupt - fooled), 0.0))
    loose = _first(cuts[: (threshold - colluding) // MOST_LOOSE + 1], each)
    failure = BEGUN * lists * float(corruption[corrupt] + cuts[loose] + each)
    gone = n * math.exp(_log_tail(n - 1, n - threshold, k)[k - t])
    return Risk(corrupt, fooled, loose, min(failure, 1.0), min(gone, 1.0))


def _first(values: Floats, most: float) -> int:
    """The index of the first value that is small enough, or the last index."""
    small = np.flatnonzero(values <= most)
    return int(small[0]) if len(small) else len(values) - 1


def _log_choose(n: npt.ArrayLike, k: npt.ArrayLike) -> Floats:
    from scipy.special import gammaln  # not at the start of every site: only sparse rounds need it

    n, k = np.broadcast_arrays(np.asarray(n, float), np.asarray(k, float))
    inside = (k >= 0) & (k <= n)
    n, k = np.where(inside, n, 0.0), np.where(inside, k, 0.0)
    return np.where(inside, gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1), -np.inf)


def _log_tail(population: int, marked: int, draws: int) -> Floats:
    """log P[H > x] for x = 0 to `draws`, H hypergeometric."""
    x = np.arange(draws + 1)
    log = _log_choose(marked, x) + _log_choose(population - marked, draws - x) - _log_choose(population, draws)
    tail = np.logaddexp.accumulate(log[::-1])[::-1]
    return np.append(tail[1:], -np.inf)


def _log_cuts(n: int, threshold: int, colluding: int, k: int, inside: int) -> Floats:
    """The log of the bound on a cut that leaves out more than x honest sites, for x = 0, 1, ...

    `inside`: how many others of its part each site picked. P[B >= b] is at most its first term over 1 - the ratio of
    the second to the first, as ratios fall.
    """
    from scipy.special import xlog1py, xlogy

    honest = threshold - colluding
    left_out = np.arange(1, max(honest - inside, 1))
    p = np.exp(_log_choose(n - 1 - left_out, k) - _log_choose(n - 1, k))
    b = honest - left_out
    ratio = (n - b) / (b + 1) * p / (1 - p)
    first = _log_choose(n, b) + xlogy(b, p) + xlog1py(n - b, -p)
    above = b > n * p
    tail = np.where(above, first - np.log1p(-np.where(above, ratio, 0.0)), 0.0)
    terms = _log_choose(n, left_out) + np.minimum(tail, 0.0)
    picked = _log_choose(k, inside) + _log_choose(b - 1, inside) - _log_choose(threshold - 1, inside)
    small = _log_choose(n, b) + b * np.minimum(picked, 0.0)
    terms = np.where(2 * b < honest, np.minimum(terms, small), terms)  # else it is for larger parts too
    return np.append(np.logaddexp.accumulate(terms[::-1])[::-1], -np.inf)
