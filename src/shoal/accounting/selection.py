"""Private selection: what the best of a random number of private runs costs (Papernot & Steinke 2022, Theorem 2).

    K ~ truncated negative binomial (shape, gamma);  run Q K times;  release only the best
    rdp'(a) = rdp(a) + (1 + shape) min_b [(1 - 1/b) rdp(b) + log(1/gamma) / b] + log(E K) / (a - 1)

Q draws one of the cells of a sweep uniformly, runs it with fresh noise, and scores it, so its divergence is at most
the largest of the cells', at each order. The results and the number of the other trials must stay hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.accounting import accountants, rdp
from shoal.accounting.accountants import Answer
from shoal.accounting.curves import Array
from shoal.accounting.events import Event
from shoal.accounting.leaves import without_sampler
from shoal.accounting.rdp import DEFAULT, Orders
from shoal.accounting.sampler_error import epsilon_beside, taken
from shoal.accounting.theorems import Adjacency, counted
from shoal.errors import ConfigError

_MOST_TRIALS = 1e6


@dataclass(frozen=True)
class Trials:
    """How many trials are made: 1, 2, ... by the truncated negative binomial distribution (Definition 1).

    `shape` 1 is the geometric distribution, 0 the logarithmic one; `gamma` 1 means one trial, always.
    """

    shape: float
    gamma: float

    def __post_init__(self) -> None:
        if not -1 < self.shape < math.inf:
            raise ConfigError(f"the shape of the number of trials must be > -1, got {self.shape:g}")
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"gamma of the number of trials must be in (0, 1], got {self.gamma:g}")

    @classmethod
    def expecting(cls, mean: float, shape: float = 0.0) -> Trials:
        """The distribution of that shape with so many trials on average."""
        if not 1 <= mean <= _MOST_TRIALS:
            raise ConfigError(f"the expected number of trials must be in 1 to {_MOST_TRIALS:,.0f}, got {mean:g}")
        low, high = -100.0, 0.0  # of log gamma: the mean falls as gamma grows
        if cls(shape, math.exp(low)).mean < mean:
            raise ConfigError(
                f"with shape {shape:g} the number of trials cannot be {mean:g} on average; take a shape nearer to 0"
            )
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(shape, math.exp(middle)).mean > mean else (low, middle)
        return cls(shape, math.exp(high))

    @property
    def mean(self) -> float:
        """The expected number of trials."""
        log = math.log(self.gamma)
        if log == 0:
            return 1.0
        odds = math.expm1(-log)  # 1/gamma - 1
        if self.shape == 0:
            return odds / -log
        return self.shape * odds / -math.expm1(self.shape * log)

    def probabilities(self) -> Iterator[float]:
        """P(K = 1), P(K = 2), ..."""
        log, stay = math.log(self.gamma), 1 - self.gamma
        if log == 0:
            chance = 1.0
        else:
            chance = stay / -log if self.shape == 0 else stay * self.shape / math.expm1(-self.shape * log)
        k = 1
        while True:
            yield chance
            chance *= stay * (k + self.shape) / (k + 1)
            k += 1

    def draw(self, generator: np.random.Generator) -> int:
        """One number of trials."""
        left = float(generator.random())
        for k, chance in enumerate(self.probabilities(), start=1):
            left -= chance
            if left < 0 or (k > self.mean and chance < 1e-18):
                return k
        raise AssertionError("the probabilities never end")


def divergence(one_run: Array, trials: Trials, orders: Orders = DEFAULT) -> Array:
    """The Renyi divergence, at each order, of the best of the trials; `one_run` is that of a single one."""
    alpha, rare = np.array(orders), -math.log(trials.gamma)
    hidden = (1 - 1 / alpha) * one_run + rare / alpha
    extra = (1 + trials.shape) * min(float(hidden.min()), rare)  # the latter at order 1
    best: Array = one_run + extra + math.log(trials.mean) / (alpha - 1)
    return best


def epsilon(cells: Sequence[Event], trials: Trials, delta: float, adjacency: Adjacency = "add-or-remove") -> Answer:
    """What releasing the best trial costs, where each trial runs one of the cells."""
    greatest, distance = np.zeros(len(DEFAULT)), 0.0
    for event in cells:
        if (reason := accountants.unbounded(event)) is not None:
            return Answer(None, delta, "rdp", False, reason)
        try:
            for counts in counted(event, adjacency).values():
                ideal, own = without_sampler(counts)
                greatest, distance = np.maximum(greatest, rdp.total(ideal, adjacency)), max(distance, own)
        except ConfigError as error:
            return Answer(None, delta, "rdp", False, str(error))
    if not greatest.any():
        return Answer(0.0, delta, "rdp", True)
    spent = divergence(greatest, trials)
    found = epsilon_beside(lambda left: rdp.epsilon(DEFAULT, spent, left), delta, trials.mean * distance)
    if math.isinf(found):
        return Answer(None, delta, "rdp", False, "the noise sampler's error exceeds delta")
    return Answer(found, delta, "rdp", True, sampler_delta=taken(found, trials.mean * distance))
